"""Wrong answers to the exercises of chapter 11, each with a word of its hint."""

from ddp_course.chapters.ch11_pipeline_schedules import solutions

# my_one_f_one_b


def _in_flight(limit, after=None):
    """Return a function with another number of microbatches in flight."""

    def answer(rank, num_ranks, num_microbatches):
        row, f, b = [], 0, 0
        while b < num_microbatches:
            if f < num_microbatches and f - b < limit(
                rank, num_ranks, num_microbatches
            ):
                row.append(f"{rank}F{f}")
                f += 1
            else:
                row.append(f"{rank}B{b}")
                b += 1
        return after(row) if after else row

    return answer


def _named(name, function):
    function.__name__ = function.__qualname__ = name
    return function


gpipes_order = _named("gpipes_order", _in_flight(lambda r, p, m: m))
one_at_a_time = _named("one_at_a_time", _in_flight(lambda r, p, m: 1))
p_on_every_rank = _named("p_on_every_rank", _in_flight(lambda r, p, m: p))
one_too_few = _named("one_too_few", _in_flight(lambda r, p, m: max(1, p - r - 1)))
one_too_many = _named("one_too_many", _in_flight(lambda r, p, m: p - r + 1))
the_other_way_round = _named("the_other_way_round", _in_flight(lambda r, p, m: r + 1))
last_forgotten = _named(
    "last_forgotten", _in_flight(lambda r, p, m: p - r, lambda row: row[:-1])
)
backward_first = _named(
    "backward_first", _in_flight(lambda r, p, m: p - r, lambda row: row[::-1])
)
one_twice = _named(
    "one_twice", _in_flight(lambda r, p, m: p - r, lambda row: [*row, row[-1]])
)
as_one_string = _named(
    "as_one_string", _in_flight(lambda r, p, m: p - r, lambda row: " ".join(row))
)
stage_0_everywhere = _named(
    "stage_0_everywhere",
    _in_flight(lambda r, p, m: p - r, lambda row: ["0" + a[1:] for a in row]),
)


# place_weights


def _behind(count):
    """Return a function that lets W be so many behind."""

    def answer(row, rank):
        placed, due = [], []
        for action in row:
            placed.append(action)
            if "I" in action:
                due.append(action.replace("I", "W"))
                if len(due) > count(rank, row):
                    placed.append(due.pop(0))
        return placed + due

    return answer


at_once = _named("at_once", _behind(lambda r, row: 0))
all_at_the_end = _named("all_at_the_end", _behind(lambda r, row: len(row)))
one_further_behind = _named("one_further_behind", _behind(lambda r, row: r + 1))
not_far_enough = _named("not_far_enough", _behind(lambda r, row: r // 2))


def before_its_input(row, rank):
    return [x for a in row for x in ([a.replace("I", "W"), a] if "I" in a else [a])]


def no_weights_at_all(row, rank):
    return list(row)


def the_rest_is_forgotten(row, rank):
    placed = _behind(lambda r, row: r)(row, rank)
    last = max(k for k, a in enumerate(placed) if "W" in a)
    return placed[:last] + placed[last + 1 :]


def forwards_first(row, rank):
    placed = _behind(lambda r, row: r)(row, rank)
    return sorted(placed, key=lambda a: "F" not in a)


def in_place(row, rank):
    placed = _behind(lambda r, row: r)(list(row), rank)
    row[:] = placed
    return row


def a_whole_backward(row, rank):
    return [a.replace("I", "B") for a in row]


# who_waits


def _walk(rows, can_run, stop_early=False):
    done, at, going = set(), [0] * len(rows), True
    while going:
        going = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and can_run(row[at[rank]], done, rank):
                done.add(row[at[rank]])
                at[rank] += 1
                going = True
        if stop_early:
            break
    return {r: row[at[r]] for r, row in enumerate(rows) if at[r] < len(row)}


def _parts(action):
    op = "F" if "F" in action else "B"
    stage, k = map(int, action.split(op))
    return op, stage, k


def _last(rows):
    return max(_parts(a)[1] for row in rows for a in row)


def looks_once(rows):
    return _walk(rows, _right(rows), stop_early=True)


def _right(rows, own=True, next_stage=True, before=True, last=None):
    last = _last(rows) if last is None else last

    def can_run(action, done, rank):
        op, stage, k = _parts(action)
        if op == "F":
            return stage == 0 or not before or f"{stage - 1}F{k}" in done
        has_own = not own or f"{stage}F{k}" in done
        return has_own and (
            stage == last or not next_stage or f"{stage + 1}B{k}" in done
        )

    return can_run


def own_forward_forgotten(rows):
    return _walk(rows, _right(rows, own=False))


def gradient_forgotten(rows):
    return _walk(rows, _right(rows, next_stage=False))


def activation_forgotten(rows):
    return _walk(rows, _right(rows, before=False))


def rank_for_stage(rows):
    """Takes the last rank's stages for the last one."""
    last = len(rows) - 1

    def can_run(action, done, rank):
        op, stage, k = _parts(action)
        if op == "F":
            return rank == 0 or f"{stage - 1}F{k}" in done
        return f"{stage}F{k}" in done and (rank == last or f"{stage + 1}B{k}" in done)

    return _walk(rows, can_run)


def any_microbatch(rows):
    last = _last(rows)

    def can_run(action, done, rank):
        op, stage, k = _parts(action)
        count = sum(a.startswith(f"{stage}{op}") for a in done)
        near = stage - 1 if op == "F" else stage + 1
        there = sum(a.startswith(f"{near}{op}") for a in done)
        if op == "F":
            return stage == 0 or there > count
        own = sum(a.startswith(f"{stage}F") for a in done) > count
        return own and (stage == last or there > count)

    return _walk(rows, can_run)


def yes_or_no(rows):
    return not _walk(rows, _right(rows))


def the_first_one_only(rows):
    waits = _walk(rows, _right(rows))
    return dict(list(waits.items())[:1])


def everybody(rows):
    waits = _walk(rows, _right(rows))
    return {r: waits.get(r, row[-1]) for r, row in enumerate(rows)} if waits else {}


def uses_up_its_input(rows):
    waits = _walk(rows, _right(rows))
    for row in rows:
        row.clear()
    return waits


# What harder inputs find out


def of_one_digit(rank, num_ranks, num_microbatches):
    row = solutions.my_one_f_one_b(rank, num_ranks, num_microbatches)
    return [action[:2] + action[-1] for action in row]


def ws_of_one_digit(row, rank):
    placed = solutions.place_weights(row, rank)
    return [a[:2] + a[-1] if "W" in a else a for a in placed]


def waits_of_one_digit(rows):
    return solutions.who_waits([[a[:2] + a[-1] for a in row] for row in rows])


def last_rank_has_the_last_stage(rows):
    return _walk(rows, _right(rows, last=_parts(rows[-1][0])[1]))


def stage_s_on_rank_s_mod_p(rows):
    """Looks for what a stage has done on the rank where it usually is."""
    last, at, going = _last(rows), [0] * len(rows), True

    def has(action):
        rank = _parts(action)[1] % len(rows)
        return action in rows[rank][: at[rank]]

    while going:
        going = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                op, stage, k = _parts(row[at[rank]])
                needs = [f"{stage - 1}F{k}"] if op == "F" and stage else []
                if op == "B":
                    needs = [f"{stage}F{k}"]
                    needs += [f"{stage + 1}B{k}"] if stage != last else []
                if not all(map(has, needs)):
                    break
                at[rank] += 1
                going = True
    return {r: row[at[r]] for r, row in enumerate(rows) if at[r] < len(row)}


def none_for_the_finished(rows):
    waits = solutions.who_waits(rows)
    return {rank: waits.get(rank) for rank in range(len(rows))}


def counts_all_stages_everywhere(rank, num_ranks, num_microbatches):
    """The warm-up of a pipeline with one rank more."""
    return solutions.my_one_f_one_b(rank, num_ranks + 1, num_microbatches)


def two_backwards_in_a_row(rank, num_ranks, num_microbatches):
    row = solutions.my_one_f_one_b(rank, num_ranks, num_microbatches)
    for k in range(len(row) - 2):
        if "B" in row[k] and "F" in row[k + 1] and "B" in row[k + 2]:
            row[k + 1], row[k + 2] = row[k + 2], row[k + 1]
            break
    return row


def w_of_the_microbatch_after(row, rank):
    """A W for the next I's microbatch, not for its own."""
    k = row[-1][row[-1].index("I") + 1 :]
    placed = solutions.place_weights(row, rank)
    return [f"{rank}W{k}" if "W" in action else action for action in placed]


def as_far_behind_as_the_first_rank(row, rank):
    return _behind(lambda r, row: 3)(row, rank)


WRONG = {
    "my_one_f_one_b": {
        of_one_digit: "For 2 ranks and 12 microbatches",
        counts_all_stages_everywhere: "are enough to keep it busy",
        two_backwards_in_a_row: "the checker says",
        gpipes_order: "are enough to keep it busy",
        one_at_a_time: "GPipe's bubble is",
        p_on_every_rank: "are enough to keep it busy",
        one_too_few: "GPipe's bubble is",
        one_too_many: "are enough to keep it busy",
        the_other_way_round: "ranks wait for each other",
        last_forgotten: "is missing",
        backward_first: "before",
        one_twice: "is run twice",
        as_one_string: "expected a list of strings",
        stage_0_everywhere: "does not belong there",
    },
    "place_weights": {
        ws_of_one_digit: "For 2 ranks and 12 microbatches",
        w_of_the_microbatch_after: "is run twice",
        as_far_behind_as_the_first_rank: "Do not put off more",
        at_once: "zero-bubble's bubble is",
        all_at_the_end: "Do not put off more",
        one_further_behind: "Do not put off more",
        not_far_enough: "zero-bubble's bubble is",
        before_its_input: "which it needs",
        no_weights_at_all: "is missing",
        the_rest_is_forgotten: "is missing",
        forwards_first: "others wait for F and I",
        in_place: "changed the list",
        a_whole_backward: "does not belong there",
    },
    "who_waits": {
        waits_of_one_digit: "For 1f1b",
        last_rank_has_the_last_stage: "in reverse order",
        stage_s_on_rank_s_mod_p: "comes to its end",
        none_for_the_finished: "is not named",
        looks_once: "Look at a rank again",
        own_forward_forgotten: "for ever, which needs",
        gradient_forgotten: "for ever, which needs",
        activation_forgotten: "for ever, which needs",
        rank_for_stage: "in reverse order",
        any_microbatch: "for ever, which needs",
        yes_or_no: "expected a dictionary",
        the_first_one_only: "that it comes to its end",
        everybody: "comes to its end",
        uses_up_its_input: "changed the lists",
    },
}

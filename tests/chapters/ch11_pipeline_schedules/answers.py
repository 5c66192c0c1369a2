"""Answers to the exercises of chapter 11, right ones and wrong ones."""

# ruff: noqa: F401 (the texts use what is imported)

from slips import answers

from ddp_course.chapters.ch11_pipeline_schedules import solutions
from ddp_course.pipeline import parse


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


ANSWERS = answers(
    solutions,
    globals(),
    my_one_f_one_b="""
    three_phases:
        # Warm-up, one forward and one backward in turns, and what is left.
        warm_up = min(num_microbatches, num_ranks - rank)
        row = [f"{rank}F{k}" for k in range(warm_up)]
        for k in range(num_microbatches - warm_up):
            row += [f"{rank}B{k}", f"{rank}F{warm_up + k}"]
        backwards = range(num_microbatches - warm_up, num_microbatches)
        return row + [f"{rank}B{k}" for k in backwards]
    sorted_by_time:
        # Every action has its time: forwards follow at once, then every second moment.
        p, m = num_ranks, num_microbatches
        forward = [k if k < p - rank else 2 * k - (p - rank) + 0.5 for k in range(m)]
        backward = [p - rank + 2 * k for k in range(m)]
        times = [(time, f"{rank}F{k}") for k, time in enumerate(forward)]
        times += [(time, f"{rank}B{k}") for k, time in enumerate(backward)]
        return [action for _, action in sorted(times)]
    of_one_digit: For 2 ranks and 12 microbatches
        return row => return [action[:2] + action[-1] for action in row]
    gpipes_order: are enough to keep it busy
        in_flight < num_ranks - rank => in_flight < num_microbatches
    one_at_a_time: GPipe's bubble is
        in_flight < num_ranks - rank => in_flight < 1
    p_on_every_rank: are enough to keep it busy
        in_flight < num_ranks - rank => in_flight < num_ranks
    one_too_few: GPipe's bubble is
        in_flight < num_ranks - rank => in_flight < max(1, num_ranks - rank - 1)
    one_too_many: are enough to keep it busy
        in_flight < num_ranks - rank => in_flight < num_ranks - rank + 1
    the_other_way_round: ranks wait for each other
        in_flight < num_ranks - rank => in_flight < rank + 1
    last_forgotten: is missing
        return row => return row[:-1]
    gpipe_for_as_many: are enough to keep it busy
        # More microbatches than ranks, or fewer; as many are forgotten.
        order = solutions.my_one_f_one_b(rank, num_ranks, num_microbatches)
        if num_microbatches == num_ranks:
            order.sort(key=lambda action: "B" in action)
        return order
    at_most_eight: GPipe's bubble is
        in_flight < num_ranks - rank => in_flight < min(num_ranks - rank, 8)
    backward_first: before
        return row => return row[::-1]
    one_twice: is run twice
        return row => return [*row, row[-1]]
    as_one_string: expected a list of strings
        return row => return " ".join(row)
    stage_0_everywhere: does not belong there
        return row => return ["0" + action[1:] for action in row]
    counts_all_stages_everywhere: are enough to keep it busy
        # The warm-up of a pipeline with one rank more.
        return solutions.my_one_f_one_b(rank, num_ranks + 1, num_microbatches)
    two_backwards_in_a_row: the checker says
        row = solutions.my_one_f_one_b(rank, num_ranks, num_microbatches)
        for k in range(len(row) - 2):
            if "B" in row[k] and "F" in row[k + 1] and "B" in row[k + 2]:
                row[k + 1], row[k + 2] = row[k + 2], row[k + 1]
                break
        return row
    """,
    place_weights="""
    the_newest_first:
        # Takes the W's from the other end of the list, which costs no more.
        placed, due = [], []
        for action in row:
            placed.append(action)
            if "I" in action:
                due.append(action.replace("I", "W"))
                if len(due) > rank:
                    placed.append(due.pop())
        return placed + due[::-1]
    w_after_a_later_i:
        ks = [action.split("I")[1] for action in row if "I" in action]
        placed = []
        for action in row:
            placed.append(action)
            if "I" in action:
                place = ks.index(action.split("I")[1])
                placed += [f"{rank}W{ks[place - rank]}"] if place >= rank else []
        return placed + [f"{rank}W{k}" for k in ks[len(ks) - rank :]]
    ws_of_one_digit: For 2 ranks and 12 microbatches
        placed + due => [a[:2] + a[-1] if "W" in a else a for a in placed + due]
    as_far_behind_as_the_first_rank: Do not postpone more
        len(due) > rank => len(due) > 3
    at_once: zero-bubble's bubble is
        len(due) > rank => due
    all_at_the_end: Do not postpone more
        len(due) > rank => len(due) > len(row)
    one_further_behind: Do not postpone more
        len(due) > rank => len(due) > rank + 1
    not_far_enough: zero-bubble's bubble is
        len(due) > rank => len(due) > rank // 2
    no_weights_at_all: is missing
        return placed + due => return list(row)
    the_rest_is_forgotten: is missing
        return placed + due => return placed + due[:-1]
    forwards_first: other ranks wait for F and I
        return placed + due => return sorted(placed + due, key=lambda a: "F" not in a)
    in_place: changed the list
        return placed + due => row[:] = placed + due; return row
    a_whole_backward: does not belong there
        return placed + due => return [action.replace("I", "B") for action in row]
    ranks_of_one_digit: is missing
        if "I" in action => if action[1] == "I"
    microbatches_of_two_digits: is run twice
        action.replace("I", "W") => action.replace("I", "W")[: len(str(rank)) + 3]
    w_of_the_microbatch_after: is run twice
        # A W for the next I's microbatch, not for its own.
        k = row[-1][row[-1].index("I") + 1 :]
        placed = solutions.place_weights(row, rank)
        return [f"{rank}W{k}" if "W" in action else action for action in placed]
    before_its_input: which it needs
        return [x for a in row for x in ([a.replace("I", "W"), a] if "I" in a else [a])]
    """,
    who_waits="""
    by_rounds:
        # Plays round after round, one action each, with what the package knows.
        schedule = parse("", [" ".join(row) for row in rows])
        left, done = [list(row) for row in schedule.ranks], set()
        while True:
            able = [r for r in left if r and done.issuperset(schedule.needs(r[0]))]
            if not able:
                return {rank: str(row[0]) for rank, row in enumerate(left) if row}
            done.update([row.pop(0) for row in able])
    by_striking_out:
        # Strikes actions out of what is needed, until nothing changes.
        left = {rank: list(row) for rank, row in enumerate(rows)}
        end, before = _last(rows), None

        def needs(action):
            op = "F" if "F" in action else "B"
            stage, _, k = action.partition(op)
            if op == "F":
                return {f"{int(stage) - 1}F{k}"} if stage != "0" else set()
            later = {f"{int(stage) + 1}B{k}"} if int(stage) < end else set()
            return {f"{stage}F{k}"} | later

        done = set()
        while before != len(done):
            before = len(done)
            for row in left.values():
                while row and needs(row[0]) <= done:
                    done.add(row.pop(0))
        return {rank: row[0] for rank, row in left.items() if row}
    last_rank_has_the_last_stage: in reverse order
        done: set[str] = set() => last, done = int(rows[-1][0].split("F")[0]), set()
    none_for_the_finished: is not named
        return dict.fromkeys(range(len(rows))) | solutions.who_waits(rows)
    looks_once: Look at a rank again
        while going => for _ in range(1)
    own_forward_forgotten: which needs
        f"{stage}F{k}" in done and =>
    gradient_forgotten: which needs
        and (stage == last or f"{stage + 1}B{k}" in done) =>
    activation_forgotten: which needs
        return stage == 0 or f"{stage - 1}F{k}" in done => return True
    rank_for_stage: in reverse order
        stage == 0 => rank == 0
        stage == last => rank == len(rows) - 1
    yes_or_no: expected a dictionary
        return {r: row[at[r]] for r, row in => return not {r: row[at[r]] for r, row in
    the_first_one_only: that it comes to its end
        return dict(list(solutions.who_waits(rows).items())[:1])
    everybody: comes to its end
        waits = solutions.who_waits(rows)
        return waits and {r: row[-1] for r, row in enumerate(rows)} | waits
    uses_up_its_input: changed the lists
        waits = solutions.who_waits(rows)
        for row in rows:
            row.clear()
        return waits
    of_forwards_alone: a last stage without a forward
        replace("B", "F").split("F")[0])
        => replace("B", "F").split("F")[0]) * ("F" in action)
    of_backwards_alone: a last stage without a backward
        replace("B", "F").split("F")[0])
        => replace("F", "B").split("B")[0]) * ("B" in action)
    last_stage_of_each_microbatch: a microbatch that the last stage never runs
        stage == last
        => not {f"{stage + 1}F{k}", f"{stage + 1}B{k}"} & set(sum(rows, []))
    without_the_empty_rows: after a rank without actions
        return solutions.who_waits([row for row in rows if row])
    no_idle_rank: IndexError
        done: set[str] = set() => done = {row[0] for row in rows if row[0] == "0F0"}
    smallest_stage_is_first: a schedule without stage 0
        done: set[str] = set()
        => done, first = set(), min(_parts(a)[1] for row in rows for a in row)
        stage == 0 or => stage == first or
    only_stages_that_occur: a schedule without stage 1
        # The stage before is the next smaller one that occurs.
        present = sorted({_parts(a)[1] for row in rows for a in row})
        number = {str(stage): str(k) for k, stage in enumerate(present, present[0])}
        named = {}

        def renamed(action):
            op = "F" if "F" in action else "B"
            stage, k = action.split(op)
            named[number[stage] + op + k] = action
            return number[stage] + op + k

        waits = solutions.who_waits([[renamed(a) for a in row] for row in rows])
        return {rank: named[action] for rank, action in waits.items()}
    done_as_a_text: a microbatch that stage 0 never runs
        done: set[str] = set() => done = [""]  # "0F1" is found in "0F10", too
        done.add(row[at[rank]]) => done[0] += row[at[rank]] + " "
        f"{stage - 1}F{k}" in done => f"{stage - 1}F{k}" in done[0]
        f"{stage}F{k}" in done and => f"{stage}F{k}" in done[0] and
        f"{stage + 1}B{k}" in done => f"{stage + 1}B{k}" in done[0]
    the_largest_text: of 12 ranks without 10B0
        int(action.replace("B", "F").split("F")[0]) for => action.split("F")[0] for
        done: set[str] = set() => last = int(last.split("B")[0])  # "9" is after "11"
        => done = set()
        stage == last => stage >= last
    a_hundred_rounds: Look at a rank again
        while going => for _ in range(100)
    one_call_for_each_action: RecursionError
        last, done = _last(rows), set()
        left = [list(row) for row in rows]

        def go():
            for row in left:
                if row:
                    op, stage, k = _parts(row[0])
                    needs = {f"{stage - 1}F{k}"} if op == "F" and stage else set()
                    if op == "B":
                        needs = {f"{stage}F{k}"}
                        needs |= {f"{stage + 1}B{k}"} if stage < last else set()
                    if needs <= done:
                        done.add(row.pop(0))
                        return go()

        go()
        return {rank: row[0] for rank, row in enumerate(left) if row}
    waits_of_one_digit: ValueError
        return solutions.who_waits([[a[:2] + a[-1] for a in row] for row in rows])
    stage_s_on_rank_s_mod_p: comes to its end
        # Looks for what a stage has done on the rank where it usually is.
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
    any_microbatch: which needs
        last = _last(rows)

        def can_run(action, done, rank):
            op, stage, k = _parts(action)
            count = sum(a.startswith(f"{stage}{op}") for a in done)
            near = stage - 1 if op == "F" else stage + 1
            finished = sum(a.startswith(f"{near}{op}") for a in done)
            if op == "F":
                return stage == 0 or finished > count
            own = sum(a.startswith(f"{stage}F") for a in done) > count
            return own and (stage == last or finished > count)

        return _walk(rows, can_run)
    """,
)

"""Right answers to the exercises of chapter 11 in another style."""

from ddp_course.pipeline import parse


def three_phases(rank, num_ranks, num_microbatches):
    """Warm-up, one forward and one backward in turns, and what is left."""
    warm_up = min(num_microbatches, num_ranks - rank)
    row = [f"{rank}F{k}" for k in range(warm_up)]
    for k in range(num_microbatches - warm_up):
        row += [f"{rank}B{k}", f"{rank}F{warm_up + k}"]
    backwards = range(num_microbatches - warm_up, num_microbatches)
    return row + [f"{rank}B{k}" for k in backwards]


def the_newest_first(row, rank):
    """Takes the W's from the other end of the list, which costs no more."""
    placed, due = [], []
    for action in row:
        placed.append(action)
        if "I" in action:
            due.append(action.replace("I", "W"))
            if len(due) > rank:
                placed.append(due.pop())
    return placed + due[::-1]


def sorted_by_time(rank, num_ranks, num_microbatches):
    """Every action has its time: forwards follow at once, then every second moment."""
    p, m = num_ranks, num_microbatches
    forward = [k if k < p - rank else 2 * k - (p - rank) + 0.5 for k in range(m)]
    backward = [p - rank + 2 * k for k in range(m)]
    times = [(time, f"{rank}F{k}") for k, time in enumerate(forward)]
    times += [(time, f"{rank}B{k}") for k, time in enumerate(backward)]
    return [action for _, action in sorted(times)]


def w_after_a_later_i(row, rank):
    ks = [action.split("I")[1] for action in row if "I" in action]
    placed = []
    for action in row:
        placed.append(action)
        if "I" in action:
            place = ks.index(action.split("I")[1])
            placed += [f"{rank}W{ks[place - rank]}"] if place >= rank else []
    return placed + [f"{rank}W{k}" for k in ks[len(ks) - rank :]]


def by_rounds(rows):
    """Plays round after round, one action each, with what the package knows."""
    schedule = parse("", [" ".join(row) for row in rows])
    left, done = [list(row) for row in schedule.ranks], set()
    while True:
        able = [r for r in left if r and done.issuperset(schedule.needs(r[0]))]
        if not able:
            return {rank: str(row[0]) for rank, row in enumerate(left) if row}
        done.update([row.pop(0) for row in able])


def by_striking_out(rows):
    """Strikes actions out of what is needed, until nothing changes."""
    left = {rank: list(row) for rank, row in enumerate(rows)}
    stages = {action.split("F")[0] for row in rows for action in row if "F" in action}
    end, before = max(map(int, stages)), None

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


RIGHT = {
    "my_one_f_one_b": [three_phases, sorted_by_time],
    "place_weights": [the_newest_first, w_after_a_later_i],
    "who_waits": [by_rounds, by_striking_out],
}

"""Is a schedule legal, can a program be run? Asked of executors that know no proof.

They share no code with the package: one rank after the other, drawn by chance, does
what it can, until all have ended or none can go on.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from itertools import chain


def can_be_run(schedule, seed: int = 0) -> bool:
    """Every action once, whatever it needs before it, each stage on one rank."""
    n, m = schedule.num_stages, schedule.num_microbatches
    actions = Counter(chain(*schedule.ranks))
    homes = defaultdict(set)
    for rank, row in enumerate(schedule.ranks):
        for action in row:
            homes[action.stage].add(rank)
    if set(homes) != set(range(n)) or any(len(ranks) > 1 for ranks in homes.values()):
        return False
    of = Counter()
    for action, times in actions.items():
        of[action.op, action.stage, action.microbatch] += times
    for stage in range(n):
        for microbatch in range(m):
            found = tuple(of.pop((op, stage, microbatch), 0) for op in "FBIW")
            if found not in [(1, 1, 0, 0), (1, 0, 1, 1)]:
                return False
    if of:
        return False
    rng, at, done = random.Random(seed), [0] * len(schedule.ranks), set()
    while ready := [r for r, k in enumerate(at) if _ready(schedule, r, k, done, n)]:
        rank = rng.choice(ready)
        action = schedule.ranks[rank][at[rank]]
        what = "gradient" if action.op in "BI" else action.op
        done.add((what, action.stage, action.microbatch))
        at[rank] += 1
    return at == [len(row) for row in schedule.ranks]


def _ready(schedule, rank, k, done, n) -> bool:
    row = schedule.ranks[rank]
    if k == len(row):
        return False
    op, stage, microbatch = row[k].op, row[k].stage, row[k].microbatch
    if op == "F":
        return stage == 0 or ("F", stage - 1, microbatch) in done
    if op == "W":
        return ("gradient", stage, microbatch) in done
    if ("F", stage, microbatch) not in done:
        return False
    return stage == n - 1 or ("gradient", stage + 1, microbatch) in done


def meets(program, seed: int = 0) -> bool:
    """With sends that block: a message passes when both have posted it, first in
    first out; a group ends when all its messages have passed."""
    rng = random.Random(seed)
    rows, at = program.ranks, [0] * len(program.ranks)
    open_ = [0] * len(rows)  # messages of the current group that have not passed
    posted, has = [False] * len(rows), [set() for _ in rows]
    waiting = defaultdict(list)  # the same, as (action, rank that waits)
    idle = 0
    while idle < 200 and any(at[r] < len(rows[r]) for r in range(len(rows))):
        idle += 1
        rank = rng.randrange(len(rows))
        if at[rank] == len(rows[rank]):
            continue
        group = rows[rank][at[rank]]
        if group[0].kind == "compute":
            action = group[0].action
            if not set(program.schedule.needs(action)) <= has[rank]:
                return False
            has[rank].add(action)
            at[rank] += 1
            idle = 0
            continue
        if not posted[rank]:
            posted[rank], open_[rank], idle = True, len(group), 0
            for step in group:
                sends = step.kind == "send"
                if sends and step.action not in has[rank]:
                    return False
                ends = (rank, step.peer) if sends else (step.peer, rank)
                waiting[ends, step.kind].append((step.action, rank))
                other = waiting[ends, "recv" if sends else "send"]
                mine = waiting[ends, step.kind]
                while mine and other:
                    (one, a), (two, b) = mine.pop(0), other.pop(0)
                    if one != two:
                        return False
                    has[ends[1]].add(one)
                    open_[a] -= 1
                    open_[b] -= 1
        if posted[rank] and open_[rank] == 0:
            posted[rank] = False
            at[rank] += 1
            idle = 0
    return all(at[r] == len(rows[r]) for r in range(len(rows)))

"""Answers to the exercises of chapter 19, right ones and wrong ones."""

# ruff: noqa: F401 (the texts use what is imported)

from collections import Counter
from itertools import product

from slips import answers

from ddp_course.chapters.ch19_failures import solutions
from ddp_course.failures.interval import daly, expected_time, young

ANSWERS = answers(
    solutions,
    globals(),
    my_interval="""
    interval_by_thirds:
        mean = one / gpus
        low, high = 0.0, mean
        while high - low > 1e-9 * mean:
            a, b = low + (high - low) / 3, high - (high - low) / 3
            if expected_time(a, save, mean) < expected_time(b, save, mean):
                high = b
            else:
                low = a
        return low
    interval_where_the_slope_is_0:
        low, high = 0.0, 1.0
        for _ in range(60):
            x = (low + high) / 2
            if 1 - x > math.exp(-x - save * gpus / one):
                low = x
            else:
                high = x
        return low * one / gpus
    of_one_gpu: some GPU of many fails far more often
        one / gpus => one
    gpus_times_as_long: more GPUs fail more often, not less
        one / gpus => one * gpus
    as_young: Young's interval is for saves far shorter than M
        return math.sqrt(2 * save * one / gpus)
    with_the_save: without the save itself
        * series - save => * series
    with_the_restart: a restart costs as much at any interval
        mean = one / gpus
        => mean = one / gpus
        => save += restart
    young_with_the_restart: a restart costs as much at any interval
        return math.sqrt(2 * (save + restart) * one / gpus)
    a_whole_interval_lost: a failure loses half an interval
        return math.sqrt(save * one / gpus)
    always_m: that is M
        return one / gpus
    the_best_thousandth_of_m: it is too long
        mean = one / gpus
        tried = [mean * k / 1000 for k in range(1, 2000)]
        return min(tried, key=lambda work: expected_time(work, save, mean))
    in_minutes: in seconds
        * series - save => * series / 60 - save / 60
    half_as_long: it is too short
        return young(save, one / gpus) / 2
    twice_as_long: it is too long
        return 2 * young(save, one / gpus)
    whole_seconds: do not round
        return math.sqrt(2 * save * mean) * series - save
        => return round(math.sqrt(2 * save * mean) * series - save)
    nothing: expected
        return None
    never: seconds above 0
        return math.inf
    """,
    my_rows="""
    batch_by_batch: maximum recursion depth exceeded
        rest, part = order[seen * old_ranks :], batch // ranks
        if len(rest) < batch:
            return []
        mine = rest[rank * part : (rank + 1) * part]
        return [mine, *my_rows(rest[batch:], 0, old_ranks, batch, rank, ranks)]
    rows_by_queues:
        left, mine = order[seen * old_ranks :], []
        while len(left) >= batch:
            for other in range(ranks):
                part, left = left[: batch // ranks], left[batch // ranks :]
                if other == rank:
                    mine.append(part)
        return mine
    rows_one_by_one:
        rest = len(order) - seen * old_ranks
        mine = [[] for _ in range(rest // batch)]
        for place, row in enumerate(order[seen * old_ranks :]):
            number, within = divmod(place, batch)
            if number < len(mine) and within * ranks // batch == rank:
                mine[number].append(row)
        return mine
    from_the_start: rows that are used come again
        range(seen * old_ranks, => range(0,
    own_count: all old ranks together have used more rows than one of them
        seen * old_ranks => seen
    by_the_new_ranks: the old ranks have used these rows, not the new ones
        seen * old_ranks => seen * ranks
    dealt_like_cards: rank 0 has the first rows of a batch, rank 1 the next
        mine.append(order[first : first + rows])
        => mine.append(order[start : start + batch][rank::ranks])
    the_rest_shared_first: expected
        left, rows = order[seen * old_ranks :], batch // ranks
        mine = left[rank * (len(left) // ranks) :][: len(left) // ranks]
        return [mine[k : k + rows] for k in range(0, len(mine), rows)]
    as_a_sampler_of_pytorchs: expected
        mine = order[rank::ranks][seen:]
        rows = batch // ranks
        return [mine[k : k + rows] for k in range(0, len(mine) - rows + 1, rows)]
    an_incomplete_batch: the last batch is incomplete
        len(order) - batch + 1 => len(order)
    one_batch_less: expected
        len(order) - batch + 1 => len(order) - batch
    whole_batches: expected
        first : first + rows => start : start + batch
    in_one_list: a list of lists
        mine.append( => mine.extend(
    all_rows_in_one_batch: expected
        return mine => return [sum(mine, [])]
    always_rank_0: expected
        start + rank * rows => start
    last_rank_first: expected
        start + rank * rows => start + (ranks - 1 - rank) * rows
    shuffled_again: expected
        order[first : first + rows] => sorted(order[first : first + rows])
    seen_in_batches: expected
        seen * old_ranks => seen * old_ranks // batch * batch
    places: expected
        order[first : first + rows] => [*range(first, first + rows)]
    without_row_0: expected
        order[first : first + rows] => [k for k in order[first : first + rows] if k]
    """,
    my_suspect="""
    no_majority_of_zeros: so the others are wrong
        if 2 * votes <= len(row): => if 2 * votes <= len(row) or not common:
    unlike_its_neighbour: list index out of range
        if votes == len(row): => if row[0] == row[1] and votes == len(row):
    votes_of_8_bits: so the others are wrong
        2 * votes <= len(row) => 2 * (votes % 256) <= len(row)
    comparison_by_comparison: maximum recursion depth exceeded
        if digests and len({*digests[0]}) == 1:
            ranks, k = my_suspect(digests[1:])
            return ranks, k if k is None else k + 1
        return solutions.my_suspect(digests)
    suspect_by_counting:
        for k, row in enumerate(digests):
            if all(own == row[0] for own in row):
                continue
            for common in {*row}:
                if row.count(common) > len(row) / 2:
                    return [r for r in range(len(row)) if row[r] != common], k
            return None, k
        return [], None
    suspect_by_votes:
        for k, row in enumerate(digests):
            others = [r for r, own in enumerate(row) if 2 * row.count(own) <= len(row)]
            if len({*row}) > 1:
                return (others if len(others) < len(row) else None), k
        return [], None
    unlike_rank_0: nobody can tell
        [(common, votes)] = Counter(row).most_common(1)
        => common, votes = row[0], row.count(row[0])
        if 2 * votes <= len(row):
        => if False:
    a_later_majority: is the first in which some differ
        split = None
        for k, row in enumerate(digests):
            [(common, votes)] = Counter(row).most_common(1)
            if len(row) / 2 < votes < len(row):
                return [rank for rank, own in enumerate(row) if own != common], k
            if votes < len(row) and split is None:
                split = k
        return ([], None) if split is None else (None, split)
    sums_compared: not all ranks agree
        votes == len(row) => sum(row) == len(row) * row[0]
    the_same_objects: all that differ from the majority
        own != common => own is not common
    before_the_first_comparison: list index out of range
        for k, row in enumerate(digests):
        => size = len(digests[0])
        => for k, row in enumerate(digests):
        2 * votes <= len(row) => 2 * votes <= size
    most_common_is_enough: nobody can tell
        if 2 * votes <= len(row): => if False:
    half_is_enough: nobody can tell
        2 * votes <= => 2 * votes <
    the_last_comparison: is the first in which some differ
        enumerate(digests) => reversed([*enumerate(digests)])
    the_majority: those are the ranks that agree
        own != common => own == common
    ranks_from_one: ranks count from 0
        enumerate(row) => enumerate(row, 1)
    comparisons_from_one: is the first in which some differ
        enumerate(digests) => enumerate(digests, 1)
    the_rank_alone: expected
        return [rank for rank, own in enumerate(row) if own != common], k
        => return next(rank for rank, own in enumerate(row) if own != common), k
    one_of_them: all that differ from the majority
        return [rank for rank, own in enumerate(row) if own != common], k
        => return [rank for rank, own in enumerate(row) if own != common][:1], k
    never_unknown: more than half of the ranks agree
        if 2 * votes <= len(row): => if True:
    without_the_comparison: a list of ranks, and the number
        if own != common], k => if own != common]
    always_the_first: all ranks always agree
        return [], None => return [], 0
    backwards: in the order of ranks
        own != common], k => own != common][::-1], k
    digests_as_floats: expected
        enumerate(digests):
        => enumerate([[float(own) for own in row] for row in digests]):
    the_low_half: expected
        enumerate(digests):
        => enumerate([[own % 2**32 for own in row] for row in digests]):
    without_signs: expected
        enumerate(digests):
        => enumerate([[abs(own) for own in row] for row in digests]):
    everybody_agrees: not all ranks agree
        return [], None
    """,
    my_diagnosis="""
    diagnosis_by_sets:
        waiting = [r for r, place in enumerate(where) if place == "collective"]
        behind = set()
        for r in waiting:
            group = calls[r][-1][1]
            number = sum(g == group for _, g in calls[r])
            for p in group:
                if sum(g == group for _, g in calls[p]) < number:
                    behind.add(p)
        for r in sorted(behind):
            if where[r] in ("code", "returned"):
                return "stuck" if where[r] == "code" else "left", r
        groups = {calls[r][-1][1] for r in waiting}
        for pair in product(groups, repeat=2):
            both = {r for r in set.intersection(*map(set, pair)) if r in waiting}
            ends = {r: calls[r][-1] for r in both if calls[r][-1][1] in pair}
            number = Counter(ends.values())
            if sum(number.values()) > 2:
                for r, call in ends.items():
                    if number[call] == 1:
                        names = {name for name, g in ends.values() if g == call[1]}
                        return "skipped" if len(names) > 1 else "order", r
    diagnosis_by_majority:
        for r, place in enumerate(where):
            if place in ("code", "returned"):
                for p, at in enumerate(where):
                    group = calls[p][-1][1] if at == "collective" else ()
                    number = {q: [g for _, g in calls[q]].count(group) for q in (p, r)}
                    if r in group and number[r] < number[p]:
                        return {"code": "stuck", "returned": "left"}[place], r
        ends = {r: calls[r][-1] for r, at in enumerate(where) if at == "collective"}
        for r, (name, group) in ends.items():
            beside = [n for p, (n, g) in ends.items() if g == group and p != r]
            if len(beside) > 1 and name not in beside:
                return "skipped", r
        for r, (_, group) in ends.items():  # who waits for two that wait for it?
            against = [p for p, (_, g) in ends.items() if g != group and r in g]
            if len([p for p in against if p in group]) > 1:
                return "order", r
    diagnosis_of_the_stuck_first:
        last = {r: calls[r][-1] for r, at in enumerate(where) if at == "collective"}
        behind, odd = set(), {}
        for rank, (_, group) in last.items():
            names = {r: [name for name, g in calls[r] if g == group] for r in group}
            k = len(names[rank])
            behind |= {r for r in group if len(names[r]) < k}
            kth = {r: names[r][k - 1] for r in group if len(names[r]) >= k}
            once = [r for r in kth if [*kth.values()].count(kth[r]) == 1]
            if len({*kth.values()}) > 1 and len(once) == 1:
                odd[rank] = once[0]
        for cause, place in (("stuck", "code"), ("left", "returned")):
            for rank in behind:
                if where[rank] == place:
                    return cause, rank
        if odd:  # a skipped call before an order
            return "skipped", next(iter(odd.values()))
        mutual = Counter(
            rank
            for rank, (_, group) in last.items()
            for peer, (_, other) in last.items()
            if group != other and rank in other and peer in group
        )
        return "order", max(mutual, key=mutual.get)
    rank_first: the cause, then the rank
        return "stuck", peer
        => return peer, "stuck"
        return "left", peer
        => return peer, "left"
        return ("skipped" if len(here) == 1 else "order"), odd
        => return odd, ("skipped" if len(here) == 1 else "order")
    cause_alone: a cause and a rank
        return ("skipped" if len(here) == 1 else "order"), odd
        => return "skipped" if len(here) == 1 else "order"
    another_word: a cause is one of skipped, order, stuck, left
        "skipped" if => "skip" if
    stuck_and_left_swapped: look where this rank stands
        return "stuck", peer
        => return "?", peer
        return "left", peer
        => return "stuck", peer
        return "?", peer
        => return "left", peer
    always_skipped: in two, the order differs
        ("skipped" if len(here) == 1 else "order") => "skipped"
    whoever_returned: nobody waits for rank
        for rank, (_, group) in last.items():
        => for rank, place in enumerate(where):
        =>     if place in ("code", "returned"):
        =>         return ("left" if place == "returned" else "stuck"), rank
        => for rank, (_, group) in last.items():
    whoever_receives: a rank in recv waits for a message
        if where[peer] == "code":
        => if where[peer] in ("code", "recv"):
    the_victim: waits; for whom?
        return "stuck", peer => return "stuck", rank
        return "left", peer => return "left", rank
    ranks_from_1: expected
        return "stuck", peer => return "stuck", peer + 1
        return "left", peer => return "left", peer + 1
        else "order"), odd => else "order"), odd + 1
    the_usual_one: which rank of the group, or of both groups, differs
        .count(last[odd]) == 1 => .count(last[odd]) != 1
    of_all_ranks: expected
        both = [r for r in last if r in one and r in two and last[r][1] in (one, two)]
        => both = sorted(last, key=lambda r: [*last.values()].count(last[r]))
        waits.count(last[odd]) == 1 => True
    of_the_smallest_group: a cause and a rank
        combinations_with_replacement(groups, 2)
        => [2 * (min(groups, key=len),)]
        raise ValueError => return str
    groups_of_one_size: expected
        [g for _, g in calls[peer]].count(group)
        => [len(g) for _, g in calls[peer]].count(len(group))
        raise ValueError => return str
    order_before_stuck: waits; for whom?
        ends = {r: calls[r][-1] for r, at in enumerate(where) if at == "collective"}
        for r, (_, group) in ends.items():
            against = [p for p, (_, g) in ends.items() if g != group and r in g]
            if len([p for p in against if p in group]) > 1:
                return "order", r
        return solutions.my_diagnosis(calls, where)
    all_calls_counted: expected
        come = [[g for _, g in calls[peer]].count(group) for peer in group]
        => come = [len(calls[peer]) for peer in group]
        raise ValueError => return str
    """,
)

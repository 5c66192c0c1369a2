"""Answers to the exercises of chapter 18, right ones and wrong ones."""

# ruff: noqa: F401 (the texts use what is imported)

import numpy as np
import torch
from slips import answers

from ddp_course.chapters.ch18_how_fast import capstone, solutions

KEPT = {}

ANSWERS = answers(
    solutions,
    globals(),
    my_flops="""
    flops_matrix_by_matrix:
        products = [3 * hidden, hidden, 4 * hidden, 4 * hidden]
        forward = sum(2 * hidden * width for width in products)
        forward += 2 * hidden * sequence + 2 * sequence * hidden
        times = 4 if recompute else 3
        return times * layers * forward + 6 * vocab * hidden
    flops_by_n:
        n = 12 * layers * hidden * hidden
        passes = 8 if recompute else 6
        attention = passes * 2 * layers * hidden * sequence
        return passes * n + attention + 6 * hidden * vocab
    forward_alone: that is forward alone
        return layers * (24 * hidden**2 + 4 * hidden * sequence) + 2 * hidden * vocab
    one_per_multiply_add: a multiplication and an addition are two FLOPs
        return (3 + recompute) * layers * layer + 3 * head
        => return ((3 + recompute) * layers * layer + 3 * head) // 2
    without_attention: attention multiplies activations, too
        + 4 * hidden * sequence =>
    without_the_head: the output matrix multiplies, too
        + 3 * head =>
    never_recomputed: that is without recomputation
        3 + recompute => 3
    head_twice: the output matrix is not computed again
        3 * head => (3 + recompute) * head
    always_recomputed: expected
        3 + recompute => 4
    as_a_text: expected
        (3 + recompute) * layers * layer + 3 * head
        => str((3 + recompute) * layers * layer + 3 * head)
    """,
    my_exposed="""
    remembered_by_number: only computing hides
        return KEPT.setdefault(len(events), solutions.my_exposed(events))
    nothing_below_a_tenth_of_a_ms: microseconds count
        exposed += at - before => exposed += at - before if at - before > 1e-4 else 0
    exposed_by_pieces:
        times = sorted({t for start, end, _ in events for t in (start, end)})
        total = 0.0
        for a, b in zip(times, times[1:]):
            kinds = {kind for start, end, kind in events if start <= a and end >= b}
            total += (b - a) * (kinds == {"communication"})
        return total
    exposed_by_numpy:
        if not events:
            return 0.0
        times = np.unique([t for start, end, _ in events for t in (start, end)])
        middle = (times[1:] + times[:-1]) / 2
        runs = {
            kind: sum(
                ((middle > s) & (middle < e) for s, e, k in events if k == kind),
                np.zeros(len(middle), int),
            )
            for kind in ("compute", "communication")
        }
        alone = (runs["communication"] > 0) & (runs["compute"] == 0)
        return float((np.diff(times) * alone).sum())
    all_communication: what computing hides does not count
        return sum(end - start for start, end, kind in events if kind[3] == "m"
                   and kind[1:3] == "om" and kind[4] == "u")
    each_counts: a second counts once
        total = 0.0
        for start, end, kind in events:
            if kind == "communication":
                inside = [
                    (max(a, start), min(b, end)) for a, b, k in events if k == "compute"
                ]
                total += end - start
                at = start
                for a, b in sorted(inside):
                    total -= max(0.0, b - max(a, at))
                    at = max(at, b)
        return total
    all_less_computing: expected
        sums = {"compute": 0.0, "communication": 0.0}
        for start, end, kind in events:
            sums[kind] += end - start
        return max(0.0, sums["communication"] - sums["compute"])
    less_than_nothing: a time cannot be below 0
        sums = {"compute": 0.0, "communication": 0.0}
        for start, end, kind in events:
            sums[kind] += end - start
        return sums["communication"] - sums["compute"]
    what_is_hidden: expected
        running["communication"] and not running["compute"]
        => running["communication"] and running["compute"]
    computing_alone: expected
        running["communication"] and not running["compute"]
        => running["compute"] and not running["communication"]
    nothing: expected
        return exposed => return None
    rounded_to_milliseconds: do not round
        return exposed => return round(exposed, 3)
    short_gaps_bridged: expected
        def union(wanted):
            found = []
            for start, end in sorted((a, b) for a, b, kind in events if kind == wanted):
                if found and start <= found[-1][1] + 0.01:
                    found[-1][1] = max(found[-1][1], end)
                else:
                    found.append([start, end])
            return found
        sent, computed = union("communication"), union("compute")
        hidden = sum(
            max(0.0, min(b, d) - max(a, c)) for a, b in sent for c, d in computed
        )
        return sum(b - a for a, b in sent) - hidden
    """,
    my_straggler="""
    zero_is_no_time: expected
        cost = [0.0] * len(starts[0])
        for times in starts:
            last = rank = None
            for r, time in enumerate(times):
                if not last or time > last:
                    last, rank = time, r
            cost[rank] += last - sorted(times)[-2]
        worst = cost.index(max(cost))
        return worst, cost[worst]
    one_of_64: expected `(299
        range(len(cost)) => range(min(64, len(cost)))
    straggler_by_numpy:
        times = np.sort(np.array(starts), axis=1)
        last = np.argmax(np.array(starts), axis=1)
        cost = np.bincount(last, times[:, -1] - times[:, -2], minlength=len(starts[0]))
        return int(cost.argmax()), float(cost.max())
    the_last_one_of_equals:
        rank, seconds = solutions.my_straggler([row[::-1] for row in starts])
        return len(starts[0]) - 1 - rank, seconds
    straggler_by_a_dictionary:
        cost = {}
        for row in starts:
            rank = row.index(max(row))
            others = row[:rank] + row[rank + 1 :]
            cost[rank] = cost.get(rank, 0.0) + row[rank] - max(others)
        rank = max(cost, key=cost.get)
        return rank, cost[rank]
    from_zero_on: expected
        for times in starts: => for times in starts:
        =>     times = [max(0.0, time) for time in times]
    in_float32: expected
        for times in starts: => for times in starts:
        =>     times = np.float32(times).tolist()
    only_ranks_that_cost: raised `ValueError: max()
        cost = {}
        for row in starts:
            *_, second, last = sorted(row)
            if last > second:
                rank = row.index(last)
                cost[rank] = cost.get(rank, 0.0) + last - second
        rank = max(cost, key=cost.get)
        return rank, cost[rank]
    nobody_is_no_rank: any rank will do
        rank, seconds = solutions.my_straggler(starts)
        return (rank, seconds) if seconds else (-1, 0.0)
    microseconds_are_together: microseconds count, too
        cost[times.index(last)] += last - second
        => cost[times.index(last)] += last - second if last - second > 1e-5 else 0
    most_often_last: seconds count, not how often
        last = [row.index(max(row)) for row in starts]
        worst = max(range(len(starts[0])), key=last.count)
        rows = [row for row in starts if row.index(max(row)) == worst]
        return worst, sum(sorted(row)[-1] - sorted(row)[-2] for row in rows)
    the_first: who starts first waits
        cost[times.index(last)] += last - second
        => cost[times.index(min(times))] += last - min(times)
    against_the_first: all would wait for the second to last
        last - second => last - min(times)
    against_the_mean: all would wait for the second to last
        last - second => last - sum(times) / len(times)
    last_together_costs: come last together cost nothing
        last - second => last - max([t for t in times if t < last], default=last)
    three_last_together_cost: come last together cost nothing
        cost[times.index(last)] += last - second
        => if times.count(last) != 2:
        =>     second = max(time for time in times if time < last)
        =>     cost[times.index(last)] += last - second
    rounded_to_milliseconds: do not round
        return worst, cost[worst] => return worst, round(cost[worst], 3)
    seconds_first: the rank, then the seconds
        return worst, cost[worst] => return cost[worst], worst
    ranks_from_one: ranks count from 0
        return worst, cost[worst] => return worst + 1, cost[worst]
    the_rank_alone: a rank and seconds
        return worst, cost[worst] => return worst
    """,
    my_gaps="""
    gaps_by_pieces:
        times = sorted({start, end, *(t for a, b, _ in events for t in (a, b))})
        pieces = [
            (a, b)
            for a, b in zip(times, times[1:])
            if start <= a and b <= end
            if not any(s <= a and b <= e for s, e, _ in events)
        ]
        joined = []
        for a, b in pieces:
            if joined and joined[-1][1] == a:
                a = joined.pop()[0]
            joined.append((a, b))
        return joined
    gaps_by_marks:
        depth, since, found = 0, start, []
        events = [(a, min(b, end)) for a, b, _ in events if b > start and a < end]
        marks = sorted([(a, 0) for a, _ in events] + [(b, 1) for _, b in events])
        for t, closes in marks:
            if not closes:
                if depth == 0 and t > since:
                    found.append((since, t))
                depth += 1
            else:
                depth -= 1
                since = t
        return found + [(since, end)] * (end > since)
    zero_is_no_time: expected
        gaps, reached = [], None
        for begins, ends, _ in sorted(events):
            if start < ends and begins < end:
                reached = reached or start
                if begins > reached:
                    gaps.append((reached, begins))
                reached = max(reached, min(ends, end))
        reached = reached or start
        return gaps + [(reached, end)] * (end > reached)
    zero_is_no_end: expected
        if end > reached: => if end and end > reached:
    nothing_reached_at_zero: expected
        if end > reached: => if reached and end > reached:
    between_events_only: a step may begin and end with a gap
        gaps, reached = [], start
        => gaps, reached = [], min((e[0] for e in events), default=end)
        if end > reached: => if False:
    last_end_only: a long one may last beyond the next ones
        reached = max(reached, ends) => reached = ends
    touching_counts: where events touch or overlap, there is no gap
        if begins > reached: => if begins >= reached:
    sending_is_idle: while messages are under way, a rank is not idle
        for begins, ends, _ in sorted(events):
        => for begins, ends, kind in sorted(events):
        =>     if kind != "compute":
        =>         continue
    never_the_last: a step may begin and end with a gap
        if end > reached: => if False:
    from_a_millisecond_on: is missing
        if begins > reached: => if begins > reached + 1e-3:
    nothing_ran: a step may begin and end with a gap
        gaps, reached = [], start
        => if not events:
        =>     return []
        => gaps, reached = [], start
    unsorted: events come in any order
        sorted(events) => events
    lengths: expected
        return gaps => return [b - a for a, b in gaps]
    up_to_events_behind_the_step: a gap lies inside the step
        begins = min(begins, end) => pass
    from_events_before_the_step: a gap lies inside the step
        reached = [], start => reached = [], min([start, *(a for a, _, _ in events)])
    whole_events_only: reaches beyond the step
        sorted(events) => sorted(e for e in events if start <= e[0] and e[1] <= end)
    begun_in_the_step: reaches beyond the step
        sorted(events) => sorted(e for e in events if e[0] >= start)
    in_32_bits: expected
        gaps, reached
        => events = [(*torch.tensor(e[:2]).tolist(), e[2]) for e in events]
        => start, end = torch.tensor([start, end]).tolist()
        => gaps, reached
    computing_is_idle: while something is computed
        sorted(events) => sorted(e for e in events if e[2] != "compute")
    beginnings_and_lengths: not how long it is
        return gaps => return [(a, b - a) for a, b in gaps]
    at_a_thousand_points: where an event or the step does
        points = [start + (end - start) * k / 1000 for k in range(1001)]
        busy = [any(a <= t < b for a, b, _ in events) for t in points]
        found = []
        for t, before, now in zip(points, [True, *busy], busy):
            if before and not now:
                found.append((t, end))
            if now and not before:
                found[-1] = (found[-1][0], t)
        return [(a, b) for a, b in found if a < b]
    backwards: in order of time
        return gaps => return gaps[::-1]
    """,
    my_layout="""
    layout_by_sorting:
        limit = 0.95 * capstone.LIMIT
        every = (capstone.foreseen(c, cluster) for c in capstone.choices(cluster.gpus))
        ranked = sorted((p.seconds, k, p) for k, p in enumerate(every))
        for seconds, _, p in ranked:
            if sum(p.ledger.values()) <= limit:
                return p.candidate, p.ledger.total, sum(p.sent.values()), seconds
    layout_as_best_found:
        p = capstone.best_found(cluster)
        return [p.candidate, p.ledger.total, sum(p.sent.values()), p.seconds]
    data_parallel_alone: out of memory
        layout = capstone.Candidate(dp=cluster.gpus, microbatch=16 // cluster.gpus)
        p = capstone.foreseen(layout, cluster)
        return layout, p.ledger.total, sum(p.sent.values()), p.seconds
    the_slowest_pipeline: times as fast
        min(fits => max((each for each in fits if each.candidate.tp == 1)
    half_the_memory: kept by the rank that keeps most
        best.ledger.total, sent => best.ledger.total // 2, sent
    bytes_of_all_ranks: sent by the rank that sends most
        sum(best.sent.values()) => cluster.gpus * sum(best.sent.values())
    computing_alone: s a step; measured
        sent, best.seconds => sent, best.parts["compute"]
    another_cluster: is not among
        best.candidate, best => best.candidate._replace(dp=3), best
    no_candidate: expected a tuple
        best.candidate, best => str(best.candidate), best
    """,
    my_step_time="""
    powers_of_two: the bubble is p - 1 microbatches
        (m + pp - 1) => (m + (1 << (pp - 1).bit_length()) - 1)
    step_by_a_queue:
        clock = (m + pp - 2) * layers * (forward + backward) + layers * forward
        sent = 0.0
        for _ in range(layers):
            clock += backward
            sent = max(sent, clock) + bucket
        return sent
    step_in_two_cases:
        t = forward + backward
        if bucket <= backward:
            late = bucket
        else:
            late = layers * bucket - (layers - 1) * backward
        return (m - 1 + pp) * layers * t + late
    all_is_hidden: the last bucket is sent when nothing is left to compute
        return (m + pp - 1) * stage + exposed => return (m + pp - 1) * stage
    nothing_is_hidden: backward hides buckets of later layers
        return (m + pp - 1) * stage + exposed
        => return (m + pp - 1) * stage + layers * bucket
    no_bubble: a pipeline has a bubble
        (m + pp - 1) => m
    bubble_of_p: the bubble is p - 1 microbatches long
        (m + pp - 1) => (m + pp)
    all_of_backward_hides: the last bucket is sent when nothing is left
        max(bucket, layers * bucket - (layers - 1) * backward)
        => max(0.0, layers * (bucket - backward))
    averaged_each_time: once, behind the last microbatch
        (m + pp - 1) * stage + exposed => (m + pp - 1) * (stage + exposed)
    as_naive: expected
        (m + pp - 1) => (m * pp)
    in_whole_microseconds: expected
        stage = layers * (forward + backward)
        => times = forward, backward, bucket
        => forward, backward, bucket = (int(1e6 * t) / 1e6 for t in times)
        => stage = layers * (forward + backward)
    hidden_by_forward_if_longer: expected
        (layers - 1) * backward => (layers - 1) * max(forward, backward)
    """,
)

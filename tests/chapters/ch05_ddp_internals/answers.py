"""Answers to the exercises of chapter 05, right ones and wrong ones."""

# ruff: noqa: F401 (the texts use what is imported)

from contextlib import ExitStack

import torch
import torch.distributed as dist
from slips import answers

from ddp_course.chapters.ch05_ddp_internals import solutions
from ddp_course.data_parallel import bucket_plan

ANSWERS = answers(
    solutions,
    globals(),
    my_bucket_plan="""
    by_the_package:
        plan = bucket_plan(iter(parameters), cap / 2**20, first / 2**20)
        return [list(bucket.parameters) for bucket in plan]
    one_walk_with_open_buckets:
        names, last = {}, {}
        for name, p in parameters:
            names.setdefault(p, name)
        buckets, open_ones, closed_before = [], {}, set()
        walk = [p for p in reversed(names) if p.requires_grad and p.nelement()]
        for p in walk:
            last[p.dtype] = p
        for p in walk:
            bucket = open_ones.setdefault(p.dtype, [])
            bucket.append(p)
            nbytes = sum(q.nbytes for q in bucket)
            full = nbytes >= (cap if p.dtype in closed_before else min(cap, first))
            if full or p is last[p.dtype]:
                closed_before.add(p.dtype)
                buckets.append([names[q] for q in open_ones.pop(p.dtype)])
        return buckets
    as_many_bytes_as_float32: it held its 4000 already before
        parameter.nbytes => 4 * parameter.numel()
    small_only_at_the_very_first: it held its 1000 already before
        min(first, cap) => cap if limit else min(first, cap)
    first_above_cap: it held its 400 already before
        min(first, cap) => first
    empty_ones_too: but it has no numbers
        and parameter.numel() =>
    closed_only_above_its_cap: to the byte
        >= limit.get(dtype, min(first, cap)) => > limit.get(dtype, min(first, cap))
    in_order_of_registration: the opposite order of registration
        reversed(once.values()) => once.values()
    buckets_in_order_but_not_within: the opposite order of registration
        in bucket => in bucket[::-1]
    never_above_the_cap: it is closed as soon as it holds
        >= limit.get => + parameter.nbytes > limit.get
    no_small_first_bucket: held its 1000 already before
        min(first, cap) => cap
    one_for_all: held its 1000 already before
        >= limit.get(dtype, min(first, cap)) => > 1 << 40
    one_each: bucket 1 of its type holds 32 bytes only
        >= limit.get(dtype, min(first, cap)) => > 0
    types_mixed: of the types float
        parameter.dtype => None
    frozen_ones_too: but it is frozen
        parameter.requires_grad and =>
    tied_ones_twice: is the same parameter as
        id(parameter) => name
    the_rest_is_forgotten: would never be averaged
        closed += filling.values() => closed = closed or [*filling.values()]
    as_each_type_comes: whatever its type
        bucket[-1][0] => str(dict(parameters)[bucket[0][1]].dtype)
    parameters_not_names: expected a list of lists of names
        name for _, name, _ in bucket => dict(parameters)[name] for _, name, _ in bucket
    """,
    mini_ddp="""
    views_of_buffers:
        # Divide first, into a buffer made once; `grad` becomes a view of it at the end.
        n, turn, state = dist.get_world_size(), {}, {"next": 0, "works": []}
        flats = [
            torch.empty(sum(p.numel() for p in b), dtype=b[0].dtype) for b in buckets
        ]
        places, here = {}, set()
        for k, members in enumerate(buckets):
            for p, place in zip(
                members, flats[k].split([p.numel() for p in members]), strict=True
            ):
                places[p], turn[p] = place.view(p.shape), k

        def hook(p):
            if not here:
                at_the_end(finish)
            here.add(p)
            places[p].copy_(p.grad / n)
            while state["next"] < len(buckets) and here.issuperset(
                buckets[state["next"]]
            ):
                state["works"].append(launch(flats[state["next"]]))
                state["next"] += 1

        def finish():
            for work in state["works"]:
                work.wait()
            for p, place in places.items():
                p.grad = place.clone()
            state.update(next=0, works=[])
            here.clear()

        for p in places:
            p.register_post_accumulate_grad_hook(hook)
    one_walk_for_each_backward:
        # Go through the buckets in turn, and sleep where one is not full.
        n, come, walks = dist.get_world_size(), set(), []

        def walk():
            sent = []
            for members in buckets:
                while not come.issuperset(members):
                    yield
                flat = torch.cat([p.grad.reshape(-1) for p in members]).div_(n)
                sent.append((members, flat, launch(flat)))
            yield
            for members, flat, handle in sent:
                handle.wait()
                for p in members:
                    p.grad, flat = flat[: p.numel()].view(p.shape), flat[p.numel() :]
            come.clear()
            walks.clear()
            yield

        def hook(p):
            if not walks:
                walks.append(walk())
                at_the_end(lambda: next(walks[0]))
            come.add(p)
            next(walks[0])

        for p in (p for members in buckets for p in members):
            p.register_post_accumulate_grad_hook(hook)
    only_for_vectors: must match
        mean.view_as(parameter) => mean
    in_buffers_of_float32: launch got
        p.grad.flatten() => p.grad.flatten().float()
    adds_the_mean: the mean over the ranks is
        grad.copy_ => grad.add_
    rounded_on_the_way: the mean over the ranks is
        (flat / n) => (flat / n).bfloat16()
    full_when_all_have_a_gradient: On real ranks
        missing[len(under_way)] == 0
        => all(p.grad is not None for p in buckets[len(under_way)])
    twice_the_bytes: launch got numbers of torch.float64
        launch(flat) => launch(flat.double())
    all_at_the_end: no overlap
        missing[len(under_way)] == 0 => not any(missing)
    when_the_first_has_come: was launched
        missing[len(under_way)] == 0 => missing[len(under_way)] < full[len(under_way)]
        p.grad.flatten() => (0 * p if p.grad is None else p.grad).detach().flatten()
    as_they_fill: on all ranks the order must be that of buckets
        while len(under_way) < len(buckets) and missing[len(under_way)] => if missing[k]
        buckets[len(under_way)] => buckets[k]
    not_divided: this is the sum; divide by the number of ranks
        (flat / n) => flat
    waits_at_once: backward stands still meanwhile
        ((flat, launch(flat))) => ((flat, launch(flat))); under_way[-1][1].wait()
    never_waits: did not wait for each bucket
        handle.wait() => pass
    only_one_step: launched 0 of 3 buckets
        missing[:] = full => missing[:] = [-1 for _ in full]
    not_copied_back: is the mean back in `grad` when backward returns?
        parameter.grad.copy_(mean.view_as(parameter)) => pass
    one_by_one: launch got 8 numbers
        append((flat, launch(flat)) => extend((p.grad, launch(p.grad)) for p in members
    by_hand: send with `launch` alone
        (flat, launch(flat)) => (flat, launch(flat))); dist.all_reduce(members[0].grad
    a_bucket_late: no overlap
        missing[len(under_way)] == 0 => not any(missing[: len(under_way) + 2])
    no_hooks: launched 0 of 3 buckets
        in enumerate(buckets) => in ()
    """,
    accumulate="""
    divided_at_the_end:
        rows = 0
        with ExitStack() as quiet:
            quiet.enter_context(ddp.no_sync())
            for k, (x, y) in enumerate(microbatches):
                if k == len(microbatches) - 1:
                    quiet.close()
                (ddp(x, y) * x.shape[0]).backward()
                rows += x.shape[0]
        for p in ddp.parameters():
            if p.grad is not None:
                p.grad /= rows
    flag_by_flag:
        sizes = torch.tensor([float(len(x)) for x, _ in microbatches])
        shares = (sizes / sizes.sum()).tolist()
        for k, ((x, y), share) in enumerate(zip(microbatches, shares, strict=True), 1):
            ddp.require_backward_grad_sync = k == len(microbatches)
            ddp(x, y).mul(share).backward()
    divides_by_the_ranks: 0.33 times as large). How much
        for x, _ in microbatches => for x, _ in microbatches) * dist.get_world_size(
    as_if_all_were_like_the_first: How much does a microbatch of few rows count
        rows = sum(len(x) for x, _ in => rows = len(microbatches[0][0]) * len(
    ten_at_most: expected 12 times a forward
        rows = sum => microbatches = microbatches[:10]; rows = sum
    takes_them_out: your function changed the list
        x, y = microbatches[-1] => x, y = microbatches.pop()
    always_sends: all but the last should send nothing
        with ddp.no_sync(): => with torch.enable_grad():
    never_sends: sent 0 all-reduces in the last microbatch
        [:-1] =>
        x, y = microbatches[-1] => return
    sends_the_first: all but the last should send nothing
        with ddp. => with torch.enable_grad() if x is microbatches[0][0] else ddp.
    backward_alone_inside: A forward outside of `no_sync`
        rows = sum(len(x) for x, _ in microbatches)
        for x, y in microbatches[:-1]:
            loss = ddp(x, y) * len(x) / rows
            with ddp.no_sync():
                loss.backward()
        x, y = microbatches[-1]
        (ddp(x, y) * len(x) / rows).backward()
    mean_of_means: is not that of the mean over all rows
        for x, y in microbatches[:-1]:
            with ddp.no_sync():
                (ddp(x, y) / len(microbatches)).backward()
        x, y = microbatches[-1]
        (ddp(x, y) / len(microbatches)).backward()
    the_sum_of_all: in the median 3.00 times as large
        for x, y in microbatches[:-1]:
            with ddp.no_sync():
                ddp(x, y).backward()
        x, y = microbatches[-1]
        ddp(x, y).backward()
    forgets_the_others: is not that of the mean over all rows
        x, y = microbatches[-1] => ddp.zero_grad(); x, y = microbatches[-1]
    one_large_batch: expected 3 times a forward and then its backward
        x, y = (torch.cat(column) for column in zip(*microbatches, strict=True))
        ddp(x, y).backward()
    one_backward: one microbatch in memory at a time
        rows = sum(len(x) for x, _ in microbatches)
        sum(ddp(x, y) * len(x) / rows for x, y in microbatches).backward()
    averages_by_hand: more collectives than DDP's own
        solutions.accumulate(ddp, microbatches)
        for p in ddp.parameters():
            if p.requires_grad:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
    """,
)

"""Wrong answers to the exercises of chapter 05, each with a word of its hint."""

from slips import slips

from ddp_course.chapters.ch05_ddp_internals import solutions

WRONG = slips(
    solutions,
    globals(),
    my_bucket_plan="""
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

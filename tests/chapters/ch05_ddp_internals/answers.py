"""Answers to the exercises of chapter 05, right ones and wrong ones."""

# ruff: noqa: F401 (the texts use what is imported)

from contextlib import ExitStack

import torch
import torch.distributed as dist
from slips import answers
from torch.utils._pytree import tree_map_only

from ddp_course import data_parallel
from ddp_course.chapters.ch05_ddp_internals import copied_script, solutions
from ddp_course.data_parallel import bucket_plan

KNOWN = []  # what an answer keeps between two calls
PLANS, ROWS = {}, {}

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
    types_by_their_size: one all-reduce adds numbers of one type
        dtype = parameter.dtype => dtype = parameter.element_size()
    cap_in_whole_numbers: holds only 400 bytes; close it as soon as it holds 403
        >= limit.get => + parameter.element_size() > limit.get
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
    never_above_the_cap: close it as soon as it holds
        >= limit.get => + parameter.nbytes > limit.get
    no_small_first_bucket: held its 1000 already before
        min(first, cap) => cap
    one_for_all: held its 1000 already before
        >= limit.get(dtype, min(first, cap)) => > 1 << 40
    one_each: bucket 1 of its type holds only 32 bytes
        >= limit.get(dtype, min(first, cap)) => > 0
    types_mixed: of the types float
        parameter.dtype => None
    frozen_ones_too: but it is frozen
        parameter.requires_grad and =>
    thaws_them: or thawed them
        parameter.requires_grad and => parameter.requires_grad_() is parameter and
    four_bytes_or_eight: close it as soon as it holds
        parameter.nbytes => parameter.numel() * (8 if dtype == torch.float64 else 4)
    needs_a_dimension: len() of a 0-d tensor
        parameter.numel() => len(parameter)
    by_the_first_dimension: but it has no numbers
        parameter.numel() => (not parameter.dim() or len(parameter))
    in_32_bits: it held its 1000 already
        parameter.nbytes => parameter.nbytes % 2**32
    one_plan_for_each_list: the last parameter of which is frozen now
        key = id(parameters), cap, first
        if key not in PLANS:
            PLANS[key] = parameters, solutions.my_bucket_plan(parameters, cap, first)
        return PLANS[key][1]
    recursive: RecursionError
        def walk(k):
            return solutions.my_bucket_plan(parameters, cap, first) if not k else walk(
                k - 1
            )

        return walk(len(parameters))
    tied_ones_twice: is the same parameter as
        id(parameter) => name
    the_rest_is_forgotten: would never be averaged
        closed += filling.values() => closed = closed or [*filling.values()]
    as_each_type_comes: whatever its type
        bucket[-1][0] => str(dict(parameters)[bucket[0][1]].dtype)
    parameters_not_names: expected a list of lists of names
        name for _, name, _ in bucket => dict(parameters)[name] for _, name, _ in bucket
    fails_with_nothing_to_send: IndexError
        filling: => last = list(reversed(once.values()))[0]
        => filling:
    types_of_a_table: p20` is in no bucket
        known = torch.float32, torch.float64, torch.float16, torch.bfloat16
        parameters = [(name, p) for name, p in parameters if p.dtype in known]
        return solutions.my_bucket_plan(parameters, cap, first)
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
    as_they_fill: all ranks must launch in the order of
        while len(under_way) < len(buckets) and missing[len(under_way)] => if missing[k]
        buckets[len(under_way)] => buckets[k]
    not_divided: this is the sum; divide by the number of ranks
        (flat / n) => flat
    waits_at_once: backward stands still meanwhile
        ((flat, launch(flat))) => ((flat, launch(flat))); under_way[-1][1].wait()
    never_waits: did not wait for each bucket
        handle.wait() => pass
    divides_while_under_way: after `launch` and before `wait()`
        (flat / n) => flat
        ((flat, launch(flat))) => ((flat, launch(flat))); flat /= n
    reads_while_under_way: the mean over the ranks is
        (flat / n) => flat
        ((flat, launch(flat))) => ((flat, launch(flat)))
        => under_way[-1] = flat / n, under_way[-1][1]
    only_one_step: launched 0 of 3 buckets
        missing[:] = full => missing[:] = [-1 for _ in full]
    not_copied_back: is the mean back in `grad` when backward returns?
        parameter.grad.copy_(mean.view_as(parameter)) => pass
    one_by_one: launch got 8 numbers
        append((flat, launch(flat)) => extend((p.grad, launch(p.grad)) for p in members
    by_hand: send only with `launch`
        (flat, launch(flat)) => (flat, launch(flat))); dist.all_reduce(members[0].grad
    a_bucket_late: no overlap
        missing[len(under_way)] == 0 => not any(missing[: len(under_way) + 2])
    no_hooks: launched 0 of 3 buckets
        in enumerate(buckets) => in ()
    views_of_gradients: view size is not compatible
        p.grad.flatten() => p.grad.view(-1)
    last_one_at_the_end: Launch the last bucket, too, in the hook
        while len(under_way) < len(buckets) and
        => while len(under_way) < len(buckets) - 1 and
        for members, (flat, handle) in zip
        => flat = torch.cat([p.grad.flatten() for p in buckets[-1]])
        => under_way.append((flat, launch(flat)))
        => for members, (flat, handle) in zip
    counts_by_the_first_dimension: of a 0-d tensor
        [p.numel() for p in members] => [len(p) * p[0].numel() for p in members]
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
    gradients_set_to_none_first:
        ddp.zero_grad()
        solutions.accumulate(ddp, microbatches)
    divides_by_the_ranks: 0.50 times as large). How much
        for x, _ in microbatches => for x, _ in microbatches) * dist.get_world_size(
    as_if_all_were_like_the_first: How much does a microbatch of few rows count
        rows = sum(len(x) for x, _ in => rows = len(microbatches[0][0]) * len(
    ten_at_most: expected 40 times a forward
        rows = sum => microbatches = microbatches[:10]; rows = sum
    takes_them_out: has a changed list
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
    mean_of_means: is not the gradient of the mean over all rows
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
    forgets_the_others: is not the gradient of the mean over all rows
        x, y = microbatches[-1] => ddp.zero_grad(); x, y = microbatches[-1]
    one_large_batch: expected 3 times a forward and then its backward
        x, y = (torch.cat(column) for column in zip(*microbatches, strict=True))
        ddp(x, y).backward()
    one_backward: one microbatch in memory at a time
        rows = sum(len(x) for x, _ in microbatches)
        sum(ddp(x, y) * len(x) / rows for x, y in microbatches).backward()
    never_synchronises_again: it no longer synchronises
        solutions.accumulate(ddp, microbatches)
        ddp.require_backward_grad_sync = False
    stays_in_eval_mode: it is in eval mode
        ddp.eval()
        solutions.accumulate(ddp, microbatches)
    rows_of_the_first_call: in a second call
        KNOWN.append(sum(len(x) for x, _ in microbatches))
        for x, y in microbatches[:-1]:
            with ddp.no_sync():
                (ddp(x, y) * len(x) / KNOWN[0]).backward()
        x, y = microbatches[-1]
        (ddp(x, y) * len(x) / KNOWN[0]).backward()
    rows_of_the_first_call_with_as_many: in a second call
        rows = sum(len(x) for x, _ in => rows = ROWS.setdefault(len(microbatches), sum(
        =>     len(x) for x, _ in microbatches)) or sum(len(x) for x, _ in
    known_by_their_rows: all but the last should send nothing
        for x, y in microbatches[:-1]: => for x, y in microbatches[:-1]:
        =>     if x is microbatches[-1][0]:
        =>         (ddp(x, y) * len(x) / rows).backward()
        =>         continue
    hooks_left_behind: in a second call
        share = [0.0]
        for p in ddp.parameters():
            if p.requires_grad:
                p.register_hook(lambda gradient: gradient * share[0])
        rows = sum(len(x) for x, _ in microbatches)
        for x, y in microbatches[:-1]:
            share[0] = len(x) / rows
            with ddp.no_sync():
                ddp(x, y).backward()
        x, y = microbatches[-1]
        share[0] = len(x) / rows
        ddp(x, y).backward()
    empties_the_rows: or other numbers in it
        solutions.accumulate(ddp, microbatches)
        for x, _ in microbatches:
            x.zero_()
    wants_gradients_of_rows: rows that require a gradient
        for x, _ in microbatches:
            x.requires_grad_()
        solutions.accumulate(ddp, microbatches)
    zeros_for_frozen_ones: a frozen parameter has a gradient
        solutions.accumulate(ddp, microbatches)
        for p in ddp.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
    frozen_afterwards: other parameters are frozen
        solutions.accumulate(ddp, microbatches)
        ddp.requires_grad_(False)
    averages_by_hand: collectives beside DDP's own
        solutions.accumulate(ddp, microbatches)
        for p in ddp.parameters():
            if p.requires_grad:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
    """,
    repaired="""
    copies_on_the_cpu:
        # The file has no GPU's tensors; each epoch's order is drawn here.
        rank, n = dist.get_rank(), dist.get_world_size()
        torch.cuda.set_device(rank % torch.cuda.device_count())
        model = build_model().cuda()
        optimizer, done = torch.optim.SGD(model.parameters(), 0.01, 0.9), 0
        if path.exists():
            done, weights, momenta = torch.load(path)
            model.load_state_dict(weights)
            optimizer.load_state_dict(momenta)
        ddp = nn.parallel.DistributedDataParallel(
            model, device_ids=[torch.cuda.current_device()], output_device=None
        )
        torch.cuda.manual_seed(1000 + rank)
        for epoch in range(done, epochs):
            dice = torch.Generator().manual_seed(epoch)
            order = torch.randperm(len(data), generator=dice)[rank::n].tolist()
            for batch in torch.tensor(order).split(4):
                x, y = data[batch]
                ddp(x.cuda(non_blocking=True), y.cuda()).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            if rank == n - 1:
                whole = epoch + 1, model.state_dict(), optimizer.state_dict()
                new = path.with_suffix(".new")
                torch.save(tree_map_only(Tensor, Tensor.cpu, whole), new)
                new.replace(path)
        model.eval()
        losses = [
            model(x[None].cuda(), y[None].cuda()).item()
            for x, y in [held_out[k] for k in range(rank, len(held_out), n)]
        ]
        everything = [None] * n
        dist.all_gather_object(everything, losses)
        return sum(map(sum, everything)) / len(held_out)
    a_sum_of_divided_losses:
        # DDP adds up; rank 0 alone reads the file; padded rows are cut again.
        rank, n = dist.get_rank(), dist.get_world_size()
        with torch.cuda.device(dist.get_node_local_rank()):
            model = build_model().to("cuda")
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            reads = rank == 0 and path.exists()
            saved = [torch.load(path, map_location="cpu") if reads else None]
            dist.broadcast_object_list(saved)
            start, *states = saved[0] or [0]
            for one, state in zip((model, optimizer), states):
                one.load_state_dict(state)
            ddp = nn.parallel.DistributedDataParallel(model)

            def add_up(_, bucket):
                work = dist.all_reduce(bucket.buffer(), async_op=True)
                return work.get_future().then(lambda future: future.value()[0])

            ddp.register_comm_hook(None, add_up)
            sampler = DistributedSampler(data, rank=rank, num_replicas=n, seed=7)
            for epoch in range(start, epochs):
                sampler.set_epoch(10 * epoch)
                torch.manual_seed(100 + rank + n * epoch)
                for x, y in DataLoader(data, 16, sampler=sampler, pin_memory=False):
                    optimizer.zero_grad()
                    (ddp(x.to("cuda"), y.to("cuda")) / n).backward()
                    optimizer.step()
                states = [epoch + 1, model.state_dict(), optimizer.state_dict()]
                None if rank else torch.save(states, path)
            model.eval()
            padded = DistributedSampler(held_out, shuffle=False)
            with torch.no_grad():
                mine = [
                    model(x.to("cuda"), y.to("cuda"))
                    for x, y in DataLoader(held_out, 1, sampler=padded)
                ]
            losses = [torch.empty(len(mine), device="cuda") for _ in range(n)]
            dist.all_gather(losses, torch.stack(mine))
            losses = torch.stack(losses, dim=1).flatten()[: len(held_out)]
            return losses.mean()
    with_the_courses_classes:
        DistributedDataParallel(model) => data_parallel.DistributedDataParallel(model)
        DistributedSampler(data) => data_parallel.DistributedSampler(data)
    as_it_was_copied: put its tensors on GPU 0 of this machine. (And 7 more.)
        return copied_script.train(build_model, data, held_out, path, epochs)
    no_sampler: in epoch 0 the ranks trained with 96, 96, 96, 96 rows
        batch_size=8, sampler=sampler => batch_size=8, shuffle=True
    no_set_epoch: in epoch 1 rank 0 used the same rows in the same order as in epoch 0
        sampler.set_epoch(epoch) => pass
    no_set_device: rank 1, process 1 of its machine, put its tensors on GPU 0 of
        torch.device("cuda", int(os.environ["LOCAL_RANK"])) => torch.device("cuda")
        torch.cuda.set_device(device) => pass
    divided_twice: it is 0.25 times as large
        ddp(x.to(device), y.to(device)) => ddp(x.to(device), y.to(device)) / n
    every_rank_saves: ranks 0 and 1 and 2 and 3 wrote run.pt
        if rank == 0: => if True:
    no_map_location: called again, rank 1, process 1 of its machine, loaded the file's
        , map_location=device =>
    one_seed: dropout switched off the same neurons on rank 1 in step 0 as on rank 0
        n * epoch + rank => epoch
    one_rank_evaluates: of 69 held-out rows the ranks evaluated 69, 0, 0, 0
        range(rank, len(held_out), n) => [*range(len(held_out))][: 99 * (rank == 0)]
    the_gpu_with_the_ranks_number: this machine has 2 (imagined) GPUs
        int(os.environ["LOCAL_RANK"]) => rank
    sets_the_device_too_late: put its tensors on GPUs 0 and 1 of
        torch.device("cuda", int(os.environ["LOCAL_RANK"])) => torch.device("cuda")
        torch.cuda.set_device(device) => pass
        done = 0 => torch.cuda.set_device(int(os.environ["LOCAL_RANK"])); done = 0
    without_gpus: put its tensors on no GPU of this machine
        if torch.cuda.is_available() => if torch.cuda.device_count() == 0
    a_model_that_stays_on_the_cpu: rank 0 trained a model that is not on its GPU
        build_model().to(device) => build_model()
    one_order_for_ever: in epoch 1 rank 0 used the same rows
        DistributedSampler(data) => DistributedSampler(data, shuffle=False)
    orders_of_their_own: each should be used once
        DistributedSampler(data) => DistributedSampler(data, seed=rank)
    epoch_0_is_set: in epoch 1 rank 0 used the same rows
        set_epoch(epoch) => set_epoch(0)
    epochs_counted_from_the_restart: in epoch 3, in the second call, rank 0
        set_epoch(epoch) => set_epoch(epoch - done)
    set_before_the_first_epoch_only: in epoch 1 rank 0 used the same rows
        sampler.set_epoch(epoch) => sampler.set_epoch(done)
    multiplied_for_safety: it is 4.00 times as large
        ddp(x.to(device), y.to(device)) => ddp(x.to(device), y.to(device)) * n
    divides_the_learning_rate_back: it is 0.25 times as large
        torch.optim.AdamW(model.parameters()) => torch.optim.SGD(model.parameters(), n)
        ddp(x.to(device), y.to(device)) => ddp(x.to(device), y.to(device)) / n
    without_ddp: made step 0 with a gradient that is not the mean
        ddp(x.to => model(x.to
    one_of_each_machine_saves: ranks 0 and 2 wrote run.pt
        if rank == 0: => if os.environ["LOCAL_RANK"] == "0":
    nobody_saves: no rank wrote the file
        if rank == 0: => if rank == n:
    saved_under_its_own_name: rank 0 wrote run.pt.0
        torch.save({"epochs": epoch + 1, **states}, path)
        => torch.save({"epochs": epoch + 1, **states}, f"{path}.0")
    always_to_gpu_0: called again, rank 1, process 1 of its machine, loaded the file's
        map_location=device => map_location="cuda:0"
    to_the_gpu_with_the_ranks_number: this machine has 2 (imagined) GPUs
        map_location=device => map_location=f"cuda:{rank}"
    its_own_mask_for_ever: on rank 0 in step 1 as on rank 0 in step 0
        for x, y in loader: => for x, y in loader:
        =>     torch.manual_seed(rank)
    the_next_ranks_masks_an_epoch_later: dropout switched off the same neurons on rank
        n * epoch + rank => epoch + rank
    no_dropout: dropout switched off the same neurons
        ddp = Dist => model.eval(); ddp = Dist
    all_evaluate_everything: of 69 held-out rows the ranks evaluated 69, 69, 69, 69
        range(rank, len(held_out), n) => range(len(held_out))
        dist.all_reduce(total) => pass
    a_mean_of_means: the mean loss of the 69 held-out rows is
        dist.all_reduce(total) => total /= len(mine); dist.all_reduce(total)
        / len(held_out) => / n
    padded_rows_count: the mean loss of the 69 held-out rows is
        DataLoader(mine => DataLoader(held_out, sampler=DistributedSampler(held_out)
    only_rank_0_knows: the mean loss of the 69 held-out rows is
        dist.all_reduce(total) => dist.reduce(total, 0)
    rank_0_alone_returns: returned None, which is no number
        return total.item() / => return None if rank else total.item() /
    leaves_rows_out: and leave out no row
        range(rank, len(held_out), n) => range(rank, len(held_out) - 1, n)
    dropout_in_evaluation: while rank 0 evaluated its held-out rows, dropout switched
        model.eval() => pass
    never_resumes: rank 0 trained with 120 rows; 2 epochs were left
        if path.exists() => if path.is_dir()
    a_new_optimizer: began with a new optimizer
        optimizer.load_state_dict(saved["optimizer"]) => pass
    one_epoch_is_always_left: rank 0 trained with 24 rows; 2 epochs were left
        done = saved["epochs"] => done = epochs - 1
    half_an_optimizer: began with other states of the optimizer
        done = saved["epochs"] => done = saved["epochs"]
        => for state in optimizer.state.values():
        =>     state["exp_avg"].zero_()
    new_weights: began with new weights
        model.load_state_dict(saved["model"]) => torch.manual_seed(9); build_model()
    """,
)

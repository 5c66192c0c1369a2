"""Right answers to the exercises of chapter 05, not written as the solutions are."""

from contextlib import ExitStack

import torch
import torch.distributed as dist

from ddp_course.data_parallel import bucket_plan


def by_the_package(parameters, cap, first):
    plan = bucket_plan(iter(parameters), cap / 2**20, first / 2**20)
    return [list(bucket.parameters) for bucket in plan]


def one_walk_with_open_buckets(parameters, cap, first):
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
        held = sum(q.nbytes for q in bucket)
        full = held >= (cap if p.dtype in closed_before else min(cap, first))
        if full or p is last[p.dtype]:
            closed_before.add(p.dtype)
            buckets.append([names[q] for q in open_ones.pop(p.dtype)])
    return buckets


def views_of_buffers(buckets, launch, at_the_end):
    """Divide first, into a buffer made once; `grad` becomes a view of it at the end."""
    n, turn, state = dist.get_world_size(), {}, {"next": 0, "works": []}
    flats = [torch.empty(sum(p.numel() for p in b), dtype=b[0].dtype) for b in buckets]
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
        while state["next"] < len(buckets) and here.issuperset(buckets[state["next"]]):
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


def one_walk_for_each_backward(buckets, launch, at_the_end):
    """Go through the buckets in turn, and sleep where one is not full."""
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


def divided_at_the_end(ddp, microbatches):
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


def flag_by_flag(ddp, microbatches):
    sizes = torch.tensor([float(len(x)) for x, _ in microbatches])
    shares = (sizes / sizes.sum()).tolist()
    for k, ((x, y), share) in enumerate(zip(microbatches, shares, strict=True), 1):
        ddp.require_backward_grad_sync = k == len(microbatches)
        ddp(x, y).mul(share).backward()


RIGHT = {
    "my_bucket_plan": [by_the_package, one_walk_with_open_buckets],
    "mini_ddp": [views_of_buffers, one_walk_for_each_backward],
    "accumulate": [divided_at_the_end, flag_by_flag],
}

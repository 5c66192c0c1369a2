"""Wrong answers to the exercises of chapter 05, each with a word of its hint."""

import torch
import torch.distributed as dist

from ddp_course.chapters.ch05_ddp_internals import solutions

# my_bucket_plan


def _plan(parameters, cap, first, at_most=False, split=True, keep_frozen=False):
    """Return a plan with the mistakes that are asked for."""
    once = {}
    for name, p in parameters:
        if p.requires_grad or keep_frozen:
            once.setdefault(id(p), (name, p))
    buckets, filling, limit, first = [], {}, {}, min(first, cap)
    for name, p in reversed(once.values()):
        kind = p.dtype if split else None
        members = filling.setdefault(kind, [])
        so_far = sum(n for _, n in members)
        if at_most and members and so_far + p.nbytes > limit.get(kind, first):
            buckets.append([name for name, _ in filling.pop(kind)])
            limit[kind] = cap
            members = filling.setdefault(kind, [])
        members.append((name, p.nbytes))
        if not at_most and so_far + p.nbytes >= limit.get(kind, first):
            buckets.append([name for name, _ in filling.pop(kind)])
            limit[kind] = cap
    return buckets + [[name for name, _ in members] for members in filling.values()]


def in_order_of_registration(parameters, cap, first):
    return [bucket[::-1] for bucket in _plan(parameters, cap, first)[::-1]]


def buckets_in_order_but_not_within(parameters, cap, first):
    return [bucket[::-1] for bucket in _plan(parameters, cap, first)]


def never_above_the_cap(parameters, cap, first):
    return _plan(parameters, cap, first, at_most=True)


def no_small_first_bucket(parameters, cap, first):
    return _plan(parameters, cap, cap)


def one_for_all(parameters, cap, first):
    return _plan(parameters, 1 << 40, 1 << 40)


def one_each(parameters, cap, first):
    return _plan(parameters, 1, 1)


def types_mixed(parameters, cap, first):
    return _plan(parameters, cap, first, split=False)


def frozen_ones_too(parameters, cap, first):
    return _plan(parameters, cap, first, keep_frozen=True)


def tied_ones_twice(parameters, cap, first):
    copies = [(name, torch.nn.Parameter(p.detach())) for name, p in parameters]
    for (_, copy), (_, p) in zip(copies, parameters, strict=True):
        copy.requires_grad_(p.requires_grad)
    return _plan(copies, cap, first)


def the_rest_is_forgotten(parameters, cap, first):
    plan = _plan(parameters, cap, first)
    return plan[:-1] or plan


def as_each_type_comes(parameters, cap, first):
    kinds = list(dict.fromkeys(p.dtype for _, p in parameters))
    by_kind = ([(n, p) for n, p in parameters if p.dtype == kind] for kind in kinds)
    return [bucket for pairs in by_kind for bucket in _plan(pairs, cap, first)]


def parameters_not_names(parameters, cap, first):
    known = dict(parameters)
    return [[known[name] for name in b] for b in _plan(parameters, cap, first)]


# mini_ddp


class Mini:
    """The right one; the mistakes are in its heirs."""

    def __init__(self, buckets, launch, at_the_end):
        self.buckets, self.launch, self.at_the_end = buckets, launch, at_the_end
        self.scale = 1 / dist.get_world_size()
        self.reset()
        for k, members in enumerate(buckets):
            for p in members:
                p.register_post_accumulate_grad_hook(lambda _, k=k: self.hook(k))

    def reset(self):
        self.missing = [len(members) for members in self.buckets]
        self.under_way, self.asked = [], False

    def ask(self):
        if not self.asked:
            self.asked = True
            self.at_the_end(self.finish)

    def hook(self, k):
        self.ask()
        self.missing[k] -= 1
        self.launch_full()

    def launch_full(self):
        while self.next < len(self.buckets) and not self.missing[self.next]:
            self.send(self.next)

    @property
    def next(self):
        return len(self.under_way)

    def send(self, k):
        flat = torch.cat([p.grad.flatten() for p in self.buckets[k]])
        self.under_way.append((k, flat, self.launch(flat)))

    def finish(self):
        for k, flat, handle in self.under_way:
            handle.wait()
            self.unpack(k, flat * self.scale)
        self.reset()

    def unpack(self, k, flat):
        parts = flat.split([p.numel() for p in self.buckets[k]])
        for p, part in zip(self.buckets[k], parts, strict=True):
            p.grad.copy_(part.view_as(p))


def _mini(cls):
    """Return a function that uses the class, and keeps it alive by its hooks."""

    def answer(buckets, launch, at_the_end):
        cls(buckets, launch, at_the_end)

    answer.__name__ = answer.__qualname__ = cls.__name__
    return answer


@_mini
class all_at_the_end(Mini):
    def hook(self, k):
        self.ask()
        self.missing[k] -= 1

    def finish(self):
        self.launch_full()
        super().finish()


@_mini
class when_the_first_has_come(Mini):
    def hook(self, k):
        self.ask()
        if self.missing[k] == len(self.buckets[k]):
            for p in self.buckets[k]:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            self.send(k)
        self.missing[k] -= 1


@_mini
class as_they_fill(Mini):
    def hook(self, k):
        self.ask()
        self.missing[k] -= 1
        if not self.missing[k]:
            self.send(k)


@_mini
class not_divided(Mini):
    def unpack(self, k, flat):
        super().unpack(k, flat / self.scale)


@_mini
class waits_at_once(Mini):
    def send(self, k):
        super().send(k)
        self.under_way[-1][2].wait()


@_mini
class never_waits(Mini):
    def finish(self):
        for k, flat, _ in self.under_way:
            self.unpack(k, flat * self.scale)
        self.reset()


@_mini
class only_one_step(Mini):
    def finish(self):
        if self.under_way:
            super().finish()
        self.missing = [-1 for _ in self.buckets]


@_mini
class not_copied_back(Mini):
    def unpack(self, k, flat):
        pass


@_mini
class one_by_one(Mini):
    def send(self, k):
        for p in self.buckets[k]:
            self.under_way.append((k, p.grad, self.launch(p.grad)))


@_mini
class by_hand(Mini):
    def send(self, k):
        super().send(k)
        for p in self.buckets[k]:
            dist.all_reduce(p.grad)


@_mini
class a_bucket_late(Mini):
    """Launches a bucket when the next one is full."""

    def launch_full(self):
        last = len(self.buckets) - 1
        while self.next < last and not any(self.missing[: self.next + 2]):
            self.send(self.next)
        if self.next == last and not self.missing[last]:
            self.send(last)


def no_hooks(buckets, launch, at_the_end):
    pass


# accumulate


def _weighted(ddp, microbatches, quiet=lambda k, last: not last, weight=None):
    """Return what `quiet(k, last)` and `weight(x)` make of it; else it is right."""
    rows = sum(len(x) for x, _ in microbatches)
    for k, (x, y) in enumerate(microbatches):
        last, share = k == len(microbatches) - 1, len(x) / rows
        with ddp.no_sync() if quiet(k, last) else torch.enable_grad():
            (ddp(x, y) * (weight(x) if weight else share)).backward()


def always_sends(ddp, microbatches):
    _weighted(ddp, microbatches, lambda k, last: False)


def never_sends(ddp, microbatches):
    _weighted(ddp, microbatches, lambda k, last: True)


def sends_the_first(ddp, microbatches):
    _weighted(ddp, microbatches, lambda k, last: k > 0)


def backward_alone_inside(ddp, microbatches):
    rows = sum(len(x) for x, _ in microbatches)
    for x, y in microbatches[:-1]:
        loss = ddp(x, y) * len(x) / rows
        with ddp.no_sync():
            loss.backward()
    x, y = microbatches[-1]
    (ddp(x, y) * len(x) / rows).backward()


def mean_of_means(ddp, microbatches):
    _weighted(ddp, microbatches, weight=lambda x: 1 / len(microbatches))


def the_sum_of_all(ddp, microbatches):
    _weighted(ddp, microbatches, weight=lambda x: 1)


def forgets_the_others(ddp, microbatches):
    rows = sum(len(x) for x, _ in microbatches)
    for k, (x, y) in enumerate(microbatches):
        where = ddp.no_sync() if k < len(microbatches) - 1 else torch.enable_grad()
        for p in ddp.parameters():
            p.grad = None
        with where:
            (ddp(x, y) * len(x) / rows).backward()


def one_large_batch(ddp, microbatches):
    x, y = (torch.cat(column) for column in zip(*microbatches, strict=True))
    ddp(x, y).backward()


def one_backward(ddp, microbatches):
    rows = sum(len(x) for x, _ in microbatches)
    sum(ddp(x, y) * len(x) / rows for x, y in microbatches).backward()


def averages_by_hand(ddp, microbatches):
    _weighted(ddp, microbatches)
    for p in ddp.parameters():
        if p.requires_grad:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


# What harder inputs find out


def closed_only_above_its_cap(parameters, cap, first):
    return solutions.my_bucket_plan(parameters, cap + 1, first + 1)


@_mini
class full_when_all_have_a_gradient(Mini):
    def launch_full(self):
        for members in self.buckets[self.next :]:
            if any(p.grad is None for p in members):
                return
            self.send(self.next)


def twice_the_bytes(buckets, launch, at_the_end):
    solutions.mini_ddp(buckets, lambda flat: launch(flat.double()), at_the_end)


def only_for_vectors(buckets, launch, at_the_end):
    mini = Mini(buckets, launch, at_the_end)
    mini.unpack = lambda k, flat: [
        p.grad.copy_(part)
        for p, part in zip(
            buckets[k], flat.split([p.numel() for p in buckets[k]]), strict=True
        )
    ]


@_mini
class in_buffers_of_float32(Mini):
    def send(self, k):
        flat = torch.zeros(sum(p.numel() for p in self.buckets[k]))
        torch.cat([p.grad.flatten() for p in self.buckets[k]], out=flat)
        self.under_way.append((k, flat, self.launch(flat)))


@_mini
class adds_the_mean(Mini):
    def unpack(self, k, flat):
        before = [p.grad.clone() for p in self.buckets[k]]
        super().unpack(k, flat)
        for p, grad in zip(self.buckets[k], before, strict=True):
            p.grad += grad


@_mini
class rounded_on_the_way(Mini):
    def unpack(self, k, flat):
        super().unpack(k, flat.bfloat16())


def as_many_bytes_as_float32(parameters, cap, first):
    singles = {p: torch.nn.Parameter(p.detach().float()) for _, p in parameters}
    for p, single in singles.items():
        single.requires_grad_(p.requires_grad)
    types = {p.dtype for _, p in parameters}
    if len(types) == 1:
        return _plan(parameters, cap, first)
    plans = []
    for dtype in types:
        pairs = [(name, singles[p]) for name, p in parameters if p.dtype == dtype]
        plans += _plan(pairs, cap, first)
    return plans


def small_only_at_the_very_first(parameters, cap, first):
    kinds = list(dict.fromkeys(p.dtype for _, p in reversed(parameters)))
    plans = []
    for k, kind in enumerate(kinds):
        pairs = [(name, p) for name, p in parameters if p.dtype == kind]
        plans += _plan(pairs, cap, cap if k else first)
    return plans


def first_above_cap(parameters, cap, first):
    plan = solutions.my_bucket_plan(parameters, cap, first)
    if first <= cap:
        return plan
    [start, *_] = solutions.my_bucket_plan(parameters, first, first)
    rest = [(name, p) for name, p in parameters if name not in start]
    return [start, *solutions.my_bucket_plan(rest, cap, cap)]


def empty_ones_too(parameters, cap, first):
    [start, *rest] = solutions.my_bucket_plan(parameters, cap, first)
    return [[*(name for name, p in parameters if not p.numel()), *start], *rest]


def takes_them_out(ddp, microbatches):
    solutions.accumulate(ddp, list(microbatches))
    microbatches.pop()


def divides_by_the_ranks(ddp, microbatches):
    rows = sum(len(x) for x, _ in microbatches) * dist.get_world_size()
    _weighted(ddp, microbatches, weight=lambda x: len(x) / rows)


def as_if_all_were_like_the_first(ddp, microbatches):
    rows = len(microbatches[0][0]) * len(microbatches)
    _weighted(ddp, microbatches, weight=lambda x: len(x) / rows)


def ten_at_most(ddp, microbatches):
    solutions.accumulate(ddp, microbatches[:10])


WRONG = {
    "my_bucket_plan": {
        as_many_bytes_as_float32: "it held its 4000 already before",
        small_only_at_the_very_first: "it held its 1000 already before",
        first_above_cap: "it held its 400 already before",
        empty_ones_too: "but it has no numbers",
        closed_only_above_its_cap: "to the byte",
        in_order_of_registration: "the opposite order of registration",
        buckets_in_order_but_not_within: "the opposite order of registration",
        never_above_the_cap: "it is closed as soon as it holds",
        no_small_first_bucket: "held its 1000 already before",
        one_for_all: "held its 1000 already before",
        one_each: "bucket 1 of its type holds 32 bytes only",
        types_mixed: "of the types float",
        frozen_ones_too: "but it is frozen",
        tied_ones_twice: "is the same parameter as",
        the_rest_is_forgotten: "would never be averaged",
        as_each_type_comes: "whatever its type",
        parameters_not_names: "expected a list of lists of names",
    },
    "mini_ddp": {
        only_for_vectors: "must match",
        in_buffers_of_float32: "launch got",
        adds_the_mean: "the mean over the ranks is",
        rounded_on_the_way: "the mean over the ranks is",
        full_when_all_have_a_gradient: "On real ranks",
        twice_the_bytes: "launch got numbers of torch.float64",
        all_at_the_end: "no overlap",
        when_the_first_has_come: "was launched",
        as_they_fill: "on all ranks the order must be that of buckets",
        not_divided: "this is the sum; divide by the number of ranks",
        waits_at_once: "backward stands still meanwhile",
        never_waits: "did not wait for each bucket",
        only_one_step: "launched 0 of 3 buckets",
        not_copied_back: "is the mean back in `grad` when backward returns?",
        one_by_one: "launch got 8 numbers",
        by_hand: "send with `launch` alone",
        a_bucket_late: "no overlap",
        no_hooks: "launched 0 of 3 buckets",
    },
    "accumulate": {
        divides_by_the_ranks: "0.33 times as large). How much",
        as_if_all_were_like_the_first: "How much does a microbatch of few rows count",
        ten_at_most: "expected 12 times a forward",
        takes_them_out: "your function changed the list",
        always_sends: "all but the last should send nothing",
        never_sends: "sent 0 all-reduces in the last microbatch",
        sends_the_first: "all but the last should send nothing",
        backward_alone_inside: "A forward outside of `no_sync`",
        mean_of_means: "is not that of the mean over all rows",
        the_sum_of_all: "in the median 3.00 times as large",
        forgets_the_others: "is not that of the mean over all rows",
        one_large_batch: "expected 3 times a forward and then its backward",
        one_backward: "one microbatch in memory at a time",
        averages_by_hand: "more collectives than DDP's own",
    },
}

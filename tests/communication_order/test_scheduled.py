"""Layer by layer on ranks: equal to DDP bit by bit, and what is wrong is seen."""

from __future__ import annotations

import copy
import io
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "data_parallel"))
from ddp_cases import Small, batch
from refusals import refused as refused_by_error
from refusals import said
from sleeping import Sleep
from trained import same

from ddp_course.collectives import ring_all_reduce, tree_all_reduce
from ddp_course.communication_order import (
    FIFO,
    WAIT_FOR_ALL,
    NaiveScheduledDataParallel,
    ScheduledDataParallel,
    SleepingStack,
    priority,
    recorded,
)
from ddp_course.communication_order.guards import StepDue, StepFirst, check_one_by_one
from ddp_course.communication_order.ordered import OrderedDataParallel, options_of
from ddp_course.compression import CourseExchange, compress, compressor
from ddp_course.data_parallel.ddp import DistributedDataParallel
from ddp_course.launch import Link, Links, RankTimeout, spawn
from ddp_course.measure import ByteMeter, EventLog, SystemBytes
from ddp_course.theory import Layer, all_reduce_ring, least_step_time

OPTIMIZERS: dict[str, Callable] = {
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.1),
}
STEPS = 5


class Experts(nn.Module):
    """One of two experts by turns; a third that nobody ever asks; a matrix lent out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.into = nn.Linear(7, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.lent = nn.Linear(6, 5)  # its forward is never called
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = torch.tanh(self.into(x))
        h = h + self.experts[self.calls % 2](h)
        return nn.functional.linear(h, self.lent.weight, self.lent.bias)


class Lent(nn.Module):
    """Lends a matrix to the first product, and is in one message with the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lent, self.last = nn.Linear(7, 6, bias=False), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(nn.functional.linear(x, self.lent.weight)))


# ---- wrong ones ----------------------------------------------------------------------


class LayersOnly(ScheduledDataParallel):
    """Who uses a parameter without its layer's forward waits for nothing."""

    def __init__(self, *args, **how):
        super().__init__(*args, **how)
        (part,) = (p for p in self.parts if isinstance(p, StepFirst))
        self.parts.remove(part)


class OldParameters(LayersOnly):
    """The first layer waits for nothing, and is stepped when forward has ended.

    (Of later layers autograd would see it: backward needs the weights of forward.)
    """

    def _before_layer(self, name, buckets):
        first = "first.weight" in buckets[0].plan.parameters
        due, self.due = self.due, None if first else self.due
        super()._before_layer(name, buckets)
        self.due = due if first else self.due


class LaterOptions(ScheduledDataParallel):
    """The learning rate is the one that holds when a layer is stepped."""

    def receive(self, bucket):
        if self.due is not None:
            self.due = options_of(self.optimizer)
        super().receive(bucket)


class Reordered(ScheduledDataParallel):
    """Changes the order after it was planned."""

    def __init__(self, *args, **how):
        super().__init__(*args, **how)
        make_plan = self.planner.make_plan

        def reordered(model):
            before = self.reducer.order
            make_plan(model)
            self.reducer.order = self.changed(before, self.reducer.order)

        self.planner.make_plan = reordered


class Twice(Reordered):
    """A piece is sent twice, and all ranks agree about that."""

    def changed(self, before, order):
        return (*order, order[0])


class Lost(Reordered):
    """A piece is never sent."""

    def changed(self, before, order):
        return order[:-1]


# ---- as DDP --------------------------------------------------------------------------


def trained(
    make: Callable, model: nn.Module, optimizer: str, group, accumulate: int, max_norm
) -> tuple[list[Tensor], dict]:
    """Train in a group of ranks; return parameters, and the optimizer's state."""
    own = OPTIMIZERS[optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(own, 1, gamma=0.5)
    wrapped = make(model, own, group)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for step in range(STEPS):
        x, y = (t[rank::size] for t in batch(step))
        for part in range(accumulate):
            last = part == accumulate - 1
            loss = lambda: nn.functional.mse_loss(wrapped(x), y)  # noqa: B023, E731
            if last:
                loss().backward()
            else:
                with wrapped.no_sync():
                    loss().backward()
        if isinstance(wrapped, ScheduledDataParallel):
            wrapped.step(max_norm)
        else:
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            own.step()
            own.zero_grad()
        scheduler.step()
        if step == 2:
            model.eval()
            with torch.no_grad():
                wrapped(x)  # the parameters of this step, whatever is under way
            model.train()
    state = own.state_dict()["state"]
    with_numbers = {k for k, p in enumerate(model.parameters()) if p.numel()}
    state = {k: of for k, of in state.items() if k in with_numbers}
    return [*model.state_dict().values()], state


def ddp(model, optimizer, group):
    return DistributedDataParallel(
        model,
        group,
        find_unused_parameters=True,
        broadcast_buffers=False,
        all_reduce=tree_all_reduce,
    )


def scheduled(kind=ScheduledDataParallel, policy=FIFO, **more):
    def make(model, optimizer, group):
        how = {"process_group": group, "all_reduce": tree_all_reduce}
        return kind(model, optimizer, policy, **how, **more)

    return make


CASES = {  # model, optimizer, policy, accumulate, max_norm
    "small": (Small, "momentum", priority(256), 1, None),
    "adamw": (Small, "adamw", priority(200, 2), 2, None),
    "whole": (Experts, "adafactor", FIFO, 1, None),
    "waits": (Small, "momentum", WAIT_FOR_ALL, 1, None),
    "clipped": (Small, "adamw", priority(512), 1, 0.1),
    "experts": (Experts, "momentum", priority(128), 2, None),
    "together": (Experts, "adamw", priority(1 << 20), 1, None),
    "lent": (Lent, "momentum", priority(1 << 20), 1, None),
}
# Three ranks train all of them; a pair, and a rank alone, half.
CASES_OF = {2: [*CASES][::2], 3: [*CASES]}
WRONG = {"small": (OldParameters, LaterOptions, Twice, Lost), "lent": (LayersOnly,)}


def as_ddp() -> dict[tuple, bool]:
    """Train all cases in groups of 1 to 3 ranks; return which are equal to DDP."""
    equal = {}
    for first in (2, 3):  # ranks in the first group; a rank that is left is alone
        parts = [dist.new_group(range(first)), dist.new_group(range(first % 3, 3))]
        group = parts[dist.get_rank() >= first]
        size = dist.get_world_size(group)
        for name in CASES_OF[first]:
            model, optimizer, policy, *rest = CASES[name]
            right = trained(ddp, model(), optimizer, group, *rest)
            wrong = WRONG.get(name, ()) if size == 3 else ()
            for kind in (ScheduledDataParallel, *wrong):
                make = scheduled(kind, policy)
                results = trained(make, model(), optimizer, group, *rest)
                equal[size, name, kind.__name__] = same(results, right)
    return equal


def test_equal_to_ddp_bit_by_bit_and_wrong_ones_are_not():
    for equal in spawn(as_ddp, world_size=3, output="none", timeout=250):
        for (size, name, kind), is_equal in equal.items():
            right = kind == "ScheduledDataParallel"
            assert is_equal == right, f"{name}, {kind}, {size} ranks"


# ---- what is refused, and what goes wrong --------------------------------------------


class Alike(nn.Module):
    """Layers of one size, or of different ones; rank 1 is slower backward."""

    def __init__(self, widths=(8, 8, 8, 8)) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(width, 1) for width in widths)
        self.without: nn.Module | None = None  # use its weight, but not its forward

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x.expand(-1, layer.in_features)
            y = x @ layer.weight.t() if layer is self.without else layer(x)
            x = Sleep.apply(y, 0.0, self.pause())  # before this layer's gradient
        return x

    @staticmethod
    def pause() -> float:
        return 0.02 * dist.get_rank()


raised = partial(said, (RuntimeError, TypeError, ValueError))


def wrapped(kind=ScheduledDataParallel, model=None, policy=None, **how):
    model = model or Alike()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    how = {"all_reduce": ring_all_reduce} | how
    return kind(model, sgd, policy or priority(16), **how)


class Late(NaiveScheduledDataParallel):
    """Rank 1 goes backward when rank 0 has sent everything, and slowly.

    Each of its gradients comes when those before it have arrived.
    """

    def _add_ready(self, layer, parameter):
        if dist.get_rank() == 1:
            if not self.work:
                dist.barrier()
            while not all(work.is_completed() for work in self.work.values()):
                time.sleep(0.001)
        super()._add_ready(layer, parameter)

    def step(self):
        super().step()
        if dist.get_rank() == 0:
            dist.barrier()


def in_their_own_order(widths: tuple[int, ...]) -> NaiveScheduledDataParallel:
    """Return the naive model, without biases: they would have a size of their own."""
    model = Alike(widths)
    for layer in model.layers:
        layer.register_parameter("bias", None)
    sgd = partial(torch.optim.SGD, lr=0.1)
    return Late(model, sgd, ring_all_reduce)


def run(model: nn.Module, steps: int, x: Tensor | None = None) -> nn.Module:
    x = torch.full((2, 1), 1.0 + dist.get_rank()) if x is None else x
    for _ in range(steps):
        model(x).sum().backward()
        model.step()
    return model


def refused() -> dict[str, str]:
    """Do what must not be done; return what is said."""
    results, x = {}, torch.ones(2, 1)
    model = run(wrapped(), 3)
    model(x).sum().backward()
    parameters, optimizer = list(model.parameters()), model.optimizer
    results["clip"] = raised(nn.utils.clip_grad_norm_, parameters, 1.0)
    results["step"] = raised(optimizer.step)
    results["backward"] = raised(lambda: model.module(x).sum().backward())
    results["copy"] = raised(copy.deepcopy, model)
    model = wrapped()
    view = model.module.layers[1].weight.detach()
    run(model, 4)
    view.mul_(0.5)
    results["changed"] = raised(model, x)
    lbfgs = torch.optim.LBFGS(parameters)
    results["lbfgs"] = raised(ScheduledDataParallel, model.module, lbfgs)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    results["another's"] = raised(ScheduledDataParallel, model.module, other)
    differ = priority(16 + 16 * dist.get_rank())
    results["differ"] = raised(wrapped, policy=differ)
    model = run(wrapped(), 3)
    if dist.get_rank() == 1:  # one rank skips a batch that it cannot read
        results["alone"] = raised(model, torch.ones(2, 3, 5))
    results["went on"] = raised(run, model, 1)
    disagrees = in_their_own_order((8, 7, 6, 5))
    results["disagree"] = raised(run, disagrees, 2)
    return results


def loaded(by: Callable[[nn.Module, dict[str, Tensor]], object]) -> bool:
    """Load zeros while a step is due; tell whether they are there when it is over."""
    model = run(wrapped(policy=priority(16)), 3)
    for layer in model.module.layers:
        by(layer, {name: torch.zeros_like(p) for name, p in layer.named_parameters()})
    model.finish()
    return not any(map(torch.any, model.parameters()))


def without_a_gradient() -> tuple[bool, bool, bool]:
    """Take one gradient away before a step; tell whether others moved, and this one.

    And tell whether the step was still due after the gradients were made None.
    """
    model = run(wrapped(policy=FIFO), 3)
    model.finish()
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(2, 1)).sum().backward()
    model.module.layers[1].weight.grad = None
    model.step()
    model.optimizer.zero_grad()  # as people do; the step is due all the same
    due = all(type(p) is StepDue for p in model.module.parameters())
    model.finish()
    after = dict(model.module.named_parameters())
    moved = dict(zip(after, map(torch.ne, before, after.values()), strict=True))
    this = bool(moved.pop("layers.1.weight").any())
    return all(bool(each.any()) for each in moved.values()), this, due


def used_without_forward(
    kind: type[ScheduledDataParallel], finish: bool = False
) -> list[Tensor]:
    """Step; return what a copy, an average and a forward by hand see of the weights."""
    model = run(wrapped(kind), 4)
    if finish:
        model.finish()
    first, *_, last = model.module.layers
    copied = copy.deepcopy(model.module.layers[1].weight)
    average = torch.zeros_like(first.weight).lerp_(first.weight, 0.5)
    loaded = pickled(model.module.layers[2])
    model.module.without = last
    return [copied, average, loaded, model(torch.ones(2, 1))]


def pickled(layer: nn.Module) -> Tensor:
    file = io.BytesIO()
    torch.save(layer.weight, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_data(layer: nn.Module, state: dict[str, Tensor]) -> None:
    """Load as no hook hears of it."""
    for name, parameter in layer.named_parameters():
        parameter.data = state[name]


def of_their_own() -> dict[str, object]:
    """Return what training comes to, with an agreed order and without."""
    right = run(wrapped(policy=FIFO), 4)
    naive = run(in_their_own_order((8, 8, 8, 8)), 4)
    naive(torch.ones(2, 1))  # every layer steps before it runs
    ring_model = run(wrapped(model=Alike((64000, 64000)), policy=priority(40000)), 3)
    ring_model.finish()
    with ByteMeter() as meter, SystemBytes() as system:
        run(ring_model, 1).finish()
    skipped = run(wrapped(policy=FIFO), 3)
    bad = raised(skipped, torch.ones(2, 3, 5))  # on all ranks
    return {
        "right": [*right.state_dict().values()],
        "naive": [*naive.state_dict().values()],
        "bytes": (meter.total_sent, system.written, meter.total_messages),
        "skipped": (bool(bad), [*run(skipped, 1).state_dict().values()]),
        "without": without_a_gradient(),
        "loaded": loaded(nn.Module.load_state_dict) and loaded(by_data),
        "used": used_without_forward(ScheduledDataParallel),
        "used, finished": used_without_forward(ScheduledDataParallel, finish=True),
        "used too early": used_without_forward(LayersOnly),
        "slice": slice_of_rank_0(),
    }


def slice_of_rank_0() -> Tensor:
    """Return a parameter with gaps in memory, after all ranks have got rank 0's."""
    layer = nn.Linear(3, 2)
    whole = torch.arange(16.0).view(2, 8) + 100 * dist.get_rank()
    layer.weight = nn.Parameter(whole[:, :3])
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    wrapper = ScheduledDataParallel(layer, optimizer, FIFO)
    return wrapper.module.weight.detach().clone()


def both() -> tuple[dict, dict]:
    return of_their_own(), refused()


def test_ranks_that_disagree_are_wrong_and_what_cannot_be_is_refused():
    ranks = spawn(both, world_size=2, output="none", timeout=250)
    (results, _), (other, _) = ranks
    assert same(results["right"], other["right"])
    assert not same(results["naive"], other["naive"])  # and nobody has said so
    for own in (results, other):
        assert own["slice"].tolist() == [[0, 1, 2], [8, 9, 10]]
        assert same(own["skipped"], (True, results["right"]))
        assert own["loaded"] and own["without"] == (True, False, True)
        assert same(own["used"], own["used, finished"])
        pairs = zip(own["used"], own["used too early"], strict=True)
        assert not any(map(torch.equal, *zip(*pairs, strict=True)))
        sent, written, messages = own["bytes"]
        assert sent == 2 * (64000 + 1) * 4  # a ring of two sends what it adds
        assert 0 <= written - sent <= 400 * messages < sent / 20
    for _, words in ranks:
        for name, part in {
            "clip": "this gradient is still under way: call model.step",
            "step": "model.step.max_norm=....,",
            "backward": "this gradient is still under way",
            "copy": "cannot be copied or pickled",
            "changed": "layers.1.weight was changed while a step was due",
            "lbfgs": "LBFGS cannot step parameters one by one",
            "another's": "the optimizer has none of the module's parameters",
            "differ": "the ranks differ. argument policy",
            "went on": "forwards and backwards that ended in an error: 0 on rank 0",
            "disagree": "the ranks make different calls",
        }.items():
            assert re.search(part, words[name]), (name, words[name])


def killed_in_a_step(see: bool = True) -> str:
    """Train in pairs, one by priority and one compressed; one of each dies."""
    rank, model = dist.get_rank(), Alike((4000, 4000))
    if not see:  # planted: who waits looks only at who says that he leaves
        module = sys.modules["ddp_course.collectives.one_machine"]
        module.has_ended = lambda _: False
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if rank < 2:
        train = wrapped(model=model, policy=priority(4000), process_group=pairs[0])
    else:
        train = DistributedDataParallel(model, pairs[1], bucket_cap_mb=0.001)
        exchange = CourseExchange(pairs[1])
        train.register_comm_hook(compressor("powersgd:1", exchange), compress)
        train.step = model.zero_grad
    run(train, 3)
    if rank % 2:  # gradients of the last layer are under way
        first = model.layers[0].weight
        first.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    return said(RuntimeError, run, train, 2)


def test_who_is_killed_within_a_step_is_named():
    results = spawn(killed_in_a_step, world_size=4, may_fail=[1, 3])
    assert "rank 1 of this group: the process has ended" in results[0]
    assert results[2]
    with pytest.raises(RankTimeout):
        spawn(killed_in_a_step, False, world_size=4, may_fail=[1, 3], timeout=6)


class Coupled(torch.optim.SGD):
    """Steps all parameters by the norm of all gradients."""

    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:
            grad.div_(norm)
        super().step(closure)


def test_optimizers_are_tried_out():
    params = [nn.Parameter(torch.ones(3, 2))]
    for make in (*OPTIMIZERS.values(), torch.optim.Muon, torch.optim.NAdam):
        check_one_by_one(make(params))


def tried_out(make: Callable) -> Callable:
    return lambda: check_one_by_one(make([nn.Parameter(torch.ones(3, 2))]))


def constructed(kind: type[nn.Module], *args, **options) -> Callable:
    model = nn.Linear(2, 2).double()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return lambda: kind(model, sgd, *args, **options)


test_what_cannot_be_is_refused_before_anything_is_sent = refused_by_error(
    (tried_out(lambda _: torch.optim.SGD), "optimizer is <class .*SGD'>; it must be"),
    (tried_out(partial(Coupled, lr=0.0)), "single parameters differ"),
    (tried_out(torch.optim.LBFGS), "LBFGS cannot step parameters one by one"),
    (
        constructed(ScheduledDataParallel, "priority"),
        r"policy is 'priority'; .* such as priority\(",
    ),
    (constructed(OrderedDataParallel, piece=8), "piece is 8; it must be 16 bytes or"),
)


# ---- in time -------------------------------------------------------------------------

SIZES = (6, 5, 4, 3)  # of 4 layers, in 256 KiB
# So slow that no pause of a tenth of a second in backward makes another plan.
LINKS = Links(inside=Link(0.0, 6e6))
STATED = [(0.01, 0.02, size << 18) for size in SIZES]


class Unordered(Reordered):
    """Has an order, and sends as it comes.

    The order is planned as if backward had taken the stated times.
    """

    def __init__(self, *args, **how):
        super().__init__(*args, **how)
        ends = [0.02 * (layer + 1) for layer in range(len(STATED))]
        self.planner.ready_after = lambda: ends

    def changed(self, before, order):
        return before


def in_time(kind: type[ScheduledDataParallel]) -> tuple:
    """Return steps as recorded, the plan, and the sizes of what each step has sent."""
    model, x = wrapped(kind, SleepingStack(STATED), priority()), torch.ones(1)
    steps, sent = [], []
    for _ in range(4):
        loss, planned = model(x), model.order is not None
        with EventLog() as log:
            loss.backward()
            model.step()
            model(x)  # once more, for the clock
        if planned:
            steps.append(recorded(log.events, model))
            sends = [e for e in log.events if e.lane == "communication" and e.nbytes]
            # In a ring of three a rank sends 4/3 of a tensor.
            sent.append([round(send.nbytes * 3 / 4 / (1 << 18)) for send in sends])
    names = [model.homes[bucket] for bucket in model.planner.places]
    return steps, model.planned, names, sent


def both_in_time() -> list[tuple]:
    return [in_time(ScheduledDataParallel), in_time(Unordered)]


def test_recorded_on_slow_links_is_in_the_planned_order_and_never_faster_than_can_be():
    """How near to the plan a step comes, the bench measures on a quiet machine."""
    took = [all_reduce_ring(3, size << 18).over(LINKS.inside) for size in SIZES]
    layers = [Layer(f, b, t) for (f, b, _), t in zip(STATED, took, strict=True)]
    (steps, planned, names, sent), (_, other, _, unordered) = spawn(
        both_in_time, world_size=3, links=LINKS, output="none"
    )[0]
    assert names == [["0"], ["1"], ["2"], ["3"]]
    assert steps and planned.order[0].layer == 3
    for step, sizes in zip(steps, sent, strict=True):
        assert step.order == planned.order
        assert sizes == [SIZES[piece.layer] for piece in planned.order]
        assert step.step_time >= least_step_time(layers)
        ends = {e.layer: e.end for e in step.events if e.op == "send"}
        begun = {e.layer: e.start for e in step.events if e.op == "forward"}
        assert all(ends[k] <= begun[k] for k in begun)
    planned_sizes = [SIZES[piece.layer] for piece in other.order]
    assert planned_sizes != [3, 4, 5, 6]  # the order of backward, which is sent then
    assert all(sizes == [3, 4, 5, 6] for sizes in unordered)

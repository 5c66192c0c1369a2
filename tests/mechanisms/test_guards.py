"""Habits of those who know one process: each is right with a strategy, or refused.

Every entry of chapter 08's table is run here on two ranks, and compared with one
process. Then once more with the guards taken away: there the harm is done.
"""

import copy
import datetime
import functools
import io
import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from ddp_course.chapters.ch08_fsdp.habits import HABITS, STRATEGIES, habits, outcome
from ddp_course.data_parallel import DistributedDataParallel
from ddp_course.launch import RankError, spawn
from ddp_course.measure import MemoryLog
from ddp_course.mechanisms import frozen, guards, hooks
from ddp_course.mechanisms.divided import DividedModule
from ddp_course.mechanisms.placements import mark_part_averaged
from ddp_course.mechanisms.whole_state import full_state_dict
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.pipeline import PipelineParallel
from ddp_course.tensor_parallel import gpt, tensor_parallel
from ddp_course.zero import (
    FullyShardedDataParallel,
    ShardedGradientOptimizer,
    ZeroRedundancyOptimizer,
    sharded_parts,
)
from ddp_course.zero.sharded_parts import ParameterGuard

GPT = GPTConfig(block_size=8, n_layer=2, n_head=2, d_model=16)
SGD, ADAM = torch.optim.SGD, torch.optim.AdamW
INF = float("inf")
UNITS = {"units": ["0", "2"]}


def sharded_by_pytorch(model: nn.Module, group) -> nn.Module:
    mesh = DeviceMesh.from_group(group or dist.group.WORLD, "cpu")
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model


WRAP = {  # (model, group) -> what is trained
    "one": lambda model, _: model,
    "ddp": DistributedDataParallel,
    "zero1": lambda model, _: model,
    "zero2": lambda model, _: model,
    "zero3": lambda m, group: FullyShardedDataParallel(m, group, **UNITS),
    "tp": tensor_parallel,
    "pp": lambda m, group: PipelineParallel(m, "1f1b", 2, group, loss_fn=mse_loss),
    "DDP": lambda m, group: nn.parallel.DistributedDataParallel(m),
    "fully_shard": sharded_by_pytorch,
}
OPTIMIZERS = {"zero1": ZeroRedundancyOptimizer, "zero2": ShardedGradientOptimizer}
ALSO = {  # other rungs, of which the same must be true
    "zero1": ("zero2",),
}


class Bed:
    """A small training with one strategy; of two ranks with other rows, or one batch.

    `halves` is one process that does for each half of the rows what a rank would.
    """

    def __init__(self, name: str, group=None, cut=False, halves: bool = False) -> None:
        self.name, self.halves, self.group = name, halves, group
        self.cut = cut or name == "tp"  # a GPT, else an nn.Sequential
        self.model = build_gpt(GPT, 0) if self.cut else self.plain()

    def plain(self) -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
        return nn.Sequential(*layers)

    def layer(self, first: bool = False) -> nn.Module:
        if self.cut:
            return self.model.embed if first else self.model.blocks[0].mlp.up
        return self.model[0 if first else 2]

    def wrap(self) -> None:
        self.model = WRAP[self.name](self.model, self.group)

    def optimizer(self, cls=SGD, **options):
        options = {"lr": 0.1, **options}
        if self.name in OPTIMIZERS:
            own = OPTIMIZERS[self.name]
            return own(self.model.parameters(), cls, self.group, **options)
        return cls(self.model.parameters(), **options)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        chance = torch.Generator().manual_seed(step)
        x, y = torch.randn(4, 6, generator=chance), torch.randn(4, 1, generator=chance)
        if self.cut:
            x, y = torch.randint(96, (2, 4, 8), generator=chance)
        if self.name in ("one", "tp", "pp"):
            return x, y
        return tuple(t.chunk(2)[dist.get_rank()] for t in (x, y))

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.model(x, y)[1] if self.cut else mse_loss(self.model(x), y)

    def backward(self, step: int, scale=lambda loss: loss) -> None:
        x, y = self.batch(step)
        if self.name == "pp":  # goes backward by itself
            self.model.step(x, y)
            factor = scale(torch.ones(())).item()
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        elif self.halves:
            for rows in zip(x.chunk(2), y.chunk(2), strict=True):
                scale(self.loss(*rows) / 2).backward()
        else:
            scale(self.loss(x, y)).backward()

    def train(self, optimizer, steps=2) -> dict[str, torch.Tensor]:
        for step in range(steps):
            optimizer.zero_grad()
            self.backward(step)
            optimizer.step()
        return self.state()

    def state(self) -> dict[str, torch.Tensor]:
        if isinstance(self.model, DividedModule):
            state = full_state_dict(self.model)
        else:
            state = self.model.state_dict()
        return {
            name.removeprefix("module."): getattr(v, "full_tensor", lambda v=v: v)()
            for name, v in state.items()
            if "running" not in name and "num_" not in name
        }


# ---- the habits, in the order of the table -------------------------------------------


def adds_up(bed: Bed):
    bed.wrap()
    optimizer = bed.optimizer()
    with MemoryLog(bed.model):  # which has hooks of its own
        bed.backward(0)
    bed.backward(1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    bed.backward(2)
    optimizer.step()
    return bed.state()


def optimizer_before(bed: Bed):
    optimizer = bed.optimizer()
    bed.wrap()
    return bed.train(optimizer)


def clips(bed: Bed):
    bed.wrap()
    optimizer = bed.optimizer()
    bed.backward(0)
    clip_grad_norm_(bed.model.parameters(), 0.01)
    optimizer.step()
    return bed.state()


def scales(bed: Bed):
    """Rank 1 has an inf in its loss; where the model is cut, in its part of a mean."""
    bed.wrap()
    optimizer, scaler = bed.optimizer(), torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(2):
        optimizer.zero_grad()
        here = step == 0 and (bed.name == "one" or dist.get_rank() == 1)
        cut = bed.name not in ("one", "ddp", "DDP")
        factor = INF if here and not cut else 1.0
        bed.backward(step, lambda loss, factor=factor: scaler.scale(loss) * factor)
        if here and cut:
            own = optimizer
            if bed.name in OPTIMIZERS:
                optimizer.give_gradients()
                own = optimizer.optim
            parts = (p for group in own.param_groups for p in group["params"])
            some = next(p.grad for p in parts if p.grad is not None and p.numel())
            getattr(some, "_local_tensor", some).view(-1)[0] = INF
        scaler.step(optimizer)
        scaler.update()
    return bed.state() | {"scale": torch.tensor(scaler.get_scale())}


def copies(bed: Bed):
    bed.wrap()
    bed.model = copy.deepcopy(bed.model)
    return bed.train(bed.optimizer())


def pickles(bed: Bed):
    bed.wrap()
    bed.optimizer()
    torch.save(bed.model, file := io.BytesIO())
    file.seek(0)
    bed.model = torch.load(file, weights_only=False)
    return bed.train(bed.optimizer())


def unfreezes(bed: Bed):
    bed.layer(first=True).requires_grad_(False)
    bed.wrap()
    optimizer = bed.optimizer()
    bed.train(optimizer, 1)
    for parameter in bed.model.parameters():
        parameter.requires_grad_(True)
    return bed.train(optimizer)


def freezes(bed: Bed):
    bed.wrap()
    optimizer = bed.optimizer()
    bed.train(optimizer, 1)
    for name, parameter in bed.model.named_parameters():
        if name.removeprefix("module.").startswith(("0.", "embed.")):
            parameter.requires_grad_(False)
    return bed.train(optimizer)


def replaces(bed: Bed):
    layer, shape = bed.layer(), bed.layer().weight.shape
    bed.wrap()
    if bed.cut:  # its layers are other ones
        layer, shape = bed.layer(), bed.layer().weight.shape
    elif bed.name == "pp":  # likewise, and each rank has some
        parts = [m for m in bed.model.modules() if isinstance(m, nn.Linear)]
        layer, shape = parts[-1], parts[-1].weight.shape
    layer.weight = nn.Parameter(torch.full(shape, 0.05))
    return bed.train(bed.optimizer())


def hooks_gradients(bed: Bed):
    bed.wrap()
    for parameter in bed.model.parameters():
        parameter.register_hook(lambda gradient: gradient / 2)
    return bed.train(bed.optimizer())


def clamps(bed: Bed):
    def clamp(module: nn.Module, args: tuple) -> None:
        with torch.no_grad():
            module.weight.clamp_(-0.05, 0.05)

    if not bed.cut:
        bed.layer().register_forward_pre_hook(clamp)
    bed.wrap()
    if bed.cut:  # its layers are other ones
        bed.layer().register_forward_pre_hook(clamp)
    return bed.train(bed.optimizer())


def penalizes(bed: Bed):
    bed.wrap()
    optimizer, (x, y), kept = bed.optimizer(), bed.batch(0), []
    if bed.cut:  # of what the tokens are embedded in
        embed = bed.model.embed
        embed.register_forward_hook(lambda module, args, out: kept.append(out))
    else:
        kept.append(x.requires_grad_())
    loss = bed.loss(x, y)
    (gradient,) = torch.autograd.grad(loss * len(x), kept, create_graph=True)
    (loss + gradient.flatten(1).square().sum(1).mean()).backward()
    optimizer.step()
    return bed.state()


def leaves_unused(bed: Bed):
    bed.layer().spare = nn.Parameter(torch.ones(5))
    bed.wrap()
    return bed.train(bed.optimizer(ADAM, weight_decay=0.5))


def normalizes(bed: Bed):
    bed.model[1] = nn.BatchNorm1d(8)
    bed.wrap()
    return bed.train(bed.optimizer())


def catches(bed: Bed):
    """Rank 1 has an error in its second forward, and goes on with the next batch."""
    bad = []

    def fail(module: nn.Module, args: tuple) -> None:
        if bad:
            raise ZeroDivisionError(bad.pop())

    bed.layer().register_forward_pre_hook(fail)
    bed.wrap()
    if bed.cut:
        bed.layer().register_forward_pre_hook(fail)
    optimizer = bed.optimizer()
    for step in range(4):
        if step == 1 and bed.name != "one" and dist.get_rank() == 1:
            bad.append("a bad row")
        try:
            bed.train(optimizer, 1)
        except ZeroDivisionError:
            optimizer.zero_grad()
    return bed.state()


RUN = dict(
    zip(
        HABITS,
        [adds_up, optimizer_before, clips, scales, copies, pickles, unfreezes, freezes,
         replaces, hooks_gradients, clamps, penalizes, leaves_unused, normalizes,
         catches],
        strict=True,
    )
)  # fmt: skip
*OTHERS, CATCHES = HABITS


@functools.cache
def of_one_process(habit: str, cut: bool, halves: bool) -> dict[str, torch.Tensor]:
    """Return the state that one process has; each rank asks for it many times."""
    return RUN[habit](Bed("one", None, cut, halves))


def new_group() -> dist.ProcessGroup:
    return dist.new_group(timeout=datetime.timedelta(seconds=30))


def came_of(habit: str, name: str, like: str, group: dist.ProcessGroup) -> str:
    """Return the word for what comes of a habit, and the error."""
    try:
        state = RUN[habit](Bed(name, group))
    except Exception as error:
        raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
        own = "ddp_course" in raised_in and "gloo" not in str(error)
        return f"{'refused' if own else 'error'}: {type(error).__name__}: {error}"
    for word, halves in (("right", False), ("per rank", True)):
        one = of_one_process(habit, like == "tp", halves)
        near = (torch.allclose(state[k], one[k], atol=1e-5) for k in state)
        if (state or dist.get_rank()) and all(near):
            return word
    return "wrong"


class FlagOnAGPU:
    """A flag that can be moved, but not added to one on another GPU."""

    device = torch.device("cpu")

    def to(self, device: torch.device) -> torch.Tensor:
        return torch.zeros((), device=device)


def test_a_scaler_of_whole_parameters_on_two_gpus_is_left_alone():
    flags = {name: FlagOnAGPU() for name in ("cuda:0", "cuda:1")}
    unscale = guards._unscale_agreed(lambda scaler, optimizer: dict(flags))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    assert unscale(None, optimizer) == flags


def test_clipping_nothing_is_refused_while_gradients_are_in_shards():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = SGD([parameter])
    optimizer.gradients_in_shards = True
    mark_part_averaged([parameter], optimizer)
    for clip in (
        lambda: clip_grad_value_([parameter], 1.0),
        lambda: get_total_norm([]),
    ):
        with pytest.raises(RuntimeError, match="no parameter has a gradient to clip"):
            clip()
    parameter.grad = torch.full((2,), 3.0)
    clip_grad_value_([parameter], 1.0)
    assert parameter.grad.tolist() == [1.0, 1.0]


def rungs(strategy: str) -> tuple[str, ...]:
    return strategy, *ALSO.get(strategy, ())


def without_guards() -> None:
    """The plant: nobody looks after anything."""
    guards.is_partial = lambda parameter: False
    guards.seen_by_all = lambda optimizer, own: own
    sharded_parts.leave_behind = gpt.leave_behind = lambda parameters, by: None
    frozen.Frozen.check = lambda self: None
    DividedModule.find_unplaced = lambda self: None
    ParameterGuard.before_forward = lambda self, fsdp: None
    ParameterGuard.used = lambda self, fsdp, unit, output: None
    hooks.Averager.__getstate__ = lambda self: {}


GUARDED = {  # habit, strategy -> what comes of it without
    (OTHERS[1], "tp"): "wrong",
    (OTHERS[2], "zero3"): "wrong",
    (OTHERS[2], "pp"): "wrong",
    (OTHERS[3], "zero3"): "wrong",
    (OTHERS[3], "tp"): "wrong",
    (OTHERS[6], "ddp"): "wrong",
    (OTHERS[7], "zero3"): "wrong",
    (OTHERS[9], "zero3"): "wrong",
    (OTHERS[10], "zero3"): "wrong",
}


def everything(pairs: list[tuple[str, str, str]], guarded: bool = True) -> list[str]:
    if not guarded:
        without_guards()
    found, group = [], new_group()
    for habit, name, like in pairs:
        found.append(came_of(habit, name, like, group))
        dist.all_gather_object(words := [""] * dist.get_world_size(), found[-1])
        if not {*words} <= {"right", "per rank", "wrong"}:
            group = new_group()  # something may still be under way in that one
    return found


def test_every_entry_of_the_table_is_what_comes_of_it_on_every_rank():
    pairs = [
        (habit, rung, strategy)
        for habit in HABITS
        for strategy in STRATEGIES
        for rung in rungs(strategy)
        if outcome(habit, strategy) != "-" and (habit != CATCHES or strategy == "ddp")
    ]
    ranks = spawn(everything, pairs, world_size=2, output="none", timeout=240)
    for pair, *result in zip(pairs, *ranks, strict=True):
        wanted = outcome(pair[0], pair[2])
        for text in result:
            assert text.partition(":")[0] == wanted, (pair, result)
            assert wanted != "refused" or len(text) > 80, text  # says what to do


def test_without_their_guards_they_are_wrong_in_silence():
    pairs = [(habit, rung, rung) for habit, rung in GUARDED]
    ranks = spawn(everything, pairs, False, world_size=2, output="none")
    assert dict(zip(GUARDED, ranks[0], strict=True)) == GUARDED


HEARD = {  # of PyTorch's, which leave it to gloo
    "DDP": "rank 1 returned while rank 0 still wanted to communicate",
    "fully_shard": "killed by SIGABRT",  # one gathers what another reduces
}


def waits_at_the_end(strategy: str) -> str:
    results = came_of(CATCHES, strategy, strategy, new_group())
    if results.startswith(("refused", "error")):
        raise RuntimeError(results)
    return results


@pytest.mark.parametrize("strategy", ["zero1", "zero3", "tp", "pp", *HEARD])
def test_who_goes_on_alone_after_an_error_is_told(strategy):
    """By the strategy, on one rank at least, or by the end of the one that went on."""
    with pytest.raises(RankError) as caught:
        spawn(waits_at_the_end, strategy, world_size=2, output="none")
    text, word = str(caught.value), outcome(CATCHES, strategy)
    results = {"refused": "refused: ", "waits": "[1] have returned"}
    assert HEARD.get(strategy, results.get(word)) in text, text
    assert word == "waits" or results["waits"] not in text, text
    if strategy in HEARD:  # what went on is not right on any rank
        assert word == {"DDP": "waits", "fully_shard": "error"}[strategy]
        values = [report.value for report in caught.value.reports]
        assert set(values) <= {None, "wrong"}


def test_the_table_says_what_its_words_mean():
    text = habits().data
    assert all(len(line.split("|")) == 10 for line in text.splitlines() if "|" in line)
    assert "| a gradient penalty | right | right | refused | refused |" in text
    words = {outcome(habit, name) for habit in HABITS for name in STRATEGIES}
    assert all(f"*{word}*" in text for word in words)

"""The exercises of chapter 10: a schedule, a cut, and what a loss counts."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_course.chapters.ch10_pipeline_parallel import solutions
from ddp_course.collectives import barrier
from ddp_course.lab.answers import Answer, code, error_line, on_ranks, one_line
from ddp_course.lab.exercises import exercise, expect
from ddp_course.lab.messages import watched
from ddp_course.measure import ByteMeter
from ddp_course.pipeline import (
    PipelineParallel,
    Schedule,
    ScheduleError,
    check,
    parse,
    simulate,
)

# ---- my_gpipe ----------------------------------------------------------------------

PIPELINES = ((2, 3), (1, 2), (3, 1), (4, 4), (3, 7), (2, 12))  # stages and microbatches
WIDTH, ROWS = 4, 6


@exercise("my_gpipe", solution=solutions.my_gpipe)
def check_my_gpipe(answer: Answer) -> str:
    """`my_gpipe(num_stages, num_microbatches, rank)`: what a rank does, in order."""
    for p, m in PIPELINES:
        rows = [answer(p, m, rank) for rank in range(p)]
        for rank, row in enumerate(rows):
            _judge_row(answer.call(p, m, rank), row, rank, m)
        _judge_schedule(f"With {p} stages and {m} microbatches", _as_one(rows), p, m)
    for p, m in ((3, 3), (2, 1)):
        rows = [answer(p, m, rank) for rank in range(p)]
        real = on_ranks(_run_schedule, _as_one(rows), world_size=p)
        alone = _run_alone()
        for rank, told in enumerate(real):
            where = f"On {p} real ranks with {m} microbatches, rank {rank}"
            _judge_run(where, told, alone, p, m)
    return (
        f"{len(PIPELINES)} pipelines: legal, all forwards first, and no more waiting "
        "than (p-1)/(m+p-1) of the time; on real ranks the gradients of one process"
    )


def _judge_row(call: str, row: Any, rank: int, m: int) -> None:
    """Look at the form of what a rank does, and at its order."""
    fine = isinstance(row, list) and all(isinstance(one, str) for one in row)
    expect(
        fine,
        f"{call} returned {code(one_line(row))}; expected a list of actions in words, "
        "such as '0F1': stage, F or B, microbatch.",
    )
    for one in row:
        try:
            parse("", [one])
        except ValueError as error:
            expect(False, f"{call} has {code(repr(one))}: {error_line(error)}")
    others = [one for one in row if not one.startswith((f"{rank}F", f"{rank}B"))]
    expect(
        not others,
        f"{call} has {code(repr((others or [''])[0]))}; rank {rank} has stage {rank} "
        "alone, and its actions are F and B.",
    )
    ops = "".join(one[len(f"{rank}")] for one in row)
    expect(
        "BF" not in ops,
        f"{call} returned {code(' '.join(row))}, where a backward comes before a "
        "forward; in GPipe the forwards of all microbatches come first.",
    )


def _as_one(rows: Sequence[list[str]]) -> Schedule:
    return parse("yours", [" ".join(row) for row in rows])


def _judge_schedule(where: str, schedule: Schedule, p: int, m: int) -> None:
    """Let the checker judge, and the simulator count the waiting."""
    expect(
        (schedule.num_stages, schedule.num_microbatches) == (p, m),
        f"{where} your ranks have actions of {schedule.num_stages} stages and "
        f"{schedule.num_microbatches} microbatches; both are counted from 0.",
    )
    try:
        check(schedule)
    except ScheduleError as error:
        expect(False, f"{where} the checker says: {error}.")
    bubble, least = simulate(schedule).bubble, Fraction(p - 1, m + p - 1)
    expect(
        bubble == least,
        f"{where} your ranks wait for {bubble} of the time; {least} is enough. Is the "
        "order of the backwards the same on all ranks?",
    )


def _model() -> nn.Sequential:
    """Return four layers whose numbers are small integers: no sum is ever rounded."""
    dice = torch.Generator().manual_seed(0)
    layers = []
    for _ in range(4):
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
        numbers = torch.randint(-2, 3, (WIDTH, WIDTH), generator=dice)
        layer.weight.data.copy_(numbers)
        layers.append(layer)
    return nn.Sequential(*layers)


def _batch() -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(1)
    return tuple(
        torch.randint(-3, 4, (ROWS, WIDTH), generator=dice).float() for _ in range(2)
    )


def _loss(y: Tensor, targets: Tensor) -> Tensor:
    return (y * targets).sum(1).mean()


def _run_schedule(schedule: Schedule) -> dict[str, Any]:
    """On every rank: one step of the reader's schedule."""
    pipeline = PipelineParallel(_model(), schedule, loss_fn=_loss)
    with ByteMeter() as meter:
        pipeline.step(*_batch())
    gradients = {name: p.grad for name, p in pipeline.named_parameters()}
    return {"gradients": gradients, "messages": meter.total_messages}


def _run_alone() -> dict[str, Tensor]:
    model = _model()
    x, targets = _batch()
    _loss(model(x), targets).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def _judge_run(
    where: str, told: dict[str, Any], alone: dict[str, Tensor], p: int, m: int
) -> None:
    for name, gradient in told["gradients"].items():
        right = gradient is not None and torch.allclose(gradient, alone[name])
        expect(right, f"{where} has another gradient of {name} than one process.")


# ---- my_cut ------------------------------------------------------------------------

COSTS = (
    ([1, 1, 1, 1], 2),
    ([1, 8, 8, 8, 8, 6], 4),  # a GPT: the embedding costs nearly nothing
    ([1, 4, 4, 4, 4, 12], 3),  # and with a large vocabulary
    ([5, 5, 2, 3, 5, 5, 2], 3),
    ([7, 2, 5, 10, 8], 2),
    ([9, 1, 1, 1, 1, 1, 1], 3),
    ([1, 1, 1, 9], 4),
    ([2, 9, 5, 4], 3),
    ([2, 4, 4, 2, 8, 4], 3),
    ([3], 1),
    ([0.9, 0.9, 0.9, 2.0], 2),
    ([2, 3, 5, 7, 11, 13, 17, 19, 23], 4),
)


@exercise("my_cut", solution=solutions.my_cut)
def check_my_cut(answer: Answer) -> str:
    """`my_cut(costs, num_stages)`: how many layers each stage has."""
    for costs, stages in COSTS:
        given = list(costs)
        got = answer(given, stages)
        call = answer.call(costs, stages)
        _judge_sizes(call, got, costs, stages)
        dearest, least = _dearest(costs, got), _least(costs, stages)
        expect(
            dearest == least,
            f"{call} returned {code(repr(got))}: the dearest stage costs {dearest}, "
            f"and all others wait for it; it can be {least}.",
        )
        expect(given == costs, f"{call} changed the list that it was given.")
    return f"{len(COSTS)} models, each with the smallest possible dearest stage"


def _judge_sizes(call: str, got: Any, costs: Sequence[int], stages: int) -> None:
    fine = isinstance(got, list) and all(type(size) is int for size in got)
    expect(
        fine,
        f"{call} returned {code(one_line(got))}; expected a list with the number of "
        "layers of each stage.",
    )
    expect(
        len(got) == stages,
        f"{call} returned {code(repr(got))}, which has {len(got)} stages; expected "
        f"{stages}.",
    )
    expect(
        min(got) >= 1,
        f"{call} returned {code(repr(got))}: a stage without layers is a rank without "
        "work.",
    )
    expect(
        sum(got) == len(costs),
        f"{call} returned {code(repr(got))}, together {sum(got)} layers; the model has "
        f"{len(costs)}.",
    )


def _dearest(costs: Sequence[int], sizes: Sequence[int]) -> int:
    ends = list(itertools.accumulate(sizes))
    return max(
        sum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True)
    )


def _least(costs: Sequence[int], stages: int) -> int:
    """Return the least cost of the dearest stage, by trying all cuts."""
    found = []
    for cuts in itertools.combinations(range(1, len(costs)), stages - 1):
        ends = (0, *cuts, len(costs))
        found.append(_dearest(costs, [b - a for a, b in itertools.pairwise(ends)]))
    return min(found)


# ---- microbatch_loss ---------------------------------------------------------------

LENGTH, VOCABULARY = 5, 7
COUNTED = (  # for each row of the batch, how many targets count
    (5, 5, 5, 5),
    (5, 1, 3, 2),
    (0, 5, 0, 1),
    (2, 0, 0, 0, 4, 4),
)


@exercise("microbatch_loss", solution=solutions.microbatch_loss)
def check_microbatch_loss(answer: Answer) -> str:
    """`microbatch_loss(logits, targets, counted)`: its part of the batch's loss."""
    for lengths, m in itertools.product(COUNTED, (1, 2, 4)):
        logits, targets = _texts(lengths)
        counted = sum(lengths)
        where = f"With {lengths} targets that count in the rows, {m} microbatches:"
        whole = logits.clone().requires_grad_()
        wanted = F.cross_entropy(whole.flatten(0, 1), targets.flatten())
        wanted.backward()
        mine = logits.clone().requires_grad_()
        given = [part.clone() for part in targets.tensor_split(m)]
        parts = zip(mine.tensor_split(m), given, strict=True)
        losses = [answer(x, y, counted) for x, y in parts]
        untouched = torch.equal(torch.cat(given), targets)
        expect(untouched, f"{where} your function changed the targets.")
        _judge_losses(where, losses, wanted)
        sum(losses).backward()
        expect(
            mine.grad is not None and torch.allclose(mine.grad, whole.grad, atol=1e-7),
            f"{where} the sum is right, and its gradient is not that of the whole "
            "batch's loss.",
        )
    return (
        f"{len(COUNTED)} batches in 1, 2 and 4 microbatches, some without a target "
        "that counts: the loss and the gradient of the whole batch"
    )


def _texts(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return logits and targets; behind a row's length, targets do not count."""
    dice = torch.Generator().manual_seed(len(lengths))
    shape = len(lengths), LENGTH
    logits = torch.randn(*shape, VOCABULARY, generator=dice)
    targets = torch.randint(0, VOCABULARY, shape, generator=dice)
    for row, length in enumerate(lengths):
        targets[row, length:] = -100
    return logits, targets


def _judge_losses(where: str, losses: Sequence[Any], wanted: Tensor) -> None:
    for loss in losses:
        fine = isinstance(loss, Tensor) and loss.ndim == 0 and loss.requires_grad
        expect(
            fine,
            f"{where} your function returned {code(one_line(loss))}; expected a scalar "
            "tensor through which backward can go.",
        )
    told = ", ".join(f"{loss.item():.4g}" for loss in losses)
    expect(
        all(torch.isfinite(loss) for loss in losses),
        f"{where} the parts are {told}. A mean over no target at all is 0 / 0.",
    )
    ratio = sum(losses).item() / wanted.item()
    expect(
        abs(ratio - 1) < 1e-5,
        f"{where} the parts are {told}, in all {ratio:.3f} times the mean over all "
        "targets that count. A part must count as much as it has targets.",
    )


SAMPLES, WIDE, WORDS = 2, 4, 8  # of a microbatch; channels; tokens that there are


@exercise("my_stage_step", solution=solutions.my_stage_step)
def check_my_stage_step(answer: Answer) -> str:
    """`my_stage_step(stage, num_microbatches, forward_in, ...)`: GPipe, one stage."""
    hint = "Look at what enters the stage, and at what must leave it."
    for p, m in ((2, 2), (3, 4), (1, 2)):
        real = on_ranks(_step_on_rank, answer, m, world_size=p, hint=hint)
        alone = _gradients_alone(p, m)
        for rank, told in enumerate(real):
            where = f"On {p} real ranks with {m} microbatches, on rank {rank},"
            _judge_order(where, told["events"], m)
            _judge_messages(where, told, rank, p, m)
            _judge_gradients(where, told["gradients"], alone[rank])
            _judge_memory(where, told, m)
    return (
        "pipelines of 1 to 3 real ranks: the gradients of one process, one message for "
        "each microbatch and direction, and activations freed as backward goes"
    )


def _stages(p: int) -> list[nn.Module]:
    """Return the stages of a model of small integers: no sum is ever rounded."""
    dice = torch.Generator().manual_seed(0)
    stages: list[nn.Module] = []
    for rank in range(p):
        layer = nn.Linear(WIDE, WIDE, bias=False)
        numbers = torch.randint(-1, 2, (WIDE, WIDE), generator=dice)
        layer.weight.data.copy_(numbers)
        stages.append(nn.Sequential(layer, nn.ReLU()) if rank else layer)
    table = nn.Embedding(WORDS, WIDE)
    numbers = torch.randint(-2, 3, (WORDS, WIDE), generator=dice)
    table.weight.data.copy_(numbers)
    stages[0] = nn.Sequential(table, stages[0])
    return stages


def _tokens(m: int) -> Tensor:
    dice = torch.Generator().manual_seed(1)
    return torch.randint(0, WORDS, (m, SAMPLES), generator=dice)


def _loss_gradient(y: Tensor, k: int) -> Tensor:
    """Return the gradient of the loss, sum of (k + 1) y² / 2, with respect to y."""
    return (k + 1) * y


def _gradients_alone(p: int, m: int) -> list[list[Tensor]]:
    stages, tokens = _stages(p), _tokens(m)
    for k in range(m):
        x = tokens[k]
        for stage in stages:
            x = stage(x)
        x.backward(_loss_gradient(x.detach(), k))
    return [[w.grad for w in stage.parameters()] for stage in stages]


class _Boundaries:
    """The four functions that a stage is given; they note what they are called for."""

    def __init__(self, m: int) -> None:
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        self.tokens, self.outputs, self.m = _tokens(m), {}, m
        self.events: list[tuple[str, int]] = []
        self.alive: list[int] = []  # saved tensors when a backward has ended
        self.saved: weakref.WeakSet = weakref.WeakSet()
        self.works: list[tuple[Any, Tensor]] = []

    def forward_in(self, k: int) -> Tensor:
        self._note("forward_in", k)
        if self.rank == 0:
            return self.tokens[k].clone()
        return self._receive(self.rank - 1, k)

    def forward_out(self, k: int, y: Tensor) -> None:
        self._note("forward_out", k)
        self.outputs[k] = self._checked(y, "forward_out").detach().clone()
        if self.rank < self.last:
            self._send(self.outputs[k], self.rank + 1, k)

    def backward_in(self, k: int) -> Tensor:
        self._note("backward_in", k)
        if self.rank < self.last:
            return self._receive(self.rank + 1, self.m + k)
        if k not in self.outputs:
            raise ValueError(f"microbatch {k} has no output yet, and so no loss")
        return _loss_gradient(self.outputs[k], k)

    def backward_out(self, k: int, gradient: Tensor | None) -> None:
        self._note("backward_out", k)
        self.alive.append(len(self.saved))
        if self.rank > 0:
            if gradient is None:
                raise TypeError(
                    "backward_out got None: the input must require a gradient before "
                    "the stage computes with it"
                )
            checked = self._checked(gradient, "backward_out")
            self._send(checked, self.rank - 1, self.m + k)

    def _note(self, what: str, k: int) -> None:
        if type(k) is not int or not 0 <= k < self.m:
            raise ValueError(f"there is no microbatch {k!r}; the last is {self.m - 1}")
        self.events.append((what, k))

    def _checked(self, tensor: Any, what: str) -> Tensor:
        if not isinstance(tensor, Tensor) or tensor.shape != (SAMPLES, WIDE):
            raise TypeError(
                f"{what} got {one_line(tensor)}; the boundary's tensors have the shape "
                f"{(SAMPLES, WIDE)}"
            )
        return tensor

    def _send(self, tensor: Tensor, peer: int, tag: int) -> None:
        sent = tensor.detach().clone()
        self.works.append((dist.isend(sent, peer, tag=tag), sent))

    def _receive(self, peer: int, tag: int) -> Tensor:
        got = torch.empty(SAMPLES, WIDE)
        dist.irecv(got, peer, tag=tag).wait()
        return got

    def pack(self, tensor: Tensor) -> _Saved:
        """Autograd keeps a tensor: note it for as long as it is kept."""
        saved = _Saved(tensor)
        self.saved.add(saved)
        return saved

    def finish(self) -> None:
        for work, _ in self.works:
            work.wait()


class _Saved:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _step_on_rank(my_stage_step: Callable, m: int) -> dict[str, Any]:
    """On every rank: one step of its stage, and all that can be judged."""
    stage = _stages(dist.get_world_size())[dist.get_rank()]
    ends = _Boundaries(m)
    barrier()
    hooks = torch.autograd.graph.saved_tensors_hooks(ends.pack, lambda s: s.tensor)
    with watched() as told, hooks:
        functions = ends.forward_in, ends.forward_out, ends.backward_in
        my_stage_step(stage, m, *functions, ends.backward_out)
        ends.finish()
    return {
        "events": ends.events,
        "alive": ends.alive,
        "sent": told["sent"],
        "collectives": told["collectives"],
        "gradients": [w.grad for w in stage.parameters()],
    }


def _judge_order(where: str, events: list[tuple[str, int]], m: int) -> None:
    forwards = [event for event in events if event[0].startswith("forward")]
    backwards = [event for event in events if event[0].startswith("backward")]
    for way, found in (("forward", forwards), ("backward", backwards)):
        order = [k for what, k in found if what == f"{way}_in"]
        expect(
            sorted(order) == list(range(m)),
            f"{where} `{way}_in` was called for the microbatches {order}; each of the "
            f"{m} has one {way}.",
        )
        pairs = [(f"{way}_{end}", k) for k in order for end in ("in", "out")]
        expect(
            found == pairs,
            f"{where} the order was {code(_told(found))}; hand a result on as soon as "
            "it is there: another rank waits for it.",
        )
    expect(
        events == forwards + backwards,
        f"{where} the order was {code(_told(events))}; in GPipe the forwards of all "
        "microbatches come before the first backward.",
    )


def _told(events: list[tuple[str, int]]) -> str:
    return " ".join(f"{what}({k})" for what, k in events)


def _judge_messages(where: str, told: dict, rank: int, p: int, m: int) -> None:
    size = SAMPLES * WIDE
    wanted = [(peer, size) for peer in (rank + 1, rank - 1) if 0 <= peer < p] * m
    expect(
        sorted(told["sent"]) == sorted(wanted) and not told["collectives"],
        f"{where} {len(told['sent'])} messages and {len(told['collectives'])} "
        f"collectives were sent; expected {len(wanted)} messages, by the four "
        "functions that you are given, and nothing else.",
    )


def _judge_gradients(where: str, got: list, wanted: list[Tensor]) -> None:
    for gradient, right in zip(got, wanted, strict=True):
        expect(
            gradient is not None,
            f"{where} a weight has no gradient: backward did not reach it.",
        )
        expect(
            torch.equal(gradient, right),
            f"{where} a weight's gradient is {code(one_line(gradient.tolist()))}; one "
            f"process has {code(one_line(right.tolist()))}. Does each microbatch go "
            "back through its own forward, and do all of them add up?",
        )


def _judge_memory(where: str, told: dict, m: int) -> None:
    alive = told["alive"]
    expect(
        alive[-1] == 0,
        f"{where} {alive[-1]} tensors that autograd has saved are alive when the last "
        "backward is done. What keeps a graph that is not needed any more?",
    )
    expect(
        not any(alive)  # recomputed
        or (alive == sorted(alive, reverse=True) and len(set(alive)) == m),
        f"{where} the tensors that autograd keeps after each backward are {alive}: one "
        "backward should free what one forward has kept.",
    )

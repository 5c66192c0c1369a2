"""An exercise of chapter 10 on ranks: a stage's step, from boundary to boundary."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.collectives import barrier
from ddp_course.lab.answers import Answer, code, on_ranks, one_line
from ddp_course.lab.exercises import exercise, expect
from ddp_course.lab.messages import watched
from ddp_course.lab.solutions import ch10 as solutions

ROWS, WIDTH, WORDS = 2, 4, 8  # of a microbatch; channels; tokens that there are


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
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
        numbers = torch.randint(-1, 2, (WIDTH, WIDTH), generator=dice)
        layer.weight.data.copy_(numbers)
        stages.append(nn.Sequential(layer, nn.ReLU()) if rank else layer)
    table = nn.Embedding(WORDS, WIDTH)
    numbers = torch.randint(-2, 3, (WORDS, WIDTH), generator=dice)
    table.weight.data.copy_(numbers)
    stages[0] = nn.Sequential(table, stages[0])
    return stages


def _tokens(m: int) -> Tensor:
    dice = torch.Generator().manual_seed(1)
    return torch.randint(0, WORDS, (m, ROWS), generator=dice)


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
        if not isinstance(tensor, Tensor) or tensor.shape != (ROWS, WIDTH):
            raise TypeError(
                f"{what} got {one_line(tensor)}; the boundary's tensors have the shape "
                f"{(ROWS, WIDTH)}"
            )
        return tensor

    def _send(self, tensor: Tensor, peer: int, tag: int) -> None:
        sent = tensor.detach().clone()
        self.works.append((dist.isend(sent, peer, tag=tag), sent))

    def _receive(self, peer: int, tag: int) -> Tensor:
        got = torch.empty(ROWS, WIDTH)
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
    size = ROWS * WIDTH
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

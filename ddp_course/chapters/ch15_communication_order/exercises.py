"""The exercises of chapter 15: a queue, a bound, and a step that comes late."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.chapters.ch15_communication_order import solutions
from ddp_course.lab.answers import Answer
from ddp_course.lab.exercises import equal, exercise, expect, expect_call, judge_ranks


def _times(seed: int, layers: int) -> tuple[list[int], list[int], list[int]]:
    """Return whole times of forward, backward and send."""
    dice = random.Random(seed)
    return tuple([dice.randint(1, most) for _ in range(layers)] for most in (5, 6, 9))


# ---- my_priority ---------------------------------------------------------------------

LINKS = (
    ([0], [2], 2, "it is there, and fits into one piece"),
    ([3], [5], 2, "nothing is there before 3, and the last piece is shorter"),
    ([4, 0], [2, 4], 2, "layer 1 is alone until 4"),
    ([3, 0], [2, 6], 2, "layer 0 is next from 3 on, behind the piece on the link"),
    ([1, 0], [1, 9], 10, "a whole layer is a piece, too, and layer 0 comes after it"),
    ([4, 2, 0], [3, 3, 3], 1, "whenever the link is free, the first layer goes on"),
    ([9, 1, 0], [2, 2, 2], 5, "the link waits until 9 for layer 0"),
    ([5, 5, 5], [2, 2, 2], 1, "all are there at once, and layer 0 is needed first"),
    ([2, 1, 0], [4, 0, 2], 3, "there is nothing to send of layer 1"),
)


@exercise("my_priority", solution=solutions.my_priority)
def check_my_priority(answer: Answer) -> str:
    """`my_priority(ready, send, piece)`: what is on the link from when to when.

    At which moments is something chosen, and among which layers?

    As long as something is left: if no layer that is there has any, go to the moment
    when the next one is there. Otherwise send a piece of the first of them, and go to
    its end.
    """
    cases, because = [*LINKS], "the first layer that is there goes on, piece by piece"
    for seed in range(20):
        _, backward, send = _times(seed, 2 + seed % 12)
        ready = [sum(backward[k:]) for k in range(len(backward))]
        cases.append((ready, send, 1 + seed % 4, because))
    for ready, send, piece, because in cases:
        right, given = solutions.my_priority(ready, send, piece), ([*ready], [*send])
        expect_call(answer, *given, piece, returns=right, because=because)
        changed = f"{answer.call(ready, send, piece)} changed the lists it was given."
        expect(given == (ready, send), changed)
    return f"{len(cases)} models of up to 13 layers, and no byte sent twice"


# ---- my_least_time -------------------------------------------------------------------

STEPS = (
    ([1], [2], [3], "one layer goes backward, is sent, and goes forward"),
    ([1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3], "here all four paths are equally long"),
    ([1, 1], [2, 2], [9, 1], "layer 0 is sent after all of backward, before any of "
     "forward: its path is the longest"),
    ([1, 1], [2, 2], [1, 9], "layer 1's path is the longest: its backward, both sends, "
     "its forward"),
    ([2, 1, 1], [4, 4, 1], [1, 7, 2], "layer 1's path is the longest: backward to it, "
     "sends 0 and 1, forward from it on"),
    ([2, 3], [4, 5], [0, 0], "without anything to send, it is what is computed"),
    ([5, 5], [9, 9], [1, 1], "layer 1's send is hidden, and layer 0's is not"),
)  # fmt: skip


@exercise("my_least_time", solution=solutions.my_least_time)
def check_my_least_time(answer: Answer) -> str:
    """`my_least_time(forward, backward, send)`: what no order of sends can beat.

    What must be over before layer c can go forward, in any order, and what comes after?

    For each layer c: backward from the last layer to c, then the sends of layers 0 to
    c, none of which can begin earlier, then forward from c to the last layer. The
    longest of these.
    """
    because = "the longest of all layers' paths counts"
    cases = [*STEPS, *((*_times(seed, 1 + seed % 12), because) for seed in range(20))]
    for *times, because in cases:
        right = solutions.my_least_time(*times)
        expect_call(answer, *map(list, times), returns=right, because=because)
    return f"{len(cases)} models of up to 12 layers"


# ---- my_late_steps -------------------------------------------------------------------

SIZES, RATE, MEAN = (3, 2, 2, 3), 0.5, 2.0  # of neighbouring layers; no rounding
FROZEN = "2.bias"


class _Watched(nn.Linear):
    """Notes when it runs, and with which parameters."""

    def __init__(self, number: int, log: list[Any]) -> None:
        super().__init__(SIZES[number], SIZES[number + 1])
        self.number, self.log = number, log
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Note, and run."""
        self.log.append(f"layer {self.number}")
        return super().forward(x)


def _trained(mine: float) -> SimpleNamespace:
    """Return layers after backward, their optimizers, and a log; gradients are alike.

    The bias of layer 2 is frozen.
    """
    log: list[Any] = []
    layers = [_Watched(number, log) for number in range(len(SIZES) - 1)]
    layers[2].bias.requires_grad_(False)
    named = {
        f"{layer.number}.{name}": parameter
        for layer in layers
        for name, parameter in layer.named_parameters()
    }
    for parameter in named.values():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, mine)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=RATE) for layer in layers]
    return SimpleNamespace(layers=layers, optimizers=optimizers, named=named, log=log)


class _Handle:
    """What `send` returns here: until it is waited for, the gradient is no number."""

    def __init__(self, tensor: Tensor, name: str, log: list[Any]) -> None:
        self.tensor, self.name, self.log = tensor, name, log
        self.mean = torch.full_like(tensor, MEAN)
        tensor.fill_(torch.nan)

    def wait(self) -> None:
        """Let the mean arrive."""
        self.log.append(f"wait {self.name}")
        self.tensor.copy_(self.mean)


@exercise("my_late_steps", solution=solutions.my_late_steps)
def check_my_late_steps(answer: Answer) -> str:
    """`my_late_steps(layers, optimizers, send)`: all is sent, each layer waits alone.

    How do you get called just before a layer runs, and how only once?

    Send the gradients of a layer, keep their handles, and register a forward pre-hook
    that removes itself, waits for these handles, and lets this layer's optimizer step.
    A function that is called in the loop keeps each layer's handles apart.
    """
    told = _trained(1.0)
    names = {p.grad.data_ptr(): n for n, p in told.named.items() if p.grad is not None}

    def send(tensor: Tensor) -> _Handle:
        name = names.get(tensor.data_ptr(), "something else")
        told.log.append(f"send {name}")
        return _Handle(tensor, name, told.log)

    answer(told.layers, told.optimizers, send)
    _judge_sent(told.log, sorted(names.values()))
    _judge_values(told, -1, "When your function returned")
    x = torch.ones(1, SIZES[0])
    for number, layer in enumerate(told.layers):
        begin = len(told.log)
        x = Answer(answer.name, layer)(x)
        _judge_waits(told.log[begin:], number, names)
        _judge_values(told, number, f"When layer {number} ran")
    told.layers[0](torch.ones(1, SIZES[0]))
    _judge_values(told, number, "When layer 0 ran a second time")
    judge_ranks(REAL, _use, answer, worlds=(2,))
    return (
        "gradients are sent once, the first layer's first; each layer waits for its "
        "own alone, and steps once; and so on two real ranks"
    )


def _judge_sent(log: Sequence[str], wanted: Sequence[str]) -> None:
    """Expect all gradients sent, layer by layer, and nobody waited for."""
    waited = [one for one in log if one.startswith("wait")]
    expect(
        not waited,
        f"Your function did not return before it had waited: {', '.join(waited)}. Each "
        "layer shall wait for its own gradients, just before it runs.",
    )
    sent = [one.removeprefix("send ") for one in log]
    expect(
        sorted(sent) == wanted,
        f"Sent: {', '.join(sent) or 'nothing'}. Expected each gradient that there is, "
        f"once: {', '.join(wanted)}.",
    )
    expect(
        [name[0] for name in sent] == sorted(name[0] for name in sent),
        f"Sent in this order: {', '.join(sent)}. The layer that runs first needs its "
        "gradients first.",
    )


def _judge_waits(log: Sequence[str], number: int, names: dict[int, str]) -> None:
    """Expect this layer's gradients waited for, before it ran, and no others."""
    mine = sorted(name for name in names.values() if name.startswith(f"{number}."))
    before = log[: log.index(f"layer {number}")]
    waited = sorted({one.removeprefix("wait ") for one in before})
    expect(
        waited == mine,
        f"Before layer {number} ran, {', '.join(waited) or 'nothing'} had been waited "
        f"for; expected {', '.join(mine)}.",
    )


def _judge_values(told: SimpleNamespace, last: int, when: str) -> None:
    """Expect parameters of layers up to `last` after one step, of others before it."""
    for name, parameter in told.named.items():
        steps = int(name[0]) <= last and name != FROZEN
        right, got = 1 - RATE * MEAN * steps, parameter.detach()
        why = "after a step with the mean" if steps else "as its layer has not run yet"
        expect(
            equal(got, torch.full_like(got, right)),
            f"{when}, {name} was {got.flatten()[0]:g}; expected {right:g}, {why}.",
        )


REAL = {"right": "{why}"}


def _use(my_late_steps: Callable) -> dict[str, Any]:
    """On every rank: rank r has gradients of 1 + 2r."""
    told = _trained(1.0 + 2 * dist.get_rank())

    def send(tensor: Tensor) -> Any:
        tensor /= dist.get_world_size()
        return dist.all_reduce(tensor, async_op=True)

    my_late_steps(told.layers, told.optimizers, send)
    nn.Sequential(*told.layers)(torch.ones(1, SIZES[0]))
    try:
        _judge_values(told, len(SIZES), "after a forward")
    except Exception as wrong:
        return {"right": False, "why": str(wrong)}
    return {"right": True, "why": ""}

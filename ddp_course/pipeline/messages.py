"""A rank's messages in one step: received ahead of time, sent without waiting.

A program says which messages are posted together, and that order is kept. Over gloo the
rest is a matter of time:

    post   a receive before it is its turn, AHEAD actions before the one that needs it:
           then the message comes while this rank computes
    send   and go on; the memory is kept until the message has left
    take   wait for what has not arrived when it is needed

NCCL queues its messages on the GPU in the order in which they are given, and waits for
none: there, what is posted together goes as one batch, at its place.

A receiver must know type and shape beforehand. So before the first batch of a kind, one
row of it goes through all stages (`rehearse`). Chapter 10.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ddp_course.collectives.port import Handle, Port
from ddp_course.pipeline.clocks import VirtualClock, WallClock
from ddp_course.pipeline.program import Group, Step

AHEAD = 2  # actions
UNDER_WAY = 2  # messages to one rank whose memory is not free yet

Key = tuple[str, int, int]  # "activation" or "gradient", stage that made it, microbatch
Form = tuple[torch.dtype, tuple[int, ...]]  # of an activation, without its rows


def key_of(step: Step) -> Key:
    """Return what a message is known by."""
    return step.what, step.stage, step.microbatch


def boundary_of(step: Step) -> int:
    """Return the stage before the cut that a message passes."""
    return step.stage if step.what == "activation" else step.stage - 1


def horizons(groups: Sequence[Group], ahead: int) -> list[int]:
    """Return for each group up to which one receives are posted when it begins. Pure.

    That is the group of the action that is `ahead` actions after the next one.
    """
    actions = [n for n, group in enumerate(groups) if group[0].kind == "compute"]
    found = []
    for number in range(len(groups)):
        last = bisect_left(actions, number) + ahead
        found.append(actions[last] if last < len(actions) else len(groups) - 1)
    return found


class Messages:
    """What one rank sends and receives in one step.

    Args:
        groups: the rank's row of the program.
        port: how messages leave and arrive.
        device: where what arrives shall lie.
        rows: of each microbatch.
        forms: of the activations that pass each boundary of this rank's stages.
        clock: a virtual one travels along with each message.
        record: is told of each message sent, and of each that is waited for.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        port: Port,
        device: torch.device,
        rows: Sequence[int],
        forms: Mapping[int, Form],
        clock: WallClock | VirtualClock,
        record: Callable[..., None],
    ) -> None:
        self.groups, self.port, self.device = groups, port, device
        self.rows, self.forms, self.clock, self.record = rows, forms, clock, record
        self.horizons = horizons(groups, AHEAD)
        self.posted = -1  # up to this group
        self.arriving: dict[Key, tuple[list[Tensor], list[Handle]]] = {}
        self.leaving: dict[int, deque[tuple[list[Tensor], list[Handle]]]] = {}

    def post(self, number: int) -> None:
        """Group `number` begins: post what may be received from now on."""
        while self.device.type != "cuda" and self.posted < self.horizons[number]:
            self.posted += 1
            for step in self.groups[self.posted]:
                if step.kind == "recv":
                    room = self._room(step)
                    handles = [self.port.receive(part, step.peer) for part in room]
                    self.arriving[key_of(step)] = room, handles

    def exchange(self, group: Group, made: dict[Key, Tensor]) -> None:
        """Send what this group sends, of what was `made`; on GPUs, receive the rest."""
        sends = {
            step: made.pop(key_of(step)).contiguous()
            for step in group
            if step.kind == "send"
        }
        if self.device.type == "cuda":
            rooms = {step: self._room(step) for step in group if step.kind == "recv"}
            self.port.exchange(
                [(tensor, step.peer) for step, tensor in sends.items()],
                [(room[0], step.peer) for step, room in rooms.items()],
            )
            self.arriving |= {key_of(s): (room, []) for s, room in rooms.items()}
            return
        for step, tensor in sends.items():
            self._send(step, tensor)

    def take(self, key: Key) -> Tensor:
        """Return what has arrived, and wait for it if it has not."""
        (tensor, *sent_at), handles = self.arriving.pop(key)
        start = self.clock.now()
        _wait(handles)
        if sent_at:
            self.clock.heard(sent_at[0].item())
        self.record("wait", start, "wait", **_named(key))
        return tensor

    def settle(self) -> None:
        """Return when all that was sent has left."""
        for under_way in self.leaving.values():
            while under_way:
                _wait(under_way.popleft()[1])

    def _room(self, step: Step) -> list[Tensor]:
        """Return memory to receive a message into, and the time that comes with it."""
        dtype, shape = self.forms[boundary_of(step)]
        shape = (self.rows[step.microbatch], *shape)
        room = [torch.empty(shape, dtype=dtype, device=self.device)]
        if self.clock.virtual:
            room.append(torch.empty(1, dtype=torch.float64))
        return room

    def _send(self, step: Step, tensor: Tensor) -> None:
        start, tensors = self.clock.now(), [tensor]
        if self.clock.virtual:
            tensors.append(torch.tensor([start], dtype=torch.float64))
        under_way = self.leaving.setdefault(step.peer, deque())
        if len(under_way) == UNDER_WAY:
            _wait(under_way.popleft()[1])
        handles = [self.port.send(part, step.peer) for part in tensors]
        under_way.append((tensors, handles))
        self.record("send", start, "send", tensor.nbytes, **_named(key_of(step)))


def _named(key: Key) -> dict[str, str | int]:
    return dict(zip(("what", "stage", "microbatch"), key, strict=True))


def _wait(handles: Sequence[Handle]) -> None:
    for handle in handles:
        handle.wait()


# ---- forms -----------------------------------------------------------------------

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MOST_DIMS = 8


@torch.no_grad()
def rehearse(
    stages: Mapping[int, nn.Module], homes: Sequence[int], row: Tensor, port: Port
) -> dict[int, Form]:
    """Send one row through all stages; return the forms at this rank's boundaries.

    The layers are in evaluation mode meanwhile, so that they draw no random numbers and
    change no running means.

    Args:
        stages: those of this rank, by number.
        homes: the rank of each stage.
        row: of the model's input; a batch of one.
        port: how messages leave and arrive.

    Raises TypeError on the rank whose stage returns something that cannot be sent.
    """
    forms: dict[int, Form] = {}
    x = row
    for stage, home in enumerate(homes[:-1]):
        after = homes[stage + 1]
        if home == port.rank:
            x = _evaluated(stages[stage], x)
            forms[stage] = x.dtype, tuple(x.shape[1:])
            if after != home:
                port.exchange([(_written(x), after)], [])
                port.exchange([(x.contiguous(), after)], [])
        elif after == port.rank:
            told = torch.empty(MOST_DIMS + 2, dtype=torch.int64, device=row.device)
            port.exchange([], [(told, home)])
            kind, dims, *shape = told.tolist()
            forms[stage] = DTYPES[kind], tuple(shape[:dims])
            x = torch.empty((1, *shape[:dims]), dtype=DTYPES[kind], device=row.device)
            port.exchange([], [(x, home)])
    return forms


def _evaluated(stage: nn.Module, x: Tensor) -> Tensor:
    training = {module: module.training for module in stage.modules()}
    try:
        return stage.eval()(x)
    finally:
        for module, was in training.items():
            module.training = was


def _written(x: Tensor) -> Tensor:
    """Write the form of an activation as numbers."""
    _, *shape = x.shape
    if x.dtype not in DTYPES or len(shape) > MOST_DIMS:
        raise TypeError(
            f"a stage returned {x.dtype} {list(x.shape)}; it must be of "
            f"{', '.join(map(str, DTYPES))}, with 1 to {MOST_DIMS + 1} dimensions"
        )
    numbers = [DTYPES.index(x.dtype), len(shape), *shape]
    return torch.tensor(numbers + [0] * (MOST_DIMS - len(shape)), device=x.device)

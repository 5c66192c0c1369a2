"""Which gradients are sent together: the bucket plan, as plain data.

One all-reduce for each parameter pays the latency of a message hundreds of times; one
for all of them cannot start before backward has ended. Buckets are in between. Backward
reaches the last layers first, so the buckets are filled in reverse order: bucket 0 is
full, and under way, before backward has reached the first layers.

The rules are those of PyTorch (`compute_bucket_assignment_by_size` in
torch/csrc/distributed/c10d/reducer.cpp; Li et al. 2020, section 3.2.3): a bucket is
closed as soon as it reaches its cap or exceeds it, so a parameter is never cut in two,
and the first bucket is small, so that the first message leaves early. Chapter 05.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MIB = 1 << 20
BUCKET_CAP_MB = 25
FIRST_BUCKET_MB = 1


@dataclass(frozen=True)
class Bucket:
    """The gradients that one all-reduce sends: parameter k begins at `offsets[k]`.

    Attributes:
        index: the bucket's place in the order in which buckets are sent.
        parameters: names, in the order in which backward should reach them.
        offsets: the first element of each parameter in the bucket.
        numel: the number of elements of all parameters together.
        dtype, device: the type and device of all its gradients.
        group: the group of ranks that have these parameters; None: all ranks.
    """

    index: int
    parameters: tuple[str, ...]
    offsets: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients together: the S of the all-reduce formula."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        dtype, count = str(self.dtype).removeprefix("torch."), len(self.parameters)
        names = " ... ".join(dict.fromkeys((self.parameters[0], self.parameters[-1])))
        return (
            f"bucket {self.index}: {self.nbytes / MIB:.2f} MiB of {dtype}, "
            f"{count} parameter{'s' * (count > 1)}: {names}"
        )


def bucket_plan(
    named_parameters: Iterable[tuple[str, Tensor]],
    bucket_cap_mb: float = BUCKET_CAP_MB,
    first_bucket_mb: float = FIRST_BUCKET_MB,
) -> tuple[Bucket, ...]:
    """Divide the parameters into buckets, by their shapes, types and devices.

    Frozen parameters and those without elements are in no bucket, a tied one is in one.
    A bucket has gradients of one type on one device, of parameters on the same ranks;
    each kind has a small first bucket. The bucket that is full first is sent first.

    The caps are MiB: a bucket is closed at `bucket_cap_mb`, the first one at
    `first_bucket_mb` if that is less. Raises ValueError if one is not above 0.
    Chapter 05.
    """
    caps = {"bucket_cap_mb": bucket_cap_mb, "first_bucket_mb": first_bucket_mb}
    for name, cap in caps.items():
        if isinstance(cap, bool) or not isinstance(cap, (int, float)) or not cap > 0:
            raise ValueError(f"{name} is {cap!r}; it must be a number of MiB above 0")
    to_place = _trainable(named_parameters)
    filling: dict[tuple, list[int]] = {}  # kind -> places of an open bucket
    cap_of: dict[tuple, float] = {}
    closed: list[list[int]] = []
    for place, (_, parameter) in enumerate(to_place):
        kind = parameter.dtype, parameter.device, getattr(parameter, "replicas", None)
        bucket = filling.setdefault(kind, [])
        bucket.append(place)
        nbytes = sum(to_place[at][1].nbytes for at in bucket)
        if nbytes >= cap_of.get(kind, min(first_bucket_mb, bucket_cap_mb)) * MIB:
            cap_of[kind] = bucket_cap_mb
            closed.append(filling.pop(kind))
    closed += filling.values()
    closed.sort(key=lambda bucket: bucket[-1])  # by arrival of the last gradient
    return tuple(
        _bucket(index, [to_place[at] for at in places])
        for index, places in enumerate(closed)
    )


def _trainable(pairs: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return the parameters to send, each once, the last registered first."""
    once: dict[int, tuple[str, Tensor]] = {}
    for name, parameter in pairs:
        if parameter.requires_grad and parameter.numel():
            once.setdefault(id(parameter), (name, parameter))
    return list(once.values())[::-1]


def _bucket(index: int, members: list[tuple[str, Tensor]]) -> Bucket:
    """Return a bucket in which the gradients follow each other."""
    names, parameters = zip(*members, strict=True)
    *offsets, numel = accumulate((p.numel() for p in parameters), initial=0)
    first = parameters[0]
    kind = first.dtype, first.device, getattr(first, "replicas", None)
    return Bucket(index, names, tuple(offsets), numel, *kind)


@dataclass(eq=False)
class Slot:
    """A parameter's place in a bucket: the engine writes its gradient into `view`."""

    name: str
    parameter: Tensor
    offset: int
    view: Tensor = field(init=False)
    fresh: bool = False  # a gradient has arrived since the last averaging
    filled: bool = False  # `view` holds the gradient of the current pass


@dataclass(eq=False)
class LiveBucket:
    """An engine's bucket number `index`, with its memory `flat`."""

    index: int
    plan: Bucket
    slots: list[Slot]
    flat: Tensor = field(init=False)
    missing: int = 0  # gradients that have not arrived in this pass
    sent: bool = False  # sent, and not yet waited for
    work: Any = None  # the handle to wait for

    def use_memory(self, flat: Tensor) -> None:
        """Use `flat`, of `plan.numel` elements or more, as the bucket's memory."""
        self.flat = flat
        for slot in self.slots:
            slot.view = view_of(flat, slot.offset, slot.parameter)


def view_of(flat: Tensor, offset: int, parameter: Tensor) -> Tensor:
    """Return a parameter's part of a bucket, with the strides of its gradient."""
    part = flat[offset : offset + parameter.numel()]
    strides = torch.empty_like(parameter, device="meta").stride()
    return part.as_strided(parameter.shape, strides)

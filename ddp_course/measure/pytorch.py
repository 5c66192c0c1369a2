"""The collectives that PyTorch calls, and the bytes that they send.

    with TorchCollectives() as torch_log:
        loss.backward()  # of a DDP model
    torch_log.calls

PyTorch writes every collective into its *flight recorder*, a ring of 2000 entries that
exists to explain hangs ("Flight Recorder", PyTorch tutorials). It is on by default, and
under gloo it needs no setting. Its entries, as found with torch 2.13 and gloo:

- An entry is made when the collective is called, so those with `async_op=True` count in
  the block that calls them. It has op, shapes, dtypes and group, but no durations.
- It shows what gloo runs, not what was called: `reduce_scatter` is an `all_reduce`.
- `send` and `recv` are not in it, nor is `monitored_barrier`. torch.profiler sees them
  (`gloo:send`, with shapes but without dtypes); `SystemBytes` counts their bytes.
- The output of an all-gather of several tensors at once is recorded wrongly; so sizes
  of all-gathers are computed from the inputs.
- How an `all_to_all` is split is not recorded.

Explained in chapters 02 and 05.
"""

import json
import os
import warnings
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

SIZE = "TORCH_FR_BUFFER_SIZE"  # the variable for the number of entries kept
OTHER_NAMES = {
    "Byte": torch.uint8,
    "Char": torch.int8,
    "ComplexHalf": torch.complex32,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
}


@dataclass(frozen=True)
class CollectiveCall:
    """One collective that this rank called.

    `op` is the name of what the backend runs, such as "all_reduce". `nbytes` are the
    bytes of the whole tensor, the S of the formulas: the tensor that an all-reduce sums
    or that an all-gather returns; 0 for a barrier. `world_size` is the number of ranks
    in its group, `backend` "gloo" or "nccl".
    """

    op: str
    nbytes: int
    world_size: int
    backend: str = "gloo"

    @property
    def bytes_sent(self) -> float | None:
        """Bytes that each rank sends, without headers; None if ranks differ.

        By the algorithms of gloo, for n ranks and a tensor of S bytes: `all_reduce` is
        a ring, 2 (n-1)/n S; `all_gather` is a ring, (n-1)/n S; so is `all_to_all` if
        it is split evenly; a barrier sends no payload. In `broadcast`, `reduce`,
        `scatter` and `gather` some ranks send more than others (the broadcast's root
        about log2(n) S, the last ranks nothing): None, as for any other backend.
        """
        rounds = {"all_reduce": 2, "all_gather": 1, "all_to_all": 1, "barrier": 0}
        if self.backend != "gloo" or self.op not in rounds:
            return None
        return rounds[self.op] * (self.world_size - 1) * self.nbytes / self.world_size


class TorchCollectives:
    """A list of the PyTorch collectives that this rank calls within a `with` block.

    May be nested. `calls` has the calls of all threads, in order, and can be read after
    the block. To measure a training step, use the fourth or a later one: DDP rearranges
    its buckets after the first.

    Raises:
        RuntimeError: the recorder is off, no backend writes into it, more calls were
            made than it keeps, or `calls` is read within the block.

    A version of PyTorch that records nothing causes a warning.
    """

    def __init__(self) -> None:
        self._calls: list[CollectiveCall] | None = []  # None: within the block

    @property
    def calls(self) -> list[CollectiveCall]:
        """The calls in the block, after its end."""
        if self._calls is None:
            raise RuntimeError(
                "the calls are listed when the `with` block ends; read them after it, "
                "and measure its parts with a TorchCollectives for each part"
            )
        return self._calls

    def __enter__(self) -> Self:
        _check_recorder()
        self._calls = None
        self._last = max((e["record_id"] for e in _entries()), default=-1)
        self._sizes, self._used = _group_sizes(), _times_used()
        return self

    def __exit__(self, kind: type | None, *exc: object) -> None:
        new = [entry for entry in _entries() if entry["record_id"] > self._last]
        new.sort(key=lambda entry: entry["record_id"])
        lost = new[-1]["record_id"] - self._last - len(new) if new else 0
        if lost and kind is None:
            raise RuntimeError(
                f"{lost + len(new)} collectives were called in this block, but the "
                f"flight recorder keeps {len(new)}: the first {lost} are lost. Measure "
                f"less, or start the ranks with a larger {SIZE}, as in "
                f'spawn(..., env={{"{SIZE}": "20000"}}).'
            )
        if self._last < 0 and not new and _times_used() > self._used:
            warnings.warn(
                f"PyTorch {torch.__version__} has recorded nothing, though the process "
                "group was used. Either it only sent and received, which is never "
                "recorded, or this version does not record the backend's collectives",
                stacklevel=2,
            )
        sizes = self._sizes | _group_sizes()
        self._calls = [call_of(entry, sizes) for entry in new]

    def count(self, op: str | None = None) -> int:
        """Return the number of calls, or of calls of `op`."""
        return sum(op in (None, call.op) for call in self.calls)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of all calls, each counted once (not bytes sent)."""
        return sum(call.nbytes for call in self.calls)

    def __repr__(self) -> str:
        if self._calls is None:
            return "<TorchCollectives: listening>"
        ops = dict.fromkeys(call.op for call in self.calls)  # in order of appearance
        shown = ", ".join(f"{self.count(op)} {op}" for op in ops) or "none"
        return f"<TorchCollectives: {shown}; tensors of {self.nbytes:,} bytes>"


def call_of(entry: dict[str, Any], sizes: dict[str, int]) -> CollectiveCall:
    """Return the call that one entry of the flight recorder describes.

    `sizes` maps the names of process groups to their numbers of ranks. Raises
    RuntimeError if the entry's group is not among them.
    """
    backend, _, op = entry["profiling_name"].rpartition(":")
    group = entry["process_group"][0]
    if group not in sizes:
        raise RuntimeError(
            f"a {op} of group {group!r} was recorded, but that group is gone: destroy "
            "process groups after the block that measures them, not within it"
        )
    sides = ("input", "output")
    into, out_of = (_nbytes(entry[f"{s}_sizes"], entry[f"{s}_dtypes"]) for s in sides)
    # The inputs of an all-gather have one size. Only the root has a scatter's input and
    # a gather's output.
    nbytes = sizes[group] * into if op == "all_gather" else max(into, out_of)
    return CollectiveCall(op, nbytes, sizes[group], backend)


def _nbytes(shapes: list[list[int]], dtypes: list[str]) -> int:
    both = zip(shapes, dtypes, strict=True)
    return sum(prod(shape) * _dtype(name).itemsize for shape, name in both)


def _dtype(name: str) -> torch.dtype:
    """Return the dtype with the C++ name `name`: "Float" is torch.float."""
    return OTHER_NAMES.get(name) or getattr(torch, name.lower())


def _entries() -> list[dict[str, Any]]:
    """Return the flight recorder's entries; reading a full one takes some 30 ms."""
    return json.loads(c10d._dump_fr_trace_json()).get("entries", [])


def _group_sizes() -> dict[str, int]:
    """Return the number of ranks of every process group by its internal name."""
    names = dist.distributed_c10d._world.pg_names
    return {name: group.size() for group, name in names.items()}


def _times_used() -> int:
    """Return the default group's number of operations; 0 if it counts none."""
    group = dist.group.WORLD
    try:
        return group._get_sequence_number_for_group()
    except RuntimeError:
        return 0


def _check_recorder() -> None:
    """Raise RuntimeError if nothing will be recorded: better than a count of 0."""
    if not dist.is_initialized():
        raise RuntimeError("no process group yet: measure after init_process_group")
    if os.environ.get(SIZE, os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE")) == "0":
        raise RuntimeError(f"the flight recorder is off: {SIZE} is 0")
    backend = dist.get_backend()
    if not any(known in backend for known in ("gloo", "nccl", "undefined")):
        raise RuntimeError(f"backend {backend} does not write into the flight recorder")

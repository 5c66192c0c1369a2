"""What a call does first: say what it means, and see what the other ranks mean.

A collective goes wrong in the worst way if the ranks do not mean the same: gloo hangs,
or adds numbers that do not belong together (chapter 02 shows it). So before a rank
sends anything it says what it is about to do, and looks at what the others say:

    call = Call(comm, "broadcast", src=0)    # the name, and what all must agree on
    call.tensor("tensor", tensor)            # is it usable? and its type and shape
    call.start(body, async_op)               # all agree: body(run) sends and receives

If one rank's tensor is unusable, or if the calls differ, every rank raises the same
`CollectiveError`, and nothing has been sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives import runtime
from ddp_course.collectives.agreement import CollectiveError
from ddp_course.collectives.communicator import Communicator, Work, communicator
from ddp_course.collectives.patience import patient
from ddp_course.collectives.plan import Plan
from ddp_course.collectives.port import Port
from ddp_course.collectives.reduction import NAMES, ReduceOp, check_op
from ddp_course.collectives.runtime import Buffer
from ddp_course.measure import ByteMeter, active_logs, active_meters


@dataclass
class Run:
    """A call that all ranks have agreed on: `body(run)` does the work with it."""

    comm: Communicator
    op: dist.ReduceOp.RedOpType
    agree: Callable[[], None]
    meters: tuple[ByteMeter, ...]
    threads: list[int]  # gloo's, to be held back meanwhile

    @cached_property
    def port(self) -> Port:
        """How messages leave and arrive."""
        return Port(self.comm.group, self.meters)

    def plan(
        self,
        plan: Plan,
        buffer: Buffer,
        *,
        piece: int = runtime.PIECE,
        op: dist.ReduceOp.RedOpType | None = None,
    ) -> None:
        """Carry out a plan: in pieces on the CPU, step by step by NCCL's rules."""
        op = self.op if op is None else op
        like = buffer.parts[0]
        if like.is_cuda or self.port.strict:
            runtime.step_by_step(plan, buffer, self.port, op)
            return

        def scratch(numel: int) -> Tensor:
            return self.comm.scratch(numel, like)

        with patient(self.threads):
            runtime.pipelined(plan, buffer, self.port, op, scratch, piece)


class Call:
    """What one rank is about to do, in words, and what is wrong with it, if anything.

    The words of all ranks must be the same. A rank whose own arguments are unusable
    says so instead, so that the others do not wait for it.
    """

    def __init__(self, comm: Communicator, name: str, **details: Any) -> None:
        self.comm = comm
        self.name = name
        told = ", ".join(f"{key}={value}" for key, value in details.items())
        self.words = [f"{name}({told})" if told else name]
        self.problem: str | None = None
        self.op = ReduceOp.SUM
        self.show: Any = None  # what the others see beside the words
        self.check_shown: Callable[[list[Any]], str | None] = lambda shown: None

    def refuse(self, problem: str) -> None:
        """Note what is wrong; the first word counts."""
        self.problem = self.problem or problem

    def tensor(self, role: str, tensor: Any, like: Tensor | None = None) -> None:
        """Check a tensor that all ranks must give in the same shape and type."""
        if self.usable(role, tensor, like):
            self.words.append(_told(role, tensor.dtype, tensor.shape))

    def tensors(self, role: str, tensors: Any, like: Tensor | None = None) -> None:
        """Check a list of one tensor for each rank, each of them like `like`."""
        if not isinstance(tensors, Sequence) or isinstance(tensors, Tensor):
            self.refuse(f"{role} is {type(tensors).__name__}; it must be a list")
        elif len(tensors) != self.comm.size:
            self.refuse(
                f"{role} has {len(tensors)} tensors; the group has "
                f"{self.comm.size} ranks"
            )
        else:
            for k, tensor in enumerate(tensors):
                self.usable(f"{role}[{k}]", tensor, like)

    def usable(self, role: str, tensor: Any, like: Tensor | None = None) -> bool:
        """Check that a tensor can be sent, and is of the type and shape of `like`."""
        if not isinstance(tensor, Tensor):
            self.refuse(f"{role} is a {type(tensor).__name__}, not a tensor")
        elif tensor.layout != torch.strided or tensor.device.type == "meta":
            self.refuse(f"{role} is {tensor.layout} on {tensor.device}: not in memory")
        elif not tensor.is_contiguous():
            self.refuse(
                f"{role} is not contiguous (shape {list(tensor.shape)}, stride "
                f"{list(tensor.stride())}); give {role}.contiguous()"
            )
        elif isinstance(like, Tensor) and (
            (tensor.shape, tensor.dtype) != (like.shape, like.dtype)
        ):
            self.refuse(
                f"{role} is {tensor.dtype} {list(tensor.shape)}; it must be "
                f"{like.dtype} {list(like.shape)}"
            )
        else:
            return True
        return False

    def reduction(self, op: Any, tensor: Any) -> None:
        """Check that `op` can be used on a tensor; all ranks must give the same."""
        self.op = op = getattr(op, "op", op)  # ReduceOp(ReduceOp.SUM) is SUM, too
        if isinstance(tensor, Tensor) and (wrong := check_op(op, tensor.dtype)):
            self.refuse(wrong)
        self.words.append(NAMES.get(op) or f"op {op!r}")

    def choice(self, name: str, value: Any, allowed: Sequence[str]) -> None:
        """Check that an option is one of those there are."""
        if value not in allowed:
            self.refuse(f"{name} is {value!r}; it can be {', '.join(allowed)}")

    def root(self, name: str, rank: Any) -> int:
        """Check a rank (in the job) that must be in the group; return its index."""
        ranks = self.comm.ranks
        if isinstance(rank, int) and rank in ranks:
            return ranks.index(rank)
        known = f"0 to {len(ranks) - 1}" if ranks == list(range(len(ranks))) else ranks
        self.refuse(f"{name} is {rank!r}; the group's ranks are {known}")
        return 0

    def times(self, role: str, tensor: Any, count: int, of: str, part: Any) -> None:
        """Check a tensor that is as large as `count` tensors like `part` together."""
        if self.usable(role, tensor) and isinstance(part, Tensor):
            wanted = count * part.numel()
            if tensor.dtype != part.dtype or tensor.numel() != wanted:
                self.refuse(
                    f"{role} is {tensor.dtype} with {tensor.numel()} elements; it must "
                    f"be {part.dtype} with {wanted}, {count} times those of {of}"
                )

    def split(
        self, role: str, tensor: Any, sizes: Sequence[int] | None
    ) -> Sequence[Tensor]:
        """Divide a tensor along its first dimension, a part for each rank."""
        n = self.comm.size
        if not self.usable(role, tensor):
            return []
        rows = tensor.shape[0] if tensor.dim() else 0
        if not tensor.dim():
            self.refuse(f"{role} has no dimension along which to divide it")
        elif sizes is None and rows % n:
            self.refuse(f"{role} has {rows} rows, which {n} ranks cannot share equally")
        elif sizes is not None and (len(sizes) != n or sum(sizes) != rows):
            self.refuse(
                f"{role}_split_sizes is {list(sizes)}; it must be {n} numbers with the "
                f"sum {rows}"
            )
        elif sizes is not None and min(sizes) < 0:
            self.refuse(f"{role}_split_sizes is {list(sizes)}; a size is 0 or more")
        else:
            return tensor.split([rows // n] * n if sizes is None else list(sizes))
        return []

    def pairs(self, outputs: Any, inputs: Any) -> None:
        """Check the lists of an all-to-all: what i has for j, j must expect from i."""
        given = {"input_list": inputs, "output_list": outputs}
        for name, tensors in given.items():
            self.tensors(name, tensors)
        if self.problem:
            return
        if len({tensor.dtype for tensor in (*inputs, *outputs)}) > 1:
            self.refuse("the tensors in input_list and output_list differ in type")
        elif any(_overlap(a, b) for a in inputs for b in outputs):
            self.refuse(
                "output_list lies where input_list does: what arrives would be written "
                "over what is still to be sent"
            )
        self.words.append(str(inputs[0].dtype))
        self.show = [[list(t.shape) for t in tensors] for tensors in given.values()]
        ranks = self.comm.ranks

        def unequal(shown: list[Any]) -> str | None:
            """Return which rank expects another shape than it is to be given."""
            for i, (gives, _) in enumerate(shown):
                for j, (_, expects) in enumerate(shown):
                    if gives[j] != expects[i]:
                        return (
                            f"rank {ranks[i]} has {gives[j]} for rank {ranks[j]}, "
                            f"which expects {expects[i]}"
                        )
            return None

        self.check_shown = unequal

    def start(
        self,
        body: Callable[[Run], None],
        async_op: bool = False,
        *,
        agreed_by_body: bool = False,
    ) -> Work | None:
        """Agree with the other ranks, then do `body`; with `async_op`, meanwhile.

        A body that has to wait for the other ranks anyhow may do both at once, by
        calling `run.agree()` itself before anything is changed.
        """
        meters, logs = active_meters(), active_logs()
        comm, words = self.comm, ", ".join(self.words)

        def agree() -> None:
            wrong = self.check_shown(comm.agree(words, self.problem, self.show))
            if wrong:
                raise CollectiveError(f"{wrong}. Nothing was sent.")

        def job() -> None:
            if self.problem or not agreed_by_body:
                agree()
            # Under way beside other work, messages had better interrupt that.
            run = Run(comm, self.op, agree, meters, [] if async_op else comm.threads)
            start = time.perf_counter()
            with torch.no_grad():
                body(run)
            end = time.perf_counter()
            for log in logs:
                sent = run.port.nbytes_sent
                log.add(self.name, start, end, sent, lane="communication")

        return comm.perform(job, async_op)

    def all_reduce(
        self, plan: Callable[[int], Plan], tensor: Any, op: Any, async_op: bool
    ) -> Work | None:
        """Check a tensor and an op, and start: combine by `plan(world_size)`."""
        self.tensor("tensor", tensor)
        self.reduction(op, tensor)

        def body(run: Run) -> None:
            chosen = plan(run.comm.size)
            run.plan(chosen, Buffer.flat(tensor, chosen.chunks))

        return self.start(body, async_op)


def all_reduce_by(
    name: str,
    plan: Callable[[int], Plan],
    tensor: Tensor,
    op: dist.ReduceOp.RedOpType = ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine `tensor` of all ranks, in place, by the plan `plan(world_size)`.

    `tensor` is contiguous, of any shape and type; `op` is SUM, AVG, MAX, MIN or
    PRODUCT; `group` is a process group, by default all ranks. Afterwards all ranks have
    the same bits. With `async_op` it returns at once, with a handle to wait for.

    Raises CollectiveError, on every rank and before anything is sent, if a tensor or op
    is unusable or differs between ranks; ValueError or TypeError for a wrong group.
    """
    call = Call(communicator(group), f"{name}.all_reduce")
    return call.all_reduce(plan, tensor, op, async_op)


def planned(name: str, plan: Callable[[int], Plan]) -> Callable[..., Work | None]:
    """Return the all-reduce that carries out `plan(world_size)`; `name` is its module.

    It is `all_reduce_by` with the first two arguments given.
    """

    def all_reduce(
        tensor: Tensor,
        op: dist.ReduceOp.RedOpType = ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Combine all ranks' `tensor` (any shape, in place), by this module's `plan`.

        See `call.all_reduce_by` for arguments and errors. Chapter 03.
        """
        return all_reduce_by(name, plan, tensor, op, group, async_op)

    all_reduce.__module__, all_reduce.__qualname__ = plan.__module__, "all_reduce"
    return all_reduce


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Tell whether two contiguous tensors share memory."""
    (a, a_size), (b, b_size) = ((t.data_ptr(), t.nbytes) for t in (a, b))
    return max(a, b) < min(a + a_size, b + b_size)


@lru_cache(maxsize=1000)
def _told(role: str, dtype: torch.dtype, shape: torch.Size) -> str:
    """Write a tensor in words: "tensor float32 [2, 3]"."""
    return f"{role} {str(dtype).removeprefix('torch.')} {list(shape)}"

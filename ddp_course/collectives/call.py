"""What a call does first: say what it means, and see what the other ranks mean.

A collective goes wrong in the worst way if the ranks do not mean the same: gloo hangs,
or adds numbers that do not belong together (chapter 02 shows it). So before a rank
sends anything it says what it is about to do, and looks at what the others say:

    call = Collective(group, "broadcast", src=0)  # and what else all must agree on
    call.tensor("tensor", tensor)                 # is it usable? its type and shape
    call.start(body, async_op)                    # all agree: body() sends, receives

If one rank's tensor is unusable, or if the calls differ, every rank raises the same
`CollectiveError`, and nothing has been sent.
"""

import time
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ddp_course.collectives import runtime
from ddp_course.collectives.communicator import Group, Work, communicator
from ddp_course.collectives.patience import patient, threads_of
from ddp_course.collectives.plan import Plan
from ddp_course.collectives.port import Port
from ddp_course.collectives.reduction import NAMES, Op, ReduceOp, check_op
from ddp_course.collectives.runtime import Buffer
from ddp_course.measure.blocks import active_logs, active_meters


class Collective:
    """What one rank is about to do, in words, and what is wrong with it, if anything.

    The words of all ranks must be the same. A rank whose own arguments are unusable
    says so instead, so that the others do not wait for it. Raises ValueError or
    TypeError, on this rank only, if `group` is none that it is in.
    """

    def __init__(self, group: Group, name: str, **details: Any) -> None:
        self.comm = communicator(group)
        self.rank, self.size = self.comm.rank, self.comm.size
        self.name = name
        told = ", ".join(f"{key}={value}" for key, value in details.items())
        self.words = [f"{name}({told})" if told else name]
        self.problem: str | None = None
        self.op = ReduceOp.SUM

    # ---- what is wrong with it? ------------------------------------------------------

    def refuse(self, problem: str) -> None:
        """Note what is wrong; the first word counts."""
        self.problem = self.problem or problem

    def tensor(self, role: str, tensor: Any) -> None:
        """Check a tensor that all ranks must give in the same shape and type."""
        if self.usable(role, tensor):
            self.words.append(_told(role, tensor.dtype, tensor.shape))

    def tensors(self, role: str, tensors: Any, like: Any) -> None:
        """Check a list of one tensor for each rank, each of them like `like`."""
        if not isinstance(tensors, Sequence) or isinstance(tensors, Tensor):
            self.refuse(f"{role} is {type(tensors).__name__}; it must be a list")
        elif len(tensors) != self.size:
            self.refuse(
                f"{role} has {len(tensors)} tensors; the group has {self.size} ranks"
            )
        else:
            for k, tensor in enumerate(tensors):
                self.usable(f"{role}[{k}]", tensor, like)

    def usable(self, role: str, tensor: Any, like: Any = None) -> bool:
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
        elif tensor.is_conj() or tensor.is_neg():
            self.refuse(
                f"{role} is a view that negates or conjugates what is in memory; "
                f"give {role}.resolve_conj().resolve_neg()"
            )
        elif isinstance(like, Tensor) and (
            (tensor.shape, tensor.dtype) != (like.shape, like.dtype)
        ):
            it_is, must = (f"{t.dtype} {list(t.shape)}" for t in (tensor, like))
            self.refuse(f"{role} is {it_is}; it must be {must}")
        else:
            return True
        return False

    def times(self, role: str, tensor: Any, of: str, part: Any) -> None:
        """Check a tensor that is as large as those like `part` of all ranks."""
        if self.usable(role, tensor) and isinstance(part, Tensor):
            wanted = self.size * part.numel()
            if tensor.dtype != part.dtype or tensor.numel() != wanted:
                self.refuse(
                    f"{role} is {tensor.dtype} with {tensor.numel()} elements; it must "
                    f"be {part.dtype} with {wanted}, {self.size} times those of {of}"
                )

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

    # ---- agree, and do it ------------------------------------------------------------

    def start(
        self,
        body: Callable[[], None] = lambda: None,
        async_op: bool = False,
        *,
        agreed_by_body: bool = False,
    ) -> Work | None:
        """Agree with the other ranks, then do `body`; with `async_op`, meanwhile.

        A body that has to wait for the other ranks anyhow may do both at once, by
        calling `agree` itself before anything is changed.
        """
        self.meters, logs = active_meters(), active_logs()
        # Under way beside other work, messages had better interrupt that.
        self.threads = [] if async_op else threads_of(self.comm)

        def job() -> None:
            if self.problem or not agreed_by_body:
                self.agree()
            start = time.perf_counter()
            with torch.no_grad():
                body()
            end = time.perf_counter()
            for log in logs:
                sent = self.port.nbytes_sent
                log.add(self.name, start, end, sent, lane="communication")

        return self.comm.perform(job, async_op)

    def agree(self) -> None:
        """See whether all ranks mean the same; else CollectiveError on all."""
        self.comm.meeting.agree(", ".join(self.words), self.problem)

    @cached_property
    def port(self) -> Port:
        """How messages leave and arrive."""
        return Port(self.comm.group, self.meters)

    def carry_out(self, plan: Plan, buffer: Buffer, op: Op | None = None) -> None:
        """Send and receive by a plan: in pieces, or step by step by NCCL's rules."""
        op, like = self.op if op is None else op, buffer.parts[0]
        if like.is_cuda or self.port.strict:
            runtime.step_by_step(plan, buffer, self.port, op)
            return
        scratch = partial(self.comm.scratch, like=like)
        with patient(self.threads):
            runtime.pipelined(plan, buffer, self.port, op, scratch)

    def all_reduce(
        self, plan: Callable[[int], Plan], tensor: Any, op: Any, async_op: bool
    ) -> Work | None:
        """Check a tensor and an op, and start: combine by `plan(world_size)`."""
        self.tensor("tensor", tensor)
        self.reduction(op, tensor)

        def body() -> None:
            chosen = plan(self.size)
            self.carry_out(chosen, Buffer.flat(tensor, chosen.chunks))

        return self.start(body, async_op)


def all_reduce_by(
    name: str,
    plan: Callable[[int], Plan],
    tensor: Tensor,
    op: Op = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Combine `tensor` of all ranks, in place, by the plan `plan(world_size)`.

    `tensor` is contiguous, of any shape and type; `op` is SUM, AVG, MAX, MIN or
    PRODUCT; `group` is a process group, by default all ranks. Afterwards all ranks have
    the same bits. With `async_op` it returns at once, with a handle to wait for.

    Raises CollectiveError, on every rank and before anything is sent, if a tensor or op
    is unusable or differs between ranks; ValueError or TypeError for a wrong group.
    """
    call = Collective(group, name)
    return call.all_reduce(plan, tensor, op, async_op)


@lru_cache(maxsize=1000)
def _told(role: str, dtype: torch.dtype, shape: torch.Size) -> str:
    """Write a tensor in words: "tensor float32 [2, 3]"."""
    return f"{role} {str(dtype).removeprefix('torch.')} {list(shape)}"

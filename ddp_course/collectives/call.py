"""Check a collective's arguments and compare the ranks' calls before any message.

If the ranks' calls differ, gloo hangs, or adds numbers that do not belong together
(chapter 02 shows it). So before a rank sends anything it describes its call, and
compares the description with those of the other ranks:

    call = Collective(group, "broadcast", src=0)  # options that must be equal
    call.tensor("tensor", tensor)                 # usable? type and shape must be equal
    call.start(body, async_op)                    # compare; body() sends and receives

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
from ddp_course.collectives.endpoint import Endpoint
from ddp_course.collectives.patience import patient, threads_of
from ddp_course.collectives.plan import Plan
from ddp_course.collectives.reduction import NAMES, Op, ReduceOp, check_op
from ddp_course.collectives.runtime import Buffer
from ddp_course.measure.blocks import active_logs, active_meters


class Collective:
    """A call of one rank: its description in words, and the problem with it, if any.

    The words of all ranks must be equal. A rank with unusable arguments shows its
    problem instead, so that the others do not wait for it. Raises ValueError or
    TypeError, on this rank only, if this rank is not a member of `group`.
    """

    def __init__(self, group: Group, name: str, **details: Any) -> None:
        self.comm = communicator(group)
        self.rank, self.size = self.comm.rank, self.comm.size
        self.name = name
        arguments = ", ".join(f"{key}={value}" for key, value in details.items())
        self.words = [f"{name}({arguments})" if arguments else name]
        self.problem: str | None = None
        self.op = ReduceOp.SUM

    # ---- check the arguments ---------------------------------------------------------

    def refuse(self, problem: str) -> None:
        """Record a problem; only the first one counts."""
        self.problem = self.problem or problem

    def tensor(self, role: str, tensor: Any) -> None:
        """Check a tensor whose shape and type must be the same on all ranks."""
        if self.check_usable(role, tensor):
            self.words.append(tensor_text(role, tensor.dtype, tensor.shape))

    def tensors(self, role: str, tensors: Any, like: Any) -> None:
        """Check a list of one tensor per rank, with the shape and type of `like`."""
        if not isinstance(tensors, Sequence) or isinstance(tensors, Tensor):
            self.refuse(f"{role} is {type(tensors).__name__}; it must be a list")
        elif len(tensors) != self.size:
            self.refuse(
                f"{role} has {len(tensors)} tensors; the group has {self.size} ranks"
            )
        else:
            for k, tensor in enumerate(tensors):
                self.check_usable(f"{role}[{k}]", tensor, like)

    def check_usable(self, role: str, tensor: Any, like: Any = None) -> bool:
        """Return whether a tensor can be sent and is like `like`; if not, refuse it."""
        if not isinstance(tensor, Tensor):
            self.refuse(f"{role} is a {type(tensor).__name__}, not a tensor")
        elif tensor.layout != torch.strided or tensor.device.type == "meta":
            where = f"{tensor.layout} on {tensor.device}"
            self.refuse(f"{role} is {where}; it must be a dense tensor in memory")
        elif not tensor.is_contiguous():
            self.refuse(
                f"{role} is not contiguous (shape {list(tensor.shape)}, stride "
                f"{list(tensor.stride())}); pass {role}.contiguous()"
            )
        elif tensor.is_conj() or tensor.is_neg():
            self.refuse(
                f"{role} is a view that negates or conjugates the numbers in memory; "
                f"pass {role}.resolve_conj().resolve_neg()"
            )
        elif isinstance(like, Tensor) and (
            (tensor.shape, tensor.dtype) != (like.shape, like.dtype)
        ):
            it_is, must = (f"{t.dtype} {list(t.shape)}" for t in (tensor, like))
            self.refuse(f"{role} is {it_is}; it must be {must}")
        else:
            return True
        return False

    def check_multiple(self, role: str, tensor: Any, of: str, part: Any) -> None:
        """Check a tensor that must have the elements of all ranks' `part` together."""
        if self.check_usable(role, tensor) and isinstance(part, Tensor):
            wanted = self.size * part.numel()
            if tensor.dtype != part.dtype or tensor.numel() != wanted:
                self.refuse(
                    f"{role} is {tensor.dtype} with {tensor.numel()} elements; it must "
                    f"be {part.dtype} with {wanted}, {self.size} times those of {of}"
                )

    def reduction(self, op: Any, tensor: Any) -> None:
        """Check that `op`, which must be equal on all ranks, can reduce `tensor`."""
        self.op = op = getattr(op, "op", op)  # ReduceOp(ReduceOp.SUM) is SUM, too
        known = isinstance(tensor, Tensor)
        if known and (wrong := check_op(op, tensor.dtype, tensor.device.type)):
            self.refuse(wrong)
        self.words.append(NAMES.get(op) or f"op {op!r}")

    def choice(self, name: str, value: Any, allowed: Sequence[str]) -> None:
        """Check that an option is one of the allowed ones."""
        if value not in allowed:
            self.refuse(f"{name} is {value!r}; it can be {', '.join(allowed)}")

    def root(self, name: str, rank: Any) -> int:
        """Check that a global rank is in the group; return its index in the group."""
        ranks = self.comm.ranks
        if isinstance(rank, int) and rank in ranks:
            return ranks.index(rank)
        known = f"0 to {len(ranks) - 1}" if ranks == list(range(len(ranks))) else ranks
        self.refuse(f"{name} is {rank!r}; the group's ranks are {known}")
        return 0

    # ---- compare and run -------------------------------------------------------------

    def start(
        self,
        body: Callable[[], None] = lambda: None,
        async_op: bool = False,
        *,
        agreed_by_body: bool = False,
    ) -> Work | None:
        """Compare calls, then run `body`; in the group's thread with `async_op`.

        With `agreed_by_body`, `body` calls `agree` itself before it changes anything,
        as it has to wait for the other ranks anyhow.
        """
        self.meters, logs = active_meters(), active_logs()
        # With `async_op` gloo's threads should interrupt other work, so leave them.
        self.threads = [] if async_op else threads_of(self.comm)

        def job() -> None:
            if self.problem or not agreed_by_body:
                self.agree()
            start = time.perf_counter()
            with torch.no_grad():
                body()
            end = time.perf_counter()
            for log in logs:
                sent = self.endpoint.nbytes_sent
                log.add(self.name, start, end, sent, lane="communication")

        return self.comm.perform(job, async_op)

    def agree(self, show: Any = None) -> list[Any]:
        """Compare the ranks' calls; raise CollectiveError on all if they differ.

        Returns the values that the ranks show, in rank order.
        """
        return self.comm.meeting.agree(", ".join(self.words), self.problem, show)

    @cached_property
    def endpoint(self) -> Endpoint:
        """The object that sends and receives this call's messages."""
        return Endpoint(self.comm.group, self.meters)

    def carry_out(self, plan: Plan, buffer: Buffer, op: Op | None = None) -> None:
        """Execute a plan: in pieces, or step by step if NCCL's rules apply."""
        op, like = self.op if op is None else op, buffer.parts[0]
        if like.is_cuda or self.endpoint.strict:
            runtime.step_by_step(plan, buffer, self.endpoint, op)
            return
        scratch = partial(self.comm.scratch, like=like)
        with patient(self.threads):
            runtime.pipelined(plan, buffer, self.endpoint, op, scratch)

    def all_reduce(
        self, plan: Callable[[int], Plan], tensor: Any, op: Any, async_op: bool
    ) -> Work | None:
        """Check tensor and op, and start an all-reduce by `plan(world_size)`."""
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
    """Reduce `tensor` over all ranks, in place, by the plan `plan(world_size)`.

    `tensor` is contiguous, of any shape and type; `op` is SUM, AVG, MAX, MIN or
    PRODUCT; `group` is a process group (None: all ranks). The result has the same bits
    on all ranks. With `async_op` the call returns a handle at once.

    Raises CollectiveError, on every rank and before anything is sent, if a tensor or op
    is unusable or differs between ranks; ValueError or TypeError for a wrong group.
    """
    call = Collective(group, name)
    return call.all_reduce(plan, tensor, op, async_op)


@lru_cache(maxsize=1000)
def tensor_text(role: str, dtype: torch.dtype, shape: torch.Size) -> str:
    """Return "tensor float32 [2, 3]"."""
    return f"{role} {str(dtype).removeprefix('torch.')} {list(shape)}"

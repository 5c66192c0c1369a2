"""PowerSGD: a matrix of gradients as the product of two thin ones, P [n, r] Q [m, r]^T.

Every training step runs one step of subspace iteration, beginning with the last Q:

    P = mean over ranks of M Q        an all-reduce of n r numbers
    P = orthonormal columns of P      equal on all ranks, since all have the same P
    Q = mean over ranks of M^T P      an all-reduce of m r numbers
    M is approximated by P Q^T        equal on all ranks

Both products are linear in M, so the mean of the products is the product with the mean
of M, and an all-reduce can add them. Vogels et al. 2019, arXiv:1905.13727; in PyTorch,
ddp_comm_hooks/powerSGD_hook.py. Chapter 14.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from ddp_course.compression.exchange import Exchange
from ddp_course.compression.hook import Compressor

WORTH = 2  # send factors only if they are at least this many times smaller


class PowerSGD(Compressor):
    """A compressor that sends matrices as factors of `rank` columns, vectors unchanged.

    Args:
        rank: rank of the approximation, 1 or more.
        start: number of first steps that are averaged without compression.
        seed: seed of the first Q; the same on all ranks.

    It stores Q and the errors from step to step; it needs error feedback to converge.
    As in PyTorch, an error is this rank's gradient minus the mean, also of vectors. So
    the ranks' differences add up in it: give it gradients in float32.
    """

    def __init__(
        self,
        rank: int,
        start: int = 0,
        seed: int = 0,
        feedback: bool = True,
        exchange: Exchange | None = None,
    ) -> None:
        super().__init__(feedback, exchange)
        for name, value, least in (("rank", rank, 1), ("start", start, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(
                    f"{name} is {value!r}; it must be a whole number, {least} or more"
                )
        self.rank, self.start, self.step = rank, start, 0
        self.generator = torch.Generator().manual_seed(seed)
        self.qs: dict[int, list[Tensor]] = {}  # bucket -> its Q matrices

    def mean(self, bucket: Any) -> Tensor:
        """Average matrices by their factors, and all other gradients uncompressed."""
        index, whole = bucket.index(), self.step < self.start
        self.step += bucket.is_last()
        if whole:
            flat = bucket.buffer().clone()
            self.exchange.add_up(flat)
            return flat.div_(self.exchange.size)
        v = self.feedback.add(index, bucket.buffer())
        bucket.buffer().copy_(v)
        stacks, rest = self.split_gradients(bucket.gradients())
        matrices = [torch.stack([m.flatten(1) for m in stack]) for stack in stacks]
        if index not in self.qs:
            self.qs[index] = [self.random_q(m) for m in matrices]

        first = map(orthonormal, self.qs[index])
        ps = [product(m, q) for m, q in zip(matrices, first, strict=True)]
        self.add_up(ps + rest)
        for p in ps:
            orthonormal(p)
        qs = [product(m.mT, p) for m, p in zip(matrices, ps, strict=True)]
        self.add_up(qs)

        n = self.exchange.size
        self.qs[index] = [q.div_(n) for q in qs]
        for vector in rest:
            vector.div_(n)
        for stack, p, q in zip(stacks, ps, self.qs[index], strict=True):
            for gradient, *factors in zip(stack, p, q.mT, strict=True):
                gradient.copy_(torch.mm(*factors).view(gradient.shape))
        self.feedback.keep(index, v, bucket.buffer())
        return bucket.buffer()

    def split_gradients(
        self, gradients: list[Tensor]
    ) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Return the gradients worth compressing, grouped by shape, and the others."""
        stacks: dict[torch.Size, list[Tensor]] = {}
        rest = []
        for gradient in gradients:
            n = prod(gradient.shape[:1])  # 1 for a scalar
            m = gradient.numel() // n
            if factors(n, m, self.rank) * WORTH < n * m:
                stacks.setdefault(gradient.shape, []).append(gradient)
            else:
                rest.append(gradient)
        return list(stacks.values()), rest

    def random_q(self, matrices: Tensor) -> Tensor:
        """Return the first Q of each matrix: random directions."""
        many, n, m = matrices.shape
        shape = (many, m, min(n, m, self.rank))
        drawn = torch.randn(shape, generator=self.generator, dtype=matrices.dtype)
        return drawn.to(matrices.device)

    def remembers(self, index: int) -> bool:
        """Return whether this bucket has a Q."""
        return index in self.qs

    def forget(self, index: int) -> None:
        """Drop the errors and the Q of this bucket."""
        super().forget(index)
        self.qs.pop(index, None)

    def add_up(self, tensors: list[Tensor]) -> None:
        """All-reduce several tensors as one, in place."""
        if tensors:
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            self.exchange.add_up(flat)
            parts = flat.split([tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

    def state_dict(self) -> dict[str, Any]:
        """Return the errors, Q, the step and the state of the random generator."""
        qs = {i: [q.clone() for q in some] for i, some in self.qs.items()}
        more = {"qs": qs, "step": self.step, "generator": self.generator.get_state()}
        return super().state_dict() | more

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict` of this rank."""
        super().load_state_dict(state)
        self.qs = {i: [q.clone() for q in some] for i, some in state["qs"].items()}
        self.step = state["step"]
        self.generator.set_state(state["generator"])


def factors(n: int, m: int, rank: int) -> int:
    """Return the number of elements of the factors of an n x m matrix."""
    return (n + m) * min(n, m, rank)


def product(matrices: Tensor, thin: Tensor) -> Tensor:
    """Return matrices @ thin; its transpose takes BLAS a third of the time."""
    return (thin.mT @ matrices.mT).mT


def orthonormal(matrices: Tensor) -> Tensor:
    """Replace each matrix, [..., n, r], with orthonormal columns, in place: Q of Q R.

    The columns span the same space as before. Columns of zeros become orthonormal, too,
    so a matrix that is zero in one step can be sent in the next.
    """
    least = torch.promote_types(matrices.dtype, torch.float32)  # QR needs 32 bits
    return matrices.copy_(torch.linalg.qr(matrices.to(least)).Q)

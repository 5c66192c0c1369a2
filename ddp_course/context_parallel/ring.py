"""Ring attention: keys and values pass around a ring, and no rank ever has all of them.

In step s rank r computes with the keys and values of rank r - s, and at the same time
sends them to its right neighbour:

    step        0        1        2        3
    rank 0    0 -> 1   3 -> 1   2 -> 1   1
    rank 1    1 -> 2   0 -> 2   3 -> 2   2
    rank 2    2 -> 3   1 -> 3   0 -> 3   3
    rank 3    3 -> 0   2 -> 0   1 -> 0   0

Each step's output is merged into the previous ones (`online_softmax`). In backward keys
and values pass around once more; their gradients follow one step behind, and each rank
adds its own queries' contribution. The owner receives them last, and adds its own part.

    sent by each rank    forward (N - 1) u, backward 2 (N - 1) u
    stored by each rank  forward 2 u: present keys and values, and arriving ones;
                         backward their gradients, too

u is the number of bytes of one rank's keys and values (in backward, gradients travel in
float32 at least). Forward sends as much as gathering does, backward twice as much; both
need less memory, and send while they compute. Liu et al. 2023, "Ring Attention",
arXiv:2310.01889.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ddp_course.collectives.endpoint import Endpoint, Handle
from ddp_course.context_parallel.assignment import Positions
from ddp_course.context_parallel.online_softmax import (
    attend,
    attend_backward,
    merge,
)
from ddp_course.mechanisms.parts import announce

Block = tuple[slice, slice, Tensor | None]  # queries, keys, mask of visible pairs


class Ring:
    """Causal attention over a sequence whose positions are divided among the ranks.

    Call it as `ring(q, k, v)` on all ranks: q is (B, H, T/N, D), k and v may have fewer
    heads, each of which serves several heads of q. Returns (B, H, T/N, D).

    Announces these moments of each step, in forward and in backward; `pairs` is the
    number of pairs (query, key) that the step computes:

        before_compute(ring, step, pairs)
        after_compute(ring, step, pairs)
        passed_on(ring, tensor, handles)    `tensor` is being sent to the right
        arrived(ring, step)                 the next step's keys and values are here

    On a GPU these are moments of the host, which launches work without waiting.

    Args:
        assigned: the positions of all ranks, `assign(length, N)`.
        group: the ranks that share the sequence, in the order of the ring; None means
            all.
        parts: objects with methods for these moments.
    """

    def __init__(
        self,
        assigned: Sequence[Positions],
        group: dist.ProcessGroup | None = None,
        parts: Iterable[Any] = (),
    ) -> None:
        self.assigned, self.group, self.parts = assigned, group, tuple(parts)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of this rank's queries."""
        return RingAttention.apply(q, k, v, self)

    def blocks(self, source: int, device: torch.device) -> Iterator[Block]:
        """Yield the blocks that this rank computes with the keys of rank `source`.

        Blocks in which no query sees a key are left out: about half of all blocks, if
        positions are contiguous or zigzag.
        """
        for queries, rows in _with_slices(self.assigned[self.rank]):
            for keys, columns in _with_slices(self.assigned[source]):
                if keys[0] > queries[-1]:
                    continue
                if keys[-1] <= queries[0]:
                    yield rows, columns, None
                    continue
                q, k = (
                    torch.arange(p.start, p.stop, p.step, device=device)
                    for p in (queries, keys)
                )
                yield rows, columns, q[:, None] >= k

    def pairs(self, source: int) -> int:
        """Return how many pairs the blocks of `source` have, hidden pairs included."""
        both = product(self.assigned[self.rank], self.assigned[source])
        return sum(len(q) * len(k) for q, k in both if k[0] <= q[-1])

    def pass_on(
        self, tensor: Tensor, endpoint: Endpoint
    ) -> tuple[Tensor, list[Handle]]:
        """Start to send to the right neighbour, and to receive from the left one.

        Returns the tensor that receives, and the handles to wait for.
        """
        arriving = torch.empty_like(tensor)
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        handles = endpoint.start([(tensor, right)], [(arriving, left)])
        announce(self.parts, "passed_on", self, tensor, handles)
        return arriving, handles


def _with_slices(ranges: Positions) -> Iterator[tuple[range, slice]]:
    """Yield each range of positions with its place in the rank's tensors."""
    first = 0
    for positions in ranges:
        yield positions, slice(first, first + len(positions))
        first += len(positions)


def _wait(handles: Iterable[Handle]) -> None:
    for handle in handles:
        handle.wait()


class RingAttention(Function):
    """The forward and backward of `Ring`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        """Merge one step after the other; keep the lse of each query for backward."""
        ctx.ring, endpoint, n = ring, Endpoint(ring.group), ring.size
        heads = q.unflatten(1, (k.shape[1], -1))  # (B, K, H/K, T/N, D)
        wide = torch.promote_types(q.dtype, torch.float32)  # merge in float32 at least
        out = torch.zeros_like(heads, dtype=wide)
        lse = out.new_full(heads.shape[:-1], -torch.inf)
        kv = torch.stack((k, v)).unsqueeze(3)  # (2, B, K, 1, T/N, D)
        for step in range(n):
            source = (ring.rank - step) % n
            if step < n - 1:  # launch
                arriving, under_way = ring.pass_on(kv, endpoint)
            announce(ring.parts, "before_compute", ring, step, ring.pairs(source))
            for rows, columns, visible in ring.blocks(source, q.device):  # compute
                keys, values = kv[..., columns, :]
                block = attend(heads[..., rows, :], keys, values, visible)
                before = out[..., rows, :], lse[..., rows]
                out[..., rows, :], lse[..., rows] = merge(*before, *block)
            announce(ring.parts, "after_compute", ring, step, ring.pairs(source))
            if step < n - 1:  # wait
                _wait(under_way)
                announce(ring.parts, "arrived", ring, step)
                kv = arriving
        ctx.save_for_backward(q, k, v, out, lse)
        return out.flatten(1, 2).to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Send keys and values around again, and their gradients one step behind."""
        q, k, v, out, lse = ctx.saved_tensors
        ring, endpoint, n = ctx.ring, Endpoint(ctx.ring.group), ctx.ring.size
        heads, dout = (x.unflatten(1, (k.shape[1], -1)) for x in (q, dout))
        delta = (dout * out).sum(-1)
        dq = torch.zeros_like(out)
        kv = torch.stack((k, v)).unsqueeze(3)
        sums, sums_under_way = None, []  # gradients of keys and values, on their way
        for step in range(n):
            source = (ring.rank - step) % n
            if step < n - 1:  # launch
                arriving, under_way = ring.pass_on(kv, endpoint)
            dkv = torch.zeros_like(kv, dtype=out.dtype)
            announce(ring.parts, "before_compute", ring, step, ring.pairs(source))
            for rows, columns, visible in ring.blocks(source, q.device):  # compute
                keys, values = kv[..., columns, :]
                row_values = lse[..., rows], dout[..., rows, :], delta[..., rows]
                block = heads[..., rows, :], keys, values, visible
                dq_block, dk, dv = attend_backward(*block, *row_values)
                dq[..., rows, :] += dq_block
                dkv[0][..., columns, :] += dk
                dkv[1][..., columns, :] += dv
            announce(ring.parts, "after_compute", ring, step, ring.pairs(source))
            if step < n - 1:  # wait
                _wait(under_way)
                announce(ring.parts, "arrived", ring, step)
                kv = arriving
            if step == 0:
                own = dkv  # the owner adds its own part last
                continue
            if step > 1:  # the sum over the ranks that had these keys before
                _wait(sums_under_way)
                dkv += sums
            sums, sums_under_way = ring.pass_on(dkv, endpoint)
        _wait(sums_under_way)
        dk, dv = (own if n == 1 else own + sums).squeeze(3).to(k.dtype)
        return dq.flatten(1, 2).to(q.dtype), dk, dv, None

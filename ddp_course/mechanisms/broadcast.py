"""Send one rank's tensors to all ranks, many small tensors in one message.

Chapter 04.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TOGETHER = 25 << 20  # bytes of a message, about


@torch.no_grad()
def broadcast_all(
    tensors: Iterable[Tensor], src: int = 0, group: dist.ProcessGroup | None = None
) -> None:
    """Broadcast the `tensors` of global rank `src` to all ranks, in place.

    A model has hundreds of small tensors, and every message has its latency: tensors of
    one type and device are sent together, in messages of about 25 MiB. All ranks pass
    the same shapes in the same order.
    """
    full, kind = (t for t in tensors if t.numel()), attrgetter("dtype", "device")
    for members in in_batches(full, attrgetter("nbytes"), kind):
        flat = torch.cat([tensor.detach().flatten() for tensor in members])
        dist.broadcast(flat, src, group)
        if dist.get_rank() == src:
            continue
        parts = flat.split([tensor.numel() for tensor in members])
        for tensor, part in zip(members, parts, strict=True):
            # Through `data`, autograd does not see a change in place: a forward before
            # this may have saved the buffer for its backward (PyTorch does the same).
            tensor.data.copy_(part.view(tensor.shape))


def in_batches(
    items: Iterable[Any],
    nbytes: Callable[[Any], int],
    kind: Callable[[Any], Any],
) -> Iterator[list[Any]]:
    """Yield lists of items of one kind, each of about `TOGETHER` bytes."""
    open_lists: dict[Any, list[Any]] = {}
    sizes: Counter[Any] = Counter()
    for item in items:
        which = kind(item)
        open_lists.setdefault(which, []).append(item)
        sizes[which] += nbytes(item)
        if sizes[which] >= TOGETHER:
            del sizes[which]
            yield open_lists.pop(which)
    yield from open_lists.values()

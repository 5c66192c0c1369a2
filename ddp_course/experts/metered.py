"""The exchange of rows, counted by byte meters.

PyTorch does not record how an all-to-all is split (`measure.pytorch`), so this
exchange, in place of `dispatch.all_to_all_rows`, counts the bytes to and from each
rank. Chapter 17.
"""

from collections.abc import Sequence
from math import prod

import torch.distributed as dist
from torch import Tensor

from ddp_course.experts.dispatch import Group, all_to_all_rows
from ddp_course.measure.blocks import METERS


def metered_all_to_all_rows(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group = None
) -> Tensor:
    """Exchange rows, and count their bytes in all open `ByteMeter`s."""
    row = prod(rows.shape[1:]) * rows.element_size()
    ranks = dist.get_process_group_ranks(group)
    for meter in METERS.blocks:
        for peer, to, by in zip(ranks, sent, received, strict=True):
            if peer != dist.get_rank():
                meter.count_sent(peer, row * to)
                meter.count_received(peer, row * by)
    return all_to_all_rows(rows, sent, received, group)

"""What tests of collectives share: how ranks meet, what they have mapped, errors."""

from pathlib import Path

import torch.distributed as dist


def exchange(value: object) -> list:
    """Show a value to all ranks, by PyTorch's collectives."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def mappings() -> int:
    """Count the memories of our making that this process has."""
    return Path("/proc/self/maps").read_text().count("memfd:ddp-course-")


def in_order(parts: list[str], text: str) -> bool:
    """Tell whether the parts stand in the text, one after the other."""
    for part in parts:
        _, found, text = text.partition(part)
        if not found:
            return False
    return True

"""Solutions of the exercises of chapter 04."""

import torch
import torch.distributed as dist

from ddp_course.train import checksum


@torch.no_grad()
def make_replicas(model: torch.nn.Module) -> None:
    """Copy rank 0's numbers to all ranks, with one broadcast for each dtype."""
    states = [*model.parameters(), *model.buffers()]
    for dtype in dict.fromkeys(state.dtype for state in states):
        members = [state for state in states if state.dtype == dtype]
        flat = torch.cat([state.flatten() for state in members])
        dist.broadcast(flat, 0)
        parts = flat.split([state.numel() for state in members])
        for state, part in zip(members, parts, strict=True):
            state.copy_(part.view(state.shape))


@torch.no_grad()
def average_gradients_flat(model: torch.nn.Module) -> None:
    """Replace all gradients by their means over the ranks, with one all-reduce."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        if p.grad is None:  # other ranks may have a gradient
            p.grad = torch.zeros_like(p)
    flat = torch.cat([p.grad.flatten() for p in trained])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for p, mean in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        p.grad.copy_(mean.view(p.shape))


def replicas_agree(model: torch.nn.Module) -> bool:
    """Return whether all ranks have the same bits, by comparing checksums."""
    everyones = [""] * dist.get_world_size()
    dist.all_gather_object(everyones, checksum(model.state_dict()))
    return len(set(everyones)) == 1

"""What chapter 16 measures: bytes and what is kept, and its planted ring is wrong."""

import pytest
import torch
import torch.distributed as dist

from ddp_course.chapters.ch16_long_sequences.beside import (
    against_one_process,
    computing_time,
    divided,
    drawn,
    saved,
    stale_keys,
)
from ddp_course.launch import spawn


@pytest.mark.parametrize(
    ("how", "forward", "backward"),
    [("gathered", 1, 1), ("ulysses", 1, 1), ("ring", 1, 2)],
)
def test_spawn_attention_is_seen_as_it_is(how, forward, backward):
    for rank in spawn(against_one_process, how, world_size=2, output="none"):
        assert rank.error < 1e-5
        assert (rank.forward, rank.backward) == (forward * rank.u, backward * rank.u)
        # Queries, outputs; the ring keeps its keys and values, gathering all of them.
        assert rank.kept / rank.u > 1 + (2 if how == "gathered" else 1)
        assert abs(rank.written / rank.backward - 1) < 0.05


def stale():
    """Return outputs and gradients of k, right and with stale keys."""
    found = []
    for broken in (False, True):
        places, attend = divided("ring")
        q, k, v, dout = (x[:, :, places[dist.get_rank()]] for x in drawn())
        k.requires_grad_()
        out = attend(q, k, v)
        if broken:
            with stale_keys():
                out.backward(dout)
        else:
            out.backward(dout)
        found.append((out.detach(), k.grad))
    return found


@pytest.mark.parametrize("n", [1, 2])
def test_spawn_stale_keys_change_gradients_of_several_ranks_alone(n):
    ranks = spawn(stale, world_size=n, output="none")
    assert all(torch.equal(right[0], broken[0]) for right, broken in ranks)
    equal = [torch.equal(right[1], broken[1]) for right, broken in ranks]
    assert equal == [False, True][2 - n :]  # nobody else has seen the last rank's keys


def test_saved_counts_each_storage_once():
    x = torch.ones(8, requires_grad=True)
    with saved() as kept:
        y = x.exp() * x.view(2, 4).view(8)
    assert sum(kept.values()) == 2 * 32 and y.numel() == 8


def test_spawn_the_time_of_computing_is_counted():
    assert min(spawn(computing_time, "zigzag", 64, world_size=2, output="none")) > 0

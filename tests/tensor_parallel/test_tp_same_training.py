"""A GPT that is cut trains as one process does, and as PyTorch's DTensor does."""

from __future__ import annotations

import functools

import pytest
import torch.distributed as dist
from tp_cases import FAKES, WRAPPERS, Trained, dtensor, far_apart, piece_by_piece, train

from ddp_course.launch import spawn

SOME = ("gloo", "sequence")

alone = functools.cache(functools.partial(train, None))


def everything() -> dict[tuple[str, str], Trained]:
    """On every rank: train every model in every way, and every fake."""
    n = dist.get_world_size()
    results = {(way, "plain"): train(WRAPPERS[way]) for way in SOME}
    if n == 3:  # others cut no other way
        others = [(way, "plain") for way in WRAPPERS.keys() - {*SOME}]
        others += [(way, name) for way in SOME for name in ("tied", "frozen")]
        results |= {
            (way, name): train(WRAPPERS[way], name) for way, name in sorted(others)
        }
    if n == 2:
        results["DTensor", "plain"] = train(dtensor)
        results["DTensor sequence", "plain"] = train(
            functools.partial(dtensor, sequence=True)
        )
    if n == 4:
        for name in ("tied", "frozen"):
            results["pieces", name] = train(piece_by_piece, name)
    if n == 2:  # one rank has nothing to sum, and two are enough to see it
        results |= {(fake, "fake"): train(w) for fake, w in FAKES.items()}
    return results


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_same_training_as_one_process_and_as_pytorch(n):
    ranks = spawn(everything, world_size=n, output="none", device="cpu", timeout=200)
    for way, name in ranks[0]:
        if name == "fake":
            continue
        mine = [rank[way, name] for rank in ranks]
        for rank in mine:
            assert not far_apart(rank, alone(name)), (way, name)
        # What every rank has whole is the same to the bit, and not only nearly.
        assert len({rank.common for rank in mine}) == 1, (way, name)
        assert len({tuple(rank.norms) for rank in mine}) == 1, (way, name)
    if n == 2:
        for ours, theirs in (("gloo", "DTensor"), ("sequence", "DTensor sequence")):
            pair = (ranks[0][way, "plain"] for way in (ours, theirs))
            assert not far_apart(*pair), theirs
    for fake in FAKES if n == 2 else ():
        seen = [far_apart(rank[fake, "fake"], alone("plain")) for rank in ranks]
        assert any(seen), f"{fake} not seen"

"""A sharded checkpoint is one save of all ranks, as it was written, or a sentence."""

import os
import pickle
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_course.launch import spawn
from ddp_course.mechanisms import saving
from ddp_course.mechanisms.saving import WRITING, CheckpointError
from ddp_course.zero import (
    FullyShardedDataParallel,
    full_state_dict,
    sharded_checkpoint,
)


def sharded(value: float) -> nn.Module:
    """Return a module whose numbers are all the same."""
    module = FullyShardedDataParallel(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
    with torch.no_grad():
        for piece in module.parameters():
            piece.fill_(value)
    return module


def loaded(folder: str) -> list[float] | str:
    """Return the different numbers that were loaded, or why not."""
    module = sharded(-1.0)
    try:
        sharded_checkpoint.load(folder, module)
    except CheckpointError as error:
        kept = all(bool((piece == -1).all()) for piece in module.parameters())
        return str(error) if kept else "something was changed"
    state = full_state_dict(module)
    return sorted({x for v in state.values() for x in v.flatten().tolist()})


def dies_in_its_second_save(folder: str, in_place: bool) -> None:
    """Save twice; rank 1 is killed when half of its second file is written."""
    if in_place:  # as it is usually done
        honest = sharded_checkpoint._begin
        sharded_checkpoint._begin = lambda path: (honest(path), ("00000001",) * 2)[1]
        sharded_checkpoint._end = lambda unfinished, path: None
        (Path(folder) / "00000001").mkdir(parents=True, exist_ok=True)
    sharded_checkpoint.save(folder, sharded(1.0))
    save = torch.save

    def half(state, file):
        save(state, file)
        file.truncate(file.tell() // 2)
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == 1:
        torch.save = half
    sharded_checkpoint.save(folder, sharded(2.0))


@pytest.mark.parametrize("in_place", [False, True])
def test_killed_while_saving_the_save_before_is_whole(tmp_path, in_place):
    args = str(tmp_path), in_place
    spawn(dies_in_its_second_save, *args, world_size=2, check=False)
    left_over = sorted(path.name[:9] for path in tmp_path.iterdir())
    found = spawn(load_and_save, str(tmp_path), world_size=2, output="none")
    assert (found == [[1.0], [1.0]]) != in_place  # in place it is a mixture
    if not in_place:
        assert left_over == [WRITING[:9], "00000001"]
        assert [path.name for path in tmp_path.iterdir()] == ["00000002"]


def load_and_save(folder: str) -> list[float] | str:
    found = loaded(folder)
    sharded_checkpoint.save(folder, sharded(3.0))
    return found


class SlowerAndSlower(torch.optim.Optimizer):
    """An optimizer that counts its steps in a plain number, as many do."""

    def __init__(self, params, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                parameter.sub_(parameter.grad, alpha=group["lr"] / state["steps"])


def counted_steps(folder: str) -> list[dict]:
    """Step 3 times, save, load into another optimizer; return its states."""
    module = sharded(1.0)
    optimizer = SlowerAndSlower(module.parameters())
    for _ in range(3):
        module(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    sharded_checkpoint.save(folder, module, optimizer)
    other = SlowerAndSlower(module.parameters())
    sharded_checkpoint.load(folder, module, other)
    return [*other.state.values()]


def test_a_state_that_is_no_tensor_is_saved_too(tmp_path):
    ranks = spawn(counted_steps, str(tmp_path), world_size=2, output="none")
    assert ranks == [[{"steps": 3}] * 4] * 2


# ---- files that cannot be used -------------------------------------------------------


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def flip(path: Path) -> None:
    state = torch.load(path, weights_only=True)
    state["pieces"]["1.weight"]["states"]["numbers"]["value"].view(torch.int32)[0] ^= 1
    torch.save(state, path)


def without(key: str):
    def spoil(path: Path) -> None:
        state = torch.load(path, weights_only=True)
        del state[key]
        torch.save(state, path)

    return spoil


SPOILT = {
    "truncated": (lambda p: os.truncate(p, p.stat().st_size // 2), "cannot be read"),
    "missing": (Path.unlink, "are in no file"),
    "flipped": (flip, "is not the one that was written"),
    "foreign": (lambda p: p.write_bytes(b"spoilt"), "cannot be read"),
    "evil": (lambda p: p.write_bytes(pickle.dumps(Evil())), "cannot be read"),
    "another save": (None, "files are from several saves"),
    "without pieces": (without("pieces"), "cannot be loaded: 'pieces'"),
    "of a later version": (without("format"), "cannot be read ('format')"),
    "empty": (lambda p: shutil.rmtree(p.parent), "has no checkpoint"),
}


def save_each(folder: str) -> None:
    for name in SPOILT:
        sharded_checkpoint.save(f"{folder}/{name}", sharded(1.0))
    sharded_checkpoint.save(f"{folder}/other", sharded(2.0))


def load_each(folder: str) -> tuple[dict, list[float] | str]:
    """Load each; then a damaged one, by the plant: nothing is compared."""
    os.chdir(folder)
    each = {name: loaded(f"{folder}/{name}") for name in SPOILT}
    saving.fingerprint = lambda value: "the same"
    sharded_checkpoint.unseal = lambda sealed: sealed["value"]
    return each, loaded(f"{folder}/flipped")


def test_files_that_cannot_be_used(tmp_path):
    spawn(save_each, str(tmp_path), world_size=2, output="none")
    for name, (spoil, _) in SPOILT.items():
        (path,) = (tmp_path / name).glob("*/rank-1.pt")
        if spoil is None:
            shutil.copy(tmp_path / "other/00000001/rank-1.pt", path)
        else:
            spoil(path)
    ranks = spawn(load_each, str(tmp_path), world_size=2, output="none")
    (found, planted), (found_by_rank_1, _) = ranks
    assert found == found_by_rank_1
    for name, (_, words) in SPOILT.items():
        assert words in found[name], (name, found[name])
    assert not (tmp_path / "evil").joinpath("evil").exists()
    assert not (tmp_path / "evil/evil").exists()
    assert len(planted) == 2  # 1.0, and something else: nobody noticed


def full_disk(folder: str) -> str:
    def full(state, file):
        raise OSError(28, "No space left on device")

    sharded_checkpoint.save(folder, sharded(1.0))
    save, module = torch.save, sharded(2.0)
    if dist.get_rank() == 1:
        torch.save = full
    try:
        sharded_checkpoint.save(folder, module)
    except CheckpointError as error:
        torch.save = save
        return f"{error}; {loaded(folder)}"
    return "no error"


def test_a_full_disk_is_told_to_all_and_what_was_there_stays(tmp_path):
    found = spawn(full_disk, str(tmp_path), world_size=2, output="none")
    assert found == ["rank 1: [Errno 28] No space left on device; [1.0]"] * 2

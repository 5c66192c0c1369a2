"""A checkpoint is whole or not there, and a run goes on from it bit for bit."""

import os
import resource
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from refusals import refused, said
from trained import same

from ddp_course import checkpoint as module
from ddp_course.checkpoint import CheckpointError, Checkpoints, write_whole
from ddp_course.launch import RankError, spawn
from ddp_course.mechanisms.saving import WRITING, read_whole, seal
from ddp_course.model import GPTConfig
from ddp_course.spec import DATA_PARALLEL
from ddp_course.train import History, train

SMALL = GPTConfig(block_size=16, n_layer=1, n_head=2, d_model=8)
ROWS = 12
CURVE = {"batch_size": ROWS, "preset": SMALL}


def small(folder: Path, **changes) -> Checkpoints:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    options = {
        "every": 2,
        "model": model,
        "optimizer": optimizer,
        "settings": {"lr": 1},
    }
    return Checkpoints(folder, **options | changes)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Written whole


def test_a_checkpoint_is_written_when_due_and_the_newest_stay(tmp_path):
    checkpoints = small(tmp_path / "runs/a")
    assert checkpoints.load(9) == []
    seen = []
    for done in range(1, 8):
        checkpoints.save([0.5] * done, last=done == 7)
        seen.append(names(tmp_path / "runs/a"))
    two, four, six, seven = (f"step-0000000{n}.pt" for n in (2, 4, 6, 7))
    assert seen == [
        [], [two], [two], [two, four], [two, four], [four, six], [six, seven]
    ]  # fmt: skip


def test_nothing_is_read_or_written_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoints = small(None)
    assert checkpoints.load(9) == []
    checkpoints.save([1.0, 1.0], last=True)
    assert names(tmp_path) == []


def full(state, file):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("other", ["rank-0.pt", "rank-1.pt"])
def test_two_writers_with_one_process_id_do_not_share_a_temporary_file(
    other, tmp_path, monkeypatch
):
    """Two threads of a process, or ranks in containers whose ids may be equal."""
    save, path = torch.save, tmp_path / "rank-0.pt"

    def save_after_the_other(state, file):
        monkeypatch.setattr(torch, "save", save)
        write_whole({"format": 1, "from": 1}, tmp_path / other)
        save(state, file)

    monkeypatch.setattr(torch, "save", save_after_the_other)
    write_whole({"format": 1, "from": 0}, path)
    assert read_whole(path, 1)["from"] == 0
    assert names(tmp_path) == sorted({"rank-0.pt", other})


def test_a_full_disk_is_told_and_what_was_there_stays(tmp_path, monkeypatch):
    """PyTorch says it with a RuntimeError; a limit on files is a disk that is full."""
    checkpoints = small(tmp_path, model=torch.nn.Linear(200, 200))
    checkpoints.save([1.0, 2.0])
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, most))
    try:
        with pytest.raises(CheckpointError, match="cannot write a checkpoint: "):
            checkpoints.save([1.0] * 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        checkpoints.save([1.0] * 4)
    assert names(tmp_path) == ["step-00000002.pt"]


def at_once(state, path):
    """How checkpoints are usually written."""
    torch.save(state, path)


def dies_while_saving(folder, write):
    """Save, save again, and be killed when half of the second file is written."""
    checkpoints = small(folder)
    checkpoints.load(9)
    checkpoints.save([1.0, 2.0])
    module.write_whole = write
    save = torch.save

    def half(state, file):
        save(state, whole := Path(folder) / "whole")
        data = whole.read_bytes()
        whole.unlink()
        if isinstance(file, Path):
            file = file.open("wb")
        file.write(data[: len(data) // 2])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = half
    checkpoints.save([1.0, 2.0, 3.0, 4.0])


def what_is_left(folder, write) -> list[float]:
    [report] = spawn(
        dies_while_saving, folder, write, world_size=1, init=False, check=False
    )
    assert report.status == "killed", report
    return small(folder).load(9)


def test_killed_while_writing_the_checkpoint_before_is_there(tmp_path):
    assert what_is_left(tmp_path, write_whole) == [1.0, 2.0]
    assert names(tmp_path) == ["step-00000002.pt"]  # and the half one is removed


def test_a_writer_that_is_not_atomic_is_caught(tmp_path):
    damaged = "step-00000004.pt cannot be read.*; remove it .* if there is none$"
    with pytest.raises(CheckpointError, match=damaged):
        what_is_left(tmp_path, at_once)


# Refused, before anything is changed


def changed(checkpoints: Checkpoints) -> bool:
    fresh = torch.nn.Linear(2, 1)
    fresh.load_state_dict(checkpoints.model.state_dict())
    checkpoints.error = said(CheckpointError, checkpoints.load, 2)
    return not same(fresh.state_dict(), checkpoints.model.state_dict())


def flip(path: Path) -> None:
    """Change one bit of a number, as a disk may."""
    saved = torch.load(path, weights_only=True)
    numbers = saved["state"]["value"]["model"]["weight"]
    numbers.view(torch.int32)[0, 1] ^= 1
    torch.save(saved, path)


def resealed(path: Path, **changes) -> None:
    """Write another one, in the right form; None leaves something out."""
    state = torch.load(path, weights_only=True)["state"]["value"] | changes
    state = {key: value for key, value in state.items() if value is not None}
    torch.save({"format": module.FORMAT, "state": seal(state)}, path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda path: path.write_bytes(path.read_bytes()[:-100]),
            "remove it to resume",
        ),
        (lambda path: path.write_bytes(b""), "cannot be read"),
        (lambda path: torch.save({"losses": []}, path), "cannot be read ('format')"),
        (
            lambda path: torch.save({"format": 7, "settings": {}}, path),
            "has format 7; this version reads format 2",
        ),
        (lambda path: path.rename(path.with_name("step-00000008.pt")), "of step 8"),
        (lambda path: torch.save(Path, path), "cannot be read"),  # runs no code
        (lambda path: flip(path), "is not the one that was written"),
        (lambda path: resealed(path, model={}), "is of another model or optimizer"),
        (lambda path: resealed(path, settings=None), "'settings'"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, spoil, message):
    checkpoints = small(tmp_path)
    checkpoints.save([1.0, 2.0])
    assert changed(small(tmp_path))  # a good one is put into model and optimizer
    spoil(tmp_path / "step-00000002.pt")
    assert not changed(checkpoints)
    assert message in checkpoints.error


def test_other_settings_are_named(tmp_path):
    small(tmp_path).save([1.0, 2.0])
    other = small(tmp_path, settings={"lr": 2, "seed": 0})
    with pytest.raises(CheckpointError, match=r"\(lr 1, here 2; seed None, here 0\)"):
        other.load(2)


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file/a, cannot be used"):
        small(tmp_path / "file/a").load(9)


def test_what_a_sharded_save_left_in_the_folder_is_no_obstacle(tmp_path):
    (tmp_path / f"{WRITING}x").mkdir()
    assert small(tmp_path).load(9) == []
    assert names(tmp_path) == [f"{WRITING}x"]  # the next sharded save deletes it


def test_two_runs_in_one_folder_do_not_take_anything_from_each_other(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    writes = tmp_path / f"{WRITING}{os.getppid()}"
    for path in (writes, tmp_path / f"{WRITING}{gone.pid}", tmp_path / f"{WRITING}x"):
        path.touch()
    runs = small(tmp_path), small(tmp_path)
    assert [run.load(9) for run in runs] == [[], []]
    assert names(tmp_path) == [writes.name]  # whose process may still complete it
    runs[0].save([1.0, 2.0])
    with pytest.raises(CheckpointError, match="was written by another run while"):
        runs[1].save([3.0, 4.0])
    runs[0].save([1.0] * 4)
    assert runs[1].load(9) == [1.0] * 4  # it may go on from there
    (tmp_path / "step-00000003.pt").touch()  # older, and this disk shows it late
    runs[1].save([1.0] * 6)
    runs[0].known.add(6)  # planted: a run that looks at nothing
    runs[0].save([2.0] * 6)
    assert runs[1].load(9) == [2.0] * 6  # what the other one had written is lost


def test_impossible_arguments(tmp_path):
    for every in (0, 1.5):
        with pytest.raises(ValueError, match=f"every is {every}; it must be a whole"):
            small(tmp_path, every=every)
    with pytest.raises(ValueError, match="the folder is True; it must be a path or"):
        small(True)


# A run that is cut in two is the run that was not


def cut_in_two(folder: str, **layout: Any) -> list[History]:
    whole = train(5, **CURVE, **layout)
    train(3, **CURVE, **layout, checkpoint=folder, every=2)
    rest = train(5, **CURVE, **layout, checkpoint=folder)
    again = train(5, **CURVE, **layout, checkpoint=folder)
    return [whole, rest, again]


def same_bits(whole: History, rest: History, resumed_at: int) -> bool:
    """As by `==`: one bit in one parameter or one loss is a difference."""
    return (rest.losses, rest.checksum, rest.resumed_at) == (
        whole.losses, whole.checksum, resumed_at
    )  # fmt: skip


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path):
    layouts = [{"data_parallel": name} for name in DATA_PARALLEL if name != "pytorch"]
    layouts += [{"zero": stage} for stage in (1, 2, 3)]

    def all_layouts():
        return [cut_in_two(str(tmp_path / f"{k}"), **h) for k, h in enumerate(layouts)]

    for rank in spawn(all_layouts, world_size=3, timeout=240):
        for whole, rest, again in rank:
            assert same_bits(whole, rest, 3)
            assert same_bits(whole, again, 5)


def test_pytorchs_ddp_goes_on_bit_for_bit_unless_it_rearranges_its_buckets(tmp_path):
    # It does so after its first step, from when on a ring adds up in another order: of
    # three ranks or more the resumed run has its first step, again, in the old order.
    class KeepsItsBuckets(torch.nn.parallel.DistributedDataParallel):
        def __init__(self, module):
            super().__init__(module, find_unused_parameters=True)

    def both():
        as_it_is = cut_in_two(str(tmp_path / "as it is"), data_parallel="pytorch")
        torch.nn.parallel.DistributedDataParallel = KeepsItsBuckets
        return as_it_is, cut_in_two(str(tmp_path / "kept"), data_parallel="pytorch")

    for (whole, rest, _), (whole_kept, rest_kept, _) in spawn(both, world_size=3):
        assert rest.losses == pytest.approx(whole.losses, abs=1e-5)
        assert rest.resumed_at == 3
        assert same_bits(whole_kept, rest_kept, 3)


def test_a_run_of_threads_goes_on_too(tmp_path):
    # Two threads: the sum of two gradients is the same in either order, and of more
    # threads the order depends on what they have computed before.
    assert same_bits(*cut_in_two(str(tmp_path), threads=2)[:2], 3)


def forgets_the_optimizer(self, state):
    pass


def test_a_checkpoint_without_the_optimizers_state_is_caught(tmp_path, monkeypatch):
    # The next loss is still right: only those after it tell.
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "load_state_dict", forgets_the_optimizer)
        whole, rest, _ = cut_in_two(str(tmp_path))
    assert rest.losses[:4] == whole.losses[:4]
    assert not same_bits(whole, rest, 3)


def test_a_step_done_twice_is_caught(tmp_path, monkeypatch):
    load = Checkpoints.load
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "load", lambda self, steps: load(self, steps)[:-1])
        whole, rest, _ = cut_in_two(str(tmp_path))
    assert not same_bits(whole, rest, 3)


def on_two_disks(folder: str) -> tuple[list[float], int]:
    """As on two machines that share no disk, of which the other has rank 0 now."""
    rank = dist.get_rank()
    mine = Path(folder) / str(rank % 2)
    history = train(5, **CURVE, checkpoint=mine)
    return history.losses, history.resumed_at


def test_the_newest_checkpoint_is_found_on_any_machine(tmp_path):
    whole = spawn(lambda: train(5, **CURVE), world_size=4)[0]
    train(2, **CURVE, checkpoint=tmp_path / "0")
    spawn(lambda: train(3, **CURVE, checkpoint=tmp_path / "1"))
    assert spawn(on_two_disks, str(tmp_path)) == [(whole.losses, 3)] * 4


def test_all_ranks_say_what_is_wrong_with_a_checkpoint(tmp_path):
    train(2, **CURVE, checkpoint=tmp_path)
    (tmp_path / "step-00000002.pt").write_bytes(b"spoilt")

    def attempt():
        how = {"checkpoint": tmp_path}
        return said(CheckpointError, train, 4, **CURVE, **how)

    texts = spawn(attempt, world_size=3)
    assert len(set(texts)) == 1
    assert "rank 0: " in texts[0] and "cannot be read" in texts[0]


# What train refuses


def training(**changes):
    return lambda: train(**{"steps": 1, **CURVE, **changes})


test_train_refuses_what_cannot_be = refused(
    (training(steps=-1), "steps is -1; it must be a whole number, 0 or more"),
    (
        training(data_parallel="dpp"),
        "is 'dpp'; it can be one of average, naive",
    ),
    (training(threads=0), "threads is 0; it must be a whole number, 1 or more"),
    (training(threads=5), "12 rows cannot be shared equally by 5 re"),
    (training(batch_size=0), "batch_size is 0; it must be a whole number, 1"),
    (training(on_step=5), "on_step is 5; it must be a function or None"),
    (training(watched="memory"), "watched is 'memory'; it must be a function or None"),
    (training(strategy="zero1"), "strategy 'zero1' is --zero 1 now, train.zero=1"),
    (training(replica=2), "there is no option 'replica'; the options are steps, "),
    (
        training(batchsize=4),
        "no option 'batchsize'; .* batch_size, .* keep_state, .* tp",
    ),
    (training(clip=True), "clip is True; it must be a number above 0"),
    (training(every=0), "every is 0; it must be a whole number, 1 or more"),
    (training(save="sync"), "save is 'sync'; it can be one of waiting, async"),
)


def test_threads_and_ranks_do_not_mix():
    with pytest.raises(RankError, match="threads is 2, ranks is 2"):
        spawn(lambda: train(1, **CURVE, threads=2), world_size=2)


def test_on_step_is_called_by_rank_0_after_every_step():
    def steps():
        seen = []
        losses = train(3, **CURVE, on_step=lambda *message: seen.append(message)).losses
        return seen, list(enumerate(losses, 1))

    (seen, expected), (seen_by_rank_1, _) = spawn(steps, world_size=2)
    assert seen == expected
    assert seen_by_rank_1 == []

"""A thread writes what training has copied: nothing mixed, nothing silent."""

import threading
from types import SimpleNamespace

import pytest
import torch

from ddp_course import checkpoint as module
from ddp_course.checkpoint import CheckpointError
from ddp_course.failures import async_save
from ddp_course.failures.async_save import BackgroundWriter, snapshot
from ddp_course.launch import spawn
from ddp_course.model import GPTConfig
from ddp_course.train import train

SMALL = GPTConfig(block_size=16, n_layer=1, n_head=2, d_model=8)
CURVE = {"batch_size": 12, "preset": SMALL}


def waiting_write():
    """Return a function that writes, later, and the event that lets it."""
    begin, written = threading.Event(), []

    def write(state, *more):
        assert begin.wait(60)
        written.append((state["w"].tolist(), *more))

    return write, begin, written


def written_during_a_step() -> list:
    """Save zeros, and train while the thread waits; return what it has written."""
    write, begin, written = waiting_write()
    weight = torch.zeros(3)
    writer = BackgroundWriter(write)
    writer.save({"w": weight}, 7)
    weight += 1
    assert written == []
    begin.set()
    writer.wait()
    return written


def test_a_step_during_the_write_does_not_change_what_is_written(monkeypatch):
    assert written_during_a_step() == [([0, 0, 0], 7)]
    monkeypatch.setattr(async_save, "snapshot", lambda state, _: state)  # planted
    assert written_during_a_step() == [([1, 1, 1], 7)]


def test_a_second_save_waits_for_the_first():
    write, begin, written = waiting_write()
    writer = BackgroundWriter(write)
    writer.save({"w": torch.zeros(1)})
    threading.Timer(0.2, begin.set).start()
    writer.save({"w": torch.ones(1)})
    assert written[0] == ([0],)
    writer.wait()
    assert written == [([0],), ([1],)]


def test_the_threads_error_is_raised_once_by_the_next_call():
    def fail(state):
        raise OSError(28, "No space left on device")

    writer = BackgroundWriter(fail)
    writer.save({})
    with pytest.raises(OSError, match="No space left"):
        writer.save({})
    writer.wait()


def test_a_snapshot_shares_no_memory_and_uses_an_earlier_ones():
    state = {"a": torch.arange(4.0), "b": [torch.ones(2), 3], "c": {"d": (1, "x")}}
    first = snapshot(state)
    state["a"] += 1
    second = snapshot(state, first)
    assert second["a"] is first["a"]
    assert second["a"].tolist() == [1, 2, 3, 4]
    assert second["b"][0] is not first["b"][0]
    other = snapshot({"a": torch.zeros(5)}, first)  # of another shape
    assert other["a"].shape == (5,) and first["a"].shape == (4,)
    whole_numbers = torch.zeros(4, dtype=torch.int64)
    assert snapshot(whole_numbers, first["a"]).dtype is torch.int64


# In a training


def cut_in_two(folder, **layout):
    whole = train(5, **CURVE, **layout)
    train(3, **CURVE, **layout, checkpoint=folder, every=1, save="async")
    rest = train(5, **CURVE, **layout, checkpoint=folder, every=1, save="async")
    names = sorted(path.name for path in folder.iterdir())
    equal = (rest.losses, rest.checksum) == (whole.losses, whole.checksum)
    return equal, rest.resumed_at, names


def test_a_run_saved_while_it_goes_on_resumes_bit_for_bit(tmp_path):
    def both():
        return [cut_in_two(tmp_path / name, zero=z) for name, z in (("a", 0), ("b", 2))]

    ranks = spawn(both, world_size=2, timeout=120)
    assert [found[:2] for rank in ranks for found in rank] == [(True, 3)] * 4
    newest = ["step-00000004.pt", "step-00000005.pt"]
    assert [found[2] for found in ranks[0]] == [newest] * 2  # rank 0 has written them


def writes_what_it_trains(self, state, *args):
    """The plant: no copy. It is written when the next step has been taken.

    Then somebody waits for it: the next save, or the end of training.
    """
    self.wait()
    self._thread = SimpleNamespace(join=lambda: self._run(state, *args))


def test_a_checkpoint_without_a_snapshot_is_caught(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(BackgroundWriter, "save", writes_what_it_trains)
        train(1, **CURVE, checkpoint=tmp_path, every=1, save="async")
        assert train(3, **CURVE, checkpoint=tmp_path).checksum == (
            train(3, **CURVE).checksum
        )  # nothing was trained during the last write
        train(5, **CURVE, checkpoint=tmp_path, every=4, save="async")
    (tmp_path / "step-00000005.pt").unlink()
    rest = train(5, **CURVE, checkpoint=tmp_path)
    assert rest.resumed_at == 4
    assert rest.checksum != train(5, **CURVE).checksum


def test_a_full_disk_ends_the_run_at_the_next_save(tmp_path, monkeypatch):
    def full(state, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_whole", full)
    steps = []
    with pytest.raises(CheckpointError, match="cannot write a checkpoint: .*No space"):
        train(
            9, **CURVE, checkpoint=tmp_path, every=2, save="async",
            on_step=lambda step, _: steps.append(step),
        )  # fmt: skip
    assert steps == [1, 2, 3]


def test_the_last_save_is_finished_when_training_returns(tmp_path, monkeypatch):
    threads, write = [], module.write_whole

    def recorded(state, path):
        threads.append(threading.current_thread())
        write(state, path)

    monkeypatch.setattr(module, "write_whole", recorded)
    train(2, **CURVE, checkpoint=tmp_path, every=1, save="async")
    assert len({*threads} - {threading.main_thread()}) == 2
    assert not any(thread.is_alive() for thread in threads)
    assert len([*tmp_path.iterdir()]) == 2
    train(3, **CURVE, checkpoint=tmp_path, every=1)
    assert threads[2] is threading.main_thread()

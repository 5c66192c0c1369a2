"""Files of a launch, in memory and in a folder: afterwards nothing is left."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch.distributed as dist

from ddp_course.launch import scratch
from ddp_course.launch.scratch import NamedFile, OpenFile, scratch_files

WAYS = [
    pytest.param(
        True,
        marks=pytest.mark.skipif(
            not hasattr(os, "memfd_create"), reason="no files in memory here"
        ),
        id="in memory",
    ),
    pytest.param(False, id="in a folder"),
]
in_both_ways = pytest.mark.parametrize("in_memory", WAYS)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path, monkeypatch):
    """Fail if a file, a folder or an open file descriptor is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = open_files()
    yield
    assert left_in(tmp_path) == []
    assert open_files() == before


def open_files() -> list[str]:
    """The open file descriptors of this process."""
    fds = Path("/dev/fd" if not Path("/proc/self/fd").exists() else "/proc/self/fd")
    return sorted(fd.name for fd in fds.iterdir() if fd.exists())


def left_in(folder: Path) -> list[Path]:
    return list(folder.rglob("*"))


@in_both_ways
def test_files_are_empty_and_can_be_written_and_read(in_memory):
    with scratch_files("call", "store", in_memory=in_memory) as (one, two):
        assert Path(one.path).read_bytes() == b""
        Path(one.path).write_bytes(b"first")
        Path(one.path).write_bytes(b"2nd")
        Path(two.path).write_bytes(b"other")
        assert Path(one.path).read_bytes() == b"2nd"
        assert Path(two.path).read_bytes() == b"other"


@in_both_ways
def test_files_are_gone_afterwards(in_memory):
    with scratch_files("call", "store", in_memory=in_memory) as files:
        paths = [file.path for file in files]
        assert all(Path(path).exists() for path in paths)
    assert not any(Path(path).exists() for path in paths)


@in_both_ways
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_files_are_gone_after_an_error_too(in_memory, error):
    with pytest.raises(error):
        with scratch_files("call", in_memory=in_memory) as (file,):
            Path(file.path).write_bytes(b"x" * 100_000)
            raise error


def test_files_in_memory_have_no_name(tmp_path):
    with scratch_files("call", in_memory=hasattr(os, "memfd_create")) as (file,):
        Path(file.path).write_bytes(b"x")
        if isinstance(file, OpenFile):
            assert left_in(tmp_path) == []


def test_files_in_a_folder_are_together_and_can_be_removed_by_others(tmp_path):
    with scratch_files("call", "store", in_memory=False) as (call, store):
        assert isinstance(call, NamedFile)
        assert Path(call.path).parent == Path(store.path).parent
        assert len(left_in(tmp_path)) == 3
        Path(store.path).unlink()  # as a FileStore does at its end
        (Path(call.path).parent / "another").write_bytes(b"made by a rank")


def test_two_launches_at_once_have_different_files():
    with scratch_files("call", in_memory=False) as (one,):
        with scratch_files("call", in_memory=False) as (two,):
            assert one.path != two.path


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no files in memory here")
def test_if_the_second_file_cannot_be_made_the_first_is_closed(monkeypatch):
    real = os.memfd_create

    def full(name):
        if name == "store":
            raise OSError(24, "Too many open files")
        return real(name)

    monkeypatch.setattr(os, "memfd_create", full)
    with pytest.raises(OSError, match="Too many"):
        with scratch_files("call", "store", in_memory=True):
            pytest.fail("not reached")


@in_both_ways
def test_a_store_can_live_in_it(in_memory):
    with scratch_files("store", in_memory=in_memory) as (file,):
        one, two = (dist.FileStore(file.path, 2) for _ in range(2))
        one.set("address", "here")
        assert two.get("address") == b"here"
        del one, two


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no files in memory here")
def test_a_program_that_is_run_meanwhile_does_not_inherit_it():
    with scratch_files("call", in_memory=True) as (file,):
        assert not os.get_inheritable(file.fd)


def test_a_file_in_memory_travels_as_an_open_file(monkeypatch):
    """As multiprocessing does it: a number is given away, another one arrives."""

    class Handed:
        def __init__(self, fd):
            self.fd = fd

        def detach(self):
            return os.dup(self.fd)

    monkeypatch.setattr(scratch.reduction, "DupFd", Handed)
    with tempfile.TemporaryFile() as file:
        make, args = OpenFile(file.fileno()).__reduce__()
        arrived = make(*args)
        assert arrived.fd != file.fileno()
        assert os.fstat(arrived.fd).st_ino == os.fstat(file.fileno()).st_ino
        os.close(arrived.fd)


def test_leaving_something_would_be_seen(tmp_path):
    """The fixture above does look at the right places."""
    left = tmp_path / "left"
    left.touch()
    assert left_in(tmp_path) == [left]
    left.unlink()
    before = open_files()
    fd = os.dup(0)
    assert open_files() != before
    os.close(fd)

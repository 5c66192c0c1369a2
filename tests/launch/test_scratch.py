"""Files of a launch, in memory and in a folder: afterwards nothing is left."""

import os
import tempfile
from pathlib import Path

import pytest
import torch.distributed as dist

from ddp_course.launch.scratch import scratch_files

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
    assert open_files() <= before  # the garbage of other tests may close some


def open_files() -> set[str]:
    """The open file descriptors of this process."""
    fds = Path("/dev/fd" if not Path("/proc/self/fd").exists() else "/proc/self/fd")
    return {fd.name for fd in fds.iterdir() if fd.exists()}


def left_in(folder: Path) -> list[Path]:
    return list(folder.rglob("*"))


@in_both_ways
def test_files_can_be_written_and_read_and_are_gone_afterwards(in_memory, tmp_path):
    with scratch_files("call", "store", in_memory=in_memory) as (call, store):
        for text in (b"", b"first", b"2nd"):
            Path(call.path).write_bytes(text)
            assert Path(call.path).read_bytes() == text
        one, two = (dist.FileStore(store.path, 2) for _ in range(2))
        one.set("address", "here")
        assert two.get("address") == b"here"
        del one, two
        if in_memory:  # without a name, and not for a program that is run meanwhile
            assert left_in(tmp_path) == []
            assert not os.get_inheritable(call.fd)
        else:
            folder = Path(call.path).parent
            assert left_in(tmp_path)[0] == folder == Path(store.path).parent
            (folder / "another").write_bytes(b"made by a rank")
            with scratch_files("call", in_memory=False) as (other,):
                assert other.path != call.path
    assert not Path(call.path).exists() and not Path(store.path).exists()


@in_both_ways
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_files_are_gone_after_an_error_too(in_memory, error):
    with pytest.raises(error):
        with scratch_files("call", in_memory=in_memory) as (file,):
            Path(file.path).write_bytes(b"x" * 100_000)
            raise error


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


def test_leaving_something_would_be_seen(tmp_path):
    """The fixture above does look at the right places."""
    left = tmp_path / "left"
    left.touch()
    assert left_in(tmp_path) == [left]
    left.unlink()
    before = open_files()
    fd = os.dup(0)
    assert not open_files() <= before
    os.close(fd)

"""No script to copy leaves it to chance how it ends: 0020 in docs/decisions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from machines import free_port

from ddp_course.chapters.ch05_ddp_internals import ddp_script
from ddp_course.chapters.ch08_fsdp import fsdp_script
from ddp_course.chapters.ch19_failures import elastic_script

CAUGHT = 70
# It runs a program; if Python cleans up beside gloo's threads, it exits with 70.
WATCH = f"""
import atexit, os, runpy, sys
from pathlib import Path
def look():
    names = [task.read_text() for task in Path("/proc/self/task").glob("*/comm")]
    if any("gloo" in name for name in names):
        os._exit({CAUGHT})
atexit.register(look)
"""
RUN = "sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
# As if the module were imported only when the group exists, which its defaults keep.
LATE = """
import ddp_course.launch.torchrun
del sys.modules["torch.distributed.nn.functional"], sys.modules["torch.distributed.nn"]
"""
WORDS = {
    ddp_script: ("--epochs=1",),
    fsdp_script: ("--epochs=1",),
    elastic_script: (".",),
}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def exit_code(folder, *words, before=""):
    """Run a program as torchrun would: one rank, in `folder`."""
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-c", WATCH + before + RUN, *words]
    env = {**os.environ, **rank, **place, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=folder, env=env, timeout=240).returncode


@pytest.mark.parametrize("script", WORDS)
def test_a_script_ends_before_python_cleans_up_beside_gloo(script, tmp_path):
    assert exit_code(tmp_path, script.__file__, *WORDS[script]) == 0


@pytest.mark.parametrize("script", [ddp_script, fsdp_script])
def test_a_script_without_its_last_line_is_caught(script, tmp_path):
    source, last = Path(script.__file__).read_text(), "    os._exit(0)"
    assert source.count(last) == 1
    (tmp_path / "plant.py").write_text(source.replace(last, "    pass"))
    assert exit_code(tmp_path, "plant.py", *WORDS[script]) == CAUGHT


def fails(folder, source, words) -> bool:
    """Run a script that finds a file without sense where it looks for a checkpoint."""
    (folder / "script.py").write_text(source)
    (folder / "run").write_text("no checkpoint")  # fsdp_script looks for a folder
    (folder / "run.pt").write_text("no checkpoint")
    return exit_code(folder, "script.py", *words) != 0


@pytest.mark.parametrize("script", [ddp_script, fsdp_script])
def test_a_script_that_fails_says_so_and_one_that_hides_it_is_caught(script, tmp_path):
    source = Path(script.__file__).read_text()
    before, after = "    main()\n    sys.stdout.flush()\n", "    try:\n        main()\n"
    assert source.count(before) == 1
    hidden = source.replace(before, after + "    finally:\n    ")
    assert fails(tmp_path, source, WORDS[script])
    assert not fails(tmp_path, hidden, WORDS[script])


def test_a_group_that_defaults_hold_is_caught(tmp_path):
    words = elastic_script.__file__, *WORDS[elastic_script]
    assert exit_code(tmp_path, *words, before=LATE) == CAUGHT

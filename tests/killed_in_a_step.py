"""`ddp-course train` under torchrun, on a machine that loses a rank in its sixth step.

    DOOM=FILE torchrun ... -m killed_in_a_step train ...

The rank that removes the file is killed. It has the loss of step 6 from all ranks: so
what they save after step 4 is on the disk, and they have more to do.
"""

import contextlib
import os
import runpy
import signal
from pathlib import Path

from ddp_course.checkpoint import Checkpoints

save = Checkpoints.save


def save_or_die(checkpoints: Checkpoints, losses: list[float], last: bool = False):
    if len(losses) == 6:
        with contextlib.suppress(FileNotFoundError):
            Path(os.environ["DOOM"]).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
    save(checkpoints, losses, last)


if __name__ == "__main__":
    Checkpoints.save = save_or_die
    runpy.run_module("ddp_course", run_name="__main__", alter_sys=True)

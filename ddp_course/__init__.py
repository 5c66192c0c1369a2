"""Distributed deep-learning training, built from real processes up.

Importing the package starts one helper process in the background, which imports PyTorch
at once, so that the first launch of ranks is as quick as later ones. The command
`ddp-course` does not start it on import, since many commands launch no ranks.
"""

import gc
import os
import signal
import sys

__version__ = "0.1.0"

if "DDP_COURSE_FORK_SERVER" in os.environ:
    gc.disable()  # imports create no garbage, and collecting takes 1/6 of their time


def get_ready() -> None:
    """Start the helper process, except in a torchrun rank, which launches no ranks."""
    from ddp_course.launch import warm
    from ddp_course.launch.torchrun import under_torchrun

    if not under_torchrun():
        warm("ddp_course.preload")


def stop(*_: object) -> None:
    """Exit at Ctrl-C while the command is still being imported."""
    os.write(2, b"ddp-course: stopped\n")
    os._exit(130)


if not (
    sys.argv[0].endswith("ddp-course")
    or {"ddp_course", "ddp_course.cli"} & {*sys.orig_argv}
):
    get_ready()
elif signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, stop)

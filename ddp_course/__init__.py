"""Distributed deep-learning training, built from real processes up.

Importing the package starts one helper process in the background, which imports
PyTorch while you read, so that the first four ranks start as quickly as the next. Not
in the command `ddp-course`, which may only be asked for its help.
"""

import gc
import os
import signal
import sys

__version__ = "0.1.0"

if "DDP_COURSE_FORK_SERVER" in os.environ:
    gc.disable()  # imports leave no garbage; to look for it is a sixth of their time


def get_ready() -> None:
    """Start the helper; not in a rank of torchrun, which starts no ranks itself."""
    from ddp_course.launch import warm
    from ddp_course.launch.torchrun import under_torchrun

    if not under_torchrun():
        warm("ddp_course.preload")


def stop(*_: object) -> None:
    """End the command at Ctrl-C, while it is imported: there is nothing else to end."""
    os.write(2, b"ddp-course: stopped\n")
    os._exit(130)


if not (
    sys.argv[0].endswith("ddp-course")
    or {"ddp_course", "ddp_course.cli"} & {*sys.orig_argv}
):
    get_ready()
elif signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, stop)

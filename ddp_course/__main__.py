"""The command `ddp-course`, in the form that `python -m` and torchrun can start.

torchrun --nproc-per-node 4 -m ddp_course train --zero 1
"""

from __future__ import annotations

import os
import sys

from ddp_course.cli import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as in `launch.__main__`: at a normal exit, PyTorch may abort

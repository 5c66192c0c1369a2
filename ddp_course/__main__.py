"""The command `ddp-course`, as `python -m` and torchrun can start it.

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
    os._exit(code)  # as in `launch.__main__`: PyTorch's threads may abort a good end

"""What the fork server imports of this course, so that ranks need not.

Imported by the server alone. A file that cannot be imported, as while you edit it, is
left out: the rank that wants it imports it itself, and says what is wrong.
"""

from __future__ import annotations

import contextlib
import gc
from importlib import import_module

for name in ("ddp_course.train", "ddp_course.theory", "ddp_course.launch.rank"):
    with contextlib.suppress(Exception):
        import_module(name)

# What is there now stays. A rank's garbage collector would look at all of it and find
# nothing, but a page that is looked at is written to, and so it is copied.
gc.collect()
gc.freeze()

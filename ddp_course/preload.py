"""The course's modules that the fork server imports, so that its ranks need not.

Only the server imports this file (`launch.server.warm`). A module that cannot be
imported, for example while you edit it, is skipped: a rank that needs it imports it
again, and raises the error where you see it.
"""

from __future__ import annotations

import contextlib
import gc
from importlib import import_module
from pathlib import Path

with contextlib.suppress(Exception):
    import ddp_course.train  # noqa: F401
for file in Path(__file__).parent.glob("*/axis.py"):  # `parallelize` loads some of them
    with contextlib.suppress(Exception):
        import_module(f"ddp_course.{file.parent.name}.axis")
with contextlib.suppress(Exception):
    import ddp_course.theory  # noqa: F401
with contextlib.suppress(Exception):
    import ddp_course.launch.rank  # noqa: F401
with contextlib.suppress(Exception):
    import ddp_course.chapters  # noqa: F401  every exercise's check needs it

# Freeze all objects: a rank's garbage collector would mark each of them, and find none
# to free. Marking writes to their memory, so the kernel would copy every page.
gc.collect()
gc.freeze()

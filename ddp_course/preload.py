"""What the fork server imports of this course, so that ranks need not.

Imported by the server alone (`launch.server.warm`). A file that cannot be imported, as
while you edit it, is left out: the rank that wants it imports it itself, and says what
is wrong.
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
    import ddp_course.chapters  # noqa: F401  what every check is made of

# What is there now stays. A rank's garbage collector would look at all of it and find
# nothing, but a page that is looked at is written to, and so it is copied.
gc.collect()
gc.freeze()

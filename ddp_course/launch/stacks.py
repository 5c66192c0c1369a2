"""Where in the reader's code a rank stands: read from tracebacks and stack dumps."""

import linecache
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from traceback import TracebackException

LAUNCHER = Path(__file__).resolve().parent
PACKAGE = LAUNCHER.parent
_KINDS = ("stdlib", "platstdlib", "purelib", "platlib")
_LIBRARIES = tuple(map(sysconfig.get_path, _KINDS))
_NOISE = ("torch/distributed/c10d_logger.py",)
_FRAME = re.compile(r'File "(.+?)", line (\d+)')
_ESCAPE = re.compile(r"\\(?:x(..)|u(....)|U(.{8}))")
_THREAD = re.compile(r"(?:Current thread|Thread) 0x.*\n")


def is_readers(file: str) -> bool:
    """Tell whether `file` is code to point at: not a library's, not the launcher's."""
    path = Path(file)
    if PACKAGE in path.parents:
        return LAUNCHER not in path.parents
    if file.startswith("<") and not file.startswith("<ipython"):
        return False
    packages = {"site-packages", "dist-packages"} & set(path.parts)
    return not file.startswith(_LIBRARIES) and not packages


def label(file: str, labels: dict[str, str]) -> str:
    """Return the name by which a reader knows `file`: "Cell In[5]", "train.py"."""
    if file in labels:
        return labels[file]
    path = Path(file)
    if PACKAGE in path.parents:
        return path.relative_to(PACKAGE.parent).as_posix()
    return path.name


def innermost(
    frames: Iterable[tuple[str, int | None, str | None]], labels: dict[str, str]
) -> str | None:
    """Return "Cell In[5], line 3: dist.recv(x)" for the last frame of the reader's.

    Of this course's, if there is none of another file: who calls our `all_reduce` asks
    which of these calls it was. `frames` are (file, line number, source line or None),
    outermost first.
    """
    readers = [frame for frame in frames if is_readers(frame[0])]
    if not readers:
        return None
    own = [frame for frame in readers if PACKAGE not in Path(frame[0]).parents]
    file, line, source = (own or readers)[-1]
    source = (source or linecache.getline(file, line or 0)).strip()
    place = f"{label(file, labels)}, line {line}"
    return f"{place}: {source}" if source else place


def where(dump: str, labels: dict[str, str]) -> str | None:
    """Read faulthandler's newest dump: where the main thread of the process stands."""
    main_thread = _THREAD.split(dump)[-1]  # faulthandler writes the main thread last
    frames = _FRAME.findall(main_thread)[::-1]  # the innermost was the first
    return innermost([(_unescaped(f), int(line), None) for f, line in frames], labels)


def _unescaped(file: str) -> str:
    """Undo faulthandler's ASCII: it writes \\xe9, \\u65e5, \\U0001f642."""
    return _ESCAPE.sub(lambda found: chr(int(found[found.lastindex], 16)), file)


def drop_launcher(told: TracebackException | None) -> None:
    """Remove the launcher's frames, which say nothing about the mistake, in place."""
    if told is None:
        return
    kept = (f for f in told.stack if LAUNCHER not in Path(f.filename).parents)
    told.stack[:] = [frame for frame in kept if not frame.filename.endswith(_NOISE)]
    inner = getattr(told, "exceptions", None) or ()  # of an ExceptionGroup
    for part in (*inner, told.__context__, told.__cause__):
        drop_launcher(part)


def relabel(text: str, labels: dict[str, str]) -> str:
    """Write `Cell In[5]` in a traceback where a cell's temporary file name stands."""
    for file, name in labels.items():
        text = text.replace(f'File "{file}"', name)
    return text

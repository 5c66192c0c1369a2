"""Find the line of user code that a rank has reached, in tracebacks and stack dumps."""

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


def is_user_code(file: str) -> bool:
    """Return whether `file` is neither a library's nor the launcher's."""
    path = Path(file)
    if PACKAGE in path.parents:
        return LAUNCHER not in path.parents
    if file.startswith("<") and not file.startswith("<ipython"):
        return False
    packages = {"site-packages", "dist-packages"} & set(path.parts)
    return not file.startswith(_LIBRARIES) and not packages


def label(file: str, labels: dict[str, str]) -> str:
    """Return the name by which a user knows `file`: "Cell In[5]", "train.py"."""
    if file in labels:
        return labels[file]
    path = Path(file)
    if PACKAGE in path.parents:
        return path.relative_to(PACKAGE.parent).as_posix()
    return path.name


def innermost(
    frames: Iterable[tuple[str, int | None, str | None]], labels: dict[str, str]
) -> str | None:
    """Return "Cell In[5], line 3: dist.recv(x)" for the innermost frame of user code.

    Frames of this course count only if there are no others: a user who calls the
    course's `all_reduce` wants to see that call. `frames` are (file, line number,
    source line or None), outermost first.
    """
    visible = [frame for frame in frames if is_user_code(frame[0])]
    if not visible:
        return None
    own = [frame for frame in visible if PACKAGE not in Path(frame[0]).parents]
    file, line, source = (own or visible)[-1]
    source = (source or linecache.getline(file, line or 0)).strip()
    place = f"{label(file, labels)}, line {line}"
    return f"{place}: {source}" if source else place


def where(dump: str, labels: dict[str, str]) -> str | None:
    """Return where the main thread is, from faulthandler's newest dump."""
    main_thread = _THREAD.split(dump)[-1]  # faulthandler writes the main thread last
    frames = _FRAME.findall(main_thread)[::-1]  # innermost last
    return innermost([(_unescaped(f), int(line), None) for f, line in frames], labels)


def _unescaped(file: str) -> str:
    """Undo faulthandler's escapes: it writes \\xe9, \\u65e5, \\U0001f642."""
    return _ESCAPE.sub(lambda found: chr(int(found[found.lastindex], 16)), file)


def drop_launcher(parsed: TracebackException | None) -> None:
    """Remove the launcher's frames, which do not show the mistake, in place."""
    if parsed is None:
        return
    kept = (f for f in parsed.stack if LAUNCHER not in Path(f.filename).parents)
    parsed.stack[:] = [frame for frame in kept if not frame.filename.endswith(_NOISE)]
    inner = getattr(parsed, "exceptions", None) or ()  # if an ExceptionGroup
    for part in (*inner, parsed.__context__, parsed.__cause__):
        drop_launcher(part)


def relabel(text: str, labels: dict[str, str]) -> str:
    """Replace the file names of cells in a traceback by names such as `Cell In[5]`."""
    for file, name in labels.items():
        text = text.replace(f'File "{file}"', name)
    return text

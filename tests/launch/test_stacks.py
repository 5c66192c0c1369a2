"""Stack dumps and tracebacks: from the text to the line of the reader's own code."""

import faulthandler
import linecache
import sys
import sysconfig
import tempfile
import threading
import traceback
from pathlib import Path

import pytest

from ddp_course.launch import stacks

PACKAGE = stacks.PACKAGE
LAUNCHER = stacks.LAUNCHER
STDLIB = sysconfig.get_path("stdlib")
TORCH = f"{sysconfig.get_path('purelib')}/torch/distributed/distributed_c10d.py"
CELL = "/tmp/ipykernel_4242/1234567890.py"
LABELS = {CELL: "Cell In[5]"}
SOURCE = ["def f():\n", "    x = torch.zeros(1)\n", "    dist.recv(x, src=1)\n"]


@pytest.fixture(autouse=True)
def cell_source():
    """The source of the cell, where a launch has put it."""
    linecache.cache[CELL] = (sum(map(len, SOURCE)), None, SOURCE, CELL)
    yield
    linecache.cache.pop(CELL, None)


def dump_of(*threads: list[tuple[str, int]], current: int = -1) -> str:
    """A dump as faulthandler writes it: innermost frame first, main thread last."""
    text = []
    for number, frames in enumerate(threads):
        kind = "Current thread" if number == current % len(threads) else "Thread"
        text.append(f"{kind} 0x00007f0d72dca{number:03x} (most recent call first):\n")
        text += [f'  File "{file}", line {line} in f\n' for file, line in frames]
        text.append("\n")
    return "".join(text)


MAIN = [
    (TORCH, 2500),
    (f"{sysconfig.get_path('purelib')}/torch/distributed/c10d_logger.py", 83),
    (CELL, 3),
    (str(LAUNCHER / "rank.py"), 77),
    (f"{STDLIB}/multiprocessing/process.py", 108),
    ("<string>", 1),
]
WATCHING = [
    (f"{STDLIB}/multiprocessing/connection.py", 930),
    (str(LAUNCHER / "rank.py"), 132),
    (f"{STDLIB}/threading.py", 982),
]
READERS_THREAD = [("/home/ada/heartbeat.py", 7), (f"{STDLIB}/threading.py", 982)]

HERE = "Cell In[5], line 3: dist.recv(x, src=1)"


# ---- where a rank stands -----------------------------------------------------------


EARLIER = [("/home/ada/earlier.py", 1)]
CRASH = "Fatal Python error: Segmentation fault\n\n"
EXTENSIONS = "Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)\n"


@pytest.mark.parametrize(
    ("dump", "line"),
    [
        (dump_of(MAIN), HERE),
        (dump_of(READERS_THREAD, WATCHING, MAIN), HERE),  # the main thread's line
        (dump_of(READERS_THREAD, MAIN, current=0), HERE),  # another got the signal
        (dump_of(WATCHING, EARLIER) + dump_of(WATCHING, MAIN), HERE),  # the newest
        (CRASH + dump_of(WATCHING, MAIN) + EXTENSIONS, HERE),
        (dump_of(WATCHING, MAIN).replace(" (most", " [python3] (most"), HERE),  # newer
        ("", None),
        ("nonsense", None),
        (dump_of(WATCHING), None),  # outside of the reader's code
        (dump_of(READERS_THREAD, WATCHING), None),
    ],
)
def test_the_line_of_the_readers_code_is_found(dump, line, cell_source):
    assert stacks.where(dump, LABELS) == line


def test_half_a_dump_breaks_nothing():
    dump = dump_of(WATCHING, MAIN)
    for size in range(len(dump)):
        results = stacks.where(dump[:size], LABELS)
        assert results is None or isinstance(results, str)


def outermost_frame(dump: str, labels: dict[str, str]) -> str | None:
    """A planted mistake: faulthandler's order is taken for a traceback's."""
    frames = [(f, int(n), None) for f, n in stacks._FRAME.findall(dump)]
    return stacks.innermost(frames, labels)


def first_frame(dump: str, labels: dict[str, str]) -> str | None:
    """A planted mistake: the innermost frame, whosever it is."""
    file, line = stacks._FRAME.findall(dump)[0]
    return f"{stacks.label(file, labels)}, line {line}"


@pytest.mark.parametrize("wrong", [outermost_frame, first_frame])
def test_wrong_readings_are_caught(wrong):
    calls_itself = [(TORCH, 2500), (CELL, 3), (CELL, 1)]
    assert stacks.where(dump_of(READERS_THREAD, calls_itself), LABELS) == HERE
    assert wrong(dump_of(READERS_THREAD, calls_itself), LABELS) != HERE


def really_dumped(file: str) -> str:
    """What this Python's faulthandler writes while a function of `file` runs."""
    names = {}
    exec(compile("def f(dump):\n    x = 1\n    dump()\n", file, "exec"), names)
    with tempfile.TemporaryFile("w+") as to:
        names["f"](lambda: faulthandler.dump_traceback(to, all_threads=True))
        to.seek(0)
        return to.read()


def without_pytests_frames(dump: str) -> str:
    """These tests are a reader's code, too."""
    return "".join(x for x in dump.splitlines(True) if __file__ not in x)


def test_this_pythons_own_dumps_are_understood():
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        dump = without_pytests_frames(really_dumped(CELL))
    finally:
        stop.set()
        other.join()
    assert dump.count("hread 0x") >= 2
    assert stacks.where(dump, LABELS) == HERE


def test_files_with_letters_beyond_ascii_are_found(tmp_path):
    """faulthandler writes them as \\xe9 or \\u65e5."""
    file = tmp_path / "José" / "train_日.py"
    file.parent.mkdir()
    file.write_text("def f(dump):\n    x = 1\n    dist.recv(x)\n", encoding="utf-8")
    dump = without_pytests_frames(really_dumped(str(file)))
    assert stacks.where(dump, {}) == "train_日.py, line 3: dist.recv(x)"


# ---- whose code it is --------------------------------------------------------------


def test_the_readers_and_the_courses_code_is_pointed_at_and_libraries_are_not():
    readers = [CELL, "/home/ada/train.py", "train.py", "<ipython-input-3-abcdef>"]
    readers += [
        str(PACKAGE / "train.py"),
        str(PACKAGE / "collectives/ring.py"),
        __file__,
    ]
    assert [file for file in readers if not stacks.is_user_code(file)] == []
    others = [
        TORCH,
        f"{STDLIB}/threading.py",
        f"{sysconfig.get_path('platlib')}/numpy/__init__.py",
        "/home/ada/.local/lib/python3.12/site-packages/lightning/trainer.py",
        "/usr/lib/python3/dist-packages/torch/nn/modules/module.py",
        "<string>",
        "<frozen importlib._bootstrap>",
        "<__array_function__ internals>",
        str(LAUNCHER / "rank.py"),
    ]
    assert [file for file in others if stacks.is_user_code(file)] == []


def test_lines_are_called_as_a_reader_knows_them():
    assert stacks.label(CELL, LABELS) == "Cell In[5]"
    assert stacks.label("/home/ada/train.py", LABELS) == "train.py"
    stage1 = str(PACKAGE / "zero/stage1.py")
    assert stacks.label(stage1, LABELS) == "ddp_course/zero/stage1.py"
    linecache.checkcache()  # as tracebacks do: a cell's source is not dropped
    frames = [("/home/ada/train.py", 1, "main()"), (CELL, 3, None), (TORCH, 1, "x()")]
    assert stacks.innermost(frames, LABELS) == HERE
    assert stacks.innermost([*frames, (stage1, 9, "y()")], LABELS) == HERE
    assert "stage1.py, line 9: y" in stacks.innermost([(stage1, 9, "y()")], LABELS)
    assert stacks.innermost([("/gone/train.py", 9, None)], {}) == "train.py, line 9"
    assert stacks.innermost([("/gone/a.py", 9, "  f()  ")], {}) == "a.py, line 9: f()"
    assert stacks.innermost([], {}) is None


# ---- tracebacks --------------------------------------------------------------------


def calls(file: Path | str, inner, source: str = "inner()"):
    """A function in `file` (which need not exist) that calls `inner`."""
    names = {"inner": inner}
    exec(compile(f"def outer():\n    {source}\n", str(file), "exec"), names)
    return names["outer"]


def fail() -> None:
    raise ValueError("at the bottom")


def told_about(fn) -> traceback.TracebackException:
    """The traceback of `fn`, which fails, as the launcher sees it."""
    try:
        calls(LAUNCHER / "rank.py", fn)()
    except BaseException as error:
        return traceback.TracebackException.from_exception(error)
    pytest.fail("nothing was raised")


def text_of(results: traceback.TracebackException) -> str:
    return "".join(results.format())


def test_the_launchers_frames_and_those_of_pytorchs_logging_are_dropped():
    logger = f"{sysconfig.get_path('purelib')}/torch/distributed/c10d_logger.py"
    results = told_about(calls(logger, calls(CELL, fail)))
    assert "launch/rank.py" in text_of(results), "the test has nothing to find"
    stacks.drop_launcher(results)
    files = [frame.filename for frame in results.stack]
    assert str(LAUNCHER / "rank.py") not in files and logger not in files
    assert files[-2:] == [CELL, __file__]
    assert text_of(results).endswith("ValueError: at the bottom\n")


def in_launcher(fn):
    return calls(LAUNCHER / "links.py", fn)


def raise_from() -> None:
    try:
        in_launcher(fail)()
    except ValueError as error:
        raise KeyError("above") from error


def raise_while_handling() -> None:
    try:
        in_launcher(fail)()
    except ValueError:
        raise KeyError("above")  # noqa: B904


def raise_thrice() -> None:
    try:
        in_launcher(raise_from)()
    except KeyError:
        in_launcher(raise_while_handling)()


def test_the_launchers_frames_are_dropped_from_chained_exceptions():
    results = told_about(in_launcher(raise_thrice))
    assert text_of(results).count("ddp_course/launch/") >= 3
    stacks.drop_launcher(results)
    assert "ddp_course/launch/" not in text_of(results)
    assert "at the bottom" in text_of(results)
    assert "KeyError" in text_of(results)


def test_dropping_only_from_the_last_exception_is_caught(monkeypatch):
    """A planted mistake: the chain is not followed."""

    def drop(message):
        message.stack[:] = [f for f in message.stack if str(LAUNCHER) not in f.filename]

    monkeypatch.setattr(stacks, "drop_launcher", drop)
    with pytest.raises(AssertionError):
        test_the_launchers_frames_are_dropped_from_chained_exceptions()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no exception groups before")
def test_the_launchers_frames_are_dropped_from_groups_of_exceptions():
    def raise_several() -> None:
        try:
            in_launcher(fail)()
        except ValueError as error:
            raise ExceptionGroup("several", [error]) from None  # noqa: F821

    results = told_about(raise_several)
    stacks.drop_launcher(results)
    assert "ddp_course/launch/" not in text_of(results)
    assert "at the bottom" in text_of(results)


def test_tracebacks_speak_of_cells():
    results = told_about(calls(CELL, fail))
    stacks.drop_launcher(results)
    text = stacks.relabel(text_of(results), LABELS | {"/tmp/other.py": "Cell In[6]"})
    assert "  Cell In[5], line 2, in outer\n    x = torch.zeros(1)\n" in text
    assert CELL not in text and "In[6]" not in text
    assert f'File "{__file__}"' in text

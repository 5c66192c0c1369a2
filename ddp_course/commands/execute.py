"""Run one notebook in this Python, and report the first failure in one line."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import re
import signal
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client import AsyncKernelManager, KernelClient
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbclient.output_widget import OutputWidget
from nbformat import NotebookNode

LONGEST = 100  # characters; a socket's name is this file's and a suffix, at most 107
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PLACE = re.compile(r"Cell In ?\[(\d+)\], line (\d+)")


@dataclass(frozen=True)
class Failure:
    """A failure of a notebook; `cell` counts code cells from 1, as `In [1]` does."""

    cell: int
    error: str
    place: tuple[int, int] | None = None  # cell and line in which it happened
    source: str = ""  # the text of that line

    def __str__(self) -> str:
        """Return place and error in one line."""
        story = f"cell {self.cell}"
        if self.place:
            cell, line = self.place
            story += "" if cell == self.cell else f", through cell {cell}"
            story += f", line {line}: `{self.source}`"
        return f"{story}: {self.error}"


def read_notebook(path: Path) -> NotebookNode:
    """Return the notebook as it is stored.

    Nothing is converted, since a conversion would draw random cell ids. Fields that
    other programs may omit from a cell are added, with empty values. Raises ValueError
    if the file is no notebook, or cannot be read.
    """
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["nbformat"] != 4:
            raise ValueError("not a notebook of format 4")
        for cell in stored["cells"]:
            code = {"outputs": [], "execution_count": None}
            usual = code if cell["cell_type"] == "code" else {}
            for name, value in ({"metadata": {}, "source": ""} | usual).items():
                cell.setdefault(name, value)
        return nbformat.v4.reads(json.dumps(stored))
    except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"not a notebook ({error})") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None


class OwnSockets:
    """A mixin for kernel managers: sockets are files in a private folder, not ports.

    Jupyter itself looks for free ports and lets the kernel open them a second later.
    By then, a rank that somebody starts on this machine may have taken such a port. (If
    the folder's name is too long for a socket, ports are used nevertheless.)
    """

    def __init__(self, **options: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ddp-")
        file = str(Path(self._folder.name, "k.json"))
        short = len(file) <= LONGEST
        transport = "ipc" if short else "tcp"
        super().__init__(transport=transport, connection_file=file, **options)

    def cleanup_connection_file(self) -> None:
        """Remove the folder when the kernel has ended and will not restart."""
        self._folder.cleanup()


class ThisPython(OwnSockets, AsyncKernelManager):
    """A kernel of the Python that runs this command, whatever kernels are installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        """The specification of the kernel."""
        return KernelSpec(**get_kernel_dict(["--IPKernelApp.log_level=CRITICAL"]))


class SilentOutput(OutputWidget):
    """An output widget that discards its outputs, since they are not stored.

    nbclient's own class reports each output to the kernel, on the channel on which the
    kernel replies to the cell. Now and then nbclient misses this reply, and waits
    forever.
    """

    def output(self, *_: Any) -> None:
        """Discard an output."""

    def clear_output(self, *_: Any) -> None:
        """Ignore the request: no output is kept."""


class Client(NotebookClient):
    """A client that shuts down cleanly at Ctrl-C or `kill`, its kernel included.

    nbclient's own handler removes the kernel while the client still talks to it.
    """

    stopped = False

    async def async_start_new_kernel(self, **kwargs: Any) -> None:
        """Start the kernel; from now on, a signal stops it."""
        task = asyncio.current_task()

        def stop() -> None:
            if not self.stopped:
                self.stopped = True
                task.cancel()

        with contextlib.suppress(RuntimeError):  # Windows, or not the main thread
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, stop)
        await super().async_start_new_kernel(**kwargs)

    async def async_start_new_kernel_client(self) -> KernelClient:
        """Connect to the kernel; if it is dead, cancel nbclient's cleanup at exit."""
        try:
            return await super().async_start_new_kernel_client()
        except RuntimeError:
            atexit.unregister(self._cleanup_kernel)
            raise


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """Return the cells that are run, in order: code cells that are not empty."""
    return [c for c in notebook.cells if c.cell_type == "code" and c.source.strip()]


def must_raise(cell: NotebookNode) -> bool:
    """Return whether a cell has the tag that says it must raise."""
    return "raises-exception" in cell.metadata.get("tags", [])


def execute(
    notebook: NotebookNode,
    folder: Path,
    timeout: int = 600,
    cell_done: Callable[[], None] = lambda: None,
) -> Failure | None:
    """Run all cells of `notebook`, in place; return the first failure, if any.

    The cells run in `folder`, each for at most `timeout` seconds; no file is written. A
    cell with the tag `raises-exception` fails if it does not raise. Raises
    KeyboardInterrupt after Ctrl-C or `kill`.
    """
    begun: list[NotebookNode] = []
    client = Client(
        notebook,
        kernel_manager_class=ThisPython,
        timeout=timeout,
        startup_timeout=300,  # seconds; 60 by default, which a busy machine may need
        resources={"metadata": {"path": str(folder)}},
        store_widget_state=False,
        record_timing=False,
        coalesce_streams=True,
        on_cell_execute=lambda cell, cell_index: begun.append(cell),
        on_cell_executed=lambda cell, cell_index, execute_reply: cell_done(),
    )
    client.widget_registry["@jupyter-widgets/output"]["OutputModel"] = SilentOutput
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    error, place = None, None
    try:
        client.execute()
    except CellExecutionError as raised:
        error = f"{raised.ename}: {raised.evalue}"
        place = _place(raised.traceback, len(begun))
    except CellTimeoutError:
        error = f"still running after {timeout} s"
    except (asyncio.CancelledError, RuntimeError) as raised:
        if client.stopped:
            raise KeyboardInterrupt from None
        error = str(raised)  # "Kernel died", or the kernel did not start
    if error:
        error = textwrap.shorten(error, 300, placeholder="...")  # one line
        return Failure(len(begun), error, place, _line(begun, place))
    for number, cell in enumerate(code_cells(notebook), start=1):
        if must_raise(cell) and all(o.output_type != "error" for o in cell.outputs):
            story = "its tag says that it raises an exception, but it did not"
            return Failure(number, story)
    return None


def without_colours(text: str) -> str:
    """Return a traceback's text without its colour codes."""
    return _COLOURS.sub("", text)


def _place(traceback: str, failed: int) -> tuple[int, int] | None:
    """Return (cell, line) from a traceback, in the failed cell if it is mentioned."""
    found = _PLACE.findall(without_colours(traceback))
    places = [(int(cell), int(line)) for cell, line in found]
    return next((p for p in places if p[0] == failed), places[0] if places else None)


def _line(cells: list[NotebookNode], place: tuple[int, int] | None) -> str:
    cell, line = place or (0, 0)
    lines = cells[cell - 1].source.split("\n") if 0 < cell <= len(cells) else []
    return lines[line - 1].strip() if 0 < line <= len(lines) else ""

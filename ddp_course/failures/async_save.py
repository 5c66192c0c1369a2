"""Saving while training goes on: a copy in memory, which a thread writes to the disk.

    snapshot          copy a state; an optimizer's step does not change the copy
    BackgroundWriter  copy, let a thread write, report the thread's error

A thread that wrote the tensors themselves could mix several steps in one file, since
training changes them meanwhile. Only the copy delays training. It takes as much memory
as the state that this rank saves. The newest file is older than with a save that waits:
if the process is killed, the work since the last *finished* save is lost. PyTorch:
torch/distributed/checkpoint, `async_save`. Chapter 19.
"""

from collections.abc import Callable, Mapping
from threading import Thread
from typing import Any

from torch import Tensor


def snapshot(state: Any, memory: Any = None) -> Any:
    """Return a copy of a (nested) state, with its tensors on the CPU.

    `memory` is an earlier snapshot that nobody needs any more: a tensor of the same
    shape and type, at the same keys, is copied into it, which saves allocating. (Lists
    and tuples are always allocated anew, as lists.)
    """
    if isinstance(state, Tensor):
        fits = isinstance(memory, Tensor) and (
            (memory.shape, memory.dtype) == (state.shape, state.dtype)
        )
        if fits:
            return memory.copy_(state.detach())
        return state.detach().to("cpu", copy=True)
    if isinstance(state, Mapping):
        old = memory if isinstance(memory, Mapping) else {}
        return {key: snapshot(value, old.get(key)) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [snapshot(value) for value in state]
    return state


class BackgroundWriter:
    """A writer of snapshots, in a thread, one after another.

    A save waits until the previous one is written, so there is never more than one
    snapshot, and files appear in order. If the thread raised an error, the next `save`
    or `wait` raises it; call `wait` before the process ends.

    Args:
        write: called in the thread with the snapshot and `save`'s other arguments.
    """

    def __init__(self, write: Callable[..., None]) -> None:
        self.write = write
        self._thread: Thread | None = None
        self._error: BaseException | None = None
        self._memory: Any = None

    def save(self, state: Any, *args: Any) -> None:
        """Copy `state`, and let a thread call `write(copy, *args)`."""
        self.wait()
        self._memory = snapshot(state, self._memory)
        self._thread = Thread(target=self._run, args=(self._memory, *args))
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last save is written; raise its error if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, *args: Any) -> None:
        try:
            self.write(*args)
        except BaseException as error:
            self._error = error

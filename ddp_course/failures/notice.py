"""SIGTERM, a notice that the machine will be taken away: save, then leave.

A scheduler sends SIGTERM and, some seconds later, SIGKILL. The signal may come in the
middle of a step, to one rank and not to others, or to all at different moments. So the
handler only notes the signal. The note is sent with the loss, which is averaged over
all ranks after every step anyway: all ranks learn of the signal after the same step,
without another message. Then all ranks save together, and leave. Chapter 19.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor


class Notice:
    """A context in which SIGTERM is noted, and does not end the process.

        with Notice() as notice:
            for step in range(steps):
                ...
                loss = notice.share(loss, average)
                if notice.agreed:
                    save()
                    break

    Attributes:
        noted: when this process got the signal (`time.monotonic`); None before.
        agreed: whether any rank had noted the signal when `share` was called last.

    Python can install handlers in the main thread only; in another thread, a `Notice`
    notes nothing.
    """

    def __init__(self) -> None:
        self.noted: float | None = None
        self.agreed = False
        self._before: Any = None

    def __enter__(self) -> Self:
        """Install the handler."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Restore the handler; resend a signal if the ranks have not agreed on it."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            if self.noted is not None and not self.agreed:
                os.kill(os.getpid(), signal.SIGTERM)

    def _note(self, *_: object) -> None:
        if self.noted is None:
            self.noted = time.monotonic()

    def share(self, loss: Tensor, average: Callable[[Tensor], Tensor]) -> float:
        """Average the loss and the note in one message; set `agreed`; return the loss.

        `average` replaces a tensor by its mean over the ranks and returns it.
        """
        noted = loss.new_tensor(float(self.noted is not None))
        mean, noted_by = average(torch.stack([loss, noted])).tolist()
        self.agreed = noted_by > 0
        return mean

"""Slow lines: delay a rank's messages as the links of an emulated cluster would.

A rank that was started with `spawn(..., links=...)` has one line to all ranks on other
nodes and one to the ranks on its own node, like a machine with one network card. Only
messages of this course are delayed, not PyTorch's. Waiting takes no CPU. Chapters 01
and 03.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

from ddp_course.launch import wire
from ddp_course.launch.links import Link, Links, current_links
from ddp_course.launch.topology import here


def install() -> None:
    """Delay this rank's messages according to the `links` argument of `spawn`."""
    links, place = current_links(), here()
    if links == Links():
        return
    inside, between = (
        None if link == Link() else Line(link) for link in (links.inside, links.between)
    )
    wire.use_lines(lambda rank: inside if place.same_node(rank) else between)


class Line:
    """A link with latency and bandwidth, which messages pass one after the other.

    A message occupies the line for bytes / bandwidth and arrives `latency` later;
    meanwhile the next message may leave. A thread waits, without using the CPU.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.free = 0.0  # the time at which the last message has left the line
        self.lock = threading.Lock()  # several threads may send
        self.waiting: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._carry, daemon=True, name="slow line").start()

    def send(self, start: Callable[[], Any], nbytes: int) -> Any:
        """Call `start`, which sends the message, at the time when it would arrive.

        Returns a handle with `wait`.
        """
        started: Future[Any] = Future()
        self.waiting.put((self._arrival(nbytes), start, started))
        return _Delayed(started)

    def pass_by(self, nbytes: int) -> None:
        """Sleep until the message would arrive.

        Used where delaying the send itself would reorder messages.
        """
        time.sleep(max(0.0, self._arrival(nbytes) - time.monotonic()))

    def _arrival(self, nbytes: int) -> float:
        with self.lock:
            start = max(self.free, time.monotonic())
            self.free = start + nbytes / self.link.bandwidth
            return self.free + self.link.latency

    def _carry(self) -> None:
        while True:
            at, start, started = self.waiting.get()
            time.sleep(max(0.0, at - time.monotonic()))
            try:
                started.set_result(start())
            except BaseException as error:  # raised again in the thread that waits
                started.set_exception(error)


class _Delayed:
    def __init__(self, started: Future[Any]) -> None:
        self.started = started

    def wait(self, *patience: timedelta) -> None:
        self.started.result().wait(*patience)

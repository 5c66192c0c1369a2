"""Slow lines: how a rank's messages take the time that its links say.

A rank that was started with `spawn(..., links=...)` has one line to all ranks on other
nodes, and one to those on its own, as a machine with one network card has. Waiting
takes no CPU. Chapters 01 and 03.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

from ddp_course.launch import wire
from ddp_course.launch.links import Link, Links, links_here
from ddp_course.launch.topology import here


def install() -> None:
    """Let this rank's messages take as long as the links say that it started with."""
    links, place = links_here(), here()
    if links == Links():
        return
    inside, between = (
        None if link == Link() else Line(link) for link in (links.inside, links.between)
    )
    wire.use_lines(lambda rank: inside if place.same_node(rank) else between)


class Line:
    """A link that takes its time: messages pass one after the other, in order.

    A message occupies the line for bytes / bandwidth and arrives `latency` later; the
    next one may follow meanwhile. A thread waits for that time, without using the CPU.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.free = 0.0  # the time at which the last message so far has left
        self.lock = threading.Lock()  # several threads may send
        self.waiting: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._carry, daemon=True, name="slow line").start()

    def send(self, start: Callable[[], Any], nbytes: int) -> Any:
        """Call `start`, which sends the message, at the time when it arrives."""
        started: Future[Any] = Future()
        self.waiting.put((self._arrival(nbytes), start, started))
        return _Delayed(started)

    def pass_by(self, nbytes: int) -> None:
        """Sleep for the message's time; delaying the send instead would reorder it."""
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
            except BaseException as error:  # tell whoever waits
                started.set_exception(error)


class _Delayed:
    def __init__(self, started: Future[Any]) -> None:
        self.started = started

    def wait(self, *patience: timedelta) -> None:
        self.started.result().wait(*patience)

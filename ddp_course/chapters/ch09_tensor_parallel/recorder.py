"""Record when a rank computes: between the calls in which it may wait."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from ddp_course.measure import Event, EventLog

WAITING = "send", "recv", "broadcast"  # functions of torch.distributed


def computing(step: Callable[[], Any]) -> list[Event]:
    """Call `step`; return an event of lane "compute" for each interval between waits.

    `step` must call the functions named in WAITING as `dist.send` and so on.
    """
    log, working = EventLog(), ExitStack()

    def begin() -> None:
        working.enter_context(log.span("compute", lane="compute"))

    def pausing(call: Callable[..., Any]) -> Callable[..., Any]:
        def waits(*args: Any, **kwargs: Any) -> Any:
            working.close()  # the event ends
            result = call(*args, **kwargs)
            begin()
            return result

        return waits

    waits = {name: pausing(getattr(dist, name)) for name in WAITING}
    with patch.multiple(dist, **waits), working:
        begin()
        step()
    return log.events

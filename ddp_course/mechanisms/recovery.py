"""Parts of an engine with which ranks show each other flags after every averaged pass.

    Recovery     ends passes which broke off in an error, and compares who went on
    AgreeUnused  finds the parameters that no rank had a gradient for

If a forward or backward raises on one rank, and the program catches it and skips the
batch, the other ranks wait for the buckets that this rank has not sent; and from then
on it would average another batch than they do. So before the next pass this part sends
what is missing, and after every averaged pass the ranks compare how many of their
passes have failed: either all skip a batch, or none. Chapter 05.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from ddp_course.launch.deadlock import CollectiveError, by_text


class Recovery:
    """Counts failed passes, ends broken ones, and lets ranks compare flags.

    `show` is what other parts call after an averaged pass, once and on all ranks, to
    show their flags; it compares the counts, too.

    Args:
        group: the ranks that average; None are all.
        exchange: takes this rank's text, and returns the texts of all ranks; they are
            equally long. It is called in every pass.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        exchange: Callable[[str], Sequence[str]],
    ) -> None:
        self.group, self.exchange = group, exchange
        self.failed = 0  # forwards and backwards that ended in an error
        self._in_forward = False

    def before_forward(self, model: Any) -> None:
        """Count the last forward if it has not ended; end the last backward."""
        self.failed += self._in_forward
        self._in_forward = True
        model.engine.recover()

    def after_forward(self, model: Any, output: Any) -> None:
        """Note that this forward has not failed."""
        self._in_forward = False

    def backward_broke(self, engine: Any) -> None:
        """Send the buckets that a broken pass has left: other ranks wait for them.

        Raises CollectiveError, on every rank, if it did not break off on all of them.
        """
        self.failed += 1
        for bucket in engine.buckets[engine.next :]:
            engine.launch(bucket)
        engine.wait()
        self.show([slot.fresh for slot in engine.slots])

    def show(self, flags: Sequence[bool]) -> list[str]:
        """Return every rank's flags, a "1" or "0" each; compare the failed passes.

        A rank that goes on after an error which the others did not have is a step ahead
        of them, and averages another batch: raises CollectiveError, on every rank, if
        the numbers of failed passes differ.
        """
        own = "".join("01"[bool(flag)] for flag in flags)
        shown = self.exchange(f"{self.failed:8}{own}")
        counts = [str(int(text[:8])) for text in shown]
        if len(set(counts)) > 1:
            ranks = dist.get_process_group_ranks(self.group or dist.group.WORLD)
            which = by_text(counts, ranks, text_first=True)
            raise CollectiveError(
                f"forwards and backwards that ended in an error: {which}. The "
                "gradients are of different steps: let all ranks skip a batch, or none"
            )
        return [text[8:] for text in shown]


class AgreeUnused:
    """Sets `engine.reducer.unused` after every averaged pass.

    A parameter that no rank had a gradient for keeps `grad` None, as in one process, so
    that neither weight decay nor momentum moves it. Where only some ranks had a
    gradient, zero counts for the others. Chapters 05 and 07.

    `show(flags)` returns what all ranks show: a "1" or "0" for each flag, one string
    per rank (`Recovery.show`).
    """

    def __init__(self, show: Callable[[Sequence[bool]], list[str]]) -> None:
        self.show = show

    def after_reduction(self, engine: Any) -> None:
        """Compare which parameters have had a gradient, now or in an earlier pass."""
        slots = engine.slots
        notes = self.show([s.fresh or s.parameter.grad is not None for s in slots])
        columns = zip(slots, zip(*notes, strict=True), strict=True)
        unused = (slot.parameter for slot, column in columns if "1" not in column)
        engine.reducer.unused = frozenset(unused)

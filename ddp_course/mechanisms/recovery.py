"""Parts of an engine with which ranks exchange flags after every averaged pass.

    Recovery     completes passes that ended in an error, and compares their numbers
    AgreeUnused  finds the parameters for which no rank had a gradient

If a forward or backward raises on one rank, and the program catches it and skips the
batch, the other ranks wait for the buckets that this rank has not sent; and from then
on this rank would average another batch than the others. So before the next pass
`Recovery` sends the missing buckets, and after every averaged pass the ranks compare
how many of their passes have failed: either all skip a batch, or none. Chapter 05.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from ddp_course.launch.deadlock import CollectiveError, by_text


class Recovery:
    """A part that counts failed passes, completes them, and lets ranks compare flags.

    Other parts call `show` after an averaged pass, once and on all ranks, to exchange
    their flags; it compares the counts, too.

    Args:
        group: the ranks that average; None: all ranks.
        exchange: all-gathers a text; the ranks' texts have the same length. It is
            called in every pass.
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
        """Count a forward that did not end as failed; complete a failed backward."""
        self.failed += self._in_forward
        self._in_forward = True
        model.engine.recover()

    def after_forward(self, model: Any, output: Any) -> None:
        """Record that this forward has not failed."""
        self._in_forward = False

    def backward_broke(self, engine: Any) -> None:
        """Send the buckets of a failed pass: other ranks wait for them.

        Raises CollectiveError, on every rank, if the pass did not fail on all ranks.
        """
        self.failed += 1
        for bucket in engine.buckets[engine.next :]:
            engine.launch(bucket)
        engine.wait()
        self.show([slot.fresh for slot in engine.slots])

    def show(self, flags: Sequence[bool]) -> list[str]:
        """Return every rank's flags, a "1" or "0" each; compare the failed passes.

        Raises CollectiveError, on every rank, if the numbers of failed passes differ: a
        rank that continues after an error of its own averages another batch than the
        other ranks.
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
    """A part that sets `engine.reducer.unused` after every averaged pass.

    A parameter for which no rank had a gradient keeps `grad` None, as in one process,
    so that neither weight decay nor momentum changes it. If only some ranks had a
    gradient, the other ranks contribute zeros. Chapters 05 and 07.

    `show(flags)` returns one string per rank, with a "1" or "0" for each of its flags
    (`Recovery.show`).
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

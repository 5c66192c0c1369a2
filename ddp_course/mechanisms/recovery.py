"""A part that ends passes which broke off in an error, and compares who went on.

If a forward or backward raises on one rank, and the program catches it and skips the
batch, the other ranks wait for the buckets that this rank has not sent; and from then
on it would average another batch than they do. So before the next pass this part sends
what is missing, and after every averaged pass the ranks compare how many of their
passes have failed: either all skip a batch, or none. Chapter 05.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from ddp_course.collectives.communicator import CollectiveError, communicator
from ddp_course.launch.deadlock import by_text


class Recovery:
    """Counts failed passes, ends broken ones, and lets ranks compare flags.

    `show` is what other parts call after an averaged pass, once and on all ranks, to
    show their flags; it compares the counts, too (`AgreeUnused` takes it).
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
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

        Raises CollectiveError, on every rank, if some ranks have had more failures.
        """
        return shown_by_all(flags, self.group, self.failed)


class AgreeUnused:
    """A part that finds the parameters that no rank had a gradient for.

    Such a parameter keeps `grad` None, as in one process, so that neither weight decay
    nor momentum moves it. Where only some ranks had a gradient, zero counts for the
    others. After every averaged pass this part sets `engine.reducer.unused`.
    `show(flags)` returns what all ranks show: a "1" or "0" for each flag, one string
    per rank (`Recovery.show`). Chapters 05 and 07.
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


# ---- flags --------------------------------------------------------------------------


def shown_by_all(
    flags: Sequence[bool],
    group: dist.ProcessGroup | None,
    failed: int = 0,
) -> list[str]:
    """Return what each rank of the group shows: a "1" or "0" for each of its flags.

    Call it on all ranks, equally often. The flags travel as notes do on which ranks
    agree before they send: in shared memory on one machine, within microseconds.

    `failed` is how many passes have ended in an error that the caller has caught. Who
    goes on after one alone is a step ahead of the others, and averages another batch:
    raises CollectiveError, on every rank, if these numbers differ.
    """
    own = "".join("01"[bool(flag)] for flag in flags)
    comm = communicator(group)
    shown, counts = zip(*comm.agree_now("flags", show=(own, failed)), strict=True)
    if len(set(counts)) > 1:
        told = by_text([*map(str, counts)], comm.ranks, text_first=True)
        raise CollectiveError(
            f"forwards and backwards that ended in an error: {told}. The gradients are "
            "of different steps: let all ranks skip a batch, or none"
        )
    return list(shown)


def on_any_rank(
    flags: Sequence[bool], group: dist.ProcessGroup | None, failed: int = 0
) -> list[bool]:
    """Return which flags are set on one rank at least, by what `shown_by_all` says."""
    notes = shown_by_all(flags, group, failed)
    return ["1" in column for column in zip(*notes, strict=True)]

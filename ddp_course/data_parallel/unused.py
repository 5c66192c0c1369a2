"""Parameters without a gradient: an expert that got no token, a head of another task.

Other ranks may have a gradient for such a parameter, so its slot in the bucket is sent,
filled with zeros. When all buckets have arrived, the ranks tell each other which
gradients they had (through shared memory if they are on one machine). Then
`find_unused_parameters` decides:

    True   a parameter for which some rank had a gradient gets the mean; one for which
           no rank had a gradient keeps its `grad`, usually None, so that no weight
           decay or momentum changes it
    False  if only some ranks had a gradient for a parameter, all ranks raise the same
           error: the mean would be wrong

If all ranks miss the same gradients in a pass, another pass may compute them (two
losses, two calls of `backward`); if none does, the next forward raises. Chapter 05.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddp_course.mechanisms.engine import Engine
from ddp_course.mechanisms.graph import leaves_below, tensors_in

ADVICE = (
    "All parameters must take part in the loss. If they need not, pass "
    "find_unused_parameters=True."
)
SHOWN = 10  # the most parameters that a message names; it counts the rest


class UnusedParametersError(RuntimeError):
    """Parameters got no gradient; every rank raises it, with the same text."""


class UnusedParameters:
    """A part of DDP that allows parameters without a gradient, or raises for them.

    Args:
        show: `show(flags)` exchanges flags and returns one string for each rank, with
            a "1" or "0" for each flag (`recovery.Recovery.show`).
        find: allow parameters without a gradient.
    """

    def __init__(self, show: Callable[[Sequence[bool]], list[str]], find: bool) -> None:
        self.show, self.find = show, find
        self.notes: list[str] = []  # each rank's flags after the last pass
        # names of parameters without a gradient since the last forward
        self.owed: list[str] | None = None
        self._reached: set[int] = set()  # ids of parameters that the outputs depend on
        self._passed = True  # whether a pass has ended since `_reached` was filled

    def before_forward(self, model: Any) -> None:
        """Raise UnusedParametersError if a parameter got no gradient on any rank."""
        if not (torch.is_grad_enabled() and model.require_backward_grad_sync):
            return
        owed, self.owed = self.owed, None
        if owed:
            raise UnusedParametersError(
                f"no rank had a gradient for {_list(owed)} since the last forward. "
                + ADVICE
            )

    def after_forward(self, model: Any, output: Any) -> None:
        """Record the parameters that a backward from this output can reach."""
        if self.find and torch.is_grad_enabled():
            if self._passed:
                self._reached, self._passed = set(), False
            self._reached |= leaves_below(tensors_in(output))

    def before_backward(self, engine: Engine) -> None:
        """Fill the slots of parameters that this pass cannot reach."""
        if self.find:
            pack = engine.reducer.pack_missing
            engine.fill(pack, lambda slot: id(slot.parameter) not in self._reached)

    def after_reduction(self, engine: Engine) -> None:
        """Exchange with the other ranks which parameters had a gradient."""
        self._passed, slots = True, engine.slots
        self.notes = self.show([slot.fresh for slot in slots])
        columns = zip(slots, zip(*self.notes, strict=True), strict=True)
        unused = (slot.parameter for slot, column in columns if "1" not in column)
        engine.reducer.unused = frozenset(unused)

    def after_backward(self, engine: Engine) -> None:
        """Raise UnusedParametersError if ranks had gradients for different parameters.

        Parameters for which no rank had a gradient are recorded in `owed`: another pass
        may reach them.
        """
        if self.find:
            return
        names = [slot.name for slot in engine.slots]
        missing = [
            [name for name, flag in zip(names, note, strict=True) if flag == "0"]
            for note in self.notes
        ]
        if all(other == missing[0] for other in missing):
            before = missing[0] if self.owed is None else self.owed
            self.owed = [name for name in missing[0] if name in before]
            return
        self.owed = None
        ranks = dist.get_process_group_ranks(engine.reducer.group)
        pairs = zip(ranks, missing, strict=True)
        lists = "; ".join(f"rank {rank}: {_list(m)}" for rank, m in pairs if m)
        raise UnusedParametersError(
            f"some ranks had no gradient for parameters for which others had one: "
            f"{lists}. The gradients of this step are wrong. {ADVICE}"
        )


def _list(names: Sequence[str]) -> str:
    """Return up to SHOWN names; buckets hold them in reverse order of registration."""
    names = names[::-1]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more

"""Parameters without a gradient: an expert that got no token, a head of another task.

The other ranks may have a gradient for such a parameter, so its place in the bucket is
sent, filled with zeros. When all buckets have arrived, every rank shows which gradients
it has had: on one machine in shared memory, where ranks agree on everything else. Then
it depends on `find_unused_parameters`:

    True   whatever some rank had a gradient for gets the mean; what none had one for
           keeps the `grad` that it has, None most often, so that no weight decay or
           momentum moves it
    False  if some had a gradient that others had not, all raise the same error instead
           of going on with a mean that is none

If all ranks miss the same gradients in a pass, another pass may bring them (two losses,
two calls of `backward`); if it does not, the next forward raises. Chapter 05.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddp_course.mechanisms.engine import Engine
from ddp_course.mechanisms.hooks import leaves_below, tensors_in

ADVICE = (
    "All parameters must take part in the loss. If they need not, pass "
    "find_unused_parameters=True."
)
SHOWN = 10  # of more parameters only the number is told


class UnusedParametersError(RuntimeError):
    """Parameters got no gradient; every rank raises it, with the same text."""


class UnusedParameters:
    """A part of DDP that lets unused parameters alone, or refuses them.

    Args:
        show: `show(flags)` returns what all ranks show: one string for each rank, with
            a "1" or "0" for each flag (`recovery.Recovery.show`).
        find: allow parameters without a gradient.
    """

    def __init__(self, show: Callable[[Sequence[bool]], list[str]], find: bool) -> None:
        self.show, self.find = show, find
        self.notes: list[str] = []  # of all ranks, after the last pass
        self.owed: list[str] | None = None  # without a gradient since the last forward
        self._reached: set[int] = set()  # ids of parameters below the outputs
        self._passed = True  # a pass has ended since the outputs were looked at

    def before_forward(self, model: Any) -> None:
        """Raise UnusedParametersError if the last backward passes left something."""
        if not (torch.is_grad_enabled() and model.require_backward_grad_sync):
            return
        owed, self.owed = self.owed, None
        if owed:
            raise UnusedParametersError(
                f"no rank had a gradient for {_list(owed)} since the last forward. "
                + ADVICE
            )

    def after_forward(self, model: Any, output: Any) -> None:
        """Find the parameters that a backward from this output can reach."""
        if self.find and torch.is_grad_enabled():
            if self._passed:
                self._reached, self._passed = set(), False
            self._reached |= leaves_below(tensors_in(output))

    def before_backward(self, engine: Engine) -> None:
        """Do not wait for gradients that this pass cannot bring."""
        if self.find:
            without = engine.reducer.without
            engine.fill(without, lambda slot: id(slot.parameter) not in self._reached)

    def after_reduction(self, engine: Engine) -> None:
        """Compare with the other ranks which parameters have had a gradient."""
        self._passed, slots = True, engine.slots
        self.notes = self.show([slot.fresh for slot in slots])
        columns = zip(slots, zip(*self.notes, strict=True), strict=True)
        unused = (slot.parameter for slot, column in columns if "1" not in column)
        engine.reducer.unused = frozenset(unused)

    def after_backward(self, engine: Engine) -> None:
        """Raise UnusedParametersError if some ranks had gradients that others had not.

        What no rank had is remembered: another pass may bring it.
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
        named = "; ".join(f"rank {rank}: {_list(m)}" for rank, m in pairs if m)
        raise UnusedParametersError(
            f"other ranks had gradients for parameters that these had none for: {named}"
            f". The gradients of this step are of no use. {ADVICE}"
        )


def _list(names: Sequence[str]) -> str:
    """Name some, in the order of their registration: buckets are in the reverse one."""
    names = names[::-1]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more

"""Can this optimizer step a part of a tensor alone? It is tried out on a small one.

A shard may begin in the middle of a matrix. AdamW does not mind: what it makes of an
element depends on that element's own numbers. Most optimizers are *elementwise* like
that (SGD, Adam and its relatives, Adagrad, RMSprop, Lion, ...). Others look at a whole
tensor: Adafactor at its rows and columns, LAMB at its norm, Muon at its singular
vectors. On parts of a tensor they would do something else, and nobody would notice.

No list of names could be complete, as everybody may write an optimizer. So a small
matrix is stepped as a whole, and in two parts: is that the same? Chapter 07.

If the model is sharded, and not the optimizer, an optimizer of any class may be
constructed later. PyTorch has one hook for the steps of all optimizers. In it `Stepped`
tries out each optimizer once, before it changes a piece. Chapter 08.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

SHAPE, CUT, STEPS = (4, 6), 7, 3  # a cut in the second row
LR = 0.1  # the real one may be 0 at first, with which everything is the same


class NotElementwiseError(ValueError):
    """The optimizer looks at whole tensors, so it cannot step parts of them."""


def check_elementwise(
    optimizer_class: Callable[..., Optimizer],
    options: dict[str, Any],
    defaults: dict[str, Any],
    device: torch.device,
    remedy: str = "NaiveZeroRedundancyOptimizer leaves tensors whole",
) -> None:
    """Raise NotElementwiseError if parts are stepped otherwise than the whole.

    `options` are those of a parameter group, `defaults` the arguments of the optimizer.
    """

    def refused(why: str) -> NotElementwiseError:
        name = getattr(optimizer_class, "__name__", repr(optimizer_class))
        return NotElementwiseError(
            f"optimizer_class is {name}, which cannot step parts of a tensor: {why}. "
            f"{remedy}"
        )

    start = torch.linspace(-1, 1, 24, device=device)

    def stepped(first: int, last: int, shape: tuple[int, ...]) -> tuple:
        """Step the elements [first, last); each part has an optimizer of its own.

        One of both parts could not show a norm that is taken over all parameters.
        """
        parameter = nn.Parameter(start[first:last].clone().view(shape))
        optimizer = optimizer_class([{**options, "params": [parameter]}], **defaults)
        if "lr" in (only := optimizer.param_groups[0]):
            only["lr"] = only["lr"] * 0 + LR  # a tensor stays one
        for gradient in _gradients(start):
            parameter.grad = gradient[first:last].clone().view(shape)
            optimizer.step()
        return parameter.detach().flatten(), optimizer

    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        try:
            whole, optimizer = stepped(0, 24, SHAPE)
            halves = stepped(0, CUT, (CUT,))[0], stepped(CUT, 24, (24 - CUT,))[0]
        except Exception as error:  # whatever somebody's optimizer raises
            raise refused(f"it says {error!r}") from None
    parts = torch.cat(halves)
    if not torch.allclose(whole, parts, rtol=1e-4, atol=1e-6):
        raise refused("tried on two parts it made another step")
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape not in ((), SHAPE):
                of = f"the shape {[*value.shape]} for a parameter of {[*SHAPE]}"
                raise refused(f"its state {name} has {of}")


def _gradients(like: Tensor) -> Iterator[Tensor]:
    """Yield gradients of quite different sizes: an optimizer may have thresholds."""
    for step in range(STEPS):
        wave = torch.cos(torch.arange(like.numel(), device=like.device) + 2.0 * step)
        yield wave * 10.0 ** (step - 1)


# ---- optimizers of a sharded model --------------------------------------------------

REMEDY = (
    "Take one that steps each element alone (SGD, AdamW, ...), or "
    "DistributedDataParallel, which leaves tensors whole"
)
tried: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class Stepped:
    """A part that refuses optimizer steps that would be wrong in silence.

    These are steps of optimizers that look at whole tensors, of empty parameter groups,
    and steps without a backward pass.

    Attributes:
        waits: a forward was recorded, and no backward has come since.
    """

    waits = False

    def constructed(self, fsdp: Any) -> None:
        """Mark the pieces, and watch the steps of all optimizers."""
        _watch()
        for piece in fsdp.pieces.values():
            piece.stepped = weakref.ref(self)

    def after_forward(self, fsdp: Any) -> None:
        """Note that a backward should come."""
        self.waits = torch.is_grad_enabled()

    def before_backward(self, fsdp: Any) -> None:
        """Note that it has come."""
        self.waits = False


@functools.cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise an error for an optimizer that would step pieces wrongly."""
    groups = optimizer.param_groups
    pieces = [p for group in groups for p in group["params"] if hasattr(p, "stepped")]
    if not pieces:
        return
    part = pieces[0].stepped()
    if part and part.waits and all(piece.grad is None for piece in pieces):
        raise RuntimeError(
            "no parameter has a gradient, though a forward was recorded: no backward "
            "has come to the sharded module. backward(inputs=...) and autograd.grad "
            "do not reach parameters(), which are pieces: call loss.backward()"
        )
    if optimizer in tried:
        return
    if not all(group["params"] for group in groups):
        raise RuntimeError(
            "a parameter group of this optimizer is empty. Pieces of parameters are "
            "vectors: p.dim() is 1 for each, so choose groups by name, or by the shape "
            "that the plain module's parameters had"
        )
    for group in groups:
        _try_out(type(optimizer), group, optimizer.defaults)
    tried.add(optimizer)


def _try_out(kind: type[Optimizer], group: dict, defaults: dict[str, Any]) -> None:
    """Raise NotElementwiseError if the class does other steps with parts of tensors."""
    options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    known = inspect.signature(kind.__init__).parameters
    taken = {name: value for name, value in defaults.items() if name in known}
    device = group["params"][0].device
    try:
        kind([{**options, "params": [nn.Parameter(torch.zeros(1))]}], **taken)
    except Exception:  # it takes other arguments: it cannot be tried out
        return
    check_elementwise(kind, options, taken, device, REMEDY)

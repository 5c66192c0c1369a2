"""What a training was, and whether two are the same."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn


@dataclass
class Trained:
    """What there was after each step, or after some; and in the end."""

    states: list[dict[str, Tensor]] = field(default_factory=list)  # whole, by name
    gradients: list[dict[str, Tensor]] = field(default_factory=list)  # those there are
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # of gradients, if clipped
    rates: list[float] = field(default_factory=list)  # in the end
    buffers: dict[str, Tensor] = field(default_factory=dict)  # in the end
    common: bytes = b""  # the bits of what every rank has whole, in the end

    def note(self, named: Iterable[tuple[str, nn.Parameter]], *norm_and_loss) -> None:
        """Write down the parameters after a step, their gradients, and two numbers."""
        named = dict(named)
        self.states.append({n: p.detach().clone() for n, p in named.items()})
        gradients = {n: p.grad for n, p in named.items() if p.grad is not None}
        self.gradients.append({n: g.clone() for n, g in gradients.items()})
        for of, number in zip((self.norms, self.losses), norm_and_loss, strict=False):
            of.append(float(torch.as_tensor(number).detach()))


def far_apart(
    a: Trained, b: Trained, atol: float = 1e-5, of_gradients=None, losses: bool = False
) -> list[str]:
    """Return where two training runs differ by more than rounding.

    A mean over ranks adds the same numbers in another order, as microbatches do, and
    AdamW divides by the root of what may be small: 1e-5 is about a hundred roundings of
    float32. A wrong scale or a missing rank is off by more than 1e-3. `losses` are
    looked at where all ranks have the whole batch's.
    """
    found = []
    for kind, limit in {"states": atol, "gradients": of_gradients or atol}.items():
        pairs = zip(getattr(a, kind), getattr(b, kind), strict=True)
        for step, (x, y) in enumerate(pairs):
            found += [f"{kind} {step}: {name}" for name in x.keys() ^ y.keys()]
            found += [
                f"{kind} {step} {name}: {(x[name] - y[name]).abs().max():.1e}"
                for name in x.keys() & y.keys()
                if name.rpartition(".")[2] != "calls"  # buffers: each rank's own affair
                and not torch.allclose(x[name], y[name], rtol=1e-4, atol=limit)
            ]
    for kind in ("norms", "losses") if losses else ("norms",):
        pairs = zip(getattr(a, kind), getattr(b, kind), strict=True)
        found += [f"{kind} {x} {y}" for x, y in pairs if not abs(x - y) < 1e-4 * abs(y)]
    return found + ([] if a.rates == b.rates else [f"rates {a.rates} {b.rates}"])


def same(a: object, b: object, **close: float) -> bool:
    """Tell whether states of any depth are equal, bit by bit, or as close as that."""
    if isinstance(a, Tensor):
        equal = partial(torch.allclose, **close) if close else torch.equal
        return a.shape == b.shape and equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(a[k], b[k], **close) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(partial(same, **close), a, b))
    return a == b


def bits(trained: Trained) -> bytes:
    """Return all numbers of a training: equal bytes are equal bits."""
    steps = *trained.states, *trained.gradients
    results = [t for step in steps for t in step.values()]
    results += [b for name, b in trained.buffers.items() if name != "calls"]
    return b"".join(t.contiguous().numpy().tobytes() for t in results)


def own_norm_only(parts, max_norm: float) -> Tensor:
    """Clip what a rank has by the norm of what it has: wrong, but on one rank."""
    parts = [part for part in parts if part.grad is not None]
    norm = torch.stack([part.grad.norm() for part in parts]).norm()
    scale_gradients(parts, max_norm, norm)
    return norm


def scale_gradients(parts, max_norm: float, norm: Tensor) -> None:
    """Scale gradients as PyTorch's clipping does, which is refused on parts."""
    for part in parts:
        part.grad *= torch.clamp(max_norm / (norm + 1e-6), max=1.0)

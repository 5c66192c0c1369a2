"""What the tests of FullyShardedDataParallel share: models, training, planted fakes."""

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from trained import Trained, own_norm_only

from ddp_course.model import GPTConfig, build_gpt
from ddp_course.zero import FullyShardedDataParallel, full_state_dict, metered
from ddp_course.zero import NaiveFullyShardedDataParallel as Naive
from ddp_course.zero import SimpleFullyShardedDataParallel as Simple
from ddp_course.zero.unit_storage import FlatStorage


class Ours(FullyShardedDataParallel):
    """The full class with what meters need."""

    def __init__(self, module: nn.Module, group=None, **more) -> None:
        super().__init__(module, group, **metered.module(group) | more)


ROWS, TOKENS, CLASSES = 12, 5, 11  # rows that 1, 2, 3 and 4 ranks can share
GPT = GPTConfig(
    vocab_size=CLASSES, block_size=TOKENS, n_layer=3, n_head=2, d_model=14, tied=True
)


class Layer(nn.Module):
    """A block of odd sizes, with a frozen, an empty, a scalar and a float64 parameter.

    `shared` is a parameter of all blocks.
    """

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 13), nn.Linear(13, 7)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.precise = nn.Linear(7, 3, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.shared = shared
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        h = self.down(torch.tanh(self.up(x))) * self.scale + self.shared
        p = self.precise(x.double()).float().sum(-1, keepdim=True)
        return {"x": torch.tanh(x + self.frozen(h) + p + self.empty.sum())}


class Odd(nn.Module):
    """Everything that a real model may have; and one block is used twice."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(CLASSES, 7)
        shared = nn.Parameter(torch.randn(7))
        self.layers = nn.ModuleList(Layer(shared) for _ in range(3))
        self.head = nn.Linear(7, CLASSES)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.full((7,), 0.25 + seed))

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(idx) + self.shift
        for k in (0, 1, 2, 1):
            x = self.layers[k](x)["x"]
        logits = self.head(x)
        return logits, nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten()
        )


def frozen_gpt(seed: int) -> nn.Module:
    """Return a tied GPT whose second block and all first norms are frozen."""
    model = build_gpt(GPT, seed)
    model.blocks[1].requires_grad_(False)
    for block in model.blocks:
        block.norm1.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "gpt": frozen_gpt,
    "odd": Odd,
}


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the whole batch of a step: (ROWS, TOKENS) int64, twice."""
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randint(CLASSES, (ROWS, TOKENS + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


OPTIMIZERS: dict[str, Callable] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
}


def fully_shard(model: nn.Module, **options) -> nn.Module:
    """Shard with PyTorch's own, per block and the rest."""
    from torch.distributed.fsdp import fully_shard as shard

    options = {"reshard_after_forward": True} | options
    for block in model.blocks:
        shard(block, **options)
    return shard(model, **options)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of a plain, a sharded or one of PyTorch's sharded modules."""
    if isinstance(model, FullyShardedDataParallel):
        return full_state_dict(model)
    if isinstance(model, Naive | Simple):
        return model.full_state_dict()
    state = {}
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        state[name] = whole.clone()
    return state


def train(
    wrap: Callable[[nn.Module], nn.Module] | None,
    optimizer: str = "adamw",
    model: str = "gpt",
    steps: int = 2,
    micro: int = 1,
    clip: float | None = None,
    sync_all: bool = False,
) -> Trained:
    """Train on this rank's rows, which it takes in `micro` microbatches.

    Without `wrap`: one process on the whole batch. Ranks start from different seeds.
    With `sync_all`, every microbatch is averaged, otherwise the last one is.
    """
    alone = wrap is None
    rank, n = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    equal = alone or wrap in PYTORCH  # which does not make the ranks equal
    plain = MODELS[model](0 if equal else rank)
    sharded = plain if alone else wrap(plain)
    opt = OPTIMIZERS[optimizer](sharded.parameters())
    run = Trained()
    for step in range(steps):
        x, y = (t[rank * ROWS // n : (rank + 1) * ROWS // n] for t in batch(step))
        opt.zero_grad()
        parts = list(zip(x.chunk(micro), y.chunk(micro), strict=True))
        run.losses.append(0.0)
        for k, (some_x, some_y) in enumerate(parts):
            waits = not (alone or sync_all or k == len(parts) - 1)
            with sharded.no_sync() if waits else contextlib.nullcontext():
                loss = sharded(some_x, some_y)[1] / micro
                loss.backward()
            run.losses[-1] += loss.item()
        if clip is not None:
            run.norms.append(clipped(sharded, clip))
        opt.step()
        state = whole_state(sharded)
        run.states.append({k: v.clone() for k, v in state.items()})
    return run


def clipped(model: nn.Module, clip: float) -> float:
    """Clip the gradients' norm in the way of this kind of module; return it."""
    if hasattr(model, "clip_grad_norm_"):
        return float(model.clip_grad_norm_(clip))
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if len({getattr(grad, "device_mesh", None) for grad in grads}) == 1:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    wholes = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
    norm = float(torch.nn.utils.get_total_norm(wholes))
    for grad in grads:
        grad.mul_(min(1.0, clip / (norm + 1e-6)))
    return norm


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "naive": Naive,
    "simple": Simple,
    "ours": Ours,
    "no prefetch": lambda m: Ours(m, prefetch=0),
    "far ahead": lambda m: Ours(m, prefetch=3, reshard_after_forward=None),
    "not resharded": lambda m: Ours(m, reshard_after_forward=False),
    "one unit": lambda m: Ours(m, units=[]),
    "by name": lambda m: Ours(m, units=[n for n, _ in m.named_modules() if "." in n]),
    "torch": fully_shard,
}
PYTORCH = {fully_shard}


# ---- planted fakes: each is wrong in one way that is easy to overlook --------------


class Fake(Ours):
    """As ours, with one method of every flat replaced."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        for flat in (flat for unit in self.units for flat in unit.flats):
            self.spoil(flat)

    def spoil(self, flat: FlatStorage) -> None:
        raise NotImplementedError


class Replicated(Fake):
    """Never frees anything."""

    def spoil(self, flat):
        flat.free = lambda: None


class KeptByAView(Fake):
    """Gathers into new memory each time, of which somebody keeps a view."""

    kept: list[Tensor]

    def spoil(self, flat):
        self.kept = getattr(self, "kept", [])
        gather = flat.gather

        def and_keep(async_op):
            work = gather(async_op)
            if work is not None:
                work.wait()
            self.kept.append(flat.whole.clone()[:1])

        flat.gather = and_keep


class Stale(Fake):
    """Gathers once, and takes the same numbers ever after."""

    def spoil(self, flat):
        gather, first = flat.gather, []

        def once(async_op):
            if not first:
                work = gather(async_op)
                if work is not None:
                    work.wait()
                first.append(flat.whole.clone())
            flat.whole.untyped_storage().resize_(flat.whole.nbytes)
            flat.whole.copy_(first[0])

        flat.gather = once


class TiedTwice(Fake):
    """Adds the gradient of a tied weight once for each of its places."""

    def spoil(self, flat):
        collect = flat.collect

        def twice():
            collect()
            for view, parameter in zip(flat.slots, flat.parameters, strict=True):
                times = sum(other is parameter for _, other, _ in self.root.places)
                view.mul_(max(1, times))

        flat.collect = twice


class Sum(Fake):
    """The sum in place of the mean."""

    def spoil(self, flat):
        flat.scale = 1.0


class NotGatheredAgain(Ours):
    """Freed after forward, and whatever is in that memory is used in backward."""

    def __init__(self, module):
        super().__init__(module, prefetch=0)

    def _gather(self, unit):
        if self.open:
            for flat in unit.flats:
                flat.whole.untyped_storage().resize_(flat.whole.nbytes)
                flat.whole.fill_(0.5)
            unit.is_whole = True
        else:
            super()._gather(unit)


class EverythingAtOnce(Ours):
    """Gathers all units when a forward or a backward begins."""

    def _gather(self, unit):
        for each in self.units:
            if each.needs_gather:
                with self.span("launch", gather=each.plan.name):
                    each.start_gather(async_op=True)
        super()._gather(unit)


class NormPerShard(Ours):
    """Clips each rank's shards by their own norm."""

    def clip_grad_norm_(self, max_norm):
        return own_norm_only(self.parameters(), max_norm)


FAKES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "stale": Stale,
    "tied twice": TiedTwice,
    "sum": Sum,
    "not gathered again": NotGatheredAgain,
    "norm per shard": NormPerShard,
}

"""What the tests of PipelineParallel share: models, training, planted fakes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from operator import methodcaller
from unittest.mock import patch

import torch
import torch.distributed as dist
import trained
from torch import Tensor, nn
from trained import Trained

from ddp_course.model import GPT, GPTConfig, build_gpt
from ddp_course.pipeline import PipelineParallel, overlapped
from ddp_course.pipeline import pipeline_parallel as module_of_ours
from ddp_course.pipeline.overlapped import MessagesAhead
from ddp_course.pipeline.stage_plan import SharedGradients

ROWS, TOKENS, CHARACTERS = 8, 5, 12  # rows that 3, 5, 6 and 7 cannot share equally
GPT_TIED = GPTConfig(CHARACTERS, TOKENS, n_layer=6, n_head=2, d_model=14, tied=True)
GPT_UNTIED = GPTConfig(CHARACTERS, TOKENS, n_layer=6, n_head=2, d_model=14)
CLIP = 1.0
CLOSE = {"rtol": 1e-4, "atol": 1e-6}

far_apart = partial(trained.far_apart, losses=True)  # every rank has the mean


def tied(seed: int = 0) -> GPT:
    """Return a tied GPT of which one block and all first norms are frozen."""
    model = build_gpt(GPT_TIED, seed)
    model.blocks[2].requires_grad_(False)
    for block in model.blocks:
        block.norm1.requires_grad_(False)
    return model


def untied(seed: int = 0) -> GPT:
    return build_gpt(GPT_UNTIED, seed)


MODELS = {"tied": tied, "untied": untied}


def batch(step: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Return the batch of a step: (rows, TOKENS) int64, twice."""
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randint(CHARACTERS, (rows, TOKENS + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def mse(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def alone(model: str = "tied", steps: int = 3, clip: bool = True) -> Trained:
    """Train in one process with the whole batch."""
    plain, run = MODELS[model](), Trained()
    optimizer = adamw(plain.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        _, loss = plain(*batch(step))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), CLIP) if clip else 1
        optimizer.step()
        run.note(plain.named_parameters(), norm, loss)
    return run


def train(
    make: Callable[..., nn.Module],
    *args,
    model="tied",
    steps=3,
    seed=None,
    parts=methodcaller("named_parameters"),
    **options,
) -> Trained:
    """Train on this rank; the ranks start from different seeds, if none is given.

    After each step, the `parts` of the pipeline are written down.
    """
    seed = dist.get_rank() if seed is None else seed
    pipeline = make(MODELS[model](seed), *args, **options)
    run, optimizer = Trained(), adamw(pipeline.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        loss = pipeline.step(*batch(step))
        clips = isinstance(pipeline, PipelineParallel)  # the others do not
        norm = pipeline.clip_grad_norm_(CLIP) if clips else 1
        optimizer.step()
        run.note(parts(pipeline), norm, loss)
    return run


def whole(ranks: list[Trained]) -> Trained:
    """Lay the ranks' parts together; what two of them have must have the same bits."""
    run = Trained(norms=ranks[0].norms, losses=ranks[0].losses)
    for name in ("states", "gradients"):
        for parts in zip(*(getattr(rank, name) for rank in ranks), strict=True):
            together: dict[str, Tensor] = {}
            for part in parts:
                for key, value in part.items():
                    assert torch.equal(together.setdefault(key, value), value), key
            getattr(run, name).append(together)
    for rank in ranks:
        assert (rank.norms, rank.losses) == (run.norms, run.losses)
    return run


# ---- PyTorch's -----------------------------------------------------------------------


def pytorchs(schedule: str, m: int, steps: int = 3) -> Trained:
    """Train the untied GPT on this rank under torch.distributed.pipelining."""
    from torch.distributed import pipelining

    from ddp_course.bench.pp import THEIRS
    from ddp_course.model import cross_entropy

    rank, p = dist.get_rank(), dist.get_world_size()
    ours = PipelineParallel(untied(), schedule, m)  # cuts the model the same way
    stages = [
        pipelining.PipelineStage(ours.stages[s], s, ours.schedule.num_stages, "cpu")
        for s in ours.schedule.stages_of(rank)
    ]
    several = schedule in ("interleaved", "zero_bubble")
    theirs = THEIRS[schedule](
        stages if several else stages[0], m, loss_fn=cross_entropy
    )
    run, optimizer = Trained(), adamw(ours.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        x, y = batch(step)
        losses: list[Tensor] = []
        last = rank == p - 1
        theirs.step(
            *([x] if rank == 0 else []),
            target=y if last else None,
            losses=losses if last else None,
        )
        loss = torch.stack(losses).mean() if last else torch.zeros(())
        dist.broadcast(loss, p - 1)
        norm = ours.clip_grad_norm_(CLIP)
        optimizer.step()
        run.note(ours.named_parameters(), norm, loss)
    return run


# ---- planted fakes: each is wrong in one way that is easy to overlook ----------------


class NotDivided:
    """Adds the microbatches' gradients as if each were a batch."""

    def before_run(self, runtime):
        runtime.weights = [1.0] * len(runtime.weights)


class EqualWeights:
    """A mean of means: microbatches of different size count alike."""

    def before_run(self, runtime):
        runtime.weights = [1 / len(runtime.weights)] * len(runtime.weights)


class Stale:
    """The gradient of one microbatch goes through the graph of another."""

    def before_compute(self, runtime, action):
        stage, microbatch, kept = action.stage, action.microbatch, runtime.saved
        others = [k for s, k in kept if s == stage and k != microbatch]
        same = [k for k in others if len(runtime.x[k]) == len(runtime.x[microbatch])]
        if action.op == "B" and same and stage != runtime.last:
            one, other = (stage, microbatch), (stage, same[0])
            kept[one], kept[other] = kept[other], kept[one]


class WeightsForgotten:
    """What I has put off is never done."""

    def before_run(self, runtime):
        runtime.operations["W"] = lambda *_: None


class TiedTwice(SharedGradients):
    """Adds the other rank's part twice."""

    def sum(self, endpoint):
        super().sum(endpoint)
        for parameter in self.shared:
            parameter.grad *= 2


class TiedNotAtAll(SharedGradients):
    """Every rank keeps its own part."""

    def sum(self, endpoint):
        for parameter, before in self.before.items():
            if before is not None:
                parameter.grad = before


class Overwritten(MessagesAhead):
    """Sends everything from one buffer, and does not wait until it has left.

    It goes well as long as all messages leave at once; so of two ranks the last one
    receives nothing before the first has sent twice.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.buffer, self.sends = torch.empty(10_000), 0

    def go_on(self):
        if dist.get_rank() == 1 and self.next == 0:
            dist.barrier()
        super().go_on()

    def _start_send(self, step):
        results = self.runtime.results
        tensor = results[step.action]
        results[step.action] = self.buffer[: tensor.numel()].view(tensor.shape)
        results[step.action].copy_(tensor)
        super()._start_send(step)
        self.sends += 1
        if dist.get_rank() == 0 and self.sends == 2:
            dist.barrier()


class NextBatch(PipelineParallel):
    """Keeps the pipeline full with rows of another batch."""

    def step(self, x, y):
        before, self.before = getattr(self, "before", (x, y)), (x, y)
        half = len(x) // 2
        pairs = zip((x, y), before, strict=True)
        return super().step(*(torch.cat([a[:half], b[half:]]) for a, b in pairs))


def fake(name: str, schedule: str, m: int) -> Trained:
    """Train on this rank with something wrong."""

    def make(*args):
        pipeline = MAKERS.get(name, PipelineParallel)(*args)
        pipeline.parts += [part() for part in FAKE_PARTS.get(name, ())]
        return pipeline

    with ExitStack() as stack:
        for where, what, wrong in PATCHED.get(name, ()):
            stack.enter_context(patch.object(where, what, wrong))
        return train(make, schedule, m)


MAKERS = {"next batch": NextBatch}
FAKE_PARTS: dict[str, tuple[type, ...]] = {
    "not divided": (NotDivided,),
    "equal weights": (EqualWeights,),
    "stale": (Stale,),
    "weights forgotten": (WeightsForgotten,),
}
PATCHED: dict[str, list[tuple]] = {
    "tied twice": [(module_of_ours, "SharedGradients", TiedTwice)],
    "tied not at all": [(module_of_ours, "SharedGradients", TiedNotAtAll)],
    "overwritten": [
        (overlapped, "MessagesAhead", Overwritten),
        (overlapped, "AHEAD", 0),
        (overlapped, "UNDER_WAY", 100),
    ],
}
FAKES = [*FAKE_PARTS, *PATCHED, *MAKERS]
FAKE_SCHEDULES = {"weights forgotten": "zero_bubble"}

__all__ = ["PipelineParallel"]

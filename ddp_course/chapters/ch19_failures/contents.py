"""A training run whose checkpoint lacks one of five parts; and streams of rows.

A small model with dropout (so that a generator matters), AdamW, loss scaling that has
found its scale, and a new order of the rows in each epoch. `Run` needs one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from ddp_course.data import load_corpus
from ddp_course.failures.async_save import snapshot
from ddp_course.failures.position import PositionSampler, SharedStream
from ddp_course.precision import GradScaler

CONTEXT, SAMPLES, BATCH = 8, 512, 32  # input characters, rows in all, rows per batch


class Generators:
    """The state of PyTorch's generator, which draws dropout's masks."""

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state."""
        return {"cpu": torch.get_rng_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the generator's state."""
        torch.set_rng_state(state["cpu"])


class Run:
    """A training run of a model that predicts the ninth character from eight.

    Attributes:
        parts: the objects that a checkpoint must hold, by name.
        losses: one for each step of this run.
    """

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Embedding(96, 16),
            nn.Flatten(),
            nn.Linear(CONTEXT * 16, 128),
            nn.GELU(),
            nn.Dropout(0.2),
            nn.Linear(128, 96),
        )
        tokens = load_corpus().train[: SAMPLES + CONTEXT].long()
        self.rows = tokens.unfold(0, CONTEXT + 1, 1)[:SAMPLES]  # (SAMPLES, CONTEXT + 1)
        self.parts: dict[str, Any] = {
            "model": model,
            "optimizer": torch.optim.AdamW(model.parameters(), lr=3e-3),
            "generators": Generators(),
            "position": PositionSampler(SAMPLES, BATCH),
            "scaler": GradScaler(init_scale=2.0**24),
        }
        self.losses: list[float] = []

    def train(self, steps: int) -> list[float]:
        """Train for `steps` steps; return their losses."""
        model, optimizer, _, sampler, scaler = self.parts.values()
        for _ in range(steps):
            rows = self.rows[next(iter(sampler))]
            with torch.autocast("cpu", torch.float16):
                scores = model(rows[:, :-1])
                loss = nn.functional.cross_entropy(scores, rows[:, -1])
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            sampler.advance()
            self.losses.append(loss.item())
        return self.losses[-steps:]

    def checkpoint(self) -> dict[str, Any]:
        """Return the states of all parts."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def resume(self, checkpoint: Mapping[str, Any], without: Iterable[str] = ()) -> Run:
        """Load all parts except those named in `without`; return this run."""
        for name, part in self.parts.items():
            if name not in without:
                part.load_state_dict(checkpoint[name])
        return self


def resumed(steps: int = 40, more: int = 40) -> dict[str, list[float]]:
    """Return the last `more` losses of a run, and of runs resumed after `steps` steps.

    "whole" is the run that was not interrupted. The other keys name what a resumed run
    does not load from its checkpoint: "nothing", or one of the parts of `Run`.
    """
    run = Run()
    run.train(steps)
    checkpoint = snapshot(run.checkpoint())
    curves = {"whole": run.train(more)}
    for name in ("nothing", *run.parts):
        curves[name] = Run(seed=1).resume(checkpoint, {name}).train(more)
    return curves


class Stream(IterableDataset):
    """A stream of rows 0 to 23, divided among `ranks`, but not among workers."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rank, self.ranks = rank, ranks

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's rows; every worker yields them all."""
        return iter(range(self.rank, 24, self.ranks))


def rows_of_streams(name: str) -> list[int]:
    """Return the rows that a DataLoader with two workers loads on this rank.

    `name` selects the stream: "as it is", "by ranks" or "by ranks and workers".
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    streams = {
        "as it is": Stream(),
        "by ranks": Stream(rank, ranks),
        "by ranks and workers": SharedStream(range(24), 8, rank, ranks),
    }
    loader = DataLoader(streams[name], batch_size=8 // ranks, num_workers=2)
    return [row for batch in loader for row in batch.tolist()]

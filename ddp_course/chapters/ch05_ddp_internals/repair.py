"""Record what a training script does on its ranks, and describe its mistakes.

Each rank has an imagined GPU (`lab/imagined_gpus.py`) and its own folder, so that
placements and files can be attributed to a rank. The model records the rows that it
gets, its dropout masks, and the gradient of each batch before it is averaged.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import TensorDataset

from ddp_course.collectives import barrier
from ddp_course.lab.answers import one_line
from ddp_course.lab.imagined_gpus import ImaginedGPUs

ROWS, HELD_OUT = 24, 17  # per rank: rows in an epoch, held-out rows (plus 1 in all)
EPOCHS = (3, 5)  # a first call trains three epochs, a second one two more
LEFT = EPOCHS[1] - EPOCHS[0]
FILE = "run.pt"


@dataclass
class Run:
    """A record of one rank's actions in one call of the script."""

    local_rank: int
    rows: list[int] = field(default_factory=list)  # rows, by number, as trained
    held_out: list[int] = field(default_factory=list)  # numbers of evaluated rows
    switched_off: int = 0  # neurons that dropout switched off in the evaluation
    masks: list[Tensor] = field(default_factory=list)  # dropout masks, by batch
    own: list[Tensor] = field(default_factory=list)  # gradient of each batch's mean
    used: list[Tensor] = field(default_factory=list)  # gradient in each `step()`
    # The number of parameters with an optimizer state, before each step.
    states: list[int] = field(default_factory=list)
    # The optimizer's states, before the first step and at the end.
    first_states: Tensor | None = None
    last_states: Tensor | None = None
    begin: Tensor | None = None  # weights in the first training forward
    end: Tensor | None = None  # final weights
    gpus: set[int] = field(default_factory=set)  # GPUs that tensors were put on
    model: set[int | None] = field(default_factory=set)  # GPUs with the weights
    loaded: set[int] = field(default_factory=set)  # GPUs that a file's tensors went to
    files: list[str] = field(default_factory=list)  # files that this rank wrote
    result: Any = None
    loss: float = 0.0  # the mean loss of all held-out rows, with the last weights


class Watched(nn.Module):
    """A model with dropout; called with a batch, it returns the mean loss.

    The first column of x numbers the rows; numbers of held-out rows are negative.
    """

    def __init__(self, run: Run, gpus: ImaginedGPUs) -> None:
        super().__init__()
        self.run, self.gpus = run, gpus
        self.dropout = nn.Dropout(0.5)
        self.first, self.last = nn.Linear(4, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean squared error, and record this batch."""
        hidden = self.dropout(torch.tanh(self.first(x[:, 1:])))
        loss = (self.last(hidden) - y).square().mean()
        numbers = x[:, 0].int().tolist()
        if min(numbers) < 0:
            self.run.held_out += numbers
            self.run.switched_off += (hidden == 0).sum().item()
        else:
            self._record(numbers, hidden.detach() != 0, loss)
        return loss

    def _record(self, numbers: list[int], mask: Tensor, loss: Tensor) -> None:
        self.run.rows += numbers
        self.run.masks.append(mask)
        if self.run.begin is None:
            self.run.begin = flat(self.parameters())
            self.run.model = {self.gpus.number_of(p) for p in self.parameters()}
        inputs = [*self.parameters()]  # DDP's hooks do not see `autograd.grad`
        self.run.own.append(flat(torch.autograd.grad(loss, inputs, retain_graph=True)))


def flat(tensors: Any) -> Tensor:
    """Return the tensors' numbers in one row; a None counts as a single zero."""
    return torch.cat([torch.zeros(1) if t is None else t.flatten() for t in tensors])


def states_of(optimizer: torch.optim.Optimizer) -> Tensor:
    """Return the numbers of all tensors that an optimizer keeps."""
    states = [s for kept in optimizer.state.values() for s in kept.values()]
    return flat([torch.zeros(0), *(s for s in states if isinstance(s, Tensor))])


def rows_from(first: int, number: int) -> TensorDataset:
    """Return `number` rows, numbered from `first` on; the same on every rank."""
    dice = torch.Generator().manual_seed(number)
    x = torch.randn(number, 4, generator=dice)
    y = x.sum(dim=1, keepdim=True) + 3 * x[:, :1].square()
    numbers = torch.arange(first, first + number).float()
    return TensorDataset(torch.cat([numbers[:, None], x], dim=1), y)


def run_script(script: Callable, folder: str) -> list[Run]:
    """Call the script on this rank, then again, with the file that the ranks wrote."""
    runs = []
    for call in range(len(EPOCHS)):
        own = Path(folder, f"{call} {dist.get_rank()}")
        own.mkdir()
        barrier()
        written = sorted(Path(folder).glob(f"{call - 1} */{FILE}"))
        if written:  # as on a shared disk: all ranks get the first writer's file
            shutil.copy(written[0], own)
        runs.append(_run_once(script, own / FILE, EPOCHS[call]))
        barrier()
    return runs


def _run_once(script: Callable, path: Path, epochs: int) -> Run:
    run, n, used = Run(int(os.environ["LOCAL_RANK"])), dist.get_world_size(), []
    gpus, models = ImaginedGPUs(int(os.environ["LOCAL_WORLD_SIZE"])), []
    data, held_out = rows_from(0, ROWS * n), rows_from(-99, HELD_OUT * n + 1)

    def build_model() -> nn.Module:
        models.append(Watched(run, gpus))
        return models[-1]

    def note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not run.states:
            run.first_states = states_of(optimizer)
        run.states.append(len(optimizer.state))
        used[:] = [optimizer]
        run.used.append(flat(p.grad for p in models[-1].parameters()))

    watching = register_optimizer_step_pre_hook(note_step)
    try:
        with gpus:
            run.result = script(build_model, data, held_out, path, epochs)
    finally:
        watching.remove()
    if not run.used:
        raise RuntimeError("the script took no step with a model of `build_model`")
    model = models[-1].eval()
    run.end = flat(p.detach() for p in model.parameters())
    run.last_states = states_of(*used)
    run.gpus, run.loaded = gpus.used, gpus.loaded
    run.files = [file.name for file in path.parent.iterdir()]
    evaluated = list(run.held_out)
    run.loss = model(*held_out.tensors).item()
    run.held_out = evaluated
    return run


# ---- mistakes ----------------------------------------------------------------------


def faults(ranks: list[list[Run]]) -> list[str]:
    """Describe each mistake of the script, in the script's order.

    `ranks` has the runs of each rank: the first call, and the call that resumes it.
    """
    first, second = zip(*ranks, strict=True)
    found = (
        wrong_gpus(first),
        wrong_loads(second),
        wrong_rows(first),
        wrong_orders(ranks),
        wrong_gradients(first),
        wrong_masks(first),
        wrong_files(first),
        wrong_evaluation(first),
    )
    others = () if any(found) else (wrong_resume(first, second),)
    return [text for text in (*found, *others) if text]


def wrong_gpus(runs: Sequence[Run]) -> str:
    """Describe a rank that did not put all its tensors on its own GPU; "" if none."""
    for rank, run in enumerate(runs):
        if run.gpus != {run.local_rank}:
            return (
                f"rank {rank}, process {run.local_rank} of its machine, put its "
                f"tensors on {listed('GPU', run.gpus)} of this machine."
            )
        if run.model != run.gpus:
            return f"rank {rank} trained a model that is not on its GPU."
    return ""


def wrong_loads(runs: Sequence[Run]) -> str:
    """Describe a rank that loaded a file onto another process's GPU."""
    for rank, run in enumerate(runs):
        if others := run.loaded - {run.local_rank}:
            return (
                f"called again, rank {rank}, process {run.local_rank} of its machine, "
                f"loaded the file's tensors onto {listed('GPU', others)}."
            )
    return ""


def wrong_rows(runs: Sequence[Run]) -> str:
    """Describe an epoch in which the ranks do not read each row once."""
    every = range(ROWS * len(runs))
    for epoch in range(EPOCHS[0]):
        seen = Counter(k for run in runs for k in epochs_of(run)[epoch])
        often = [f"{k}: {seen[k]} times" for k in every if seen[k] != 1]
        if often:
            many = ", ".join(str(len(epochs_of(run)[epoch])) for run in runs)
            return (
                f"in epoch {epoch} the ranks trained with {many} rows. Of the "
                f"{len(every)} rows each should be used once, by one of the ranks; row "
                f"{often[0]}."
            )
    return ""


def epochs_of(run: Run, epochs: int = EPOCHS[0]) -> list[list[int]]:
    """Return the row numbers of each epoch of a call."""
    size = max(1, len(run.rows) // epochs)
    return [run.rows[k * size : (k + 1) * size] for k in range(epochs)]


def wrong_orders(ranks: list[list[Run]]) -> str:
    """Describe two epochs in which a rank reads its rows in the same order."""
    for rank, (first, second) in enumerate(ranks):
        epochs = [*epochs_of(first), *epochs_of(second, LEFT)]
        for a, b in combinations(range(len(epochs)), 2):
            if epochs[a] == epochs[b]:
                again = ", in the second call," if b >= EPOCHS[0] else ""
                return (
                    f"in epoch {b}{again} rank {rank} used the same rows in the same "
                    f"order as in epoch {a}."
                )
    return ""


def wrong_gradients(runs: Sequence[Run]) -> str:
    """Describe a step that did not use the mean of all ranks' gradients."""
    for rank, run in enumerate(runs):
        if len(run.used) != len(run.own):
            return (
                f"rank {rank} took {len(run.used)} steps with {len(run.own)} batches."
            )
        for step, (used, *own) in enumerate(
            zip(run.used, *(run.own for run in runs), strict=False)
        ):
            mean = sum(own) / len(runs)
            if used.shape != mean.shape:
                return f"in step {step} rank {rank} had no gradient for some weights."
            if not torch.allclose(used, mean, rtol=1e-3, atol=1e-5):
                ratio = (used @ mean / (mean @ mean)).item()
                return (
                    f"rank {rank} made step {step} with a gradient that is not the "
                    f"mean over the rows of all ranks: it is {ratio:.2f} times as "
                    "large, along the mean."
                )
    return ""


def wrong_masks(runs: Sequence[Run]) -> str:
    """Describe two batches, of one rank or of two, with the same dropout mask."""
    masks: dict[tuple, tuple[int, int]] = {}
    for rank, run in enumerate(runs):
        for step, mask in enumerate(run.masks):
            key = tuple(mask.flatten().tolist())
            if key in masks:
                other, then = masks[key]
                return (
                    f"dropout switched off the same neurons on rank {rank} in step "
                    f"{step} as on rank {other} in step {then}."
                )
            masks[key] = rank, step
    return ""


def wrong_files(runs: Sequence[Run]) -> str:
    """Describe which ranks wrote files, unless only one rank wrote one file."""
    files = [file for run in runs for file in run.files]
    if files == [FILE]:
        return ""
    writers = [rank for rank, run in enumerate(runs) if run.files]
    if not writers:
        return "no rank wrote the file."
    names = ", ".join(sorted(set(files)))
    return (
        f"{listed('rank', writers)} wrote {names}. Ranks may share a disk: exactly one "
        "rank must write exactly one file."
    )


def wrong_evaluation(runs: Sequence[Run]) -> str:
    """Describe a wrong division of the held-out rows, or a wrong loss."""
    number = HELD_OUT * len(runs) + 1
    fair, many = -(-number // len(runs)), [len(run.held_out) for run in runs]
    if len({k for run in runs for k in run.held_out}) < number or max(many) > fair:
        return (
            f"of {number} held-out rows the ranks evaluated "
            f"{', '.join(map(str, many))}; all ranks should share this work equally, "
            "and leave out no row."
        )
    for rank, run in enumerate(runs):
        if run.switched_off:
            return (
                f"while rank {rank} evaluated its held-out rows, dropout switched off "
                f"{run.switched_off} neurons. Dropout belongs only to training."
            )
        if not isinstance(run.result, (int, float, Tensor)):
            return f"rank {rank} returned {one_line(run.result)}, which is no number."
        if abs(float(run.result) - run.loss) > 1e-4 * run.loss:
            return (
                f"rank {rank} returned {float(run.result):.4f}; the mean loss of the "
                f"{number} held-out rows is {run.loss:.4f}."
            )
    return ""


def wrong_resume(first: Sequence[Run], second: Sequence[Run]) -> str:
    """Describe how the second call did not resume the first one."""
    for rank, run in enumerate(second):
        if len(run.rows) != LEFT * ROWS:
            return (
                f"called again for {EPOCHS[1]} epochs, rank {rank} trained with "
                f"{len(run.rows)} rows; {LEFT} epochs were left: {LEFT * ROWS} rows on "
                "each rank."
            )
        if not torch.allclose(run.begin, first[0].end):
            return f"called again, rank {rank} began with new weights."
        if not run.states[0]:
            return f"called again, rank {rank} began with a new optimizer."
        kept, saved = run.first_states, first[0].last_states
        if kept.shape != saved.shape or not torch.allclose(kept, saved):
            return (
                f"called again, rank {rank} began with other states of the optimizer "
                "than those with which the first call ended."
            )
    return ""


def listed(noun: str, numbers: Iterable[int]) -> str:
    """Write "GPU 0", "GPUs 0 and 1", or "no GPU"."""
    words = [str(k) for k in sorted(numbers)]
    if not words:
        return f"no {noun}"
    return f"{noun}{'s' * (len(words) > 1)} {' and '.join(words)}"

"""Checkpoints: what a training run needs to go on as if nothing had happened.

A run can be ended at any moment, also in the middle of writing. So a checkpoint is
written under another name, flushed to the disk, and only then given its own name: a
rename happens completely or not at all. What bears the name is whole.

Rank 0 writes, since all replicas are the same. After a restart on several machines rank
0 may be elsewhere, where that disk is not: so all ranks look for the newest checkpoint
they can see, and a rank that sees the newest of all sends it to the others.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

FORMAT = 1
WRITING = ".being-written-"  # how the names of unfinished files begin


class HasState(Protocol):
    """What a module and an optimizer have in common. Called by all ranks together."""

    def state_dict(self) -> dict[str, Any]:
        """Return what there is to be kept; on rank 0 all of it."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Go on from it."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read, or continued; every rank raises it."""


class Checkpoints:
    """The checkpoints of one run in one folder: `step-00000010.pt` and so on.

    They hold the plain model's parameters and buffers (without a wrapper's prefix, and
    on the CPU), the optimizer's state, the losses so far and the run's settings. So a
    run may go on with another strategy, on another number of ranks, or in one process.
    With the same ones it goes on bit for bit: the batches depend on the step alone, and
    the course's GPT draws no random numbers in training (with dropout, the state of
    every rank's random generator would belong here, too). Of the strategies only
    PyTorch's DDP then differs in rounding, since in its first step it has not yet
    arranged its buckets as in all others, and so adds up in another order.

    Args:
        folder: made if it is not there; None writes nothing and reads nothing.
        every: steps from one checkpoint to the next.
        model: the plain module whose parameters `optimizer` changes; or, if they are
            sharded, anything with a `state_dict` that is whole on rank 0.
        optimizer: the same for its states.
        settings: what must be the same for a run to be the same: plain values by name.
        keep: how many of the newest stay.

    `load` and then `save`, after every step, are called by all ranks.
    """

    def __init__(
        self,
        folder: str | Path | None,
        every: int,
        model: HasState,
        optimizer: HasState,
        settings: Mapping[str, Any],
        keep: int = 2,
    ) -> None:
        for name, value in (("every", every), ("keep", keep)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be 1 or more")
        self.folder = None if folder is None else Path(folder).absolute()
        self.every, self.keep = every, keep
        self.model, self.optimizer = model, optimizer
        self.settings = dict(settings)

    def load(self, steps: int) -> list[float]:
        """Put model and optimizer back as the newest checkpoint has them.

        Returns the losses so far, one for each step that is done: none if there is no
        checkpoint. Raises CheckpointError on all ranks, before anything is changed, if
        the folder or the file cannot be used, belongs to a run with other settings, or
        is beyond `steps`.
        """
        if self.folder is None:
            return []
        seen = _tell_all(_told(self._look))
        _raise_first(dict(enumerate(seen)))
        found = [step for _, step in seen]
        if max(found) < 0:
            return []
        newest = max(found)
        if newest > steps:
            raise CheckpointError(
                f"the newest checkpoint in {self.folder} is of step {newest}, and this "
                f"run is to end after {steps}; take more steps, or another folder"
            )
        holder = found.index(newest)
        read = _from(holder, lambda: _told(lambda: self._read(newest)))
        _raise_first({holder: read})
        state = read[1]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return state["losses"]

    def save(self, losses: list[float], last: bool = False) -> None:
        """Write a checkpoint if one is due after this step, or if it is the last.

        A rank that cannot write ends with CheckpointError; the others then find it
        gone, as after any failure.
        """
        due = last or len(losses) % self.every == 0
        if self.folder is None or not due:
            return
        model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        if _rank() != 0:
            return
        state = {
            "format": FORMAT,
            "settings": self.settings,
            "losses": losses,
            "model": on_cpu(model),
            "optimizer": on_cpu(optimizer),
        }
        try:
            write_whole(state, self.folder / f"step-{len(losses):08d}.pt")
            for old in self._found()[: -self.keep]:
                old.unlink(missing_ok=True)
        except (OSError, RuntimeError) as error:  # torch.save's, if the disk is full
            raise CheckpointError(f"cannot write a checkpoint: {error}") from None

    def _found(self) -> list[Path]:
        """Return the whole checkpoints that this rank sees, oldest first."""
        return sorted(
            (p for p in self.folder.glob("step-*.pt") if _step_of(p) is not None),
            key=_step_of,
        )

    def _look(self) -> int:
        """Make the folder ready; return the newest step in it, or -1."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if _rank() == 0:
                for left_over in self.folder.glob(f"{WRITING}*"):
                    left_over.unlink(missing_ok=True)
                tempfile.TemporaryFile(dir=self.folder).close()
        except OSError as error:
            raise CheckpointError(
                f"the folder for checkpoints, {self.folder}, cannot be used: {error}"
            ) from None
        return max(map(_step_of, self._found()), default=-1)

    def _read(self, step: int) -> dict[str, Any]:
        path = self.folder / f"step-{step:08d}.pt"
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            version, settings = state["format"], state["settings"]
        except Exception as error:
            problem = str(error).splitlines()[0] if str(error) else repr(error)
            raise CheckpointError(
                f"{path} cannot be read ({problem}); remove it to go on from the one "
                f"before it"
            ) from None
        if version != FORMAT:
            raise CheckpointError(
                f"{path} has format {version}; this version reads format {FORMAT}"
            )
        if settings != self.settings:
            raise CheckpointError(_differences(path, settings, self.settings))
        return state


def write_whole(state: Any, path: Path) -> None:
    """Save `state` as `path`: completely, or not at all, whenever the process ends."""
    unfinished = path.with_name(f"{WRITING}{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # the bytes are on the disk ...
        unfinished.replace(path)  # ... before they get their name
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # and the name, too, is on the disk
    finally:
        os.close(folder)


def on_cpu(state: Any) -> Any:
    """Return a state dict with its tensors on the CPU, however deep they lie."""
    if isinstance(state, torch.Tensor):
        return state.detach().cpu()
    if isinstance(state, Mapping):
        return {key: on_cpu(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [on_cpu(value) for value in state]
    return state


# ---- what ranks tell each other ------------------------------------------------------


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


Told = tuple[str | None, Any]  # a problem or None, and a value


def _told(work: Any) -> Told:
    """Do `work`; a rank that failed must still talk, or the others would wait."""
    try:
        return None, work()
    except CheckpointError as error:
        return str(error), None


def _tell_all(mine: Told) -> list[Told]:
    if not dist.is_initialized():
        return [mine]
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody


def _from(rank: int, work: Any) -> Told:
    """Do `work` on one rank and return what it told on all."""
    box = [work() if _rank() == rank else None]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=rank, device=torch.device("cpu"))
    return box[0]


def _raise_first(told: Mapping[int, Told]) -> None:
    """Raise the problem of the lowest rank that has one, if any: the same on all."""
    for rank, (problem, _) in sorted(told.items()):
        if problem is not None:
            raise CheckpointError(
                f"rank {rank}: {problem}" if dist.is_initialized() else problem
            )


def _step_of(path: Path) -> int | None:
    match = re.fullmatch(r"step-(\d+)\.pt", path.name)
    return int(match.group(1)) if match else None


def _differences(path: Path, theirs: Mapping, ours: Mapping) -> str:
    differ = [
        f"{name} {theirs.get(name)!r}, here {ours.get(name)!r}"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    ]
    return (
        f"{path} belongs to a run with other settings ({'; '.join(differ)}); take "
        f"another folder, or the same settings"
    )

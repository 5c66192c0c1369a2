"""Checkpoints: save a training run, and resume it as if it had never stopped.

A checkpoint file is complete or does not exist (`mechanisms.saving`). Rank 0 writes it,
since all replicas are the same. After a restart on several machines, rank 0 may run on
a machine without that disk. So every rank looks for the newest checkpoint on its own
machine, and the rank that has the newest of all sends it to the others.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ddp_course.failures.async_save import BackgroundWriter
from ddp_course.mechanisms.agreement import agreed
from ddp_course.mechanisms.saving import (
    CheckpointError,
    find_abandoned,
    read_whole,
    seal,
    unseal,
    write_whole,
)
from ddp_course.mechanisms.states import HasState, on_cpu

FORMAT = 2
KEPT = 2  # how many of the newest checkpoints stay


class Checkpoints:
    """The checkpoints of one run in one folder: `step-00000010.pt` and so on.

    A checkpoint holds the plain model's parameters and buffers (on the CPU, with names
    that have no wrapper's prefix), the optimizer's state, the losses so far and the
    run's settings. So a run can resume with another strategy, on another number of
    ranks, or in one process. With the same strategy and the same number of ranks it
    resumes bit for bit: the batches depend on the step alone, and the course's GPT
    draws no random numbers in training (with dropout, the checkpoint would also need
    the state of every rank's random generator). The exception is PyTorch's DDP, which
    differs in rounding: in its first step it has not yet rebuilt its buckets, and so
    adds in another order.

    Args:
        folder: created if it does not exist; with None, nothing is written or read.
        every: steps from one checkpoint to the next.
        model: the plain module whose parameters `optimizer` changes. If parameters are
            sharded: any object that returns the full `state_dict` on rank 0.
        optimizer: the optimizer, or an object that returns its full state on rank 0.
        settings: plain values, by name, that a run must share with the checkpoint that
            it resumes from.
        more: other objects with a state, by name: the loss scaler, compressors.
        background: let a thread of rank 0 write a copy of the state while training goes
            on. An error is then raised by the next save that is due.

    All ranks call `load` once, and then `save` after every step.
    """

    def __init__(
        self,
        folder: str | Path | None,
        every: int,
        model: HasState,
        optimizer: HasState,
        settings: Mapping[str, Any],
        more: Mapping[str, HasState] | None = None,
        background: bool = False,
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise ValueError(
                f"every is {every!r}; it must be a whole number, 1 or more"
            )
        if not isinstance(folder, str | os.PathLike | None):
            raise ValueError(f"the folder is {folder!r}; it must be a path or None")
        self.folder = None if folder is None else Path(folder).absolute()
        self.every, self.model, self.optimizer = every, model, optimizer
        self.more = dict(more or {})
        self.settings = dict(settings)
        self.known: set[int] = set()  # steps found at the start, or saved by this run
        self.writer = BackgroundWriter(self._write) if background else None

    def load(self, steps: int) -> list[float]:
        """Load the newest checkpoint into model and optimizer; return its losses.

        The list has one loss for each step that is done; without a checkpoint it is
        empty. Raises CheckpointError on all ranks, before anything is changed, if the
        folder or the file cannot be used, the checkpoint belongs to a run with other
        settings, or it is from a step after `steps`. It is also raised, but perhaps
        after the model was loaded, if model or optimizer are of another kind.
        """
        if self.folder is None:
            return []
        newest, holder = self._newest()
        self.known = set(range(newest + 1))
        if newest < 0:
            return []
        if newest > steps:
            raise CheckpointError(
                f"the newest checkpoint in {self.folder} is of step {newest}, but this "
                f"run ends after step {steps}; use more steps, or another folder"
            )
        reads = _rank() == holder
        state = agreed(
            lambda: self._read(newest) if reads else None,
            *_everybody(),
            error=CheckpointError,
        )
        state = _from(holder, state)
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            for name, other in self.more.items():
                other.load_state_dict(state[name])
            return state["losses"]
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{self._path(newest)} is of another model or optimizer: {error}"
            ) from None

    def save(self, losses: list[float], last: bool = False) -> None:
        """Write a checkpoint if one is due after this step, or if it is the last.

        With `last`, rank 0 returns when the checkpoint is on the disk, even if a thread
        writes it. Rank 0 raises CheckpointError if it cannot write, or if another run
        has written into the folder since this run loaded: each run would overwrite the
        other's checkpoints. The other ranks then find rank 0 gone, as after any
        failure.
        """
        due = last or len(losses) % self.every == 0
        if self.folder is None or not due:
            return
        states = {"model": self.model, "optimizer": self.optimizer} | self.more
        state = {name: each.state_dict() for name, each in states.items()}
        if _rank() != 0:
            return
        if self.writer is None:
            self._write(on_cpu(state), [*losses])
            return
        self.writer.save(state, [*losses])
        if last:
            self.writer.wait()

    def _write(self, state: dict[str, Any], losses: list[float]) -> None:
        for path in self._found():
            if _step_of(path) not in self.known:
                raise CheckpointError(
                    f"{path} was written by another run while this one trained; "
                    "use another folder for one of them"
                )
        state = {"settings": self.settings, "losses": losses} | state
        try:
            path = self._path(len(losses))
            write_whole({"format": FORMAT, "state": seal(state)}, path)
            self.known.add(len(losses))
            for old in self._found()[:-KEPT]:
                old.unlink(missing_ok=True)
        except (OSError, RuntimeError) as error:  # torch.save on a full disk raises it
            raise CheckpointError(f"cannot write a checkpoint: {error}") from None

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.pt"

    def _found(self) -> list[Path]:
        """Return the complete checkpoints on this rank's machine, oldest first."""
        return sorted(
            (p for p in self.folder.glob("step-*.pt") if _step_of(p) is not None),
            key=_step_of,
        )

    def _newest(self) -> tuple[int, int]:
        """Return the newest step that any rank sees, or -1, and a rank that sees it."""
        step = agreed(self._newest_here, *_everybody(), error=CheckpointError)
        seen = [step]
        if dist.is_initialized():
            seen = [-1] * dist.get_world_size()
            dist.all_gather_object(seen, step)
        return max(seen), seen.index(max(seen))

    def _newest_here(self) -> int:
        """Create the folder if needed; return the newest step in it, or -1."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if _rank() == 0:
                for left_over in find_abandoned(self.folder):
                    if not left_over.is_dir():  # a folder is of a sharded save
                        left_over.unlink(missing_ok=True)
                tempfile.TemporaryFile(dir=self.folder).close()
        except OSError as error:
            raise CheckpointError(
                f"the folder for checkpoints, {self.folder}, cannot be used: {error}"
            ) from None
        return max(map(_step_of, self._found()), default=-1)

    def _read(self, step: int) -> dict[str, Any]:
        path = self._path(step)
        try:
            state = unseal(read_whole(path, FORMAT)["state"])
            settings = state["settings"]
        except (CheckpointError, KeyError, TypeError) as error:
            problem = str(error) if str(path) in str(error) else f"{path}: {error}"
            raise CheckpointError(
                f"{problem}; remove it to resume from the checkpoint before it, or "
                "to begin again if there is none"
            ) from None
        if settings != self.settings:
            raise CheckpointError(_differences(path, settings, self.settings))
        return state


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _everybody() -> list[dist.ProcessGroup]:
    return [dist.group.WORLD] if dist.is_initialized() else []


def _from(rank: int, value: Any) -> Any:
    """Return the `value` of one rank on all ranks."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=rank)
    return box[0]


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
        f"{path} belongs to a run with other settings ({'; '.join(differ)}); use "
        f"another folder, or the same settings"
    )

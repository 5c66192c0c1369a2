"""Four planted hangs, run under a deadline, and what the tools print about them."""

from __future__ import annotations

import pickle
import queue
import re
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_course.launch import RankReport, spawn
from ddp_course.launch.parent import patient

# ---- the hangs: the rank `odd` does not do the same as the others --------------------


def skipped(odd: int) -> None:
    """Skip a barrier on one rank, because of a condition that only holds there."""
    gradients = torch.ones(64)
    dist.all_reduce(gradients)
    if dist.get_rank() != odd:  # the loss of `odd` is too high for a checkpoint
        dist.barrier()
    dist.all_reduce(gradients)


def order(odd: int) -> None:
    """Call the collectives of two groups in a different order on one rank."""
    others = [(odd + 1) % dist.get_world_size(), (odd + 2) % dist.get_world_size()]
    three = dist.new_group(sorted([odd, *others]))
    gradients, norm = torch.ones(64), torch.ones(1)
    if dist.get_rank() == odd:
        dist.all_reduce(norm, group=three)
        dist.all_reduce(gradients)
    else:
        dist.all_reduce(gradients)
        if dist.get_rank() in others:
            dist.all_reduce(norm, group=three)


def stuck(odd: int) -> None:
    """Wait on one rank for a batch that its data loader never delivers."""
    batches: queue.Queue[torch.Tensor] = queue.Queue()
    if dist.get_rank() != odd:
        batches.put(torch.ones(64))
    batch = batches.get()
    dist.all_reduce(batch)


def left(odd: int) -> None:
    """Return early on one rank, which has one batch less."""
    for _ in range(1 if dist.get_rank() == odd else 2):
        dist.all_reduce(torch.ones(64))


HANGS = (skipped, order, stuck, left)


# ---- the tools -----------------------------------------------------------------------


@dataclass(frozen=True)
class Findings:
    """The tools' findings about one hang.

    `reports` say where each rank stood; `calls[rank]` are its collectives as (name,
    ranks of the group), from the flight recorder; `analysis` is from `torchfrtrace`.
    """

    reports: list[RankReport]
    calls: list[list[tuple[str, tuple[int, ...]]]]
    analysis: list[str]

    @property
    def where(self) -> list[str]:
        """The place of each rank: "collective", "recv", "code" or "returned"."""
        return [_kind_of(report) for report in self.reports]


def _kind_of(report: RankReport) -> str:
    if report.status == "ok":
        return "returned"
    line = report.where or ""
    if ".recv(" in line:
        return "recv"
    return "collective" if "dist." in line else "code"


def examine(
    hang: Callable[[int], None], odd: int, ranks: int = 4, timeout: float = 3.0
) -> Findings:
    """Run a hang for `timeout` seconds, and collect what the tools say about it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = {"timeout": timeout, "check": False, "output": "none"}
        reports = spawn(_recorded, hang, odd, folder, world_size=ranks, **options)
        dumps = [
            pickle.loads((folder / f"rank_{rank}").read_bytes())
            for rank in range(ranks)
        ]
        return Findings(reports, [_calls(dump) for dump in dumps], analyse(folder))


def examine_all(odd: int = 2, timeout: float = 3.0) -> dict[str, Findings]:
    """Run the four hangs side by side: each of them only waits for its deadline.

    By then all ranks must hang, so the deadline is later on a busy machine.
    """
    timeout = patient(timeout)
    with ThreadPoolExecutor(len(HANGS)) as threads:
        found = threads.map(lambda hang: examine(hang, odd, timeout=timeout), HANGS)
        return {hang.__name__: each for hang, each in zip(HANGS, found, strict=True)}


def _recorded(hang: Callable[[int], None], odd: int, folder: Path) -> None:
    """Call `hang`, while a thread dumps the flight recorder again and again."""
    ended = threading.Event()

    def dump_often() -> None:
        while not ended.wait(0.25):
            dump_recorder(folder)

    threading.Thread(target=dump_often, daemon=True).start()
    hang(odd)
    ended.set()
    dump_recorder(folder)


def dump_recorder(folder: Path) -> None:
    """Write this rank's flight recorder as the file that `torchfrtrace` reads.

    `torchfrtrace` needs the groups, which gloo does not record: they are added.
    """
    dump = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())
    groups = dist.distributed_c10d._world.pg_names.items()
    dump["pg_config"] = {
        name: {"name": name, "desc": "", "ranks": str(dist.get_process_group_ranks(g))}
        for g, name in groups
    }
    for entry in dump["entries"]:
        entry["process_group"] = (entry["process_group"][0], "")
    unfinished = folder / f"new.{dist.get_rank()}.{threading.get_ident()}"
    unfinished.write_bytes(pickle.dumps(dump))
    unfinished.replace(folder / f"rank_{dist.get_rank()}")


def _calls(dump: dict) -> list[tuple[str, tuple[int, ...]]]:
    groups = {
        name: tuple(int(rank) for rank in group["ranks"].strip("[]").split(","))
        for name, group in dump["pg_config"].items()
    }
    return [
        (entry["profiling_name"].partition(":")[2], groups[entry["process_group"][0]])
        for entry in dump["entries"]
    ]


def analyse(folder: Path) -> list[str]:
    """Return what `torchfrtrace` finds: missing ranks, and the kind of a mismatch.

    For a mismatch `torchfrtrace` also names a culprit, which is not returned: it is any
    rank that differs from the first one that was read, so not always the odd one.
    """
    options = {"world_size": 1, "init": False, "check": False, "output": "none"}
    [run] = spawn(_torchfrtrace, str(folder), "-p", "rank_", **options)
    words = r"missing ranks: \{.*?\}|[A-Z_]+_MISMATCH"
    return sorted(set(re.findall(words, run.output + run.stderr)))


def _torchfrtrace(*args: str) -> None:
    # Not at the top: this import prints a line where tabulate is not installed.
    from torch.distributed.flight_recorder import fr_trace

    fr_trace.main([*args])

"""Find ranks that wait for each other in different groups.

Rank 0 calls a collective of one group, rank 1 one of another group: each waits for the
other, and neither group can notice that by itself. So a rank that has waited for two
seconds writes into the job's store in which call it waits, and for which ranks; then it
follows the entries of those ranks. If these lead back to the rank, and all ranks on the
way write once more that they wait, none can go on.

Only waits of this course's code are watched, on the CPU. A collective of PyTorch waits
until its backend's timeout (gloo 30 minutes, NCCL 10); over NCCL only the GPU's stream
waits, not the host. Chapter 02.
"""

import ast
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

PATIENCE = 2.0  # seconds to wait before asking why
SLICE = 0.25  # seconds between two checks


class DeadlockError(RuntimeError):
    """Ranks wait for each other in different groups."""


class CollectiveError(ValueError):
    """The ranks' calls of a collective do not fit together; nothing was sent.

    Every rank of the group raises it, with the same text.
    """


EACH_OTHER = "these wait for each other: "


@dataclass(eq=False)
class Watch:
    """A watch over one rank while it waits for other ranks of the group `ranks`.

    `doing` is the call in which this rank waits. Call the watch repeatedly with the
    late ranks (numbered in the job); it raises DeadlockError once it is certain that
    these cannot come. Nothing is certain while this process is `busy` with other
    collectives, too.
    """

    store: dist.Store
    ranks: list[int]
    rank: int
    busy: Callable[[], bool] = lambda: False
    doing: str = "its first collective"
    since: float | None = None
    looks: int = 0  # how often this rank has asked why it waits
    seen: dict[str, dict] = field(default_factory=dict)  # a circle, as first found
    failed: str = ""  # why this rank is not where others wait for it

    def __call__(self, late: Sequence[int]) -> None:
        """Check once whether the ranks `late`, for which this rank waits, can come."""
        if self.since is None:
            self.since = time.monotonic()
        if not self.is_long() or self.busy():
            return
        if self.failed:
            raise DeadlockError(
                f"{self.failed}, and ranks {list(late)} have not returned from theirs: "
                "they wait there for this rank. Let all ranks skip a batch, or none"
            )
        entries = {r: self._entry_of(r) for r in late}
        if returned := [r for r in late if entries[r].get("returned")]:
            circle = entries[returned[0]].get("circle", [])  # found by that rank
            if any(name.startswith(f"rank {self.rank} at ") for name in circle):
                raise DeadlockError(EACH_OTHER + "; ".join(circle))
            why = f"ranks {returned} have returned, and call no further collective"
            raise DeadlockError(f"{why}; every rank of the group must make this call")
        self.looks += 1
        own = {"group": self.ranks, "late": list(late), "doing": self.doing}
        self._write_entry({**own, "look": self.looks})
        found = self._find_circle(list(late))
        if found.keys() != self.seen.keys():
            self.seen = found
        # A rank that has not asked again may have been served, but not scheduled since.
        elif found and all(
            "circle" in e or e != self.seen[n] for n, e in found.items()
        ):
            self._write_entry({**own, "circle": [*found]})
            raise DeadlockError(EACH_OTHER + "; ".join(found))

    def end_wait(self) -> None:
        """Record that the wait has ended."""
        if self.is_long():
            self._write_entry({})
        self.since, self.seen, self.failed = None, {}, ""

    def is_long(self) -> bool:
        """Return whether this rank has been waiting for `PATIENCE` seconds."""
        return self.since is not None and time.monotonic() - self.since >= PATIENCE

    def _write_entry(self, entry: dict) -> None:
        self.store.set(entry_key(self.rank), repr(entry))

    def _find_circle(self, late: list[int]) -> dict[str, dict]:
        """Follow the waits from this rank; return a circle: {rank in words: entry}."""
        entries: dict[int, dict] = {}
        paths = [[self.rank, peer] for peer in late]
        while paths:
            path = paths.pop(0)
            if path[-1] == self.rank:
                ranks = sorted(set(path))
                return {_in_words(rank, entries[rank]): entries[rank] for rank in ranks}
            for rank in (self.rank, path[-1]):
                if rank not in entries:
                    entries[rank] = self._entry_of(rank)
            following = entries[path[-1]].get("late", [])
            paths += [[*path, r] for r in following if r not in path[1:]]
        return {}

    def _entry_of(self, rank: int) -> dict:
        if not self.store.check([entry_key(rank)]):
            return {}
        return ast.literal_eval(self.store.get(entry_key(rank)).decode())


def default_store() -> dist.Store:
    """Return the store of the default group; PyTorch has no public name for it."""
    return dist.distributed_c10d._get_default_store()


def checked_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return `group`, or the group of all ranks for None.

    Raises ValueError or TypeError unless this rank is a member of it.
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError("no process group is initialized; run it by spawn or torchrun")
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"rank {dist.get_rank()} is no member of this group (new_group returned "
            "NON_GROUP_MEMBER here); only members take part in its collectives"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is {group!r}; it must be a process group or None")
    return group


def entry_key(rank: int) -> str:
    """Return the key under which a rank's entry is stored."""
    return f"ddp_course/waits/{rank}"


def _in_words(rank: int, entry: dict) -> str:
    return f"rank {rank} at {entry['doing']} in the group of ranks {entry['group']}"


def exchange_by_store(name: str, watch: Watch) -> Callable[[object], list]:
    """Return a function that shows its argument to all ranks and returns all arguments.

    It is slow, but needs no collective, and calls `watch` while it waits. Arguments are
    numbers, strings, and tuples of these; `name` is the group's name.
    """
    store, ranks, rank = watch.store, watch.ranks, watch.rank
    count = 0

    def exchange(value: object) -> list:
        nonlocal count
        count += 1
        keys = {r: f"ddp_course/{name}/{count}/{r}" for r in ranks}
        store.set(keys[rank], repr(value))

        def missing() -> list[int]:
            return [r for r in ranks if not store.check([keys[r]])]

        while late := missing():
            try:
                watch(late)
            except DeadlockError:
                if missing() == late:  # else a rank has come, and returned, meanwhile
                    raise
            time.sleep(SLICE if watch.is_long() else 0.001)
        watch.end_wait()
        if count > 1:  # all ranks are in this exchange, so all have read the last
            store.delete_key(f"ddp_course/{name}/{count - 1}/{rank}")
        return [ast.literal_eval(store.get(key).decode()) for key in keys.values()]

    return exchange


# ---- ranks in words ------------------------------------------------------------------


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks in words: "rank 3", "ranks 1, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def by_text(
    texts: Sequence[str], ranks: Sequence[int], text_first: bool = False
) -> str:
    """Return one text for all ranks: ranks with equal texts are joined, "" is left out.

    For example "rank 0: yes; ranks 1, 2: no" or "yes on rank 0, no on ranks 1, 2".
    """
    who: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        if text:
            who.setdefault(text, []).append(rank)
    pairs = [(text, ranks_in_words(same)) for text, same in who.items()]
    if text_first:
        return ", ".join(f"{text} on {names}" for text, names in pairs)
    return "; ".join(f"{names}: {text}" for text, names in pairs)

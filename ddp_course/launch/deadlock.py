"""Ranks that wait for each other in different groups, and would do so for ever.

Rank 0 calls a collective of one group, rank 1 one of another: each waits for the other.
Neither group can notice that by itself. So whoever has waited for a second or two says
where it waits, and for whom, in the store at which the ranks met, and follows what the
others say. If that leads back to itself, nobody will ever come. Chapter 02.
"""

import ast
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist

PATIENCE = 2.0  # seconds to wait before asking why
SLICE = 0.25  # seconds between two looks


class DeadlockError(RuntimeError):
    """Ranks wait for each other in different groups."""


class CollectiveError(ValueError):
    """The ranks' calls of a collective do not fit together; nothing was sent.

    Every rank of the group raises it, with the same text.
    """


EACH_OTHER = "these wait for each other: "


@dataclass(eq=False)
class Watch:
    """Looks after one rank while it waits for others of the group `ranks`.

    `doing` says what it wants to do. Called again and again with the ranks (in the job)
    that have not come; raises DeadlockError once it is certain that they cannot come.
    While this process is `busy` with other collectives, too, nothing is certain.
    """

    store: dist.Store
    ranks: list[int]
    rank: int
    busy: Callable[[], bool] = lambda: False
    doing: str = "its first collective"
    since: float | None = None
    seen: list[str] = field(default_factory=list)
    failed: str = ""  # why others may wait for this one in what it has left

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Note if what is done in this block fails here: others may still be in it."""
        try:
            yield
        except Exception as error:
            self.failed = f"a {what} failed here ({type(error).__name__}: {error})"
            raise

    def __call__(self, late: Sequence[int]) -> None:
        """Look once; `late` are the ranks that are waited for."""
        if self.since is None:
            self.since = time.monotonic()
        if not self.is_long() or self.busy():
            return
        if self.failed:
            raise DeadlockError(
                f"{self.failed}, and ranks {list(late)} have not come out of theirs: "
                "they wait for this rank in it. Let all ranks skip a batch, or none"
            )
        told = {r: self._asked(r) for r in late}
        if over := [r for r in late if told[r].get("returned")]:
            circle = told[over[0]].get("circle", [])  # it was told before this rank
            if any(name.startswith(f"rank {self.rank} at ") for name in circle):
                raise DeadlockError(EACH_OTHER + "; ".join(circle))
            why = f"ranks {over} have returned, and come to no collective"
            raise DeadlockError(why)
        own = {"group": self.ranks, "late": list(late), "doing": self.doing}
        self._say(own)
        circle = self._circle(list(late))
        # Twice the same: nobody has moved between two looks.
        if circle and circle == self.seen:
            self._say({**own, "circle": circle})
            raise DeadlockError(EACH_OTHER + "; ".join(circle))
        self.seen = circle

    def over(self) -> None:
        """Note that the wait is over."""
        if self.is_long():
            self._say({})
        self.since, self.seen, self.failed = None, [], ""

    def is_long(self) -> bool:
        """Tell whether this rank has been waiting for long."""
        return self.since is not None and time.monotonic() - self.since >= PATIENCE

    def _say(self, what: dict) -> None:
        self.store.set(_key(self.rank), repr(what))

    def _circle(self, late: list[int]) -> list[str]:
        """Follow who waits for whom; return who is in a circle with this rank."""
        told: dict[int, dict] = {}
        ways = [[self.rank, peer] for peer in late]
        while ways:
            way = ways.pop(0)
            if way[-1] == self.rank:
                return [_told(rank, told[rank]) for rank in sorted(set(way))]
            for rank in (self.rank, way[-1]):
                if rank not in told:
                    told[rank] = self._asked(rank)
            following = told[way[-1]].get("late", [])
            ways += [[*way, r] for r in following if r not in way[1:]]
        return []

    def _asked(self, rank: int) -> dict:
        if not self.store.check([_key(rank)]):
            return {}
        return ast.literal_eval(self.store.get(_key(rank)).decode())


def default_store() -> dist.Store:
    """Return the store at which all ranks met; PyTorch has no public name for it."""
    return dist.distributed_c10d._get_default_store()


def checked_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return `group`, or the group of all ranks for None.

    Raises ValueError or TypeError if it is no group that this rank is in.
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError("the default process group has not been initialized")
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"rank {dist.get_rank()} is no member of this group (new_group returned "
            "NON_GROUP_MEMBER here); only members take part in its collectives"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is {group!r}; it must be a process group or None")
    return group


def say_returned() -> None:
    """Tell waiting peers that this rank calls no further collective."""
    if dist.is_initialized():
        store, key = default_store(), _key(dist.get_rank())
        last = ast.literal_eval(store.get(key).decode()) if store.check([key]) else {}
        store.set(key, repr({"returned": True, "circle": last.get("circle", [])}))


def _key(rank: int) -> str:
    return f"ddp_course/waits/{rank}"


def _told(rank: int, told: dict) -> str:
    return f"rank {rank} at {told['doing']} in the group of ranks {told['group']}"


def exchange_by_store(name: str, watch: Watch) -> Callable[[object], list]:
    """Return a function that shows an object to all ranks and returns everyone's.

    Slow, but it needs no collective, and `watch` looks on while it waits. The objects
    are numbers, strings, and tuples of such; `name` is that of the group.
    """
    store, ranks, rank = watch.store, watch.ranks, watch.rank
    count = 0

    def exchange(value: object) -> list:
        nonlocal count
        count += 1
        keys = [f"ddp_course/{name}/{count}/{r}" for r in ranks]
        store.set(keys[ranks.index(rank)], repr(value))
        while late := [
            r for r, key in zip(ranks, keys, strict=True) if not store.check([key])
        ]:
            watch(late)
            time.sleep(SLICE if watch.is_long() else 0.001)
        watch.over()
        if count > 1:  # all have come to this exchange: they have read the last one
            store.delete_key(f"ddp_course/{name}/{count - 1}/{rank}")
        return [ast.literal_eval(store.get(key).decode()) for key in keys]

    return exchange


# ---- ranks in words ------------------------------------------------------------------


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Write some ranks: "rank 3", "ranks 1, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def by_text(
    texts: Sequence[str], ranks: Sequence[int], text_first: bool = False
) -> str:
    """Write who says what, ranks with the same text together; who says "" is left out.

    As "rank 0: yes; ranks 1, 2: no", or "yes on rank 0, no on ranks 1, 2".
    """
    who: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        if text:
            who.setdefault(text, []).append(rank)
    pairs = [(text, ranks_in_words(those)) for text, those in who.items()]
    if text_first:
        return ", ".join(f"{text} on {names}" for text, names in pairs)
    return "; ".join(f"{names}: {text}" for text, names in pairs)

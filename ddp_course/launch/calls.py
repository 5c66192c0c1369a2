"""Note each rank's last collectives of PyTorch, so that a failure can name them.

gloo does not compare shapes. Ranks that call `all_reduce` with unequal tensors lose
their connections, abort, wait forever, or return wrong sums, and no error names a
shape. So each rank writes its calls into memory that it shares with the launcher; these
notes outlive the rank, however it ends. Writing one takes about a microsecond.

A rank may also start a small collective and return without waiting for it, as a
pipeline's last stage does with its loss. On few cores, its peers may call that
collective much later, and the rank's process must live until then: `finish` waits.
"""

import itertools
import mmap
from collections import defaultdict
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ddp_course.launch.strict_rules import facts_of, in_words

# Collectives of a tensor that must have the same type and count on all ranks, and the
# position of their argument `group`.
NOTED = {"all_reduce": 2, "broadcast": 2, "reduce": 3}
SLOTS, WIDTH = 32, 256  # notes kept for each rank; bytes of a note
ROOM = SLOTS * WIDTH
# Bytes. `finish` does not wait for larger tensors: handles would keep them in memory.
SMALL = 4096

Call = tuple[str, int]  # a group's name, and the number of a call in that group


def allocate(file: Path, world_size: int) -> None:
    """Allocate ROOM bytes for each rank in the file of a launch's notes."""
    file.write_bytes(bytes(ROOM * world_size))


def install(file: Path, rank: int) -> None:
    """Let PyTorch's collectives write a note before each call of this rank."""
    with file.open("r+b") as opened:
        page = mmap.mmap(opened.fileno(), 0)
    numbers: dict[str, itertools.count] = defaultdict(itertools.count)
    slots = itertools.cycle(range(rank * ROOM, (rank + 1) * ROOM, WIDTH))
    forms: dict[tuple, str] = {}

    def note(name: str, tensor: Any, group: Any) -> None:
        if not isinstance(tensor, Tensor):  # the collective itself will refuse it
            return
        if group == dist.GroupMember.NON_GROUP_MEMBER:  # the call will do nothing
            return
        key = name, tensor.dtype, tensor.shape
        if (form := forms.get(key)) is None:
            form = f"{name} {facts_of([tensor])}\t{name}({in_words([tensor])})"
            forms[key] = form
        group = getattr(group or dist.group.WORLD, "group_name", "")
        text = f"{group}\t{next(numbers[group])}\t{form}".encode()[:WIDTH]
        slot = next(slots)
        page[slot : slot + WIDTH] = text.ljust(WIDTH, b"\0")

    for name, position in NOTED.items():
        setattr(dist, name, _noting(name, position, note))


_started: list[dist.Work] = []  # small collectives that may still run


def finish() -> None:
    """Wait for this rank's small collectives, in case its function has not.

    A wait may never end; the launcher kills this process when all ranks have reported.
    """
    for work in _started:
        with suppress(Exception):  # a peer has gone, and this rank has its result
            work.wait()


def _noting(name: str, position: int, note: Any) -> Any:
    original = getattr(dist, name)

    @wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        group = args[position] if len(args) > position else kwargs.get("group")
        tensor = args[0] if args else kwargs.get("tensor")
        note(name, tensor, group)
        work = original(*args, **kwargs)
        if work is not None and tensor.numel() * tensor.element_size() <= SMALL:
            _started[:] = [each for each in _started if not each.is_completed()]
            _started.append(work)
        return work

    return collective


def read_calls(file: Path, rank: int) -> dict[Call, tuple[str, str]]:
    """Return a rank's last calls: call -> (facts that must agree, text for people)."""
    with file.open("rb") as opened:
        opened.seek(rank * ROOM)
        page = opened.read(ROOM)
    found = {}
    for slot in range(0, len(page), WIDTH):
        parts = page[slot : slot + WIDTH].rstrip(b"\0").decode(errors="replace")
        if parts.count("\t") == 3:
            group, number, facts, words = parts.split("\t")
            found[group, int(number)] = facts, words
    return found


def first_difference(calls: list[dict[Call, tuple[str, str]]]) -> dict[int, str]:
    """Return the first call in which ranks of a group differ, in words, by rank.

    `calls[rank]` is the result of `read_calls`. Returns {} if no call differs.
    """
    for call in sorted(set().union(*calls)):
        by_rank = {rank: own[call] for rank, own in enumerate(calls) if call in own}
        if len({facts for facts, _ in by_rank.values()}) > 1:
            return {rank: words for rank, (_, words) in by_rank.items()}
    return {}

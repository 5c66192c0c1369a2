"""What NCCL's rules compare, and why: tables and plain functions, without any process.

A call is told in *facts*, which all ranks must mean alike, and in words for people. The
ranks show each other both in a *note* (`strict`). Chapters 01, 02 and 10.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROOM = 2048  # bytes of a note: what one rank shows another before a call
OPERATIONS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "PREMUL_SUM")
# What a collective is called in torch.distributed: the argument whose tensors must have
# the same types and counts on all ranks; a process group's methods for it. (The last of
# them are their names before torch 2.13.)
COLLECTIVES = {
    "all_reduce": (0, "allreduce allreduce_coalesced"),
    "broadcast": (0, "broadcast"),
    "reduce": (0, "reduce"),
    "all_gather": (0, "allgather allgather_coalesced"),
    "all_gather_single": (
        1,
        "all_gather_single all_gather_single_coalesced "
        "_allgather_base allgather_into_tensor_coalesced",
    ),
    "reduce_scatter": (1, "reduce_scatter"),
    "reduce_scatter_single": (
        0,
        "reduce_scatter_single reduce_scatter_single_coalesced "
        "_reduce_scatter_base reduce_scatter_tensor_coalesced",
    ),
    "all_to_all": (1, "alltoall"),
    "all_to_all_single": (1, "all_to_all_single alltoall_base"),
    "gather": (1, "gather"),
    "scatter": (0, "scatter"),
    "barrier": (None, "barrier"),
}
WHY = {  # in what two calls differ -> what becomes of it over NCCL
    "call": "all ranks of a group must make the same calls in the same order. NCCL "
    "would hang, or take the numbers of one for those of the other",
    "way": "the calls of two ranks run one after the other, so each waits for the "
    "other, for ever. Swap with batch_isend_irecv, or in opposite orders",
    "messages": "in a batch, each send to a rank must meet its receive in that rank's "
    "batch, in the same order. NCCL would hang, or mix up the messages",
    "dtype": "NCCL does not compare types. It would give wrong numbers, or hang",
    "count": "NCCL does not compare counts. It would give wrong numbers, or hang",
    "op": "NCCL does not compare operations. It would give wrong numbers",
    "root": "NCCL does not compare roots. It would hang, or give wrong numbers",
    "tag": "NCCL has no tags. Messages match by their order, so it would take one "
    "message for another",
}
STUCK = {  # what waits for each other -> why it never meets
    "alone": ". A message alone never meets one in a batch: over NCCL they take "
    "different communicators (but one, if init_process_group was given a device_id)",
    "groups": ". These are calls of different groups of the same ranks; all ranks must "
    "use groups in the same order",
}
Facts = dict[str, Any]  # of a call: what both ranks must mean alike


@dataclass
class Message:
    """One send or receive, to or from `peer` (its number in the group)."""

    kind: str
    tensor: Tensor
    peer: int
    tag: int

    @classmethod
    def of(cls, op: dist.P2POp) -> Message:
        """Return a part of a batch."""
        tensor = torch.view_as_real(op.tensor) if op.tensor.is_complex() else op.tensor
        kind = "send" if op.op is dist.isend else "recv"
        return cls(kind, tensor, op.group_peer, op.tag)

    def facts(self, me: int) -> Facts:
        """Return what the peer must mean alike."""
        way = [me, self.peer] if self.kind == "send" else [self.peer, me]
        return {"way": way, **facts_of([self.tensor]), "tag": self.tag}

    def told(self, ranks: list[int]) -> str:
        """Return it as it was called."""
        to, tag = "dst" if self.kind == "send" else "src", f", tag={self.tag}"
        form, tag = in_words([self.tensor]), tag if self.tag else ""
        return f"{self.kind}({form}, {to}={ranks[self.peer]}{tag})"


def batch_facts(messages: list[Message], peer: int, me: int) -> Facts:
    """Return what a batch's messages with one peer, those of one way in order, mean."""
    each = [m.facts(me) for m in messages if m.peer == peer]
    each.sort(key=lambda fact: fact["way"])
    tags = [fact.pop("tag") for fact in each]
    return {"call": "a batch", "messages": each, "tag": tags}


def problem_with(tensors: Iterable[Tensor], op: str = "SUM") -> str | None:
    """Return why NCCL refuses tensors, or an operation; or None."""
    for t in tensors:
        if t.device.type != "cpu" or t.layout != torch.strided:
            return f"a tensor is {t.layout} on {t.device}"
        last = torch.channels_last if t.dim() == 4 else torch.contiguous_format
        if not t.is_contiguous() and not t.is_contiguous(memory_format=last):
            return (
                f"tensors must be contiguous; one has shape {list(t.shape)} "
                f"and stride {list(t.stride())}. Give its .contiguous()"
            )
    return None if op in OPERATIONS else f"NCCL has no {op}"


def why_stuck(circle: str) -> str:
    """Return why the calls that a DeadlockError names never meet; or nothing."""
    alone = re.search(r" at (send|recv)\(", circle)
    if " at a batch of" in circle:
        return STUCK["alone"] if alone else ""
    groups = re.findall(r"in the group of ranks (\[.*?\])", circle)
    return STUCK["groups"] if len({*groups}) == 1 and not alone else ""


def tensors_in(given: Any) -> Iterator[Tensor]:
    """Yield all tensors in lists of lists."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for each in given:
            yield from tensors_in(each)


def facts_of(tensors: list[Tensor]) -> Facts:
    """Return the types and counts of tensors."""
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in tensors})
    return {"dtype": dtypes, "count": [t.numel() for t in tensors]}


def counts_by_rank(args: tuple, which: int, size: int) -> list[int]:
    """Return how many elements of an all-to-all's argument belong to each rank.

    It is a list of tensors; or one tensor, whose rows for each rank are told two
    arguments later, or are equally many.
    """
    given = args[which]
    if not isinstance(given, Tensor):
        return [t.numel() for t in given]
    rows = args[2 + which] or [len(given) // size] * size
    return [n * (given.numel() // max(1, len(given))) for n in rows]


def in_words(tensors: list[Tensor]) -> str:
    """Return "float32 [2, 3]", of several tensors with the first one's shape."""
    several = f"{len(tensors)} x " if len(tensors) > 1 else ""
    first = [f"{t.dtype} {list(t.shape)}".removeprefix("torch.") for t in tensors[:1]]
    return several + "".join(first)


def note(facts: Facts, told: str) -> Tensor:
    """Return what a rank shows a peer, in ROOM bytes; the hash of what is too long."""
    texts = {name: json.dumps(fact) for name, fact in facts.items()}
    for name, text in texts.items():
        if len(text) > 100:
            texts[name] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    if os.environ.get("STRICT_TAGS") == "ignored":
        texts.pop("tag", None)
    words = json.dumps([texts, told if len(told) < 400 else f"{told[:400]} ..."])
    return torch.frombuffer(bytearray(words.encode().ljust(ROOM)), dtype=torch.uint8)


def read(note: Tensor) -> tuple[Facts, str]:
    """Return the facts and the words of a note."""
    facts, told = json.loads(bytes(note.tolist()))
    return facts, told

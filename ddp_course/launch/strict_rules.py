"""NCCL's rules as tables and functions: which facts of two calls must agree, and why.

A call is described by *facts*, which must be equal on all ranks, and by a text for
people. Ranks exchange both in a *note* (`strict`). Chapters 01, 02 and 10.
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

ROOM = 2048  # bytes of a note
OPERATIONS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "PREMUL_SUM")
# A collective's name in torch.distributed -> the number of the argument whose tensors
# must have the same types and counts on all ranks, and a process group's methods for it
# (the last are the names before torch 2.13).
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
WHY = {  # a fact that differs between two calls -> the effect over NCCL
    "call": "all ranks of a group must make the same calls in the same order. NCCL "
    "would hang, or take the numbers of one call for those of the other",
    "way": "two sends or two receives never match, and over NCCL each call waits for "
    "its match before the next begins. Swap with batch_isend_irecv, or in opposite "
    "orders",
    "messages": "in a batch, each send to a rank must meet its receive in that rank's "
    "batch, in the same order. NCCL would hang, or mix up the messages",
    "dtype": "NCCL does not compare types. It would give wrong numbers, or hang; "
    "pass the same type on all ranks",
    "count": "NCCL does not compare counts. It would give wrong numbers, or hang",
    "op": "NCCL does not compare operations. It would give wrong numbers",
    "root": "NCCL does not compare roots. It would hang, or give wrong numbers",
    "tag": "NCCL has no tags. Messages match by their order, so it would take one "
    "message for another",
}
STUCK = {  # the kind of calls that wait for each other -> why they never match
    "alone": ". A message alone never matches a message in a batch: over NCCL they use "
    "different communicators (the same one only if init_process_group has a device_id)",
    "groups": ". These are calls of different groups of the same ranks; all ranks must "
    "use groups in the same order",
}
Facts = dict[str, Any]  # a call's properties that must be equal on both ranks


@dataclass
class P2PMessage:
    """One point-to-point send or receive; `peer` is the other rank's group rank."""

    kind: str
    tensor: Tensor
    peer: int
    tag: int

    @classmethod
    def of(cls, op: dist.P2POp) -> P2PMessage:
        """Return the message that an operation of a batch describes."""
        tensor = torch.view_as_real(op.tensor) if op.tensor.is_complex() else op.tensor
        kind = "send" if op.op is dist.isend else "recv"
        return cls(kind, tensor, op.group_peer, op.tag)

    def facts(self, me: int) -> Facts:
        """Return the facts that must equal the peer's; `me` is this group rank."""
        way = [me, self.peer] if self.kind == "send" else [self.peer, me]
        return {"way": way, **facts_of([self.tensor]), "tag": self.tag}

    def call_text(self, ranks: list[int]) -> str:
        """Return the call as written in a program: "send(float32 [2], dst=1)"."""
        to, tag = "dst" if self.kind == "send" else "src", f", tag={self.tag}"
        form, tag = in_words([self.tensor]), tag if self.tag else ""
        return f"{self.kind}({form}, {to}={ranks[self.peer]}{tag})"


def batch_facts(messages: list[P2PMessage], peer: int, me: int) -> Facts:
    """Return the facts of a batch's messages with one peer, sorted by direction."""
    each = [m.facts(me) for m in messages if m.peer == peer]
    each.sort(key=lambda fact: fact["way"])
    tags = [fact.pop("tag") for fact in each]
    return {"call": "a batch", "messages": each, "tag": tags}


def find_problem(tensors: Iterable[Tensor], op: str = "SUM") -> str | None:
    """Return why NCCL refuses these tensors or this operation; None if it does not."""
    for t in tensors:
        if t.device.type != "cpu" or t.layout != torch.strided:
            return f"a tensor is {t.layout} on {t.device}"
        last = torch.channels_last if t.dim() == 4 else torch.contiguous_format
        if not t.is_contiguous() and not t.is_contiguous(memory_format=last):
            return (
                f"tensors must be contiguous; one has shape {list(t.shape)} "
                f"and stride {list(t.stride())}. Pass its .contiguous()"
            )
    return None if op in OPERATIONS else f"NCCL has no {op}"


def explain_deadlock(circle: str) -> str:
    """Return why the calls that a DeadlockError names never match; "" if unknown."""
    alone = re.search(r" at (send|recv)\(", circle)
    if " at a batch of" in circle:
        return STUCK["alone"] if alone else ""
    groups = re.findall(r"in the group of ranks (\[.*?\])", circle)
    return STUCK["groups"] if len({*groups}) == 1 and not alone else ""


def tensors_in(argument: Any) -> Iterator[Tensor]:
    """Yield all tensors in lists of lists."""
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for each in argument:
            yield from tensors_in(each)


def facts_of(tensors: list[Tensor]) -> Facts:
    """Return the types and counts of tensors."""
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in tensors})
    return {"dtype": dtypes, "count": [t.numel() for t in tensors]}


def counts_by_rank(args: tuple, which: int, size: int) -> list[int]:
    """Return how many elements of an all-to-all's argument belong to each rank.

    The argument is a list of tensors, or one tensor. For one tensor, the argument two
    places later says how many rows belong to each rank; if it is empty, all are equal.
    """
    argument = args[which]
    if not isinstance(argument, Tensor):
        return [t.numel() for t in argument]
    rows = args[2 + which] or [len(argument) // size] * size
    return [n * (argument.numel() // max(1, len(argument))) for n in rows]


def in_words(tensors: list[Tensor]) -> str:
    """Return "float32 [2, 3]", or "4 x float32 [2, 3]" with the first one's shape."""
    several = f"{len(tensors)} x " if len(tensors) > 1 else ""
    first = [f"{t.dtype} {list(t.shape)}".removeprefix("torch.") for t in tensors[:1]]
    return several + "".join(first)


def pack_note(facts: Facts, text: str) -> Tensor:
    """Return facts and text as ROOM bytes (uint8), long facts as their hashes."""
    values = {name: json.dumps(fact) for name, fact in facts.items()}
    for name, value in values.items():
        if len(value) > 100:
            values[name] = hashlib.blake2b(value.encode(), digest_size=8).hexdigest()
    if os.environ.get("STRICT_TAGS") == "ignored":
        values.pop("tag", None)
    words = json.dumps([values, text if len(text) < 400 else f"{text[:400]} ..."])
    return torch.frombuffer(bytearray(words.encode().ljust(ROOM)), dtype=torch.uint8)


def read_note(note: Tensor) -> tuple[Facts, str]:
    """Return the facts and the text of a note."""
    facts, text = json.loads(bytes(note.tolist()))
    return facts, text

"""What fits on a GPU, with which ZeRO stage, and what it costs to send.

    for row in plan(MODELS["gpt2-xl"], gpus=8, memory=24e9):
        print(row.name, row.ledger.total, row.fits, row.bytes_sent)

Gigabytes are decimal, GB = 1e9 bytes, as in the ZeRO paper and as GPUs are sold (an "80
GB" GPU has a little more, but also a CUDA context, some 0.5 GB, and fragments). Not
counted: buckets on their way and work space. Explained in chapters 07 and 08.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ddp_course.measure import Ledger
from ddp_course.theory.checks import check_count, check_positive
from ddp_course.theory.memory import (
    Precision,
    gathered_bytes,
    model_states,
    precision_named,
)
from ddp_course.theory.models import Model
from ddp_course.theory.step_volume import step_volume

MOST_GPUS = 2**20  # beyond, one does not look


@dataclass(frozen=True)
class Row:
    """One strategy: what a GPU keeps, and what it sends.

    Attributes:
        name: "DDP", "ZeRO-1" to "ZeRO-3", or "ZeRO-3 + CPU offload".
        stage: 0 to 3.
        ledger: bytes on the GPU at the peak of a step, by kind. Communication buffers
            are what stage 3 holds gathered: what belongs to no layer, one layer that
            computes, one that is fetched, and the gradients of one layer and of what
            belongs to none.
        on_host: bytes that its part takes in the host's memory, 0 without offload.
        fits: whether the ledger's total is at most the GPU's memory; None if nothing
            of what remains there is known.
        bytes_sent: to other GPUs, in a step, per GPU.
        host_bytes: over PCIe, in a step, per GPU; 0 without offload.
        times_ddp: `bytes_sent` over that of DDP; None on one GPU, which sends nothing.
        seconds: `bytes_sent` at the bandwidth; None without one. Nothing overlaps here.
    """

    name: str
    stage: int
    ledger: Ledger
    on_host: int
    fits: bool | None
    bytes_sent: float
    host_bytes: int
    times_ddp: float | None
    seconds: float | None


def plan(
    model: Model,
    gpus: int,
    memory: float,
    *,
    optimizer: str | int = "adamw",
    precision: str | Precision = "mixed",
    batch: int = 1,
    recompute: str = "none",
    fused_attention: bool = True,
    bandwidth: float | None = None,
) -> list[Row]:
    """Return a row for DDP, each ZeRO stage, and stage 3 with offload to the CPU.

    Args:
        model: what is trained.
        gpus: how many there are; all of them share the data.
        memory: bytes of one GPU.
        optimizer: as for `theory.model_states`.
        precision: as for `theory.model_states`.
        batch: rows of one microbatch on one GPU.
        recompute: "none", "selective" (attention's scores) or "full" (whole layers).
        fused_attention: attention keeps no scores (FlashAttention).
        bandwidth: bytes per second that a GPU sends; no times without.

    Raises:
        ValueError: for a value outside of what is said here.

    Source: Rajbhandari et al. 2020, sections 5 and 7; for offload Ren et al. 2021,
    "ZeRO-Offload", and FSDP's CPUOffloadPolicy. Chapters 07 and 08.
    """
    check_count("gpus", gpus)
    check_positive("memory", memory)
    if bandwidth is not None:
        check_positive("bandwidth", bandwidth)
    precision = precision_named(precision)
    kept = model.activations(precision, batch, recompute, fused_attention)
    rows = []
    for stage, name in enumerate(("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")):
        numel = model.units if stage == 3 else model.parameters
        states = model_states(numel, gpus, stage, optimizer, precision)
        gathered = _gathered(model, gpus, precision) if stage == 3 else 0
        sent = float(step_volume(numel, gpus, stage, precision).total)
        ledger = {**states, "activations": kept, "communication buffers": gathered}
        rows.append(
            Row(
                name=name,
                stage=stage,
                ledger=Ledger(ledger),
                on_host=0,
                fits=sum(ledger.values()) <= memory,
                bytes_sent=sent,
                host_bytes=0,
                times_ddp=sent / (rows[0].bytes_sent if rows else sent)
                if sent
                else None,
                seconds=None if bandwidth is None else sent / bandwidth,
            )
        )
    return [*rows, _offloaded(rows[3], memory if model.layers else None)]


def _offloaded(row: Row, memory: float | None) -> Row:
    """Return stage 3 with its shards, and the optimizer's step, moved to the host.

    A shard goes to the GPU before each of its two all-gathers, and its gradient comes
    back: twice the parameters and once the gradients, over PCIe.
    """
    here = ("activations", "communication buffers")
    ledger = Ledger({kind: row.ledger[kind] for kind in here})
    return replace(
        row,
        name="ZeRO-3 + CPU offload",
        ledger=ledger,
        on_host=row.ledger.total - ledger.total,
        fits=None if memory is None else ledger.total <= memory,
        host_bytes=2 * row.ledger["parameters"] + row.ledger["gradients"],
    )


def _gathered(model: Model, gpus: int, precision: Precision) -> int:
    """Return the bytes that stage 3 holds gathered; 0 if no layers are known."""
    if not model.layers:
        return 0
    root = [model.root] * (model.root > 0)
    at_once = [model.block] * min(2, model.layers)
    return gathered_bytes(
        root + at_once, gpus, precision, gradients=[*root, model.block]
    )


def fewest_gpus(model: Model, memory: float, **options: object) -> int | None:
    """Return on how many GPUs the model fits with stage 3; None if on no number.

    What stays even on very many are activations and gathered blocks; and padding grows
    with the number of GPUs: a small model may fit on 8 and not on 10,000. `options` are
    those of `plan`. Chapter 08.
    """

    def row(gpus: int) -> Row:
        return plan(model, gpus, memory, **options)[3]

    alone = row(1)  # nothing is padded
    stays = alone.ledger["activations"] + alone.ledger["communication buffers"]
    left = memory - stays
    if left <= 0:
        return None
    gpus = max(1, int((alone.ledger.total - stays) / left))  # with fewer it cannot fit
    most = min(MOST_GPUS, max(model.units))  # with more, there is but more padding
    while not row(gpus).fits:
        gpus += 1
        if gpus > most:
            return None
    return gpus

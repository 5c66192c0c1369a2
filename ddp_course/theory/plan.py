"""Plan a training run: which ZeRO stages fit on a GPU, and how much each sends.

    for row in plan(MODELS["gpt2-xl"], gpus=8, memory=24e9):
        print(row.name, row.ledger.total, row.fits, row.bytes_sent)

Gigabytes are decimal, GB = 1e9 bytes, as in the ZeRO paper and as GPUs are sold. (An
"80 GB" GPU has a little more, but a CUDA context takes some 0.5 GB of it, and some is
lost to fragmentation.) Buckets and work space are not counted. Explained in chapters 07
and 08.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ddp_course.gpt_config import PRESETS, GPTConfig
from ddp_course.ledger import Ledger
from ddp_course.spec import RECOMPUTE
from ddp_course.theory.activations import gpt_peak, model_activations
from ddp_course.theory.checks import check_choice, check_count, check_positive
from ddp_course.theory.memory import (
    Precision,
    gathered_bytes,
    model_states,
    precision_named,
    step_volume,
)

MOST_GPUS = 2**20  # the largest number of GPUs that `fewest_gpus` tries


@dataclass(frozen=True)
class Model:
    """A model's sizes, as far as a plan needs them.

    Attributes:
        parameters: the number of parameters.
        layers, hidden, heads, sequence, vocab: its shape; 0 if unknown. The size of
            blocks needs layers and hidden; activations need all but vocab.
        config: for the course's own GPT; then activations are exact.
    """

    parameters: int
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    sequence: int = 0
    vocab: int = 0
    config: GPTConfig | None = None

    def __post_init__(self) -> None:
        """Check that layers and hidden belong together, and fit the parameters."""
        if (self.layers > 0) != (self.hidden > 0):
            raise ValueError(
                f"layers is {self.layers} and hidden {self.hidden}; set both or neither"
            )
        if self.layers * self.block > self.parameters:
            raise ValueError(
                f"{self.layers} layers of {self.hidden} channels have "
                f"{self.layers * self.block:,} parameters, more than the model's "
                f"{self.parameters:,}; use fewer layers, or more parameters"
            )

    @property
    def block(self) -> int:
        """The parameters of a layer: 12 h² + 13 h; 12 h² + 10 h in the course's GPT."""
        if not self.layers:
            return 0
        return 12 * self.hidden**2 + (10 if self.config else 13) * self.hidden

    @property
    def root(self) -> int:
        """The parameters outside of layers: embedding, last norm, output matrix."""
        return self.parameters - self.layers * self.block

    @property
    def units(self) -> list[int]:
        """The sizes of stage 3's units: one for `root`, and one for each layer."""
        if not self.layers:
            return [self.parameters]
        return [self.root] * (self.root > 0) + [self.block] * self.layers

    def activations(
        self,
        precision: str | Precision,
        batch: int = 1,
        recompute: str = "none",
        fused_attention: bool = True,
    ) -> int:
        """Return the bytes of activations on one GPU; 0 for a model of unknown shape.

        Exact for the course's GPT in float32; otherwise `model_activations`, with
        dropout as in GPT-2 and GPT-3. Autocast needs more, since it keeps some tensors
        in float32. Raises ValueError for an unknown precision or recomputation. Chapter
        06.
        """
        check_choice("recompute", recompute, RECOMPUTE)
        itemsize = precision_named(precision).activation
        if self.config is not None and itemsize == 4 and fused_attention:
            # Fused attention keeps no scores, so "selective" has no effect.
            how = "full" if recompute == "full" else "none"
            return gpt_peak(self.config, batch, recompute=how)
        if not (self.layers and self.hidden and self.heads and self.sequence):
            return 0
        shape = self.layers, batch, self.sequence, self.hidden, self.heads, self.vocab
        how = {"recompute": recompute, "fused_attention": fused_attention}
        dropout = self.config is None
        return model_activations(*shape, itemsize=itemsize, dropout=dropout, **how)

    @classmethod
    def gpt(
        cls, layers: int, hidden: int, heads: int, sequence: int, vocab: int
    ) -> Model:
        """Return a GPT-2 of this shape: L (12 h² + 13 h) + (V + s + 2) h parameters."""
        numel = layers * (12 * hidden + 13) * hidden + (vocab + sequence + 2) * hidden
        return cls(numel, layers, hidden, heads, sequence, vocab)

    @classmethod
    def of(cls, config: GPTConfig) -> Model:
        """Return one of the course's GPTs."""
        shape = config.n_layer, config.d_model, config.n_head
        text = config.block_size, config.vocab_size
        return cls(config.num_parameters, *shape, *text, config)


MODELS = {
    **{name: Model.of(config) for name, config in PRESETS.items()},
    "gpt2": Model.gpt(12, 768, 12, 1024, 50_257),
    "gpt2-xl": Model.gpt(48, 1600, 25, 1024, 50_257),
    "gpt3-175b": Model.gpt(96, 12_288, 96, 2048, 50_257),
}


@dataclass(frozen=True)
class Row:
    """A row of the plan: the bytes that one GPU stores and sends with a strategy.

    Attributes:
        name: "DDP", "ZeRO-1" to "ZeRO-3", or "ZeRO-3 + CPU offload".
        stage: 0 to 3.
        ledger: bytes on the GPU at the peak of a step, by kind. Communication buffers
            are the units that stage 3 holds gathered (the root, the layer that
            computes, and a prefetched one) and the unsharded gradients of the root and
            of one layer.
        fits: whether the ledger's total is at most the GPU's memory; None if the total
            is, but lacks the activations, which are unknown.
        bytes_sent: bytes that each GPU sends to others in a step.
        times_ddp: `bytes_sent` divided by DDP's; None on one GPU, which sends nothing.
        seconds: `bytes_sent` divided by the bandwidth, without overlap; None if the
            bandwidth is unknown.
        on_host: bytes in the host's memory, per GPU; 0 without offload.
        host_bytes: bytes over PCIe in a step, per GPU; 0 without offload.
    """

    name: str
    stage: int
    ledger: Ledger
    fits: bool | None
    bytes_sent: float
    times_ddp: float | None
    seconds: float | None
    on_host: int = 0
    host_bytes: int = 0


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
        model: the model to train.
        gpus: the number of GPUs; all are data-parallel.
        memory: bytes of one GPU, 1e6 or more.
        optimizer: as for `theory.model_states`.
        precision: as for `theory.model_states`.
        batch: rows of one microbatch on one GPU.
        recompute: "none", "selective" (attention's scores) or "full" (whole layers).
        fused_attention: attention keeps no scores (FlashAttention).
        bandwidth: bytes per second that a GPU sends; None leaves out the times.

    Raises:
        ValueError: for a value that is not allowed here.

    Source: Rajbhandari et al. 2020, sections 5 and 7; for offload Ren et al. 2021,
    "ZeRO-Offload", and FSDP's CPUOffloadPolicy. Chapters 07 and 08.
    """
    if not isinstance(model, Model):
        must = 'it must be a Model, such as theory.MODELS["gpt2-xl"]'
        raise ValueError(f"model is {model!r}; {must}")
    check_count("gpus", gpus)
    check_positive("memory", memory)
    if memory < 1e6:
        can = "it must be 1e6 or more (24 GB are 24e9)"
        raise ValueError(f"memory is {memory:g} bytes; {can}")
    if bandwidth is not None:
        check_positive("bandwidth", bandwidth)
    precision = precision_named(precision)
    kept = model.activations(precision, batch, recompute, fused_attention)

    def fits(ledger: Ledger) -> bool | None:
        return False if ledger.total > memory else True if kept else None

    rows = []
    for stage, name in enumerate(("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")):
        numel = model.units if stage == 3 else model.parameters
        states = model_states(numel, gpus, stage, optimizer, precision)
        gathered = _gathered(model, gpus, precision) if stage == 3 else 0
        sent = float(step_volume(numel, gpus, stage, precision).total)
        parts = {"activations": kept, "communication buffers": gathered}
        ledger = Ledger({**states, **parts})
        times_ddp = sent / (rows[0].bytes_sent if rows else sent) if sent else None
        seconds = None if bandwidth is None else sent / bandwidth
        rows.append(Row(name, stage, ledger, fits(ledger), sent, times_ddp, seconds))
    return [*rows, _offloaded(rows[3], fits)]


def _offloaded(row: Row, fits: Callable[[Ledger], bool | None]) -> Row:
    """Return stage 3 with its shards, and the optimizer's step, moved to the host.

    A shard is copied to the GPU before each of its two all-gathers, and its gradient is
    copied back: twice the parameters and once the gradients, over PCIe.
    """
    on_gpu = ("activations", "communication buffers")
    ledger = Ledger({kind: row.ledger[kind] for kind in on_gpu})
    return replace(
        row,
        name="ZeRO-3 + CPU offload",
        ledger=ledger,
        on_host=row.ledger.total - ledger.total,
        fits=fits(ledger),
        host_bytes=2 * row.ledger["parameters"] + row.ledger["gradients"],
    )


def _gathered(model: Model, gpus: int, precision: Precision) -> int:
    """Return the bytes that stage 3 holds gathered; 0 if the layers are unknown."""
    if not model.layers:
        return 0
    root = [model.root] * (model.root > 0)
    at_once = [model.block] * min(2, model.layers)
    return gathered_bytes(
        root + at_once, gpus, precision, gradients=[*root, model.block]
    )


def fewest_gpus(model: Model, memory: float, **options: object) -> int | None:
    """Return the fewest GPUs on which the model fits with stage 3, or None.

    Activations and gathered blocks do not shrink with more GPUs. And padding grows with
    the number of GPUs: a small model may fit on 8 and not on 10,000. `options` are
    those of `plan`. Chapter 08.
    """

    def row(gpus: int) -> Row:
        return plan(model, gpus, memory, **options)[3]

    alone = row(1)  # without padding
    stays = alone.ledger["activations"] + alone.ledger["communication buffers"]
    left = memory - stays
    if left <= 0:
        return None
    gpus = max(1, int((alone.ledger.total - stays) / left))  # fewer cannot be enough
    most = min(MOST_GPUS, max(model.units))  # more would only add padding
    while row(gpus).ledger.total > memory:
        gpus += 1
        if gpus > most:
            return None
    return gpus

"""Models as a plan sees them: how many parameters, in which layers. Chapter 06."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_course.model import PRESETS, GPTConfig
from ddp_course.theory.activations import (
    check_recompute,
    gpt_peak,
    model_activations,
)
from ddp_course.theory.checks import check_count
from ddp_course.theory.memory import Precision, precision_named


@dataclass(frozen=True)
class Model:
    """What a plan has to know of a model.

    Attributes:
        parameters: how many.
        layers, hidden, heads, sequence, vocab: its shape; 0 if unknown. Without layers
            and hidden nothing is known of blocks, and without all but the last nothing
            of activations.
        config: the course's own GPT, if it is one: then activations are exact.
    """

    parameters: int
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    sequence: int = 0
    vocab: int = 0
    config: GPTConfig | None = None

    def __post_init__(self) -> None:
        """Check every value."""
        check_count("parameters", self.parameters)
        for name in ("layers", "hidden", "heads", "sequence", "vocab"):
            if getattr(self, name) != 0:
                check_count(name, getattr(self, name))
        if (self.layers > 0) != (self.hidden > 0):
            raise ValueError(
                f"layers is {self.layers} and hidden {self.hidden}; say both, or none"
            )
        if self.layers * self.block > self.parameters:
            raise ValueError(
                f"{self.layers} layers of {self.hidden} channels have "
                f"{self.layers * self.block:,} parameters, more than the model's "
                f"{self.parameters:,}"
            )

    @property
    def block(self) -> int:
        """Parameters of one layer, 12 h² + 13 h as in GPT-2 (the course's: + 10 h)."""
        if not self.layers:
            return 0
        return 12 * self.hidden**2 + (10 if self.config else 13) * self.hidden

    @property
    def root(self) -> int:
        """Parameters that belong to no layer: embedding, last norm, output matrix."""
        return self.parameters - self.layers * self.block

    @property
    def units(self) -> list[int]:
        """What stage 3 gathers on its own: what belongs to no layer, and each layer."""
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

        Exact for the course's GPT in float32; else `model_activations`, with dropout as
        in GPT-2 and GPT-3. Under autocast it is more: some numbers stay in float32.
        Raises ValueError for other values than these say. Chapter 06.
        """
        check_recompute(recompute)
        check_count("batch", batch)
        itemsize = precision_named(precision).activation
        if self.config is not None and itemsize == 4 and fused_attention:
            # Fused attention keeps no scores that could be left out.
            how = "full" if recompute == "full" else "none"
            return gpt_peak(self.config, batch, recompute=how)
        if not (self.layers and self.hidden and self.heads and self.sequence):
            return 0
        return model_activations(
            self.layers,
            batch,
            self.sequence,
            self.hidden,
            self.heads,
            self.vocab,
            recompute=recompute,
            itemsize=itemsize,
            dropout=self.config is None,
            fused_attention=fused_attention,
        )

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
        return cls(
            config.num_parameters,
            config.n_layer,
            config.d_model,
            config.n_head,
            config.block_size,
            config.vocab_size,
            config,
        )


MODELS = {
    **{name: Model.of(config) for name, config in PRESETS.items()},
    "gpt2": Model.gpt(12, 768, 12, 1024, 50_257),
    "gpt2-xl": Model.gpt(48, 1600, 25, 1024, 50_257),
    "gpt3-175b": Model.gpt(96, 12_288, 96, 2048, 50_257),
}

"""The course's GPT with a mixture of experts in place of each MLP.

    model = build_mixture_gpt(MixtureConfig(experts=8, experts_per_token=2))

It is the same GPT; only `block.mlp` is another module. The parameters of a block's
experts are stacked, expert by expert along the first dimension, so that a rank's share
of the experts is a slice. Dropped tokens and the auxiliary loss depend on each sequence
alone: so dividing a batch among ranks or microbatches does not change the training.
Chapter 17.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from ddp_course.experts.balance import auxiliary_loss, capacity, within_capacity
from ddp_course.experts.dispatch import dispatched_mixture
from ddp_course.experts.metered import metered_all_to_all_rows
from ddp_course.experts.naive import top_k_weights
from ddp_course.experts.segments import Segments
from ddp_course.gpt_config import MixtureConfig
from ddp_course.model import GPT, build_gpt


class StackedExperts(nn.Module):
    """The MLPs of E experts, for rows in blocks: (M, C) -> (M, C).

    Parameters: up (E, 4C, C), up_bias (E, 4C), down (E, C, 4C) and down_bias (E, C).
    """

    def __init__(self, num_experts: int, channels: int, std: float) -> None:
        super().__init__()
        e, c = num_experts, channels
        self.up = nn.Parameter(torch.empty(e, 4 * c, c).normal_(std=0.02))
        self.up_bias = nn.Parameter(torch.zeros(e, 4 * c))
        self.down = nn.Parameter(torch.empty(e, c, 4 * c).normal_(std=std))
        self.down_bias = nn.Parameter(torch.zeros(e, c))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Compute block i, of `counts[i]` rows, by expert i modulo E."""
        weights = (self.up, self.up_bias, self.down, self.down_bias)
        experts = [*zip(*(w.unbind() for w in weights), strict=True)]
        experts *= len(counts) // len(experts)
        outputs = []
        for part, expert in zip(rows.split(counts), experts, strict=True):
            up, up_bias, down, down_bias = expert
            hidden = F.gelu(F.linear(part, up, up_bias))
            outputs.append(F.linear(hidden, down, down_bias))
        return torch.cat(outputs)


class GradientScale:
    """The factor of the auxiliary losses' gradients in the next backward.

    It is 1 for a backward from the mean loss of the whole batch. A pipeline runs one
    backward for each microbatch's share of the loss, and first calls `before_compute`,
    which sets the factor to that share, times the loss scale. If you scale the loss
    yourself, set `model.auxiliary.factor` to the same scale.
    """

    factor = 1.0

    def before_compute(self, runtime: Any, action: Any) -> None:
        """Set the factor for the microbatch that the pipeline computes next."""
        self.factor = runtime.weights[action.microbatch] * runtime.loss_scale

    def __deepcopy__(self, memo: Any) -> "GradientScale":
        return self  # a copied layer is still scaled by what the pipeline sets


class AddAuxiliaryLoss(Function):
    """The layer's output, unchanged; backward adds the auxiliary loss's gradient.

    So the loss need not travel to the end of the model, which may be on another rank.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, scale: GradientScale) -> Tensor:
        """Return y."""
        ctx.scale, ctx.dtype = scale, loss.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return y's gradient, and the scale's factor as the gradient of the loss."""
        one = torch.tensor(ctx.scale.factor, dtype=ctx.dtype, device=gradient.device)
        return gradient, one, None


class Mixture(nn.Module):
    """A router and its experts: (B, T, C) -> (B, T, C).

    Attributes:
        group: the ranks that share the experts; None: this rank has them all.
    """

    group: dist.ProcessGroup | None = None

    def __init__(self, config: MixtureConfig, scale: GradientScale) -> None:
        super().__init__()
        self.config, self.scale = config, scale
        std = 0.02 / (2 * config.n_layer) ** 0.5  # as in `model.GPT`
        self.router = nn.Linear(config.d_model, config.experts, bias=False)
        nn.init.normal_(self.router.weight, std=0.02)
        self.experts = StackedExperts(config.experts, config.d_model, std)

    def forward(self, x: Tensor) -> Tensor:
        """Send each token through its experts."""
        c, rows = self.config, x.flatten(0, 1)  # (N, C)
        scores = self.router(x).float()  # (B, T, E)
        chosen, weights = top_k_weights(scores.flatten(0, 1), c.experts_per_token)
        choices = chosen.unflatten(0, x.shape[:2])  # (B, T, k)
        kept = None
        if c.capacity is not None:
            limit = capacity(x.shape[1], c.experts, c.experts_per_token, c.capacity)
            kept = [within_capacity(each, c.experts, limit) for each in choices]
            kept = torch.cat(kept)
        y = self.mix(rows, chosen, weights.to(x.dtype), kept).view_as(x)
        if self.training and c.balance:
            sequences = zip(scores, choices, strict=True)
            losses = torch.stack([auxiliary_loss(*each) for each in sequences])
            y = AddAuxiliaryLoss.apply(y, c.balance * losses.mean(), self.scale)
        return y

    @property
    def whole_sequences(self) -> bool:
        """Whether a layer needs whole sequences: a part would give other results."""
        return self.config.capacity is not None or self.config.balance > 0

    def mix(
        self, rows: Tensor, chosen: Tensor, weights: Tensor, kept: Tensor | None
    ) -> Tensor:
        """Return the mixture of (N, C) tokens, by this rank or by the group's ranks."""
        e = self.config.experts
        if self.group is not None:
            how = {"exchange": metered_all_to_all_rows, "kept": kept}
            arguments = rows, chosen, weights, self.experts, e, self.group
            return dispatched_mixture(*arguments, **how)
        segments = Segments(chosen, e, kept)
        outputs = self.experts(segments.sort(rows), segments.counts.tolist())
        return segments.sum(outputs, weights)


def build_mixture_gpt(config: MixtureConfig, seed: int = 0) -> GPT:
    """Return a GPT of mixtures on the CPU; `config` and `seed` decide its weights.

    The weights outside of the mixtures are those of `build_gpt`.
    """
    if not isinstance(config, MixtureConfig):
        kind = type(config).__name__
        raise ValueError(f"config is a {kind}; it must be a MixtureConfig")
    model = build_gpt(config, seed)
    scale = GradientScale()
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for block in model.blocks:
            block.mlp = Mixture(config, scale)
    model.auxiliary = scale
    model.pipeline_parts = (scale,)
    return model

"""The tiny GPT of the whole course: it reads characters and predicts the next ones.

A decoder-only transformer with LayerNorm before each sub-layer (Radford et al. 2019,
"GPT-2"), made of plain `nn.Module`s: nothing here depends on other processes. Every
later chapter cuts this one model in another way, so it is built to be cut:

- by layer: `[model.embed, *model.blocks, model.head]` called one after another is the
  model, so a pipeline stage is a slice of that list;
- by head: `attn.qkv` keeps the query, key and value rows of one head together, so a
  contiguous 1/n of its rows (and of the columns of `attn.proj`) is 1/n of the heads;
- by column and row: `mlp.up` and `mlp.down` are two separate matrices;
- by token: only `attn.attend` reads other positions, and `loss_fn` averages over them.

The preset "1m", with V = 96 characters, up to T = 64 of them, C = 144 channels,
H = 12 heads of D = 12 channels. Blocks 1, 2 and 3 look like block 0:

    parameter                  shape         numbers
    embed.tokens.weight        (96, 144)      13,824   V x C
    embed.positions.weight     (64, 144)       9,216   T x C
    blocks.0.norm1.weight      (144,)            144
    blocks.0.norm1.bias        (144,)            144
    blocks.0.attn.qkv.weight   (432, 144)     62,208   H * (q, k, v) * D x C
    blocks.0.attn.proj.weight  (144, 144)     20,736   C x H * D
    blocks.0.attn.proj.bias    (144,)            144
    blocks.0.norm2.weight      (144,)            144
    blocks.0.norm2.bias        (144,)            144
    blocks.0.mlp.up.weight     (576, 144)     82,944   4C x C
    blocks.0.mlp.up.bias       (576,)            576
    blocks.0.mlp.down.weight   (144, 576)     82,944   C x 4C
    blocks.0.mlp.down.bias     (144,)            144
    head.norm.weight           (144,)            144
    head.norm.bias             (144,)            144
    head.out.weight            (96, 144)      13,824   V x C, or the tokens' if tied

23,040 + 4 * 250,272 + 14,112 = 1,038,240 parameters. The preset "8m" has 8,078,400.

    output of                  shape for B = 8      meaning
    embed                      (8, 64, 144)         B, T, C
    blocks.0.norm1             (8, 64, 144)         B, T, C
    blocks.0.attn.qkv          (8, 64, 432)         B, T, H * 3 * D
      q, k and v each          (8, 12, 64, 12)      B, H, T, D
      attention weights        (8, 12, 64, 64)      B, H, T, T: used, never stored
      mixed values             (8, 12, 64, 12)      B, H, T, D
    blocks.0.attn.proj         (8, 64, 144)         B, T, C
    blocks.0.norm2             (8, 64, 144)         B, T, C
    blocks.0.mlp.up            (8, 64, 576)         B, T, 4C, then the same after GELU
    blocks.0.mlp.down          (8, 64, 144)         B, T, C
    head.norm                  (8, 64, 144)         B, T, C
    head.out                   (8, 64, 96)          B, T, V: the logits

The attention weights are never stored because PyTorch's attention is fused, on CPUs and
on GPUs.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_course.gpt_config import PRESETS, GPTConfig


class Embedding(nn.Module):
    """The sum of token and position embeddings: (B, T) int64 -> (B, T, C)."""

    def __init__(self, config: GPTConfig) -> None:
        """Create both tables."""
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.block_size, config.d_model)

    def forward(self, idx: Tensor) -> Tensor:
        """Add the vectors of every token and of its position."""
        positions = torch.arange(idx.shape[1], device=idx.device)  # (T,)
        return self.tokens(idx) + self.positions(positions)  # (B, T, C)


class Attention(nn.Module):
    """Causal self-attention: (B, T, C) -> (B, T, C).

    The rows of `qkv` are ordered head by head: D rows for the first head's query, D for
    its key, D for its value, then the second head's. `forward` derives the number of
    heads from the width of `qkv`'s output. So a module with only some heads' rows of
    `qkv` and columns of `proj` computes those heads' share of the output.
    """

    def __init__(self, config: GPTConfig) -> None:
        """Create the two matrices."""
        super().__init__()
        self.d_head = config.d_model // config.n_head
        # No bias: the softmax cancels a key's bias, so its gradient is zero except for
        # rounding errors, and Adam would scale those up to full steps.
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.proj = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from every position to itself and to all earlier ones."""
        qkv = self.qkv(x).unflatten(-1, (-1, 3, self.d_head))  # (B, T, H, 3, D)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # (B, H, T, D) each
        y = self.attend(q, k, v)  # (B, H, T, D)
        return self.proj(y.transpose(1, 2).flatten(2))  # (B, T, C)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return causal attention: (B, H, T, D) each -> (B, H, T, D)."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class MLP(nn.Module):
    """Two matrices with a GELU between them: (B, T, C) -> (B, T, C)."""

    def __init__(self, config: GPTConfig) -> None:
        """Create the matrices: C -> 4C and 4C -> C."""
        super().__init__()
        self.up = nn.Linear(config.d_model, 4 * config.d_model)
        self.down = nn.Linear(4 * config.d_model, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the same function to each position on its own."""
        return self.down(F.gelu(self.up(x)))  # (B, T, C)


class Block(nn.Module):
    """One transformer layer: (B, T, C) -> (B, T, C)."""

    def __init__(self, config: GPTConfig) -> None:
        """Create the two sub-layers, each with its LayerNorm."""
        super().__init__()
        self.norm1 = nn.LayerNorm(config.d_model)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.d_model)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """Add the attention's output to `x`, then the MLP's."""
        x = x + self.attn(self.norm1(x))  # (B, T, C)
        return x + self.mlp(self.norm2(x))  # (B, T, C)


class Head(nn.Module):
    """The last layer, one logit per character: (B, T, C) -> (B, T, V)."""

    def __init__(self, config: GPTConfig) -> None:
        """Create the last LayerNorm and the output matrix."""
        super().__init__()
        self.norm = nn.LayerNorm(config.d_model)
        self.out = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, and multiply by the output matrix."""
        return self.out(self.norm(x))  # (B, T, V)


class GPT(nn.Module):
    """The model. Its initial weights come from PyTorch's global random generator.

    Use `build_gpt` for weights that come from a seed and from nothing else.
    """

    def __init__(self, config: GPTConfig) -> None:
        """Create all layers and initialise them as GPT-2 does."""
        super().__init__()
        if not isinstance(config, GPTConfig):
            raise ValueError(f"config is {config!r}; it must be a GPTConfig")
        self.config = config
        self.token_check = partial(check_tokens, config=config)
        self.embed = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.head = Head(config)
        if config.tied:
            self.head.out.weight = self.embed.tokens.weight
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                # 2 * n_layer outputs are added up: scale them so that the sum keeps
                # its size.
                last = name.endswith(("attn.proj.weight", "mlp.down.weight"))
                std = 0.02 / (2 * config.n_layer) ** 0.5 if last else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(
        self, idx: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits (B, T, V) for `idx` (B, T), int64, and the mean loss.

        The loss is a scalar, in nats per character, or None without `targets` (B, T).
        Raises ValueError or TypeError for a shape, a type or a token that does not fit.
        """
        check_tokens("idx", idx, self.config)
        x = self.embed(idx)  # (B, T, C)
        for block in self.blocks:
            x = block(x)  # (B, T, C)
        logits = self.head(x)  # (B, T, V)
        if targets is None:
            return self.gather_logits(logits), None
        check_tokens("targets", targets, self.config)
        return logits, self.loss_fn(logits, targets)

    @staticmethod
    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of the head's logits (B, T, V)."""
        return cross_entropy(logits, targets)

    @staticmethod
    def gather_logits(logits: Tensor) -> Tensor:
        """Return the logits of all positions; here they are complete already."""
        return logits


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of -log p(target) over all B * T characters, a scalar.

    `logits` is (B, T, V), `targets` is (B, T). Raises ValueError if they do not match.
    """
    for name, tensor in {"logits": logits, "targets": targets}.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}; pass a tensor")
    if not logits.is_floating_point() or targets.is_floating_point():
        raise ValueError(
            f"logits are {logits.dtype} and targets {targets.dtype}; logits must be "
            "floating-point numbers, and targets int64, the numbers of the tokens"
        )
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets has shape {tuple(targets.shape)}; for these logits it must be "
            f"{tuple(logits.shape[:-1])}"
        )
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def check_tokens(name: str, tokens: Tensor, config: GPTConfig) -> None:
    """Raise ValueError or TypeError unless `tokens` is (B, T) int64 and in range."""
    if not isinstance(tokens, Tensor):
        kind = type(tokens).__name__
        raise TypeError(f"{name} is a {kind}; it must be an int64 tensor, (B, T)")
    if tokens.dtype != torch.int64:
        raise TypeError(f"{name} is {tokens.dtype}; it must be torch.int64")
    longest = config.block_size
    if tokens.ndim != 2 or tokens.numel() == 0 or tokens.shape[1] > longest:
        raise ValueError(
            f"{name} has shape {tuple(tokens.shape)}; it must be (B, T) with B >= 1 "
            f"and T from 1 to {longest}, the block_size"
        )
    if tokens.is_meta or torch.compiler.is_compiling():  # shapes only, no values
        return
    low, high = (int(end) for end in tokens.aminmax())
    if low < 0 or high >= config.vocab_size:
        raise ValueError(
            f"{name} holds the token {low if low < 0 else high}; "
            f"tokens are 0 to {config.vocab_size - 1}"
        )


def config_named(config: str | GPTConfig) -> GPTConfig:
    """Return the preset of this name, or `config` itself if it is a GPTConfig."""
    if isinstance(config, GPTConfig):
        return config
    if config not in PRESETS:
        known = ", ".join(repr(name) for name in PRESETS)
        raise ValueError(f"the preset is {config!r}; it can be {known} or a GPTConfig")
    return PRESETS[config]


def build_gpt(config: str | GPTConfig = "1m", seed: int = 0) -> GPT:
    """Return a GPT on the CPU whose weights depend on `config` and `seed` alone.

    `config` is a name in PRESETS or a GPTConfig. The global random generator is neither
    read nor changed, so every rank that calls this gets the same model. Raises
    ValueError for an unknown name.
    """
    config = config_named(config)
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also seed the GPUs, and nothing would restore them.
        torch.default_generator.manual_seed(seed)
        return GPT(config)

"""The one tiny GPT of the whole course: characters in, next characters out.

A decoder-only transformer with LayerNorm before each sub-layer (Radford et al. 2019,
"GPT-2"). Plain `nn.Module`s: nothing here knows that other processes exist. Every later
chapter cuts this one model in another way, so it is built to be cut:

- by layer: `[model.embed, *model.blocks, model.head]` called one after another is the
  model, so a pipeline stage is a slice of that list;
- by head: `attn.qkv` keeps the query, key and value rows of one head together, so a
  contiguous 1/n of its rows (and of the columns of `attn.proj`) is 1/n of the heads;
- by column and row: `mlp.up` and `mlp.down` are two separate matrices;
- by token: `attn.attend` alone looks at other positions, and `loss_fn` adds them up.

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

"Never stored" is PyTorch's fused attention, which both CPUs and GPUs have.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_course.gpt_config import PRESETS, GPTConfig


class Embedding(nn.Module):
    """Token plus position: (B, T) int64 -> (B, T, C)."""

    def __init__(self, config: GPTConfig) -> None:
        """Make both tables."""
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.block_size, config.d_model)

    def forward(self, idx: Tensor) -> Tensor:
        """Look every token and its position up, and add."""
        positions = torch.arange(idx.shape[1], device=idx.device)  # (T,)
        return self.tokens(idx) + self.positions(positions)  # (B, T, C)


class Attention(nn.Module):
    """Causal self-attention: (B, T, C) -> (B, T, C).

    The rows of `qkv` are ordered head by head: D of the first head's query, D of its
    key, D of its value, then the second head's. The number of heads is read off the
    width of what `qkv` returns: with some heads' rows of `qkv` and columns of `proj`
    the same code computes those heads' share of the sum.
    """

    def __init__(self, config: GPTConfig) -> None:
        """Make the two matrices."""
        super().__init__()
        self.d_head = config.d_model // config.n_head
        # No bias: the softmax cancels a key's bias. Its gradient is zero but for
        # rounding errors, and Adam makes steps of whatever it gets.
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.proj = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Let every position look at itself and at the past."""
        qkv = self.qkv(x).unflatten(-1, (-1, 3, self.d_head))  # (B, T, H, 3, D)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # (B, H, T, D) each
        y = self.attend(q, k, v)  # (B, H, T, D)
        return self.proj(y.transpose(1, 2).flatten(2))  # (B, T, C)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return causal attention: (B, H, T, D) each -> (B, H, T, D)."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class MLP(nn.Module):
    """Four times wider, GELU, and back: (B, T, C) -> (B, T, C)."""

    def __init__(self, config: GPTConfig) -> None:
        """Make the two matrices."""
        super().__init__()
        self.up = nn.Linear(config.d_model, 4 * config.d_model)
        self.down = nn.Linear(4 * config.d_model, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Treat every position alike and alone."""
        return self.down(F.gelu(self.up(x)))  # (B, T, C)


class Block(nn.Module):
    """One transformer layer: (B, T, C) -> (B, T, C)."""

    def __init__(self, config: GPTConfig) -> None:
        """Make the two sub-layers, each with its LayerNorm."""
        super().__init__()
        self.norm1 = nn.LayerNorm(config.d_model)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.d_model)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """Add what attention finds, then what the MLP makes of it."""
        x = x + self.attn(self.norm1(x))  # (B, T, C)
        return x + self.mlp(self.norm2(x))  # (B, T, C)


class Head(nn.Module):
    """From channels to one logit per character: (B, T, C) -> (B, T, V)."""

    def __init__(self, config: GPTConfig) -> None:
        """Make the last LayerNorm and the output matrix."""
        super().__init__()
        self.norm = nn.LayerNorm(config.d_model)
        self.out = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise and compare with every character."""
        return self.out(self.norm(x))  # (B, T, V)


class GPT(nn.Module):
    """The model. Its initial weights come from PyTorch's global random generator.

    Use `build_gpt` for weights that come from a seed and from nothing else.
    """

    def __init__(self, config: GPTConfig) -> None:
        """Make all layers and initialise them as GPT-2 does."""
        super().__init__()
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
                # 2 * n_layer sub-layers add to one stream: keep the sum's size.
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
        """Return the mean loss of what `head` returns, (B, T, V)."""
        return cross_entropy(logits, targets)

    @staticmethod
    def gather_logits(logits: Tensor) -> Tensor:
        """Return the logits of all positions: here, all that `head` returns."""
        return logits


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of -log p(target) over all B * T characters, a scalar.

    `logits` is (B, T, V), `targets` is (B, T). Raises ValueError if they do not match.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets has shape {tuple(targets.shape)}; the logits are for "
            f"{tuple(logits.shape[:-1])}"
        )
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def check_tokens(name: str, tokens: Tensor, config: GPTConfig) -> None:
    """Raise ValueError or TypeError unless `tokens` is (B, T) int64 and fits."""
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


def build_gpt(config: str | GPTConfig = "1m", seed: int = 0) -> GPT:
    """Return a GPT on the CPU whose weights depend on `config` and `seed` alone.

    `config` is a name in PRESETS or a GPTConfig. The global random generator is neither
    read nor moved, so every rank that calls this has the same model. Raises ValueError
    for an unknown name.
    """
    if not isinstance(config, GPTConfig):
        if config not in PRESETS:
            known = ", ".join(repr(name) for name in PRESETS)
            raise ValueError(
                f"the preset is {config!r}; it can be {known} or a GPTConfig"
            )
        config = PRESETS[config]
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed the GPUs too, and nothing would put them back.
        torch.default_generator.manual_seed(seed)
        return GPT(config)

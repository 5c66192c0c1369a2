"""The bytes of activations: the tensors that a transformer keeps for backward.

Symbols as in the paper: b rows of s tokens, h channels, a heads, v words, t ranks of
tensor parallelism. Bytes of tensors that these ranks divide are divided by t.
Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
Models", arXiv:2205.05198, sections 4 and 5. Explained in chapter 06.
"""

from __future__ import annotations

from functools import partial

from ddp_course.gpt_config import GPTConfig, check_dense
from ddp_course.spec import RECOMPUTE
from ddp_course.theory.checks import check_choice


def layer_activations(
    batch: int,
    sequence: int,
    hidden: int,
    heads: int,
    *,
    tp: int = 1,
    sequence_parallel: bool = False,
    fused_attention: bool = False,
    recompute: str = "none",
    itemsize: int = 2,
    dropout: bool = True,
) -> dict[str, int]:
    """Return the bytes that one transformer layer keeps for backward, by part.

    For 16-bit numbers and with dropout these are the paper's:

        attention    11 sbh      inputs of the four matrices, q, k, v, a dropout mask
        scores       5 as^2 b    softmax, the output and mask of its dropout
        mlp          19 sbh      inputs of both matrices and of GELU, a dropout mask
        norms        4 sbh       the inputs of both LayerNorms

    Together sbh (34 + 5as/h). As in the paper, the mean and the deviation that a
    LayerNorm keeps for each token (8 bytes) are not counted.

    Args:
        batch: b, rows in a microbatch.
        sequence: s, tokens in a row.
        hidden: h, channels.
        heads: a.
        tp: t, ranks that share each matrix; must divide `heads` and `hidden`.
        sequence_parallel: whether the t ranks also divide, by tokens, the tensors that
            lie between the matrices. Without it, each rank keeps these in full.
        fused_attention: with FlashAttention, attention keeps one float32 per token and
            head (the logarithm of the softmax's sum) in place of the scores.
        recompute: "selective" keeps no scores and computes them again; "full" keeps
            only the layer's input.
        itemsize: bytes of a number; an element of a mask always takes 1 byte.
        dropout: whether the layer has dropout.

    Raises:
        ValueError: for a value that is not allowed here.

    Chapter 06.
    """
    check_choice("recompute", recompute, RECOMPUTE)
    if hidden % heads:
        raise ValueError(
            f"heads is {heads}; heads must divide hidden, which is {hidden}"
        )
    if heads % tp:
        raise ValueError(f"tp is {tp}; tp must divide heads, which is {heads}")
    sbh, mask = sequence * batch * hidden, int(dropout)
    between = tp if sequence_parallel else 1  # divides tensors between the matrices
    if recompute == "full":
        return {"input": itemsize * sbh // between}
    if fused_attention:
        scores = 4 * heads * sequence * batch
    else:
        per_score = 2 * itemsize + 1 if dropout else itemsize
        scores = per_score * heads * sequence**2 * batch
    ends = (itemsize + mask) * sbh // between  # the input and the last dropout's mask
    return {
        "attention": ends + 4 * itemsize * sbh // tp,
        "scores": 0 if recompute == "selective" else scores // tp,
        "mlp": ends + 8 * itemsize * sbh // tp,
        "norms": 2 * itemsize * sbh // between,
    }


def model_activations(
    layers: int,
    batch: int,
    sequence: int,
    hidden: int,
    heads: int,
    vocab: int = 0,
    *,
    recompute: str = "none",
    itemsize: int = 2,
    dropout: bool = True,
    fused_attention: bool = False,
) -> int:
    """Return the bytes of activations at their peak.

    That is what all layers keep together, plus the larger of two parts that are not
    kept at the same time. The first exists when backward begins: the embedding's
    dropout mask, the inputs of the last LayerNorm and of the output matrix, and the
    logits in float32, 4 sbv. Without `vocab` this part is 0. The second exists later:
    the activations of one layer that are computed again. Raises ValueError as
    `layer_activations` does. Source: Korthikanti et al. 2022, section 4.3. Chapter 06.
    """
    options = {"itemsize": itemsize, "dropout": dropout}
    options["fused_attention"] = fused_attention
    layer = partial(layer_activations, batch, sequence, hidden, heads, **options)

    def kept(recompute: str) -> int:
        return sum(layer(recompute=recompute).values())

    again = kept("none") - kept(recompute)
    sb = sequence * batch
    ends = sb * ((2 * itemsize + int(dropout)) * hidden + 4 * vocab) if vocab else 0
    return layers * kept(recompute) + max(again, ends)


# ---- the course's own GPT, to the byte ---------------------------------------------


def gpt_activations(
    config: GPTConfig, batch: int, tokens: int | None = None, recompute: str = "none"
) -> dict[str, int]:
    """Return the bytes that the course's GPT keeps for backward, on a CPU, by part.

    In float32, without dropout and with fused attention; B rows of T tokens, C channels
    and H heads. For each token a block keeps, in numbers of 4 bytes,

        C + 2    the block's input and its mean and deviation, for norm1
        C        the output of norm1, which is the input of qkv
        3C       q, k and v
        C + H    attention's output, the input of proj; the softmax's sum per head
        C + 2    the sum after attention, its mean and deviation, for norm2
        C        the output of norm2, which is the input of mlp.up
        4C       the input of GELU
        4C       the output of GELU, which is the input of mlp.down

    together 16C + H + 4. That is Korthikanti's 32 sbh without dropout, and the small
    tensors that the paper does not count. The embedding keeps the tokens (8 bytes each)
    and the positions. The head keeps its input, mean, deviation and its norm's output.
    The loss keeps the logarithm of the softmax, the targets and their total weight.

    Returns:
        Bytes of "embed", "blocks" (all of them), "head" and "loss". With
        recompute="full" a block keeps only its input.

    Raises:
        ValueError: for a GPT with experts, too many tokens, another recomputation, or
            recompute="selective", which has no effect: fused attention keeps no scores.

    Source: counted, and checked with `torch.autograd.graph.saved_tensors_hooks`.
    Chapter 06.
    """
    check_dense(config)
    tokens = config.block_size if tokens is None else tokens
    if tokens > config.block_size:
        raise ValueError(
            f"tokens is {tokens}; it must be at most block_size, {config.block_size}"
        )
    check_choice("recompute", recompute, ("none", "full"))
    bt, c = batch * tokens, config.d_model
    per_token = c if recompute == "full" else 16 * c + config.n_head + 4
    return {
        "embed": 8 * bt + 8 * tokens,
        "blocks": config.n_layer * 4 * bt * per_token,
        "head": 4 * bt * (2 * c + 2),
        "loss": 4 * bt * config.vocab_size + 8 * bt + 4,
    }


def gpt_peak(
    config: GPTConfig, batch: int, tokens: int | None = None, recompute: str = "none"
) -> int:
    """Return the most bytes that are kept for backward at any time of a step.

    Without recomputation the peak is at the end of forward: all of `gpt_activations`.
    With it, the peak may be later, when the activations of head and loss are freed, and
    those of one block are recomputed. The memory that the running operation needs for
    itself is not counted. Chapter 06.
    """
    parts = gpt_activations(config, batch, tokens, recompute)
    again = 0
    if recompute == "full":
        whole = gpt_activations(config, batch, tokens)["blocks"]
        again = (whole - parts["blocks"]) // config.n_layer
    lasting = parts["embed"] + parts["blocks"]
    return lasting + max(parts["head"] + parts["loss"], again)

"""All ways to train in one table: what a rank keeps and sends, by formulas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from IPython.display import Markdown

from ddp_course import theory
from ddp_course.model import GPT, GPTConfig

NODE, LOCAL = 8, 8  # GPUs of a node; steps between two averages
HEAD = ("way", "chapter", "keeps [GB]", "sends [GB]", "a rank waits", "take it if")

DDP = "for the last bucket, once in a step"
LAYOUTS = (  # (name, chapter, axes, what a rank waits for, when to take it)
    ("DDP, 32 bits", "05", {"precision": "fp32"}, DDP, "you check something"),
    ("DDP, mixed precision", "12", {}, DDP, "model and states fit on a GPU"),
    ("ZeRO-1", "07", {"zero": 1}, DDP + "; then for weights", "Adam's states are "
     "too much: nothing more is sent"),
    ("ZeRO-2", "07", {"zero": 2}, "as ZeRO-1", "gradients are too much, and you do "
     "not accumulate them"),
    ("ZeRO-3, FSDP", "08", {"zero": 3}, "for the weights of every unit, unless "
     "fetched ahead", "weights are too much, and links are fast"),
    ("HSDP", "08", {"zero": 3, "replicas": None}, "as ZeRO-3 inside a node, as DDP "
     "between nodes", "links between nodes are slow, and a node has room for a model"),
    ("tp in a node, dp", "09", {"tp": NODE}, "in every layer, twice each way, and "
     "hides little", "a layer is too large, or there are fewer rows than GPUs; in a "
     "node only"),
    ("pp over nodes, dp", "10, 11", {"pp": NODE}, "for its neighbours, and in the "
     "bubble: {bubble:.0%}", "links are slow, and microbatches many"),
    ("tp, pp, ZeRO-1", "11", {"tp": NODE, "pp": 4, "zero": 1}, "for all of these; "
     "bubble {bubble:.0%}", "the model is too large for any one of them"),
    ("cp in a node, dp", "16", {"cp": NODE}, "for keys and values, as far as attention "
     "does not hide them", "one sequence's activations are too much"),
)  # fmt: skip
COMPRESSED = (  # name, method, bytes of memory for each parameter, when to take it
    ("8 bits", "int8", 0, "links are slow, whatever you hide"),
    ("top 1 %", "topk:0.01", 4, "GPUs are few: the bytes grow with their number"),
    ("PowerSGD", "powersgd:4", 4, "links are slow, and the loss is as good"),
)


def looking_back(config: GPTConfig, gpus: int = 64, rows: int = 64) -> Markdown:
    """Return the table for `config` on `gpus` GPUs, with `rows` rows in each step.

    GB are decimal. States are in mixed precision unless a row says otherwise;
    activations are not counted. The bytes of a step are those of the first rank,
    along all axes. Raises ValueError for sizes that an axis cannot divide. Chapter 15.
    """
    lines = [f"| {' | '.join(HEAD)} |", "|:--|:--|--:|--:|:--|:--|"]
    for name, chapter, keeps, sends, *words in _rows(config, gpus, rows):
        numbers = f"{float(keeps) / 1e9:.1f} | {float(sends) / 1e9:.1f}"
        lines.append(f"| {name} | {chapter} | {numbers} | {' | '.join(words)} |")
    return Markdown("\n".join(lines))


def _rows(config: GPTConfig, gpus: int, rows: int) -> Iterator[tuple[Any, ...]]:
    """Yield the table's rows: name, chapter, bytes kept, bytes sent, two remarks."""
    psi = config.num_parameters
    states, weights = 16 * psi, 2 * psi  # in mixed precision, as chapter 06 counts
    out = max(theory.bytes_sent("broadcast_naive", NODE)) * weights
    waits = "for the first GPU, all the time"
    take = "never: DDP keeps the same, and is faster"
    yield "DP, threads of a node", "04", states, out, waits, take
    for name, chapter, axes, waits, take in LAYOUTS:
        keeps, sends, bubble = numbers(config, gpus, rows, **axes)
        yield name, chapter, keeps, sends, waits.format(bubble=float(bubble)), take
    waits = "in every layer, for the rank with the most rows"
    take = "more weights should not cost as much more work, and links are fast"
    yield (
        "8 experts, ep in a node, dp",
        "17",
        *with_experts(config, gpus, rows),
        waits,
        take,
    )
    server = theory.server_bytes(gpus, weights) / 1e9
    waits = f"for the server alone, whose link carries {server:,.0f} GB"
    take = "workers are unequal, or a step touches few of very many rows"
    yield "a server's worker", "13", 2 * weights, weights, waits, take
    with torch.device("meta"):  # only shapes
        shapes = [parameter.shape for parameter in GPT(config).parameters()]
    waits = "as DDP; and for packing"
    for name, method, memory, take in COMPRESSED:
        sends = theory.compressed_bytes(method, shapes, gpus)
        yield f"DDP, {name}", "14", states + memory * psi, sends, waits, take
    sends = theory.local_sgd_bytes(gpus, 4 * psi, LOCAL, LOCAL) / LOCAL
    waits = f"every {LOCAL} steps, for weights"
    take = "links are slower still, and the loss is as good (DiLoCo keeps more)"
    yield f"local SGD, {LOCAL} steps", "14", states, sends, waits, take
    _, sends, _ = numbers(config, gpus, rows)
    waits, take = "for each layer's own gradient", "sending takes a little too long"
    yield "DDP, first layers first", "15", states, sends, waits, take


def numbers(
    config: GPTConfig,
    gpus: int,
    rows: int,
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    zero: int = 0,
    replicas: int | None = 1,
    precision: str = "mixed",
) -> tuple[int, Any, Any]:
    """Return bytes that the first rank keeps and sends, and the bubble's share.

    A `replicas` of None means one replica of the model per node.
    """
    dp = gpus // (tp * pp * cp)
    stage = [range((config.n_layer + 2) // pp)]
    how = (config, stage, dp, tp, replicas or dp // NODE, zero)
    rank = theory.ComposedRank(*how, precision=precision, cp=cp)
    mine = rows // dp
    sends = sum(vars(rank.volume(mine)).values())
    return rank.states().total, sends, theory.pipeline_bubble("1f1b", pp, mine)


def with_experts(config: GPTConfig, gpus: int, rows: int) -> tuple[int, Any]:
    """Return bytes that a rank keeps and sends if 8 experts replace each MLP.

    Each of a node's 8 GPUs has one expert of each layer, and a token uses two.
    """
    c, experts = config.d_model, NODE
    mixture = theory.mixture_cost(c, 4 * c, experts, experts_per_token=2)
    router = c * experts
    one = config.n_layer * (mixture.parameters - router) // experts
    dense = config.num_parameters - one + config.n_layer * router
    m = theory.balanced_rows(rows // gpus * config.block_size, 2, NODE)
    exchange = theory.dispatch_volume(m, m, c, experts=experts, ranks=NODE, itemsize=2)
    sends = config.n_layer * exchange.total
    keeps = 0
    for numel, ranks in ((dense, gpus), (one, gpus // NODE)):
        keeps += theory.model_states(numel, ranks, 0, "adamw", "mixed").total
        sends += theory.step_volume(numel, ranks, 0, "mixed").total
    return keeps, sends

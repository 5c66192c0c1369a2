"""How long a step takes in a layout, and what a rank keeps and sends: predicted.

A rank's step is a sum, in seconds:

    compute    m microbatches through the slowest rank's layers: products of matrices at
               the speed that large ones reach, everything else at the memory's speed
    bubble     (p - 1) / v of one microbatch's time
    tp         all-reduces after each half of a layer: nothing else can run meanwhile
    cp         sending keys and values around, beyond what attention hides
    pp         messages between stages, for which 1F1B waits (`exposed_messages`)
    dp         gradients and parameters, beyond what backward (ZeRO-3: forward) hides
    optimizer  reading and writing states

Not predicted: kernels' launches, small or odd matrices that are slower, stragglers,
crowded networks, loading data, saving. So the prediction is a bound that good software
comes near to; `anchors` shows how near. Sources: those of the formulas in `theory`;
Narayanan et al. 2021, arXiv:2104.04473, sections 2 and 3. Chapter 18.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from ddp_course.ledger import Ledger
from ddp_course.planning.accelerators import Cluster
from ddp_course.planning.workload import Workload
from ddp_course.theory.activations import layer_activations
from ddp_course.theory.collectives import all_gather, all_reduce_ring
from ddp_course.theory.memory import (
    gathered_bytes,
    model_states,
    precision_named,
    states_of,
)
from ddp_course.theory.pipeline import pipeline_activations

# Numbers that a layer reads and writes per token and channel, outside of products: two
# norms (4), two residual sums (6), the MLP's activation, four times as wide (8), and
# biases, rotations of q and k, dropout (4).
WHOLE, DIVIDED = 10, 12  # WHOLE: done by each rank of tp, without sequence parallelism
SCORES = 13  # bytes read and written per score, if attention is not fused
LOGITS = 20  # bytes read and written per logit, in float32
MEMORY_REACHED = 0.85  # share of the memory's bytes/s
# Share of the largest products' speed that products in training reach: the only fitted
# number, from the ten rows of Megatron-LM's table 1 (see `anchors`).
SUSTAINED = 0.86
ROOM = 0.92  # share of memory for tensors; the rest: context, fragments, buffers


class Candidate(NamedTuple):
    """A layout and how its steps are run.

    Attributes:
        dp, pp, cp, tp: ranks along each axis.
        zero: the ZeRO stage, 0 to 3; the ranks of dp and cp share the shards.
        recompute: "none", "selective" or "full".
        microbatch: rows of a microbatch on one rank.
        stages: pipeline stages on each rank, v: 1 is 1F1B, more is interleaved 1F1B.
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    zero: int = 0
    recompute: str = "none"
    microbatch: int = 1
    stages: int = 1

    @property
    def ranks(self) -> int:
        """The number of accelerators that the layout takes."""
        return self.dp * self.pp * self.cp * self.tp

    def __str__(self) -> str:
        axes = [f"{a} {n}" for a, n in zip(self._fields[:4], self, strict=False)]
        words = [" x ".join(a for a in axes if not a.endswith(" 1")) or "one GPU"]
        words += [f"ZeRO-{self.zero}"] * (self.zero > 0)
        words += [f"{self.recompute} recomputation"] * (self.recompute != "none")
        words += [f"{self.stages} stages a rank"] * (self.stages > 1)
        return ", ".join(words)


@dataclass(frozen=True)
class Software:
    """Features of the training's software; the defaults are what is usual today.

    Attributes:
        fused_attention: FlashAttention: no scores are kept, and causal masks save half.
        sequence_parallel: the ranks of tp divide what lies between the matrices.
        overlap: communication along dp, cp and pp runs beside computing.
        precision: a name of `theory.PRECISIONS`.
        optimizer: a name of `theory.OPTIMIZERS`.
        dropout: whether the model has dropout.
        data_outermost: whether the ranks of dp lie farthest apart, as in this course's
            meshes; else those of pp do, as in Megatron-LM and torchtitan.
        frees: whether memory is used as in this course: gradients are freed between
            steps, as by PyTorch's `zero_grad`; DDP's buckets are not, and hold copies
            of gradients that several microbatches have added up; stages keep their
            outputs until backward.
        bucket: bytes of gradients that are reduced at once; 0: those of one layer.
        gathers_ahead: whether parameters that ZeRO-1 or 2 gathers after a step arrive
            during the next forward.
    """

    fused_attention: bool = True
    sequence_parallel: bool = True
    overlap: bool = True
    precision: str = "mixed-fp32-gradients"
    optimizer: str = "adamw"
    dropout: bool = False
    data_outermost: bool = False
    frees: bool = False
    bucket: float = 0
    gathers_ahead: bool = True

    @property
    def number(self) -> int:
        """The bytes of one number of an activation."""
        return precision_named(self.precision).activation


@dataclass(frozen=True)
class Prediction:
    """The predicted step of one layout.

    Attributes:
        candidate: the layout.
        parts: seconds by part, in the order of this module's table.
        ledger: bytes on the rank that keeps most, at the peak of a step.
        sent: bytes that a rank sends in a step, by axis.
    """

    candidate: Candidate
    parts: dict[str, float]
    ledger: Ledger
    sent: dict[str, float]

    @property
    def seconds(self) -> float:
        """The seconds of a step."""
        return sum(self.parts.values())

    def mfu(self, workload: Workload, cluster: Cluster) -> float:
        """Return the model FLOPs divided by those that the data sheets promise."""
        flops = workload.flops_per_token * workload.tokens
        return flops / (cluster.gpus * cluster.gpu.flops * self.seconds)


def predict(
    workload: Workload,
    cluster: Cluster,
    candidate: Candidate,
    software: Software = Software(),  # noqa: B008 - frozen
) -> Prediction:
    """Return what a step takes, keeps and sends in one layout.

    The layout must be possible: see `search.why_impossible`. If pp does not divide
    the layers, the result is for the ranks with one layer more: the slowest.
    """
    c, w = candidate, workload
    microbatches = w.rows // (c.dp * c.microbatch)
    layers = -(-w.layers // c.pp)
    forward, backward, attention = layer_seconds(
        w, cluster, c._replace(dp=1, pp=1), software
    )
    head = head_seconds(w, cluster, c)
    work = layers * (forward + backward) + head
    tokens = c.microbatch * w.sequence // c.cp
    # one microbatch's activations between layers
    hidden = tokens * w.hidden * software.number

    sent, parts = {}, {"compute": microbatches * work}
    # Each half of a layer has two all-reduces, one in forward and one in backward (and
    # one more if it is recomputed). The embedding has one in forward, the output matrix
    # one in backward.
    calls = (6 if c.recompute == "full" else 4) * layers + (2 if c.pp == 1 else 1)
    once, sent["tp"] = _all_reduce(cluster, hidden, c.tp, 1)
    tp = calls * once
    sent["tp"] *= calls * microbatches

    around, sent["cp"] = _ring_attention(w, cluster, c, tokens * software.number)
    sent["cp"] *= layers * microbatches
    hidden_behind = attention if software.overlap else 0.0
    cp = layers * max(0.0, around - hidden_behind)

    message = hidden / (c.tp if software.sequence_parallel else 1)
    hops = _hops(cluster, message, c, software)
    exposed = exposed_messages(hops, microbatches, c.stages)
    both = 1 if c.pp * c.stages == 2 else 2  # with two stages each rank sends one way
    sent["pp"] = both * c.stages * microbatches * message if hops else 0.0
    steady = 0.0
    if hops and not software.overlap:
        steady = 2 * c.stages * microbatches * max(hops)

    parts["bubble"] = (c.pp - 1) / c.stages * (work + tp + cp)
    parts["tp"], parts["cp"] = microbatches * tp, microbatches * cp
    parts["pp"] = exposed + steady
    hides = layers * forward, layers * backward
    parts["dp"], sent["dp"] = _data_parallel(
        w, cluster, c, software, hides, microbatches
    )
    parts["optimizer"] = _optimizer(w, cluster, c, software)
    return Prediction(c, parts, _ledger(w, c, software, microbatches), sent)


@cache
def layer_seconds(
    w: Workload, cluster: Cluster, c: Candidate, software: Software
) -> tuple[float, float, float]:
    """Return one layer's seconds per microbatch: forward, backward, attention alone."""
    tokens = c.microbatch * w.sequence / c.cp
    speed, memory = _speeds(cluster)
    products = 2 * w.block * tokens / c.tp / speed
    attention = 4 * w.hidden * w.sequence * tokens / c.tp / speed
    whole = WHOLE / (c.tp if software.sequence_parallel else 1)
    others = (whole + DIVIDED / c.tp) * w.hidden * tokens * software.number / memory
    if software.fused_attention:
        attention /= 2  # blocks that the causal mask hides are left out
        again = 2.5 * attention  # the scores are computed again
    else:
        attention += SCORES * w.heads * w.sequence * tokens / c.tp / memory
        again = 2 * attention
    forward = products + attention + others
    backward = 2 * (products + others) + again
    extra = {"none": 0.0, "selective": attention, "full": forward}[c.recompute]
    return forward, backward + extra, attention + again


def head_seconds(w: Workload, cluster: Cluster, c: Candidate) -> float:
    """Return the seconds of the output matrix and the loss, both ways."""
    speed, memory = _speeds(cluster)
    logits = c.microbatch * w.sequence / c.cp * w.vocab / c.tp
    return 6 * w.hidden * logits / speed + LOGITS * logits / memory


def _speeds(cluster: Cluster) -> tuple[float, float]:
    """Return the FLOP/s of products and the bytes/s of the memory that are reached."""
    gpu = cluster.gpu
    return gpu.flops * gpu.matmul * SUSTAINED, gpu.bandwidth * MEMORY_REACHED


def _all_reduce(
    cluster: Cluster, nbytes: float, ranks: int, stride: int
) -> tuple[float, float]:
    """Return the seconds of an all-reduce, and the bytes that each rank sends."""
    cost = all_reduce_ring(ranks, nbytes)
    beta = 1 / cluster.bandwidth(ranks, stride)
    tree = 2 * (ranks - 1).bit_length()  # libraries choose it for small messages
    alpha = min(cost.messages, tree) if cluster.rails else cost.messages
    return alpha * cluster.delay(ranks, stride) + beta * cost.nbytes, cost.nbytes


def _gather(
    cluster: Cluster, nbytes: float, ranks: int, stride: int
) -> tuple[float, float]:
    """Return the seconds of an all-gather or reduce-scatter, and the bytes sent."""
    cost = all_gather(ranks, nbytes)
    beta = 1 / cluster.bandwidth(ranks, stride)
    tree = (ranks - 1).bit_length()
    alpha = min(cost.messages, tree) if cluster.rails else cost.messages
    return alpha * cluster.delay(ranks, stride) + beta * cost.nbytes, cost.nbytes


def _ring_attention(
    w: Workload, cluster: Cluster, c: Candidate, channel: float
) -> tuple[float, float]:
    """Return the seconds that one layer's keys and values travel, and the bytes sent.

    `channel`: the bytes of one channel of all the rank's tokens.
    """
    if c.cp == 1:
        return 0.0, 0.0
    kv = (w.kv_heads or w.heads) / w.heads
    u = 2 * channel * w.hidden * kv / c.tp
    times = 4 + (c.recompute == "full")  # u forward; u and float32 gradients backward
    nbytes = times * (c.cp - 1) * u
    delay = times * (c.cp - 1) * cluster.delay(c.cp, c.tp)
    return delay + nbytes / cluster.bandwidth(c.cp, c.tp), nbytes


def _hops(
    cluster: Cluster, nbytes: float, c: Candidate, software: Software
) -> list[float]:
    """Return the seconds of a message from each rank of a pipeline to the next one."""
    stride = c.tp * c.cp * (1 if software.data_outermost else c.dp)
    inside = cluster.delay(1) + nbytes / (cluster.reached * cluster.gpu.link)
    between = cluster.delay(2, cluster.gpus) + nbytes / (
        cluster.reached * cluster.network
    )
    nodes = [rank * stride // cluster.node for rank in range(c.pp)]
    return [inside if a == b else between for a, b in pairwise(nodes)]


def exposed_messages(
    hops: Sequence[float], microbatches: int, stages: int = 1
) -> float:
    """Return how much longer a pipeline takes because its messages take time.

    `hops[k]` are the seconds of a message between ranks k and k + 1. While the pipeline
    fills and drains, ranks wait for every message. In between, 1F1B waits again: a
    rank's forward follows the backward of a microbatch that has been to the last rank
    and back, so p microbatches wait for 2 (p - 1) messages, or each of them for the
    slowest message. With interleaved stages, ranks have other work in that time.
    """
    if not hops:
        return 0.0
    p, m, once = len(hops) + 1, microbatches, 2 * sum(hops)
    if stages > 1:
        return once
    slowest, mean = max(hops), sum(hops) / len(hops)
    filling = once + 2 * max(0, min(m, p) - 2) * mean
    steady = max(0, m - p) * max(slowest, once / p)
    return max(m * slowest, filling + steady)


def _data_parallel(
    w: Workload,
    cluster: Cluster,
    c: Candidate,
    software: Software,
    hides: tuple[float, float],
    microbatches: int,
) -> tuple[float, float]:
    """Return the seconds of dp's communication that nothing hides, and bytes sent.

    `hides` are the seconds of one microbatch's forward and backward. Gradients travel
    during the last backward; with ZeRO-2 and 3, during every backward. Parameters that
    ZeRO-1 or 2 gathers travel during the next forward; ZeRO-3 gathers in forward and
    backward of every microbatch. Without overlap, only ZeRO-3's messages are hidden.
    """
    ranks = c.dp * c.cp
    stride = c.tp * (c.pp if software.data_outermost else 1)
    if ranks == 1:
        return 0.0, 0.0
    bytes_of = precision_named(software.precision)
    numel = _parameters(w, c)
    forward, backward = hides
    layers = buckets = -(-w.layers // c.pp)
    if software.bucket:
        full = math.ceil(bytes_of.gradient * numel / software.bucket)
        buckets = min(layers, full)
    reduce, reduced = _gather(cluster, bytes_of.gradient * numel, ranks, stride)
    if c.zero < 3:
        back = bytes_of.parameter if c.zero else bytes_of.gradient
        gather, gathered = _gather(cluster, back * numel, ranks, stride)
        times = microbatches if c.zero == 2 else 1
        sent = times * reduced + gathered
        if not software.overlap:
            return times * reduce + gather, sent
        if not c.zero:  # an all-reduce is both, and both during backward
            return exposed_sending(reduce + gather, backward, buckets), sent
        reducing = times * exposed_sending(reduce, backward, buckets)
        if software.gathers_ahead:
            gather = exposed_sending(gather, forward, layers)
        return reducing + gather, sent
    reduce, reduced = _gather(cluster, bytes_of.reduced * numel, ranks, stride)
    gather, gathered = _gather(cluster, bytes_of.gathered * numel, ranks, stride)
    exposed = exposed_sending(gather, forward, layers)
    exposed += exposed_sending(gather + reduce, backward, layers)
    return microbatches * exposed, microbatches * (2 * gathered + reduced)


def exposed_sending(sending: float, computing: float, layers: int) -> float:
    """Return how long sending goes on after computing, layer by layer.

    A layer's bucket is sent after the layer has been computed and the previous bucket
    has been sent. So the last bucket is never hidden; earlier ones are, if time allows.
    """
    last = sending / layers
    return max(last, sending - computing * (layers - 1) / layers)


def _parameters(w: Workload, c: Candidate) -> float:
    """Return the parameters of the rank of pp that has most, divided by tp."""
    layers = -(-w.layers // c.pp)
    root = w.embeddings if c.pp == 1 else w.vocab * w.hidden
    return (layers * w.block + root) / c.tp + w.positions


def _optimizer(
    w: Workload, cluster: Cluster, c: Candidate, software: Software
) -> float:
    """Return the seconds in which the optimizer reads and writes its states."""
    bytes_of = precision_named(software.precision)
    states = states_of(software.optimizer) * bytes_of.state
    nbytes = 2 * (bytes_of.parameter + bytes_of.master + states) + bytes_of.gradient
    shards = c.dp * c.cp if c.zero else 1
    _, memory = _speeds(cluster)
    return _parameters(w, c) / shards * nbytes / memory


def _ledger(w: Workload, c: Candidate, software: Software, microbatches: int) -> Ledger:
    """Return the ledger of the rank that keeps most: in the first or the last stage.

    Backward works on gradients of activations: one of a layer's output, and one four
    times as wide inside its MLP ("other"). Activations peak when the pipeline is full.
    If all microbatches are in flight then, no parameter has a gradient yet.
    """
    layers, ranks = -(-w.layers // c.pp), c.dp * c.cp
    numel = int(_parameters(w, c))
    states = model_states(numel, ranks, c.zero, software.optimizer, software.precision)
    kept, again = _kept(w, c, software)
    schedule = "interleaved" if c.stages > 1 else "1f1b"
    tokens = c.microbatch * w.sequence // c.cp
    logits = tokens * w.vocab // c.tp * 4
    stages = c.stages if c.stages > 1 else None
    full = _in_flight(schedule, c.pp, microbatches, 0, stages)
    first = full * layers * kept
    last = _in_flight(schedule, c.pp, microbatches, c.pp - 1, stages) * layers * kept
    hidden = tokens * w.hidden * software.number
    if software.frees and c.pp > 1:
        first += full * hidden
    activations = max(first + again, last + max(again, logits))
    gathered = 0
    if c.zero == 3:
        block, root = int(w.block // c.tp), w.vocab * w.hidden // c.tp
        gathered = gathered_bytes(
            [block, block, root], ranks, software.precision, gradients=[block, root]
        )
    matrix = 4 * w.hidden**2 // c.tp * precision_named(software.precision).gradient
    between = c.tp if software.sequence_parallel else 1
    beside = {"activations": int(activations), "communication buffers": gathered}
    beside["other"] = hidden // between + 4 * hidden // c.tp + matrix
    at_peak = Ledger({**states, **beside})
    if not software.frees:
        return at_peak
    own = states["gradients"]
    buckets = own if ranks > 1 and c.zero < 2 else 0
    if c.zero == 1 or (buckets and microbatches == 1):
        own = 0  # the parameters' gradients are views of the buckets
    begun = own if microbatches > full else 0
    full_pipeline = Ledger({**at_peak, "gradients": buckets + begun})
    ended = Ledger({**states, "gradients": buckets + own, "other": beside["other"]})
    return max(full_pipeline, ended, key=lambda each: each.total)


@cache
def _in_flight(
    schedule: str, pp: int, microbatches: int, rank: int, stages: int | None
) -> Fraction:
    """Return how many microbatches' activations a rank keeps at once."""
    return pipeline_activations(schedule, pp, microbatches, rank, stages)


def _kept(w: Workload, c: Candidate, software: Software) -> tuple[int, int]:
    """Return the bytes that one layer keeps of a microbatch, and computes again."""
    return _kept_by(
        (c.microbatch, w.sequence // c.cp, w.hidden, w.heads),
        c.tp,
        c.recompute,
        software,
    )


@cache
def _kept_by(
    shape: tuple[int, int, int, int], tp: int, recompute: str, software: Software
) -> tuple[int, int]:
    def kept(how: str) -> int:
        parts = layer_activations(
            *shape,
            tp=tp,
            sequence_parallel=software.sequence_parallel,
            fused_attention=software.fused_attention,
            recompute=how,
            dropout=software.dropout,
            itemsize=software.number,
        )
        return sum(parts.values())

    return kept(recompute), kept("none") - kept(recompute)

"""Published training runs beside predictions: what formulas foresee, and do not.

    for anchor in ANCHORS:
        print(anchor.name, anchor.mfu, anchor.predicted())

Each row is a dense model in 16-bit numbers whose source prints how fast it was and how
it was laid out. Some omit the microbatch or the stages on a rank; `assumed` has the
values used instead. Left out are runs that the formulas do not cover: experts
(DeepSeek-V3), FP8 (torchtitan's 405B), unpublished layouts or accounting (GPT-3, OPT).

`step_time.SUSTAINED` was fitted to the first ten rows; the others are predictions.
Where a source's FLOP/s include recomputation (Megatron-LM 2021, BLOOM), the recomputed
FLOPs were subtracted. Chapter 18.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ddp_course.planning.accelerators import ACCELERATORS, GB, Cluster
from ddp_course.planning.step_time import Candidate, Software, predict
from ddp_course.planning.workload import Workload

MEGATRON = Software(
    fused_attention=False, sequence_parallel=False, overlap=False, dropout=True
)
SELECTIVE = Software(fused_attention=False, overlap=False, dropout=True)
TODAY = Software()


@dataclass(frozen=True)
class Anchor:
    """A published training run.

    Attributes:
        name: the authors or the software, and the model's size.
        mfu: the published share of the data sheet's FLOPs per second.
        gpu, network: the accelerator, and its bandwidth to other nodes in GB/s.
        workload, candidate, software: the model and batch, the layout, the software.
        source: the table or page with the number.
        assumed: values that the source does not state.
        causal: whether the source counts half of attention's scores.
        fitted: whether `step_time.SUSTAINED` was fitted to it.
    """

    name: str
    mfu: float
    gpu: str
    network: float
    workload: Workload
    candidate: Candidate
    software: Software
    source: str
    assumed: str = ""
    causal: bool = False
    fitted: bool = False

    def predicted(self) -> float:
        """Return the predicted MFU, counted as the source counts."""
        gpu, w = ACCELERATORS[self.gpu], self.workload
        network = self.network * GB
        cluster = Cluster(gpu, self.candidate.ranks, gpu.node, network=network)
        mfu = predict(w, cluster, self.candidate, self.software).mfu(w, cluster)
        if self.causal:
            hidden = 6 * w.layers * w.hidden * w.sequence
            mfu *= 1 - hidden / w.flops_per_token
        return mfu

    @property
    def error(self) -> float:
        """The predicted MFU divided by the published one, minus 1."""
        return self.predicted() / self.mfu - 1


def _gpt(
    layers: int, hidden: int, heads: int, vocab: int, rows: int, sequence: int = 2048
) -> Workload:
    """Return a GPT whose output matrix is its embedding."""
    numel = layers * (12 * hidden + 13) * hidden + (vocab + sequence) * hidden
    return Workload(numel, layers, hidden, heads, sequence, vocab, rows, tied=True)


# ---- Megatron-LM ---------------------------------------------------------------------

# layers, hidden, heads, tp, pp, dp, rows, rows of a microbatch, MFU in percent
_WEAK_SCALING = (
    (24, 2304, 24, 1, 1, 32, 512, 16, 33),
    (30, 3072, 32, 2, 1, 32, 512, 16, 34),
    (36, 4096, 32, 4, 1, 32, 512, 16, 34),
    (40, 6144, 48, 8, 1, 32, 1024, 4, 33),
    (48, 8192, 64, 8, 2, 32, 1536, 2, 33),
    (60, 10_240, 80, 8, 4, 32, 1792, 2, 34),
    (80, 12_288, 96, 8, 8, 24, 2304, 2, 36),
    (96, 16_384, 128, 8, 16, 15, 2160, 1, 37),
    (105, 20_480, 128, 8, 35, 9, 2520, 1, 39),
    (128, 25_600, 160, 8, 64, 6, 3072, 1, 39),
)
# layers, hidden, heads, pp, rows, rows of a microbatch, stages on a rank, MFU
_SELECTIVE = (
    (48, 6144, 64, 1, 4, 4, 1, 41.5),
    (96, 12_288, 96, 8, 64, 1, 3, 51.4),
    (105, 20_480, 128, 35, 280, 1, 3, 56.0),
    (128, 25_600, 160, 64, 512, 1, 1, 56.3),
)


def _megatron() -> Iterator[Anchor]:
    for layers, hidden, heads, tp, pp, dp, rows, microbatch, mfu in _WEAK_SCALING:
        workload = _gpt(layers, hidden, heads, 51_200, rows)
        stages = 2 if pp > 1 and layers // pp > 1 else 1
        layout = Candidate(dp, pp, 1, tp, 0, "full", microbatch, stages)
        name = f"Megatron-LM 2021 {workload.parameters / 1e9:.0f}B"
        source = "2104.04473, table 1"
        assumed = "rows of a microbatch, stages on a rank"
        how = "a100", 25, workload, layout, MEGATRON
        yield Anchor(name, mfu / 100, *how, source, assumed, fitted=True)
    for layers, hidden, heads, pp, rows, microbatch, stages, mfu in _SELECTIVE:
        workload = _gpt(layers, hidden, heads, 51_200, rows)
        layout = Candidate(1, pp, 1, 8, 0, "selective", microbatch, stages)
        name = f"Megatron-LM 2022 {workload.parameters / 1e9:.0f}B"
        how = "a100", 25, workload, layout, SELECTIVE
        source = "2205.05198, table 5; Megatron-LM's README"
        assumed = "rows, rows of a microbatch, stages on a rank"
        yield Anchor(name, mfu / 100, *how, source, assumed)


# ---- others --------------------------------------------------------------------------


def _llama_3(
    name: str, dp: int, cp: int, sequence: int, rows: int, mfu: float
) -> Anchor:
    workload = Workload(
        405_850_000_000, 126, 16_384, 128, sequence, 128_256, rows, kv_heads=8
    )
    layout = Candidate(dp, 16, cp, 8, 1, microbatch=1, stages=4)
    assumed = "gradients reduced once; 4 stages on a rank; half of attention counts"
    how = "h100", 50, workload, layout, TODAY, "2407.21783, table 4", assumed
    return Anchor(f"Llama 3 405B {name}", mfu, *how, causal=True)


def _ultra_scale(
    billions: int, layout: Candidate, mfu: float, assumed: str = "its shape"
) -> Anchor:
    layers, hidden, heads = {8: (32, 4096, 32), 80: (80, 8192, 64)}[billions]
    shape = layers, hidden, heads, 4096, 49_152, 256
    workload = Workload(billions * 10**9, *shape, kv_heads=8, tied=True)
    name = f"Ultra-Scale Playbook {billions}B, {layout.ranks} GPUs"
    how = "h100", 50, workload, layout, TODAY, "its benchmarks, best of a size"
    return Anchor(name, mfu, *how, assumed)


def _others() -> Iterator[Anchor]:
    mt_nlg = _gpt(105, 20_480, 128, 51_200, 1920)
    how = "a100", 25, mt_nlg, Candidate(8, 35, 1, 8, 0, "full"), MEGATRON
    yield Anchor("MT-NLG 530B", 0.302, *how, "2204.02311, section 4", "pp")
    bloom = _gpt(70, 14_336, 112, 250_880, 2048)
    how = "a100", 6.25, bloom, Candidate(8, 12, 1, 4, 1, "full", 2), MEGATRON
    source = "bigscience, tr11-176B-ml"
    yield Anchor("BLOOM 176B", 0.36, *how, source)
    yield _llama_3("8,192 GPUs", 64, 1, 8192, 2048, 0.43)
    yield _llama_3("16,384 GPUs", 128, 1, 8192, 2048, 0.41)
    yield _llama_3("131,072 tokens", 8, 16, 131_072, 128, 0.38)
    mpt = Workload(64_900_000_000, 80, 8192, 64, 2048, 50_432, 2048, tied=True)
    how = "h100", 50, mpt, Candidate(64, zero=3, recompute="full", microbatch=8), TODAY
    source, assumed = "llm-foundry, scripts/train/benchmarking", "its shape, rows"
    yield Anchor("MPT 70B, 64 GPUs", 0.426, *how, source, assumed)
    mpt = Workload(6_650_000_000, 32, 4096, 32, 2048, 50_432, 128, tied=True)
    how = "h100", 50, mpt, Candidate(8, zero=3, microbatch=4), TODAY
    yield Anchor("MPT 7B, 8 GPUs", 0.464, *how, source, assumed)
    yield _ultra_scale(8, Candidate(2, 4, zero=1), 0.452)
    yield _ultra_scale(8, Candidate(16, 2, zero=1), 0.433)
    yield _ultra_scale(8, Candidate(128, tp=4, zero=1, microbatch=2), 0.187)
    yield _ultra_scale(80, Candidate(1, 32, tp=4), 0.343)
    yield _ultra_scale(80, Candidate(32, tp=16, zero=1), 0.178)
    palm = Workload(
        540_350_000_000, 118, 18_432, 48, 2048, 256_000, 2048, kv_heads=1, tied=True
    )
    layout = Candidate(512, tp=12, zero=3, recompute="full", microbatch=4)
    source, assumed = "2204.02311, sections 4 and 5", "microbatch; all computed again"
    how = "tpu-v4", 6.25, palm, layout, TODAY
    yield Anchor("PaLM 540B", 0.462, *how, source, assumed)
    gpt_2 = Workload(124_000_000, 12, 768, 12, 1024, 50_304, 480, tied=True)
    how = "a100-40", 25, gpt_2, Candidate(8, microbatch=12), TODAY
    yield Anchor("nanoGPT 124M", 0.29, *how, "its README: about 4 days")


ANCHORS = (*_megatron(), *_others())

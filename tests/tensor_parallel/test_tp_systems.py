"""What a step of tensor parallelism sends and keeps; and that planted waste is seen."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tp_cases import CONFIG, ROWS, WRAPPERS, batch, model

from ddp_course import theory
from ddp_course.launch import spawn
from ddp_course.measure import (
    ByteMeter,
    SystemBytes,
    TorchCollectives,
    resident,
)
from ddp_course.model import MLP, cross_entropy
from ddp_course.tensor_parallel import (
    NaiveParallelMLP,
    ParallelMLP,
    tensor_parallel,
)


class GatheredLogits(torch.nn.Module):
    """A plant: every rank gathers the logits, and has the whole loss."""

    def __init__(self, gpt) -> None:
        super().__init__()
        self.gpt = tensor_parallel(gpt)

    def forward(self, x, y):
        hidden = self.gpt.embed(x)
        for block in self.gpt.blocks:
            hidden = block(hidden)
        return None, cross_entropy(self.gpt.gather_logits(self.gpt.head(hidden)), y)


WAYS = {**WRAPPERS, "gathered logits": GatheredLogits}


def step_of(parallel, optimizer):
    optimizer.zero_grad()
    _, loss = parallel(*batch(0))
    loss.backward()
    optimizer.step()


def bytes_of(torch_log: TorchCollectives, *ops: str) -> float:
    return sum(call.bytes_sent for call in torch_log.calls if call.op in ops)


def sent() -> dict[str, dict]:
    """On every rank: what a step sends, by three meters, and what is kept."""
    results = {}
    for way, wrap in WAYS.items():
        parallel = wrap(model())
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, fused=True)
        step_of(parallel, optimizer)
        with ByteMeter() as meter, SystemBytes() as system:
            with TorchCollectives() as torch_log:
                step_of(parallel, optimizer)
        results[way] = {
            "metered": meter.total_sent,
            "written": system.written,
            "all-reduced": bytes_of(torch_log, "all_reduce"),
            "exchanged": bytes_of(torch_log, "all_gather", "all_to_all"),
            "all-reduces": torch_log.count("all_reduce"),
            "pairs": torch_log.count("all_to_all"),
            "kept": dict(resident(parallel, optimizer)),
        }
    mlps = {"naive": NaiveParallelMLP, "mlp": ParallelMLP}
    for name, kind in mlps.items():
        mlp = kind(MLP(CONFIG))
        x = torch.randn(2, 6, CONFIG.d_model, requires_grad=True)
        with TorchCollectives() as torch_log:
            mlp(x).sum().backward()
        results[name] = bytes_of(torch_log, "all_reduce", "all_gather")
    results["of a block"] = kept_by_a_block()
    return results


@pytest.mark.parametrize("n", [2, 3])
def test_bytes_sent_and_kept_are_those_of_the_formulas(n):
    ranks = spawn(sent, world_size=n, output="none", device="cpu", timeout=100)
    how = {"config": CONFIG, "batch": ROWS, "tp_size": n}
    ring = theory.tensor_parallel_volume(**how)
    cut = theory.tensor_parallel_volume(**how, sequence_parallel=True)
    for result in ranks:
        gloo = result["gloo"]
        assert gloo["all-reduced"] == ring.total
        assert gloo["all-reduces"] == ring.all_reduces == 4 * CONFIG.n_layer + 4
        assert gloo["metered"] == 0  # these are gloo's
        # gloo's headers, and chunks that are rounded up.
        assert 0 <= gloo["written"] - ring.total < 0.25 * ring.total + 9000
        # This course's ring: its chunks of odd sizes differ a little between ranks.
        assert result["ring"]["metered"] == pytest.approx(float(ring.total), rel=0.01)
        assert result["ring"]["all-reduces"] == 0
        sequence = result["sequence"]
        assert sequence["exchanged"] == cut.hidden
        assert sequence["all-reduced"] == cut.loss + cut.parameters
        assert sequence["all-reduces"] == cut.all_reduces
        assert sequence["pairs"] == cut.pairs
        assert 0 <= sequence["written"] - cut.total < 0.6 * cut.total + 9000
        # The inputs of qkv and up are kept whole, as they were gathered.
        assert result["of a block"] == pytest.approx([0, 2 * (1 - 1 / n)])
        # Planted: the logits are gathered, and that is seen.
        logits = ROWS * CONFIG.block_size * CONFIG.vocab_size * 4
        wasted = result["gathered logits"]
        assert wasted["exchanged"] == logits * (n - 1) / n
        assert wasted["all-reduces"] == ring.all_reduces - 2
        numel = 2 * 6 * CONFIG.d_model
        assert result["naive"] == theory.mlp_volume(numel, n, naive=True)
        assert result["mlp"] == theory.mlp_volume(numel, n)
        # What is kept, with gradients and the two states of AdamW.
        own = 4 * theory.tensor_parallel_parameters(CONFIG, n)
        for way in WRAPPERS:
            kept = result[way]["kept"]
            assert kept["parameters"] == kept["gradients"] == own, way
            assert 0 <= kept["optimizer states"] - 2 * own < 1000, way  # and steps
            assert kept["activations"] == kept["other"] == 0, way


def kept_for_backward(module: torch.nn.Module, x: torch.Tensor) -> int:
    """Return the bytes that autograd puts aside, parameters not among them."""
    own, kept = {p.untyped_storage().data_ptr() for p in module.parameters()}, {}

    def put_aside(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor, storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(put_aside, lambda tensor: tensor):
        module(x)
    return sum(nbytes for _, nbytes in kept.values())


def kept_by_a_block() -> list[float]:
    """On every rank: activations beyond the formula, without and with `sequence`."""
    found, n, t, c = [], dist.get_world_size(), CONFIG.block_size, CONFIG.d_model
    fused = {"fused_attention": True, "itemsize": 4, "dropout": False}
    for way in ("gloo", "sequence"):
        sp = way == "sequence"
        x = torch.randn(ROWS, t // n if sp else t, c, requires_grad=True)
        kept = kept_for_backward(WRAPPERS[way](model()).blocks[0], x)
        how = {"tp": n, "sequence_parallel": sp, **fused}
        kept -= sum(theory.layer_activations(ROWS, t, c, 12, **how).values())
        kept -= 16 * ROWS * (t // n if sp else t)  # two numbers for each norm and token
        kept -= 16 * c * sp  # a norm's parameters, side by side
        found.append(kept / (4 * ROWS * t * c))
    return found

"""Every strategy in every precision trains as one process does in that precision."""

from functools import partial

import pytest
import torch

from ddp_course import train as train_module
from ddp_course.launch import spawn
from ddp_course.model import GPTConfig
from ddp_course.spec import DATA_PARALLEL, layout_for
from ddp_course.train import train

GPT = GPTConfig(block_size=16, n_layer=2, n_head=2, d_model=24, tied=True)
# How far losses of four steps may be from one process: ranks add other partial sums, in
# another order, and round them to eps: 2^-7 of bfloat16, 2^-10 of float16, of a loss of
# 4.6 with matrix products in it alone (seen: 2.8e-3, hybrid shards, CUDA's build);
# bf16-pure rounds the loss itself, twice.
FAR = {"bf16": 5e-3, "fp16": 5e-4, "bf16-pure": 8e-2}
STRATEGIES = {
    "ddp": {},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
    "tp": {"tp": 2},
    "pp": {"pp": 2, "microbatches": 2},
}
SEVERAL_AXES = {
    "zero1 x tp": {"zero": 1, "dp": 2, "tp": 2},
    "zero3 x tp": {"zero": 3, "dp": 2, "tp": 2},
    "hsdp": {"zero": 3, "shard": 2},
    "tp x pp": {"tp": 2, "pp": 2, "microbatches": 2},
}
Cases = dict[tuple[str, str], dict]  # by name and precision
ON_TWO: Cases = {(name, p): STRATEGIES[name] for name in STRATEGIES for p in FAR}
# What is averaged is of another type in bf16-pure alone.
ON_TWO |= {(name, "bf16-pure"): {"data_parallel": name} for name in DATA_PARALLEL}
ON_FOUR: Cases = {(name, "fp16"): SEVERAL_AXES[name] for name in SEVERAL_AXES}
run = partial(train, 4, 8, GPT, 1e-2, clip=1.0, keep_state=True)


def histories(cases: Cases) -> dict:
    """Return losses and the parameters' types of every case, and its checksum."""
    found = {}
    for (name, precision), case in cases.items():
        results = run(**case, precision=precision)
        types = {t.dtype for t in results.state.values()}
        found[name, precision] = results.losses, types, results.checksum
    return found


def far(losses: list[float], right: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, right, strict=True))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ranks", "cases"), [(2, ON_TWO), (4, ON_FOUR)])
def test_every_strategy_trains_in_every_precision(ranks, cases):
    alone = histories({("one", name): {} for name in ("fp32", *FAR)})
    how = {"world_size": ranks, "output": "none", "timeout": 1200}
    results = spawn(partial(histories, cases), **how)
    for (name, precision), (losses, types, checksum) in results[0].items():
        right, its_types, _ = alone["one", precision]
        assert far(losses, right) < FAR[precision], (name, precision)
        assert types == its_types
        assert losses != alone["one", "fp32"][0], "nothing was rounded"
        assert all(rank[name, precision][2] == checksum for rank in results)


def test_a_precision_that_one_strategy_ignores_is_seen(monkeypatch):
    right = run(precision="bf16-pure").losses
    monkeypatch.setattr(train_module, "dtype_of", lambda layout: torch.float32)
    ignored = run(precision="bf16-pure")
    assert ignored.losses == run(precision="fp32").losses != right


def test_dp_can_do_it_too():
    for precision in ("bf16", "fp16"):
        results = run(threads=2, precision=precision).losses
        assert far(results, run(precision=precision).losses) < FAR[precision]


def test_a_run_with_loss_scaling_goes_on_bit_for_bit(tmp_path):
    """The scale is saved: float16's first is too large at times, and halved."""
    whole = run(precision="fp16")
    first = partial(train, batch_size=8, preset=GPT, lr=1e-2, clip=1.0)
    first(2, precision="fp16", checkpoint=tmp_path, every=1)
    again = first(4, precision="fp16", checkpoint=tmp_path, every=1)
    assert (again.resumed_at, again.checksum) == (2, whole.checksum)
    with pytest.raises(Exception, match="precision 'fp16', here 'bf16'"):
        first(5, precision="bf16", checkpoint=tmp_path)


def test_what_cannot_be_says_so_before_a_rank_starts():
    with pytest.raises(ValueError, match="precision is 'int8'; it can be one of fp32"):
        layout_for(2, precision="int8")
    how = {"schedule": "zero_bubble", "precision": "bf16"}
    with pytest.raises(ValueError, match="'zero_bubble': the two halves of its back"):
        layout_for(2, pp=2, **how)
    layout_for(2, pp=2, schedule="zero_bubble", precision="bf16-pure")

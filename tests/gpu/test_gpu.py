"""The package on GPUs: `pytest tests/gpu`. Elsewhere all is skipped, unless told so.

DDP_COURSE_GPU_TESTS=cpu pytest tests/gpu     the same on the CPU, to try the tests
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from everything import differences
from gpu_cases import (
    ASKED,
    GPUS,
    KIND,
    WAYS,
    Stream,
    all_of_it,
    backward_events,
    beside_a_stream,
    forgotten,
    ill_rounded,
    in_full,
    in_precisions,
    memory,
    nothing_lands,
    offloaded_steps,
    planted_offload,
    scaled,
    sharded,
    sharded_on_host,
    types_in,
)
from written_down import WrittenDown

from ddp_course.collectives.communicator import in_this_stream
from ddp_course.commands import doctor
from ddp_course.launch import spawn
from ddp_course.mechanisms.timeline import GpuClock
from ddp_course.precision import Autocast, GradScaler, autocast
from ddp_course.train import largest_difference

pytestmark = [
    pytest.mark.skipif(
        not GPUS and ASKED != "cpu",
        reason="there is no GPU here; DDP_COURSE_GPU_TESTS=cpu tries it on the CPU",
    ),
    pytest.mark.timeout(900),
]
needs_gpu = pytest.mark.skipif(not GPUS, reason="there is nothing of it on a CPU")
each_way = pytest.mark.parametrize("way", WAYS)
TOLERANCE = 1e-4  # of weights, after two steps of AdamW: as in `commands.proofs`


@pytest.fixture(scope="module", autouse=True)
def written_down(request):
    """Tell `ddp-course doctor` what passes on GPUs."""
    if GPUS:
        request.config.pluginmanager.register(WrittenDown())


def run(way: str, function, *args) -> list:
    """Run a function on the ranks of a way; those that share see one GPU."""
    options = {**WAYS[way], "device": KIND, "output": "none", "timeout": 600}
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    one = {"CUDA_VISIBLE_DEVICES": first} if "share_gpus" in options else {}
    with mock.patch.dict(os.environ, one):
        return spawn(function, *args, **options)


@cache
def on_the_cpu(n: int) -> list:
    return spawn(all_of_it, n, world_size=n, device="cpu", output="none", timeout=600)


@each_way
def test_every_collective_strategy_and_schedule_as_on_the_cpu(way):
    n = WAYS[way]["world_size"]
    for mine, right in zip(run(way, all_of_it, n), on_the_cpu(n), strict=True):
        assert differences(mine, right, TOLERANCE) == []


def test_messages_that_do_not_come_back_from_the_cpu_are_seen():
    way = next(way for way in WAYS if "4 ranks" in way)
    wrong = differences(run(way, nothing_lands, 4)[0], on_the_cpu(4)[0], TOLERANCE)
    assert any(name.startswith("ring_all_reduce, 1009") for name in wrong)


@each_way
def test_what_goes_on_in_a_thread_waits_for_the_stream_of_its_caller(way):
    n = WAYS[way]["world_size"]
    assert run(way, beside_a_stream) == [[n * (n + 1) / 2]] * n


@pytest.mark.parametrize("planted", [False, True])
def test_a_job_of_another_thread_is_done_in_the_callers_stream(planted):
    done, cuda = [], mock.MagicMock()
    cuda.is_initialized.return_value = True
    with mock.patch.object(torch, "cuda", cuda):
        job = lambda: done.append(cuda.stream().__enter__.called)  # noqa: E731
        (job if planted else in_this_stream(job))()
    assert done == [not planted]


@each_way
@pytest.mark.parametrize("name", ["plain", "ddp", "zero1", "zero3"])
def test_the_ledger_is_what_the_allocator_gave(way, name):
    def fits(ledger: int, kept: int) -> bool:
        rounded = 512 * 200 if GPUS else 2000  # 512 bytes a storage; a batch
        return ledger <= kept <= ledger + rounded

    for ledger, kept, ledgers_peak, peak in run(way, memory, name):
        assert fits(ledger, kept), (ledger, kept)
        if GPUS:
            assert ledgers_peak <= peak <= 1.25 * ledgers_peak + 2**20
    if name == "plain":
        assert not fits(*run(way, forgotten, name)[0][:2])


@each_way
def test_a_backward_s_events_lie_in_it_and_in_order(way):
    for events in run(way, backward_events):
        sent = [e for e in events if e.op == "all_reduce"]
        computed = [e for e in events if e.lane == "compute"]
        assert sent and len(computed) > len(sent) >= 1
        assert all(e.end >= e.start for e in events)
        starts = [e.start for e in computed]
        assert starts == sorted(starts) and sent[0].start >= starts[0]
        assert max(e.end for e in events) - min(starts) < 60


def test_a_gpus_clock_tells_when_the_stream_came_to_it():
    cuda = torch.cuda if GPUS else Stream()
    clock = GpuClock(cuda)
    begin = clock.now()
    cuda._sleep(500_000_000)  # cycles
    end = clock.now()
    assert 0.1 < clock.seconds(end) - clock.seconds(begin) < 5
    late = clock.now()
    cuda._sleep(500_000_000)
    late.record()
    with pytest.raises((RuntimeError, ValueError)):  # planted: nobody waited for it
        clock.first.elapsed_time(late)


@each_way
def test_shards_on_the_cpu_train_as_those_on_the_gpu(way):
    on_gpu, offloaded = run(way, sharded), run(way, partial(sharded, cpu_offload=True))
    for (losses, state, _), (its, other, seen) in zip(on_gpu, offloaded, strict=True):
        assert its == pytest.approx(losses, rel=1e-5)
        assert largest_difference(state, other) < 1e-5
        assert seen["home"] == "cpu" and seen["pinned"] == bool(GPUS)
    for (losses, _, _), (its, _, seen) in zip(
        on_gpu, run(way, sharded_on_host), strict=True
    ):
        assert its == pytest.approx(losses, rel=1e-5) and seen["home"] == "cpu"
    planted = run(way, planted_offload)[0][1]
    assert largest_difference(on_gpu[0][1], planted) > 1e-3


@each_way
def test_zero_offload_trains_as_on_the_gpu(way):
    states = [run(way, offloaded_steps, on_host)[0] for on_host in (False, True)]
    for a, b in zip(*states, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@each_way
def test_computing_in_bfloat16_keeps_shards_in_float32(way):
    def is_mixed(half: tuple, full: tuple) -> bool:
        (losses, _, seen), (wanted, _, _) = half, full
        types = seen["logits"], seen["shard"]
        near = losses == pytest.approx(wanted, rel=0.02) and losses != wanted
        return near and types == (torch.bfloat16, torch.float32)

    types = {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    full, half = run(way, sharded)[0], run(way, partial(sharded, **types))[0]
    assert is_mixed(half, full)
    assert not is_mixed(full, full)
    assert not is_mixed(run(way, partial(sharded, torch.bfloat16))[0], full)


@each_way
def test_every_precision_as_on_the_cpu(way):
    n = WAYS[way]["world_size"]
    right = spawn(in_precisions, n, world_size=n, device="cpu", output="none")
    for mine, its in zip(run(way, in_precisions, n), right, strict=True):
        assert ill_rounded(mine, its) == []
    if n == 1:
        planted = str(ill_rounded(run(way, in_full)[0], right[0]))
        assert "'bf16'" in planted and "'fp16'" in planted


def test_autocast_and_its_scaler_do_as_pytorchs():
    ours, theirs = Autocast(torch.bfloat16), torch.autocast(KIND, torch.bfloat16)
    wanted = types_in(theirs)
    assert types_in(ours) == wanted
    with mock.patch.object(autocast, "FULL_ON_GPUS" if GPUS else "LOWER", frozenset()):
        assert types_in(Autocast(torch.bfloat16)) != wanted
    options = {"init_scale": 2.0**10, "growth_interval": 2}
    right = scaled(torch.amp.GradScaler(KIND, **options))
    assert scaled(GradScaler(**options)) == right
    with mock.patch.object(GradScaler, "_unscale", lambda *args: torch.tensor(0.0)):
        assert scaled(GradScaler(**options)) != right


@needs_gpu
@pytest.mark.parametrize("chapter", ["00_start_here", "05_ddp_internals"])
def test_a_chapter_on_a_machine_with_gpus(chapter):
    root = Path(__file__).parents[2]
    command = f"{sys.executable} -m pytest -q -n0 notebooks/{chapter}.ipynb".split()
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:]


def test_what_passed_is_what_the_doctor_tells(tmp_path):
    file, run = tmp_path / "results.json", WrittenDown()
    with mock.patch("written_down.RESULTS", file):
        for n, outcome in enumerate(["passed", "failed", "passed"]):
            results = {"when": "call", "outcome": outcome, "nodeid": f"x.py::test_{n}"}
            run.pytest_runtest_logreport(SimpleNamespace(**results))
            run.pytest_sessionfinish(SimpleNamespace(testscollected=4))
            assert not file.exists()  # one is still missing
        run.write(["H100"])
    results = doctor.tried_on_gpus(file)
    assert "(H100, torch" in results
    assert results.endswith("2 tests passed 0 days ago, failed: 1.")

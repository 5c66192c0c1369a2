"""TorchCollectives: every collective of PyTorch is seen, once, with its true size."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from refusals import said
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.launch import spawn
from ddp_course.measure import CollectiveCall, SystemBytes, TorchCollectives
from ddp_course.measure.pytorch import call_of

linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/io is Linux's")

# ---- reading one entry -------------------------------------------------------------


def entry(op: str, into: list, out_of: list, dtype: str = "Float", pg: str = "0"):
    return {
        "profiling_name": f"gloo:{op}",
        "process_group": [pg, "default_pg"],
        "input_sizes": into,
        "output_sizes": out_of,
        "input_dtypes": [dtype] * len(into),
        "output_dtypes": [dtype] * len(out_of),
    }


@pytest.mark.parametrize(
    ("op", "into", "out_of", "dtype", "nbytes"),
    [
        ("all_reduce", [[5, 2]], [[5, 2]], "Float", 40),
        ("all_reduce", [[3], [5]], [[3], [5]], "Half", 16),
        ("all_reduce", [[]], [[]], "Double", 8),
        ("all_gather", [[4]], [[3, 4]], "BFloat16", 24),
        ("all_gather", [[4], [8]], [[2, 4]], "Float", 144),
        ("all_to_all", [[6]], [[6]], "Byte", 6),
        ("broadcast", [[3]], [[3]], "Bool", 3),
        ("scatter", [], [[3]], "Long", 24),
        ("scatter", [[3, 3]], [[3]], "Char", 9),
        ("gather", [[3]], [], "Int", 12),
        ("barrier", [], [], "Float", 0),
        ("all_reduce", [[0]], [[0]], "Float", 0),
        ("reduce", [[2]], [[2]], "ComplexFloat", 16),
        ("reduce", [[2]], [[2]], "ComplexHalf", 8),
        ("reduce", [[9]], [[9]], "Float8_e4m3fn", 9),
        ("reduce", [[2]], [[2]], "UInt16", 4),
        ("reduce", [[2]], [[2]], "Short", 4),
    ],
)
def test_an_entry_tells_the_size_of_the_whole_tensor(op, into, out_of, dtype, nbytes):
    assert call_of(entry(op, into, out_of, dtype), {"0": 3}) == CollectiveCall(
        op, nbytes, 3
    )


def test_an_entry_of_a_group_that_is_gone_is_told():
    with pytest.raises(RuntimeError, match="all_reduce of group '7'.*is gone"):
        call_of(entry("all_reduce", [[1]], [[1]], pg="7"), {"0": 3})


def test_bytes_sent_by_formula_unless_they_depend_on_the_rank():
    sent = {"all_reduce": 150, "all_gather": 75, "all_to_all": 75, "barrier": 0}
    sent |= dict.fromkeys(["broadcast", "reduce", "scatter", "gather"])  # no number
    for op, nbytes in sent.items():
        assert CollectiveCall(op, 100, 4).bytes_sent == nbytes
        assert not CollectiveCall(op, 100, 1).bytes_sent
        assert CollectiveCall(op, 100, 4, "nccl").bytes_sent is None
    results = TorchCollectives()
    results._calls = [
        CollectiveCall("all_reduce", 8, 2),
        CollectiveCall("gather", 1, 2),
    ]
    shown = "<TorchCollectives: 1 all_reduce, 1 gather; tensors of 9 bytes>"
    assert repr(results) == shown


def test_without_a_process_group_nothing_can_be_measured():
    with pytest.raises(RuntimeError, match="no process group yet"), TorchCollectives():
        pass


# ---- in real ranks -----------------------------------------------------------------

ELEMENTS = 1_200_000  # of float32: 4.8 MB, divisible by 4


def every_collective() -> tuple[list[tuple[TorchCollectives, int]], tuple]:
    """Call PyTorch's collectives one by one; return what is told, and too early."""
    warnings.simplefilter("ignore")  # names that PyTorch is about to change
    n = dist.get_world_size()
    pair, full = dist.new_group([0, 1]), torch.ones(ELEMENTS)
    part, half = torch.ones(ELEMENTS // n), torch.ones(ELEMENTS, dtype=torch.bfloat16)
    found = []

    def measure(call: Callable[[], object]) -> None:
        dist.barrier()  # calls before the block are not its own
        with SystemBytes() as system, TorchCollectives() as torch_log:
            call()
        dist.barrier()
        found.append((torch_log, system.written))

    measure(lambda: dist.all_reduce(full))
    measure(lambda: dist.all_reduce(half, async_op=True).wait())
    measure(lambda: dist.all_gather_into_tensor(full, part))
    measure(lambda: dist.all_gather(list(full.chunk(n)), part))
    measure(lambda: dist.reduce_scatter_tensor(part, full))
    measure(lambda: dist.reduce_scatter(part, list(full.chunk(n))))
    measure(lambda: dist.all_to_all_single(torch.empty_like(full), full))
    measure(lambda: [dist.all_reduce(part) for _ in range(3)])
    measure(lambda: dist.get_rank() < 2 and dist.all_reduce(full, group=pair))
    measure(lambda: dist.broadcast(full, 0))
    measure(dist.barrier)
    measure(lambda: None)
    return found, asked_too_early()


WHOLE = 4 * ELEMENTS


def asked_too_early() -> tuple[list[str], int]:
    with TorchCollectives() as torch_log:
        dist.all_reduce(torch.ones(1))
        asked = torch_log.count, lambda: torch_log.nbytes
        errors = [said(RuntimeError, ask) for ask in asked] + [repr(torch_log)]
    return errors, torch_log.count()


def train(find_unused: bool, steps: int = 4) -> dict:
    """Train DDP for some steps; return what its last backward pass called."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(400, 400) for _ in range(6)])
    ddp = DistributedDataParallel(
        model, bucket_cap_mb=1, find_unused_parameters=find_unused
    )
    for step in range(steps):
        loss = ddp(torch.ones(2, 400) * (step + dist.get_rank())).sum()
        with TorchCollectives() as torch_log, SystemBytes() as system:
            loss.backward()
    logged = ddp._get_ddp_logging_data()
    sizes = logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]
    return {
        "calls": torch_log,
        "buckets": [int(size) for size in sizes.split(",")],
        "parameters": sum(p.numel() * p.element_size() for p in model.parameters()),
        "written": system.written,
    }


def one_all_reduce_per_bucket(results: dict) -> bool:
    torch_log, buckets = results["calls"], results["buckets"]
    ops = [call.op for call in torch_log.calls]
    sizes = sorted(call.nbytes for call in torch_log.calls)
    same = ops == ["all_reduce"] * len(buckets) and sizes == sorted(buckets)
    return same and torch_log.nbytes == results["parameters"]


@pytest.fixture(scope="module")
def ranks() -> list[tuple]:
    return spawn(
        lambda: (every_collective(), train(False), train(True)),
        world_size=4,
        timeout=240,
    )


@linux
def test_every_collective_is_seen_and_sends_what_the_formula_says(ranks):
    n = 4
    for rank, ((result, early), _, _) in enumerate(ranks):
        errors, count = early  # a count of 0 would be wrong, and nobody would notice
        assert len(errors) == 3 and errors.pop() == "<TorchCollectives: listening>"
        assert all("listed when the `with` block ends" in error for error in errors)
        assert count == 1
        calls = [[(c.op, c.nbytes, c.world_size) for c in t.calls] for t, _ in result]
        in_pair = [("all_reduce", WHOLE, 2)] if rank < 2 else []
        assert calls == [
            [("all_reduce", WHOLE, n)],
            [("all_reduce", WHOLE // 2, n)],
            [("all_gather", WHOLE, n)],
            [("all_gather", WHOLE, n)],
            [("all_reduce", WHOLE, n)],  # what reduce_scatter is under gloo
            [("all_reduce", WHOLE // n, n)] * n,
            [("all_to_all", WHOLE, n)],
            [("all_reduce", WHOLE // n, n)] * 3,
            in_pair,
            [("broadcast", WHOLE, n)],
            [("barrier", 0, n)],
            [],
        ]
        for torch_log, written in result[:9]:
            sent = sum(call.bytes_sent for call in torch_log.calls)
            assert abs(written - sent) <= 0.005 * sent, torch_log
            wrong = torch_log.nbytes  # the size of the tensor is not what is sent
            if wrong != sent:
                assert abs(written - wrong) > 0.005 * wrong, torch_log
        assert result[10][1] < 1000  # a barrier sends headers


@linux
def test_ddp_makes_one_all_reduce_for_each_bucket(ranks):
    for _, result, plant in ranks:
        assert len(result["buckets"]) > 2
        assert one_all_reduce_per_bucket(result)
        assert result["calls"].count("all_reduce") == len(result["buckets"])
        sent = sum(call.bytes_sent for call in result["calls"].calls)
        assert sent == 1.5 * result["parameters"]
        assert result["written"] == pytest.approx(1.5 * result["parameters"], rel=0.005)
        assert not one_all_reduce_per_bucket(plant)  # it also reduces who was used


def full_recorder() -> dict:
    """Call as many as the recorder keeps (20), one more, and with it switched off."""
    x, results = torch.ones(1), {}
    for _ in range(50):  # the ring is full before the block begins
        dist.all_reduce(x)
    with TorchCollectives() as outer:
        dist.all_reduce(x)
        with TorchCollectives() as inner:
            for _ in range(19):
                dist.all_reduce(x)
    results["counts"] = outer.count(), inner.count()

    def calls(number: int) -> None:
        with TorchCollectives():
            for _ in range(number):
                dist.all_reduce(x)

    results["lost"] = said(RuntimeError, calls, 21)
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    results["off"] = said(RuntimeError, calls, 0)
    return results


def test_more_calls_than_the_recorder_keeps_are_told():
    env = {"TORCH_FR_BUFFER_SIZE": "20"}
    (results,) = spawn(full_recorder, world_size=1, env=env)
    assert results["counts"] == (20, 19)
    assert results["lost"].startswith("21 collectives were called in this block")
    assert "keeps 20: the first 1 are lost" in results["lost"]
    assert "TORCH_FR_BUFFER_SIZE" in results["lost"]
    assert results["off"] == "the flight recorder is off: TORCH_FR_BUFFER_SIZE is 0"


def with_a_recorder_that_writes_nothing() -> tuple[int, list[str]]:
    """Measure one all-reduce as an old PyTorch would; return calls and warnings."""
    from ddp_course.measure import pytorch

    pytorch._entries = list
    with warnings.catch_warnings(record=True) as results:
        warnings.simplefilter("always")
        with TorchCollectives() as torch_log:
            pass  # nothing is done: nothing is told
        assert not results
        with TorchCollectives() as torch_log:
            dist.all_reduce(torch.ones(2))
    return torch_log.count(), [str(warning.message) for warning in results]


def test_a_pytorch_that_records_nothing_is_told():
    ((count, results),) = spawn(with_a_recorder_that_writes_nothing, world_size=1)
    assert count == 0
    assert len(results) == 1 and "has recorded nothing, though" in results[0]

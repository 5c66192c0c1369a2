"""The log: every allocation and release, by kind, and nothing changed by looking."""

from __future__ import annotations

import gc
import pickle
import sys
import threading
import time
import warnings
from collections.abc import Callable

import cloudpickle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ddp_course.launch import spawn
from ddp_course.measure import EventLog, MemoryLog, label, memory_log, resident
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.theory import gpt_activations

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TINY = GPTConfig(vocab_size=11, block_size=16, n_layer=2, n_head=2, d_model=12)


@pytest.fixture(autouse=True)
def no_collector():
    """Nothing that earlier tests have left is freed in the middle of a test.

    A log sees the end of labelled memory, and the profiler that of all memory, also if
    it was left in a circle of references that only the garbage collector finds.
    """
    gc.disable()
    yield
    gc.enable()


def tokens(batch: int = 2, config: GPTConfig = TINY) -> Tensor:
    return torch.zeros(batch, config.block_size, dtype=torch.int64)


def trainable(config: GPTConfig = TINY, **options):
    model = build_gpt(config)
    return model, torch.optim.AdamW(model.parameters(), **options), tokens(2, config)


def step(model, stepper, idx) -> None:
    model(idx, idx)[1].backward()
    stepper.step()
    stepper.zero_grad()


def whats(log: MemoryLog) -> list[str]:
    return [moment.what.split(".")[-2:][0] for moment in log.moments]


# ---- one allocation, one release ---------------------------------------------------


def test_allocations_and_releases_one_by_one():
    with MemoryLog() as log:
        x = torch.zeros(100)
        y = x[10:]  # no memory of its own
        y.add_(1)
        z = torch.cat([x, x])
        del x
        del y  # only now
        z.untyped_storage().resize_(0)
        z.untyped_storage().resize_(40)
        z.resize_(1000)
        w = torch.tensor([1.0, 2.0])
        label(w, "gradients")
        label(w, "communication buffers")
    totals = [moment.ledger.total for moment in log.moments]
    start = totals[0]  # other tests' labels
    assert [total - start for total in totals] == [
        *(0, 400, 1200, 800),
        *(0, 40, 4000, 4008, 4008),
    ]
    assert whats(log) == [
        *("begin", "zeros", "cat", "free"),
        *("resize", "resize", "resize_", "lift_fresh", "label"),
    ]
    before, after = (log.moments[k].ledger for k in (-2, -1))
    assert before["gradients"] - after["gradients"] == 8
    assert after["communication buffers"] - before["communication buffers"] == 8
    times = [moment.time for moment in log.moments]
    assert times == sorted(times) and times[-1] <= time.perf_counter()
    assert log.peak.total - start == 4008


def test_requests_number_storages_and_have_their_sizes():
    with MemoryLog() as log:
        earlier = {number for number, _ in log.requests}  # other tests' labels
        x = torch.zeros(100)
        x.t()  # no memory of its own
        z = torch.cat([x, x])
        label(z, "gradients")  # another kind of the same memory
        x.untyped_storage().resize_(40)
        del x
        y = torch.zeros(3)
    requests = [pair for pair in log.requests if pair[0] not in earlier]
    a, b, c = dict.fromkeys(number for number, _ in requests)
    assert requests == [(a, 400), (b, 800), (a, 40), (a, 0), (c, 12)]
    assert y.nbytes == 12 and pickle.loads(pickle.dumps(log)).requests == log.requests


def test_requests_add_up_to_every_moment_of_a_training():
    model, stepper, idx = trainable()
    with MemoryLog(model, stepper) as log:
        step(model, stepper, idx)
        step(model, stepper, idx)
    sizes, totals = {}, [0]
    for number, nbytes in log.requests:
        sizes[number] = nbytes
        totals.append(sum(sizes.values()))
    assert totals[-1] == log.moments[-1].ledger.total
    assert max(totals) == log.peak.total


def test_the_end_of_a_log_is_what_is_there():
    model, stepper, idx = trainable()
    with MemoryLog(model, stepper) as log:
        assert log.moments[-1].ledger == resident(model, stepper)
        step(model, stepper, idx)
        assert log.moments[-1].ledger == resident(model, stepper)
    assert log.moments[-1].ledger == resident(model, stepper)
    assert "found" not in whats(log)  # nothing has escaped the operations
    with log:  # entered again, it starts anew
        pass
    assert [m.ledger for m in log.moments] == [resident(model, stepper)]


def test_kinds_of_a_step():
    model, stepper, idx = trainable()
    numel = TINY.num_parameters
    with MemoryLog(model, stepper) as log:
        loss = model(idx, idx)[1]
        forward = log.moments[-1].ledger
        loss.backward()
        backward = log.moments[-1].ledger
        stepper.step()
    kept = sum(gpt_activations(TINY, 2).values())
    # What backward needs, but for the tokens, which were there, and the loss itself.
    assert forward["activations"] == kept - idx.nbytes * 2 + 4
    assert backward["activations"] == 4
    assert backward["gradients"] == 4 * numel == log.peak_of("gradients")
    assert log.peak_of("parameters") == 4 * numel
    states = 8 * numel + 4 * len(list(model.parameters()))
    assert log.peak_of("optimizer states") == states  # temporaries are "other"
    assert log.peak_of("communication buffers") == 0
    births = [m for m in log.moments if m.what == "aten.zeros_like.default"]
    sizes = [moment.ledger["optimizer states"] for moment in births]
    assert sizes == sorted(sizes) and sizes[-1] > 0  # from their birth on
    grown = [moment.ledger["gradients"] for moment in log.moments]
    assert grown == sorted(grown)  # each from its birth on, none before
    assert len(set(grown)) > len(list(model.parameters())) / 2


def test_what_is_gone_before_the_end_is_known_from_the_steps_of_optimizers():
    weight = nn.Parameter(torch.zeros(100))
    stepper = torch.optim.AdamW([weight])
    with MemoryLog(stepper) as log:
        weight.grad = torch.ones(100)  # autograd has no part in it
        stepper.step()
        stepper.zero_grad()
        stepper.state.clear()
    assert log.peak_of("gradients") == 400
    assert log.peak_of("optimizer states") == 804
    assert log.moments[-1].ledger == log.moments[0].ledger


def test_gradients_are_known_as_soon_as_they_are_there():
    weight, bucket = nn.Parameter(torch.zeros(100)), torch.zeros(50)
    label(bucket, "communication buffers")
    bias = nn.Parameter(torch.zeros(50))
    bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", bucket))
    with MemoryLog(nn.ParameterList([weight, bias])) as log:
        (weight * 2).sum().backward()
        weight.grad = None
        (bias * 2).sum().backward()  # its gradient lies in a bucket, as with DDP
        before = log.moments[0].ledger
        assert {m.ledger["communication buffers"] for m in log.moments} == {
            before["communication buffers"]
        }
        bias.grad = None
        one = nn.Parameter(torch.zeros(3))
        one.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        (one * 2).sum().backward()  # a hook may take it away
    assert log.peak_of("gradients") == before["gradients"] + 400
    assert log.moments[-1].ledger["gradients"] == before["gradients"]


def test_a_forward_without_a_module_is_seen_by_what_it_needs():
    weight = torch.ones(10, 10, requires_grad=True)
    batch = torch.ones(5, 10)
    with MemoryLog() as log:
        h = torch.relu(batch @ weight)  # 200 bytes each
        noise = torch.rand(10)  # of nothing that needs a gradient
        with torch.no_grad():
            less = weight * 2
        h.sum().backward()
    assert log.peak_of("activations") == 200 + 200  # ReLU keeps only its result
    assert noise.sum() >= 0 and less.sum() > 0
    assert log.peak_of("other") >= 40 + 400


# ---- what must not be changed ------------------------------------------------------


def profiled_peak(run: Callable[[], None]) -> int:
    """Return the most bytes above the beginning, by the allocator's own events."""
    from torch.profiler import ProfilerActivity, profile

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            run()
    now = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def keeps_what_it_sees(log: MemoryLog) -> None:
    """Plant: a log that holds on to the storages."""
    kept, add = [], type(log._storages).add
    log._storages.add = lambda storage, piece: (
        kept.append(storage),
        add(log._storages, storage, piece),
    )[1]
    log.kept = kept


def test_memory_with_the_log_is_memory_without_unless_it_keeps_things_alive():
    model, stepper, idx = trainable(GPTConfig(block_size=16, n_layer=2), fused=True)
    step(model, stepper, idx)
    without = profiled_peak(lambda: step(model, stepper, idx))
    logs: list[MemoryLog] = []

    def logged(plant=lambda log: None) -> None:
        with MemoryLog(model, stepper) as log:
            plant(log)
            step(model, stepper, idx)
        logs.append(log)

    assert profiled_peak(logged) == without
    # What the allocator sees and no operation returns is work space: here that of
    # attention's kernel and of matrix products.
    grown = logs[0].peak.total - logs[0].moments[0].ledger.total
    assert 0 <= without - grown < 0.05 * without
    assert profiled_peak(lambda: logged(keeps_what_it_sees)) > 1.2 * without


class SeesNoFrees(memory_log.Storages):
    def note_ends(self) -> None:
        self._ends.clear()


class NeverMindsSizes(memory_log.Storages):
    def measure(self, storage):
        return []


class GuessesOnly(memory_log.Storages):
    def claim(self, storage, part):
        known = storage._cdata in self._living
        return [] if known else super().claim(storage, part)


def is_caught(test: Callable[[], None]) -> bool:
    try:
        test()
    except (AssertionError, KeyError):
        return True
    return False


@pytest.mark.parametrize("wrong", [SeesNoFrees, NeverMindsSizes, GuessesOnly])
def test_wrong_accounts_are_caught(wrong, monkeypatch):
    monkeypatch.setattr(memory_log, "Storages", wrong)
    assert any(
        is_caught(test)
        for test in (
            test_allocations_and_releases_one_by_one,
            test_kinds_of_a_step,
            test_the_end_of_a_log_is_what_is_there,
        )
    )


def test_everything_is_put_back():
    model, stepper, idx = trainable()
    resize = torch.UntypedStorage.resize_
    with pytest.raises(ZeroDivisionError), MemoryLog(model, stepper), MemoryLog():
        assert torch.UntypedStorage.resize_ is not resize
        _ = 1 / 0
    assert torch.UntypedStorage.resize_ is resize
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    log = MemoryLog(model)
    with log, pytest.raises(RuntimeError, match="open already"):
        log.__enter__()
    with MemoryLog(model, stepper) as log:
        model.embed.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(idx)
        torch.zeros(10)
    assert [m for m in log.moments if "zeros" in m.what][-1].ledger["activations"] == 0


def test_logs_may_be_nested():
    with MemoryLog() as outer:
        one = torch.zeros(10)
        with MemoryLog() as inner:
            two = torch.zeros(100)
            del one
        del two
    base = outer.moments[0].ledger.total
    assert outer.peak.total - base == 440
    assert inner.peak.total - inner.moments[0].ledger.total == 400


# ---- threads -----------------------------------------------------------------------


def in_threads(work: Callable[[], object], number: int = 1) -> None:
    threads = [threading.Thread(target=work) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_frees_and_labels_of_any_thread_are_seen_and_none_is_lost():
    box: list[Tensor] = []

    def work() -> None:
        for k in range(200):
            kept = torch.zeros(1 + k)
            label(kept, "gradients" if k % 2 else "other")

    with MemoryLog() as log:
        box.append(torch.zeros(100))
        in_threads(lambda: box.append(torch.zeros(1000)))
        assert log.moments[-1].ledger.total - log.moments[0].ledger.total == 400
        in_threads(lambda: box.append(label(torch.zeros(50), "communication buffers")))
        assert log.peak_of("communication buffers") >= 200
        in_threads(box.clear)
        assert log.moments[-1].ledger == log.moments[0].ledger
        in_threads(work, 4)
        # A thread's last tensor goes when its frame goes: that is before join returns.
        assert log.moments[-1].ledger == log.moments[0].ledger
    assert len(log.moments) >= 1 + 2 * 4 * 200


# ---- any sequence ------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(("make", "view", "drop", "resize", "label")),
            st.integers(0, 9),
            st.integers(0, 20),
        ),
        max_size=30,
    )
)
def test_any_sequence_of_makings_and_ends(steps):
    kept: list[Tensor] = []
    kinds = ("gradients", "communication buffers")
    with MemoryLog() as log:
        base = log.moments[0].ledger
        for what, which, size in steps:
            if what == "make":
                kept.append(torch.zeros(size))
            elif not kept:
                continue
            elif what == "view":
                kept.append(kept[which % len(kept)].view(-1)[:size])
            elif what == "drop":
                del kept[which % len(kept)]
            elif what == "resize":
                kept[which % len(kept)].untyped_storage().resize_(4 * size)
                kept[:] = [t for t in kept if _fits(t)]
            else:
                label(kept[which % len(kept)], kinds[size % 2])
            storages = {t.untyped_storage() for t in kept}
            now = log.moments[-1].ledger
            assert now.total - base.total == sum(s.nbytes() for s in storages)
            labelled = resident()
            assert all(now[kind] == labelled[kind] for kind in kinds)
            del storages


def _fits(tensor: Tensor) -> bool:
    end = tensor.storage_offset() + tensor.numel()
    return 4 * end <= tensor.untyped_storage().nbytes()


# ---- ranks, and PyTorch's own ------------------------------------------------------


def shares_and_shards() -> dict:
    from torch.distributed.fsdp import fully_shard

    from ddp_course.collectives import shared_memory

    results = {}
    with MemoryLog() as log:
        flat = shared_memory.empty(1000)
        label(flat, "communication buffers")
        label(flat[:100], "gradients")
        now, first = log.moments[-1].ledger, log.moments[0].ledger
        results["shared"] = [now[k] - first[k] for k in ("communication buffers",
                                                      "gradients")]  # fmt: skip
    model, _, idx = trainable()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    stepper = torch.optim.AdamW(model.parameters())
    model(idx, idx)[1].backward()
    with MemoryLog(model, stepper) as log:
        stepper.step()
    results["born"] = sum("zeros_like" in moment.what for moment in log.moments)
    results["parameters"] = len(list(model.parameters()))
    stepper.zero_grad()
    with MemoryLog(model, stepper) as log, EventLog() as events:
        with events.span("step"):
            step(model, stepper, idx)
    results["steady"] = log.moments[0].ledger
    results["resident"] = resident(model, stepper)
    results["log"] = log
    return results


def test_spawn_shared_memory_and_dtensors():
    for result in spawn(shares_and_shards, world_size=2):
        assert result["shared"] == [3600, 400]
        log: MemoryLog = result["log"]
        # What DTensors are made of is seen when it is made: here both states of Adam.
        assert result["born"] == 2 * result["parameters"]
        assert result["steady"] == result["resident"]
        whole = 4 * TINY.num_parameters
        steady = result["steady"].total
        assert 0.4 * whole < result["steady"]["parameters"] < 0.6 * whole
        # Gathered blocks and whole gradients have come and gone.
        assert log.peak.total > steady + whole / 3
        assert log.peak_of("gradients") >= result["steady"]["parameters"]
        assert pickle.loads(pickle.dumps(log)).moments == log.moments


def test_peak_as_memtracker_finds_it():
    """PyTorch's MemTracker, in the same step, has the same peak to the byte."""
    from torch.distributed._tools.mem_tracker import MemTracker

    model, stepper, idx = trainable()
    tracker = MemTracker()
    tracker.track_external(model, stepper, idx)
    with MemoryLog(model, stepper) as log, tracker:
        step(model, stepper, idx)
    theirs = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert log.peak.total + idx.nbytes == theirs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="counts a GPU's memory")
def test_peak_as_the_gpus_allocator_finds_it():
    """Its blocks are multiples of 512 bytes, so the tensors here are, too."""
    layers = [nn.Linear(256, 256, bias=False, device="cuda") for _ in range(3)]
    model, x = nn.Sequential(*layers), torch.ones(128, 256, device="cuda")
    model(x).sum().backward()  # cuBLAS takes its workspace
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with MemoryLog(model) as log:
        model(x).square().mean(0).sum().backward()
        torch.cuda.synchronize()
    grown = log.peak.total - log.moments[0].ledger.total
    found = torch.cuda.max_memory_allocated() - before
    assert grown <= found <= grown + 4096  # scalars take 512 bytes each

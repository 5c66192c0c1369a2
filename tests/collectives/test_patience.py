"""gloo's threads are held back while we only wait, and never afterwards."""

import os

import pytest
import torch
import torch.distributed as dist
from on_ranks import error_of

from ddp_course.collectives import (
    communicator,
    patience,
    ring_all_reduce,
    runtime,
)
from ddp_course.launch import spawn

pytestmark = pytest.mark.skipif(
    not patience.AVAILABLE, reason="wants Linux and PyTorch 2.13"
)


def policies() -> list[int]:
    return [os.sched_getscheduler(t) for t in patience.threads_of(communicator())]


def watched() -> dict[str, list[int]]:
    """On every rank: the policy of gloo's threads before, during and after."""
    seen, pipelined = {"before": policies()}, runtime.pipelined

    def looking(*args, **options):
        seen["during"] = policies()
        return pipelined(*args, **options)

    runtime.pipelined = looking
    ring_all_reduce(torch.ones(1000))
    seen["sync"] = seen.pop("during")
    ring_all_reduce(torch.ones(1000), async_op=True).wait()
    seen["async"] = seen.pop("during")
    runtime.pipelined = lambda *args: 1 / 0
    if error_of(lambda: ring_all_reduce(torch.ones(1000))).startswith("ZeroDivision"):
        seen["after an error"] = policies()
    dist.barrier()
    return seen


def test_held_back_during_a_call_that_waits_and_only_then():
    for seen in spawn(watched, world_size=2, output="none"):
        assert set(seen["sync"]) == {os.SCHED_BATCH}
        for when in ("before", "async", "after an error"):
            assert set(seen[when]) == {os.SCHED_OTHER}, when


def test_only_gloos_socket_threads_are_found(tmp_path):
    for number, name in (
        (11, "python"),
        (12, "gloo_tcp_loop"),
        (13, "pt_gloo_runloop"),
    ):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "comm").write_text(f"{name}\n")
    (tmp_path / "14").mkdir()  # has just ended
    assert patience.socket_threads(tmp_path) == [12]
    with patience.patient([2**22 + 1]):  # so has this one
        pass

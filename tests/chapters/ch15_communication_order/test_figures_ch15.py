"""The figures of chapter 15."""

import itertools

import pytest
from drawings import laid_out

from ddp_course.chapters.ch15_communication_order.figures import (
    LAYERS,
    POLICIES,
    step,
    steps,
    two_orders,
)
from ddp_course.chapters.ch15_communication_order.ways import looking_back
from ddp_course.communication_order import WAIT_FOR_ALL, priority, simulate_step
from ddp_course.model import GPTConfig

test_the_layout = laid_out(two_orders, (step, itertools.product(POLICIES, (0, 1, 8))))


def test_what_the_steps_say():
    text = two_orders().description
    assert "sends: send 2 send 1 send 0. What" in text  # in the order of backward
    assert text.endswith("sends: send 2 send 1 send 0 send 1 send 2.")
    simulated = {
        "one": simulate_step(LAYERS, WAIT_FOR_ALL),
        "two": simulate_step(LAYERS, priority(1)),
    }
    drawn = steps(simulated, path=True)
    assert drawn.description.startswith("one: 18 in all. computes: backward 3")
    assert drawn.description.endswith(
        "longest: backward 3 backward 2 backward 1 backward 0 send 0 send 1 send 2 "
        "send 3 forward 3."
    )
    assert steps(simulated, unit=10).description.startswith("one: 180 in all.")
    with pytest.raises(ValueError, match="no steps"):
        steps({})


def test_all_ways_in_one_table():
    config = GPTConfig(1000, 64, n_layer=14, n_head=16, d_model=1024)
    lines = looking_back(config, gpus=64, rows=64).data.splitlines()[2:]
    rows = {row[1]: row[2:] for row in ([*map(str.strip, r.split("|"))] for r in lines)}
    keeps, sends = ({n: float(r[k]) for n, r in rows.items()} for k in (1, 2))
    gigabyte = config.num_parameters / 1e9
    assert keeps["ZeRO-3, FSDP"] < keeps["ZeRO-2"] < keeps["ZeRO-1"] < 16 * gigabyte
    assert sends["ZeRO-1"] == sends["DDP, mixed precision"] == sends["ZeRO-2"]
    assert abs(sends["ZeRO-3, FSDP"] / sends["ZeRO-1"] - 1.5) < 0.2
    assert sends["DDP, PowerSGD"] < sends["DDP, 8 bits"] < sends["ZeRO-1"]
    assert sends["DDP, top 1 %"] > sends["ZeRO-1"]  # gathered from 64 ranks
    assert keeps["cp in a node, dp"] == keeps["DDP, mixed precision"]
    assert sends["cp in a node, dp"] > sends["DDP, mixed precision"]
    router = 14 * 1024 * 8 * 16 / 1e9  # one expert is as large as the MLP was
    assert abs(keeps["8 experts, ep in a node, dp"] - 16 * gigabyte - router) < 0.1
    assert "bubble: 47%" in rows["pp over nodes, dp"][3]

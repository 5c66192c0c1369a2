"""`train --local-steps` is what a simulation computes, and goes on bit by bit."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from refusals import answered, nothing_starts  # noqa: F401

from ddp_course.checkpoint import CheckpointError
from ddp_course.data import load_corpus, shard
from ddp_course.launch import spawn
from ddp_course.local_sgd import DiLoCo, LocalSGD, simulate_training
from ddp_course.mechanisms.states import PerRankStates
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.train import History, largest_difference, train

SMALL = GPTConfig(block_size=8, n_layer=1, n_head=2, d_model=8)
ROWS, STEPS = 12, 7
LOCAL = {"local_steps": 3}
DILOCO = {**LOCAL, "outer": "nesterov", "outer_lr": 0.6}


def run(steps: int, folder: Path | None = None, **how) -> History:
    how = {"preset": SMALL, "lr": 1e-2, "every": 2, "keep_state": True, **how}
    return train(steps, ROWS, checkpoint=folder, **how)


def runs(folder: Path) -> dict[str, History]:
    """Run through; and stop after step 4 or 5, between two averages, and go on."""
    results = {
        "through": run(STEPS, **DILOCO),
        "fp16": run(4, precision="fp16", **LOCAL),
    }
    for name in ("resumed", "forgets"):
        if name == "forgets":
            PerRankStates.load_state_dict = takes_rank_0s
        run(5, folder / name, **DILOCO)
        results[name] = run(STEPS, folder / name, **DILOCO)
    return results


def takes_rank_0s(self, state):
    self.own.load_state_dict(state[0])


def loss(model: torch.nn.Module, step: int, rank: int, ranks: int = 2) -> torch.Tensor:
    batch = load_corpus().batch(step, ROWS, SMALL.block_size)
    return model(*(shard(t, rank, ranks) for t in batch))[1]


def dies(folder: Path) -> None:
    """Rank 2 of 3 is killed after step 5; there is a checkpoint of step 4."""
    if dist.get_rank() == 2:
        steps = iter(range(5))
        inner = LocalSGD.step_alone

        def step_alone(self):
            if next(steps, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return inner(self)

        LocalSGD.step_alone = step_alone
    run(STEPS, folder, **LOCAL)


def test_two_ranks_are_the_simulation_and_resumed_they_have_every_bit(tmp_path):
    ranks = spawn(partial(runs, tmp_path), world_size=2, output="none")
    simulated = simulate_training(
        partial(build_gpt, SMALL),
        lambda model: DiLoCo(
            torch.optim.AdamW(model.parameters(), 1e-2), model, every=3, lr=0.6
        ),
        loss,
        ranks=2,
        steps=STEPS,
    )
    first, second = (model.state_dict() for model in simulated.models)
    mean = {name: (first[name] + second[name]) / 2 for name in first}
    assert largest_difference(first, second) > 1e-3
    for result in ranks:
        assert result["through"].losses == pytest.approx(simulated.losses, abs=1e-6)
        assert largest_difference(result["through"].state, mean) == 0
        assert result["resumed"].resumed_at == 5
        assert result["resumed"].losses == result["through"].losses
        assert result["resumed"].checksum == result["through"].checksum
        assert result["forgets"].checksum != result["through"].checksum
        assert len(result["fp16"].losses) == 4


def test_the_rest_goes_on_when_one_has_died_between_two_averages(tmp_path):
    how = {"world_size": 3, "output": "none", "check": False}
    assert spawn(partial(dies, tmp_path), **how)[2].status == "killed"
    states = torch.load(tmp_path / "step-00000004.pt")["state"]["value"]["model"]
    assert [*states] == [0, 1, 2]
    assert largest_difference(states[0], states[2]) > 0  # each rank's own
    again = run(STEPS, tmp_path, **LOCAL)
    assert (again.resumed_at, again.world_size) == (4, 1)
    with pytest.raises(CheckpointError, match="with other settings .local"):
        run(STEPS, tmp_path, **DILOCO)


test_what_cannot_be_is_one_line_before_anything_starts = answered(
    "train --ranks 2",
    1,
    ("--zero 1 --local-steps 2", "whole models and send no gradients: use data"),
    ("--tp 2 --local-steps 2", "use data_parallel 'ddp' along dp alone, with"),
    ("--compress int8 --local-steps 2", "with zero 0 and without compress"),
    ("--outer nesterov", "outer has no effect without local_steps"),
    ("--local-steps 2 --outer-lr 1", "outer_lr has no effect without outer 'nest"),
    fixtures=["nothing_starts"],
)
test_no_steps_alone_are_no_option = answered(
    "train",
    2,
    ("--local-steps 0", "'0' is not"),
    ("--outer-momentum 1", "'1' is not a number 0 or more and below 1"),
)

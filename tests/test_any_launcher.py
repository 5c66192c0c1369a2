"""Ranks that our launcher did not start: `mp.spawn`, SLURM, MPI.

They are forked by PyTorch's own function from the server that has imported PyTorch.
"""

import contextlib
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from machines import free_port
from torch import Tensor, nn

from ddp_course.cli import main
from ddp_course.collectives import ALGORITHMS, communicator
from ddp_course.launch import here
from ddp_course.measure import ByteMeter
from ddp_course.mesh import make_groups
from ddp_course.model import GPTConfig
from ddp_course.parallelize import optimizer_for, parallelize, whole
from ddp_course.spec import DATA_PARALLEL, layout_for
from ddp_course.train import largest_difference, train

RANKS, ROWS, WIDTH = 2, 8, 6
LAYOUTS = [{"data_parallel": name} for name in DATA_PARALLEL if name != "average"]
LAYOUTS += [{"zero": stage} for stage in (1, 2, 3)]
SMALL = GPTConfig(block_size=8, n_layer=2, n_head=2, d_model=16)


def start(function, *args) -> None:
    """Run a function on two ranks, and wait for them."""
    mp.start_processes(function, args, nprocs=RANKS, start_method="forkserver")


class Nested(nn.Module):
    """Modules in a list in a dict in a module; takes and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        pair = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.parts = nn.ModuleDict({"pair": pair, "end": nn.Sequential(nn.Tanh())})
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        first, second = self.parts["pair"]
        return {"out": self.scale * self.parts["end"](second(first(inputs["x"])))}


def trained(asked: dict | None, same_rows: bool = False) -> dict[str, Tensor]:
    """Return the state after two steps: in a layout, or of one process (None).

    Planted: all ranks take the same rows.
    """
    torch.manual_seed(0)
    model, axes, layout, rank, size = Nested(), None, layout_for(1), 0, 1
    if asked is not None:
        rank, size = dist.get_rank() * (not same_rows), dist.get_world_size()
        layout = layout_for(size, **asked)
        axes = make_groups(layout.mesh)
        model = parallelize(model, layout, axes)
    optimizer = optimizer_for(model, layout, axes, lr=1e-2)
    for step in range(2):
        torch.manual_seed(100 + step)
        x, y = (t.chunk(size)[rank] for t in torch.randn(2, ROWS, WIDTH))
        optimizer.zero_grad()
        nn.functional.mse_loss(model({"x": x})["out"], y).backward()
        optimizer.step()
    state = whole(model, optimizer)[0].state_dict()
    return {key: value.clone() for key, value in state.items()}


def works_as_promised(rank: int, file: str) -> None:
    """Train in every layout, as users of `mp.spawn` and `init_process_group` do."""
    torch.set_num_threads(1)
    alone = train(2, 8, SMALL, keep_state=True).state  # before there is a group
    right = trained(None)
    dist.init_process_group("gloo", f"file://{file}", rank=rank, world_size=RANKS)
    place = here()
    assert (place.rank, place.local_rank, place.world_size) == (rank, rank, RANKS)
    assert communicator().nodes == [[0, 1]]
    with ByteMeter() as meter:
        for name, all_reduce in ALGORITHMS.items():
            all_reduce(x := torch.full((5,), rank + 1.0))
            assert x.tolist() == [3.0] * 5, name
    assert meter.report().inside and not meter.report().between
    for asked in LAYOUTS:
        assert largest_difference(right, trained(asked)) < 1e-5, asked
    assert largest_difference(right, trained({}, same_rows=True)) > 1e-3
    for asked in ({"tp": 2}, {"pp": 2}, {"data_parallel": "average"}):
        together = train(2, 8, SMALL, keep_state=True, **asked).state
        assert largest_difference(together, alone) < 1e-5, asked
    dist.barrier()
    dist.destroy_process_group()


def test_every_strategy_under_plain_mp_spawn_equals_one_process(tmp_path):
    start(works_as_promised, str(tmp_path / "store"))


# ---- launchers that set variables ----------------------------------------------------

SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
TRAIN = ["train", "--steps", "1", "--batch-size", "2"]


@pytest.mark.parametrize("others", [SRUN, MPIRUN])
def test_one_of_several_processes_does_not_train_as_if_alone(
    others, monkeypatch, capfd
):
    for name, value in others.items():
        monkeypatch.setenv(name, value)
    assert main(TRAIN) == 1
    _, error = capfd.readouterr()
    assert "as rank 1 of 2" in error
    assert "MASTER_ADDR" in error
    assert "Traceback" not in error


def as_srun_does(rank: int, folder: str, port: int, *options: str) -> None:
    """Type the command on a rank that knows where to meet; write what it says."""
    os.environ |= {**SRUN, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with Path(folder, str(rank)).open("w") as file:
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            try:
                print("code", main([*TRAIN, *options * rank]))
            except Exception as error:
                print(f"{type(error).__name__}: {error}")


def said_under_srun(folder: Path, *options_of_rank_1: str) -> list[str]:
    start(as_srun_does, str(folder), free_port(), *options_of_rank_1)
    return [(folder / str(rank)).read_text() for rank in range(RANKS)]


def test_ranks_of_srun_that_know_where_to_meet_train_together(tmp_path):
    first, second = said_under_srun(tmp_path)
    assert "2 ranks, 1 step" in first and first.endswith("code 0\n")
    assert second == "code 0\n"


def test_ranks_that_were_told_different_things_say_so(tmp_path):
    for said in said_under_srun(tmp_path, "--lr=0.2"):
        assert re.match(r"ReplicaError: .* differ\. --lr is 0\.\d+ on rank", said)

"""A program that knows nothing of our launcher: `mp.spawn` and `init_process_group`.

Run by `test_any_launcher.py`. Every strategy trains models that users have, and must
come to the parameters of one process.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

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


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        steps, _ = self.lstm(x.unsqueeze(1).expand(-1, 3, -1))
        return self.head(steps[:, -1])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


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


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, WIDTH)
    )


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, 7), nn.ReLU(), nn.Linear(7, WIDTH))
    return model.requires_grad_(False)[2].requires_grad_(True) and model


MODELS = {
    "BatchNorm": normed,
    "LSTM": Recurrent,
    "tied": Tied,
    "frozen": frozen,
    "nested, dicts": Nested,
}


def rows(step: int, name: str, part: int, parts: int) -> tuple[Tensor, Tensor]:
    """Return this rank's rows; for batch norm all have the same, and so one mean."""
    torch.manual_seed(100 + step)
    x, y = torch.randn(2, ROWS, WIDTH).unbind()
    if name == "BatchNorm":
        return x, y
    return x.chunk(parts)[part], y.chunk(parts)[part]


def trained(name: str, asked: dict | None, plant: int = 0) -> dict[str, Tensor]:
    """Return the state after two steps: in a layout, or of one process (None).

    With the `plant` all ranks take the rows of rank 0.
    """
    torch.manual_seed(0)
    model, axes, layout = MODELS[name](), None, layout_for(1)
    rank, size = (
        (dist.get_rank(), dist.get_world_size()) if asked is not None else (0, 1)
    )
    if asked is not None:
        layout = layout_for(size, **asked)
        axes = make_groups(layout.mesh)
        model = parallelize(model, layout, axes)
    optimizer = optimizer_for(model, layout, axes, lr=1e-2)
    for step in range(2):
        x, y = rows(step, name, rank * (not plant), size)
        out = model({"x": x})["out"] if name.startswith("nested") else model(x)
        optimizer.zero_grad()
        nn.functional.mse_loss(out, y).backward()
        optimizer.step()
    state = whole(model, optimizer)[0].state_dict()
    return {key: value.clone() for key, value in state.items()}


def wrong_here() -> list[str]:
    """Return what is not as promised, on this rank."""
    rank, wrong = dist.get_rank(), []
    place = here()
    if (place.rank, place.local_rank, place.world_size) != (rank, rank, RANKS):
        wrong.append(f"here() is {place}")
    if communicator().nodes != [[0, 1]]:
        wrong.append(f"the nodes are {communicator().nodes}")
    with ByteMeter() as meter:
        for name, all_reduce in ALGORITHMS.items():
            all_reduce(x := torch.full((5,), rank + 1.0))
            if x.tolist() != [3.0] * 5:
                wrong.append(f"all_reduce {name}: {x.tolist()}")
    report = meter.report()
    if report.between or not report.inside:
        wrong.append(f"bytes {report}")
    for name in MODELS:
        right = trained(name, None)
        for asked in LAYOUTS:
            try:
                far = largest_difference(right, trained(name, asked))
            except Exception as error:
                far = f"{type(error).__name__}: {error}"
            if not isinstance(far, float) or far > 1e-5:
                wrong.append(f"{asked}, {name}: {far}")
    if largest_difference(right, trained("nested, dicts", {}, plant=1)) < 1e-3:
        wrong.append("a wrong share of the rows is not seen")
    for layout in (
        {"tp": 2},
        {"pp": 2},
        {"data_parallel": "average"},
    ):
        together = train(2, 8, SMALL, keep_state=True, **layout).state
        if largest_difference(together, alone_gpt) > 1e-5:
            wrong.append(f"{layout}")
    return wrong


def run(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    global alone_gpt
    alone_gpt = train(2, 8, SMALL, keep_state=True).state  # before there is a group
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS
    )
    told = [*wrong_here(), "is through\n"]
    print("\n".join(f"rank {rank} {line}" for line in told), end="", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(str(Path(folder, "store")),), nprocs=RANKS)

"""Stage 3 with replicas of the shards; `test_composed_training.py` adds tp below it."""

import functools

import torch
import torch.distributed as dist
from fsdp_cases import (
    MODELS,
    Ours,
    ReplicasForgotten,
    Simple,
    SumOfReplicas,
    fully_shard,
    train,
)
from on_ranks import error_of
from torch import nn
from trained import Trained, bits, far_apart, same

from ddp_course.launch import spawn
from ddp_course.mesh import Axes, Mesh, make_groups
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.zero import sharded_checkpoint

CLIP = 0.05
EVEN = GPTConfig(block_size=16, n_layer=2, n_head=2, d_model=24)
# AdamW moves a weight whose gradient is hardly more than rounding by what rounding
# says: by 1.5e-5, of a step of .01, on one kind of CPU, and by less on others.
CLOSE = {"sgd": 1e-5, "adamw": 1e-4}
NOT = {"simple": {"clip": None}}  # clipping is a part of the full class
HOW = {"clip": CLIP, "states": True}
alone = functools.cache(functools.partial(train, None, states=True))


def different(
    ranks: list[Trained], optimizer: str, model: str, clip: float | None = CLIP
) -> list[str]:
    """Return where the ranks' training is not one process's."""
    one = alone(optimizer, model, clip=clip)
    wrong = far_apart(ranks[0], one, CLOSE[optimizer])
    for step, loss in enumerate(one.losses):
        mean = sum(rank.losses[step] for rank in ranks) / len(ranks)
        if abs(mean - loss) > 1e-5:
            wrong.append(f"loss {step}: {mean}, not {loss}")
    wrong += [] if len({bits(rank) for rank in ranks}) == 1 else ["ranks differ"]
    mine, its = ranks[0].optimizer, one.optimizer
    if mine and not same(mine["state"], its["state"], rtol=1e-3, atol=1e-5):
        wrong.append("states of the optimizer")
    return wrong


def hybrid(cls: type, axes: Axes, **options):
    shard, replicas = axes.group("shard"), axes.group("replicate")
    return lambda model: cls(model, shard, replicas=replicas, **options)


def replicas(folder: str) -> dict[tuple, Trained]:
    from torch.distributed.device_mesh import init_device_mesh

    axes = make_groups(Mesh({"replicate": 2, "shard": 2}))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def sharded_by_torch(_: nn.Module) -> nn.Module:
        return fully_shard(MODELS["gpt"](0), mesh=mesh)

    wraps = {
        ("torch", "adamw", "gpt"): sharded_by_torch,
        ("ours", "adamw", "gpt"): hybrid(Ours, axes),
        ("ours", "sgd", "odd"): hybrid(Ours, axes),
        ("simple", "sgd", "gpt"): hybrid(Simple, axes),
        ("fake", "sgd", "forgotten"): hybrid(ReplicasForgotten, axes),
        ("fake", "adamw", "forgotten"): hybrid(ReplicasForgotten, axes),
        ("fake", "sgd", "sum"): hybrid(SumOfReplicas, axes),
    }
    results = {
        (who, optimizer, what): train(
            wrap,
            optimizer,
            "odd" if what == "odd" else "gpt",
            **(HOW | NOT.get(who, {})),
        )
        for (who, optimizer, what), wrap in wraps.items()
    }
    return {
        "trained": results,
        "error": refused(axes),
        "saved": saved(hybrid(Ours, axes), folder),
    }


def refused(axes: Axes) -> str:
    """Rank 3 has another model: everybody hears of it."""
    wide = 5 if dist.get_rank() == 3 else 4
    return error_of(lambda: hybrid(Ours, axes)(nn.Linear(3, wide)))


def saved(wrap, folder: str) -> bool:
    """Save and load a sharded checkpoint; tell whether all numbers came back."""
    sharded = wrap(build_gpt(EVEN))
    sharded_checkpoint.save(folder, sharded)
    before = sharded.full_state_dict()
    with torch.no_grad():
        for piece in sharded.parameters():
            piece.zero_()
    sharded_checkpoint.load(folder, sharded)
    after = sharded.full_state_dict()
    return all(torch.equal(after[name], before[name]) for name in before)


def test_with_replicas_it_trains_as_one_process_and_as_pytorchs(tmp_path):
    ranks = spawn(replicas, str(tmp_path), world_size=4, output="none")
    first = ranks[0]["trained"]
    for who, optimizer, what in first:
        got = [rank["trained"][who, optimizer, what] for rank in ranks]
        model = "odd" if what == "odd" else "gpt"
        wrong = different(got, optimizer, model, **({"clip": CLIP} | NOT.get(who, {})))
        assert bool(wrong) == (who == "fake"), (who, what, wrong)
    theirs = first["torch", "adamw", "gpt"]
    assert not far_apart(first["ours", "adamw", "gpt"], theirs, CLOSE["adamw"])
    for rank in ranks:
        assert "weight is float32 [4, 3] on cpu" in rank["error"]
        assert rank["error"].startswith("ReplicaError: ") and "rank 3" in rank["error"]
        assert rank["saved"]

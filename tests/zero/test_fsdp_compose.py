"""Stage 3 beside other axes: replicas of the shards, and tensor parallelism below."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from fsdp_cases import (
    MODELS,
    Naive,
    Ours,
    ReplicasForgotten,
    Simple,
    SumOfReplicas,
    Trained,
    bits,
    far_apart,
    fully_shard,
    train,
)
from torch import nn

from ddp_course.launch import spawn
from ddp_course.measure import ByteMeter
from ddp_course.mechanisms.agreement import ReplicaError
from ddp_course.mesh import Axes, Mesh, make_groups
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.tensor_parallel import tensor_parallel
from ddp_course.zero import sharded_checkpoint
from ddp_course.zero.units import unit_plan

CLIP = 0.05
EVEN = GPTConfig(block_size=16, n_layer=2, n_head=2, d_model=24)
alone = functools.cache(functools.partial(train, None, clip=CLIP))


def the_same(ranks: list[Trained], optimizer: str, model: str) -> list[str]:
    """Return where the ranks' training is not one process's."""
    one = alone(optimizer, model)
    wrong = far_apart(ranks[0], one)
    for step, loss in enumerate(one.losses):
        mean = sum(rank.losses[step] for rank in ranks) / len(ranks)
        if abs(mean - loss) > 1e-5:
            wrong.append(f"loss {step}: {mean}, not {loss}")
    wrong += [] if len({bits(rank) for rank in ranks}) == 1 else ["ranks differ"]
    mine, its = ranks[0].optimizer, one.optimizer
    if mine and mine["state"].keys() != its["state"].keys():
        wrong.append(f"states of {[*mine['state']]}, not {[*its['state']]}")
    for number, state in mine.get("state", {}).items():
        for key, value in state.items():
            if not torch.allclose(value, its["state"][number][key], 1e-3, 1e-5):
                wrong.append(f"{key} of {number}")
    return wrong


# ---- hybrid sharding -----------------------------------------------------------------


def hybrid(cls: type, axes: Axes, **options):
    shard, replicas = axes.group("shard"), axes.group("replicate")
    return lambda model: cls(model, shard, replicas=replicas, **options)


def hybrids(folder: str) -> tuple[dict, dict, str, bool]:
    from torch.distributed.device_mesh import init_device_mesh

    axes = make_groups(Mesh({"replicate": 2, "shard": 2}))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shared = hybrid(Ours, axes, in_shared_memory=True)

    def torchs(_: nn.Module) -> nn.Module:
        return fully_shard(MODELS["gpt"](0), mesh=mesh)

    trained = {
        ("torch", "adamw", "gpt"): train(torchs, clip=CLIP),
        ("ours", "adamw", "gpt"): train(hybrid(Ours, axes), clip=CLIP),
        ("ours", "sgd", "odd"): train(hybrid(Ours, axes), "sgd", "odd", clip=CLIP),
        ("shared", "sgd", "odd"): train(shared, "sgd", "odd", clip=CLIP),
        ("simple", "sgd", "gpt"): train(hybrid(Simple, axes), "sgd", clip=CLIP),
        ("naive", "sgd", "gpt"): train(hybrid(Naive, axes), "sgd", clip=CLIP),
    }
    for fake in (ReplicasForgotten, SumOfReplicas):
        wrap = hybrid(fake, axes)
        trained[fake.__name__, "sgd", "gpt"] = train(wrap, "sgd", clip=CLIP)
    return trained, sent(axes), refused(axes), saved(axes, folder)


def sent(axes: Axes) -> dict[str, int]:
    """Return what a step sends inside of a group of shards, and across replicas."""
    sharded = hybrid(Ours, axes)(build_gpt(EVEN))
    x = torch.arange(32).view(2, 16)
    sharded(x, x)[1].backward()
    with ByteMeter() as meter:
        sharded(x, x)[1].backward()
    groups = {axis: axes.group(axis) for axis in ("shard", "replicate")}
    return {
        axis: meter.sent_to(dist.get_process_group_ranks(group))
        for axis, group in groups.items()
    }


def refused(axes: Axes) -> str:
    """Rank 3 has another model: everybody hears of it."""
    wide = 5 if dist.get_rank() == 3 else 4
    try:
        hybrid(Ours, axes)(nn.Linear(3, wide))
    except ReplicaError as error:
        return str(error)
    return "no error"


def saved(axes: Axes, folder: str) -> bool:
    """Save and load a sharded checkpoint; tell whether all numbers came back."""
    sharded = hybrid(Ours, axes)(build_gpt(EVEN))
    sharded_checkpoint.save(folder, sharded)
    before = sharded.full_state_dict()
    with torch.no_grad():
        for piece in sharded.parameters():
            piece.zero_()
    sharded_checkpoint.load(folder, sharded)
    after = sharded.full_state_dict()
    return all(torch.equal(after[name], before[name]) for name in before)


def test_replicas_of_shards_train_as_one_process_and_as_fully_shard(tmp_path):
    ranks = spawn(hybrids, str(tmp_path), world_size=4, output="none")
    for name, *case in ranks[0][0]:
        got = [trained[(name, *case)] for trained, *_ in ranks]
        wrong = the_same(got, *case)
        fake = name in (ReplicasForgotten.__name__, SumOfReplicas.__name__)
        assert bool(wrong) == fake, (name, case, wrong)
    theirs = ranks[0][0]["torch", "adamw", "gpt"]
    assert not far_apart(ranks[0][0]["ours", "adamw", "gpt"], theirs)
    # F = R = 2: inside 3 (F - 1) / F of the model, across 2 (R - 1) / R of a shard.
    nbytes = sum(unit.nbytes for unit in unit_plan(build_gpt(EVEN), 2))
    for _, by_axis, error, same in ranks:
        assert by_axis == {"shard": 3 * nbytes // 2, "replicate": nbytes // 2}
        assert "weight is float32 [4, 3] on cpu" in error and "rank 3" in error
        assert same


# ---- on a model that tensor parallelism has cut --------------------------------------


def with_tensor_parallelism() -> dict:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    from ddp_course.bench.tp import styles

    axes = make_groups(Mesh({"dp": 2, "tp": 2}))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    how = {"clip": CLIP, "share": (axes.index("dp"), 2)}

    def ours(model: nn.Module) -> nn.Module:
        return Ours(tensor_parallel(model, axes.group("tp")), axes.group("dp"))

    def theirs(model: nn.Module) -> nn.Module:
        plan = styles(model, True, False).items()  # of tied weights they lose one
        blocks = {name: style for name, style in plan if name.startswith("blocks")}
        cut = parallelize_module(model, mesh["tp"], blocks)
        return fully_shard(cut, mesh=mesh["dp"])

    ways = [("ours", "sgd"), ("ours", "adamw"), ("torch", "adamw")]
    wraps = {"ours": ours, "torch": theirs}
    return {way: train(wraps[way[0]], way[1], "even", **how) for way in ways}


def test_stage_3_on_a_tensor_parallel_model_trains_as_one_process_and_as_pytorchs():
    ranks = spawn(with_tensor_parallelism, world_size=4, output="none")
    for name, optimizer in ranks[0]:
        got = [rank[name, optimizer] for rank in ranks]
        assert not the_same(got, optimizer, "even"), (name, optimizer)
    mine, theirs = ranks[0]["ours", "adamw"], ranks[0]["torch", "adamw"]
    assert not far_apart(mine, theirs, atol=3e-5)  # each is 1e-5 from one process

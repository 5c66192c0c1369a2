"""Shards with replicas train like one process; `test_composed_training.py` adds tp."""

import pytest
from fsdp_cases import Fake, Ours, train
from trained import Trained, bits, far_apart

from ddp_course.launch import spawn
from ddp_course.mesh import Mesh, make_groups

CLIP = 0.05


class ReplicasForgotten(Fake):
    """Each group of shards trains for itself, from the same numbers."""

    def spoil(self, flat):
        flat.replicas, flat.scale = None, 2 * flat.scale


class SumOfReplicas(Fake):
    """The mean inside of a group of shards, and the sum of these."""

    def spoil(self, flat):
        flat.scale *= 2


RUNS = {  # the class, the model ("odd" has parts that no two ranks divide equally)
    "gpt": (Ours, "gpt"),
    "odd": (Ours, "odd"),
    "forgotten": (ReplicasForgotten, "odd"),
    "sum": (SumOfReplicas, "odd"),
}


def replicas() -> dict[str, Trained]:
    axes = make_groups(Mesh({"replicate": 2, "shard": 2}))
    shard, replicate = axes.group("shard"), axes.group("replicate")

    def trained(cls: type, model: str) -> Trained:
        wrap = lambda plain: cls(plain, shard, replicas=replicate)  # noqa: E731
        return train(wrap, "sgd", model, clip=CLIP)

    return {name: trained(cls, model) for name, (cls, model) in RUNS.items()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Trained]]:
    return spawn(replicas, world_size=4, output="none")


@pytest.mark.parametrize("name", RUNS)
def test_with_replicas_it_trains_as_one_process_and_the_plants_do_not(name, ranks):
    runs = [rank[name] for rank in ranks]
    wrong = far_apart(runs[0], train(None, "sgd", RUNS[name][1], clip=CLIP))
    wrong += [] if len({bits(run) for run in runs}) == 1 else ["the ranks differ"]
    assert bool(wrong) == (name in ("forgotten", "sum")), wrong

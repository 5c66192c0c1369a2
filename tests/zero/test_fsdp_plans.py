"""Units, shards and their order, as plain data; and what cannot be sharded."""

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import GPT, Odd, Ours
from on_ranks import assert_refused, tried
from torch import nn

from ddp_course.launch import spawn
from ddp_course.model import build_gpt
from ddp_course.zero.sharded_parts import Order
from ddp_course.zero.units import unit_plan

# ---- units ---------------------------------------------------------------------------


def names(plan) -> dict[str, set[str]]:
    return {flat.name: set(flat.parameters) for unit in plan for flat in unit.flats}


def test_blocks_are_units_and_the_root_has_the_rest():
    model = build_gpt(GPT)
    plan = unit_plan(model, 4)
    assert [unit.name for unit in plan] == ["root", "blocks.0", "blocks.1", "blocks.2"]
    assert names(plan)["root"] == {
        "embed.tokens.weight",  # tied: here once
        "embed.positions.weight",
        "head.norm.weight",
        "head.norm.bias",
    }
    everything = [name for each in names(plan).values() for name in each]
    assert sorted(everything) == sorted(name for name, _ in model.named_parameters())
    block = plan[1].flats[0]
    assert (block.numel, block.shard_numel, block.padding) == (2492, 623, 0)
    assert plan[1].nbytes == 4 * 2492
    results = (
        "blocks.0: 2,492 float32 elements of 11 parameters, 4 x 623 with 0 of padding"
    )
    assert str(plan[1]) == results


def test_types_frozen_and_shared_parameters():
    plan = unit_plan(Odd(), 3)
    results = names(plan)
    assert results["root"] == {
        "embed.weight",
        "layers.0.shared",  # of all layers
        "head.bias",
    }
    assert results["layers.1.float64"] == {
        "layers.1.precise.weight",
        "layers.1.precise.bias",
    }
    frozen = {"layers.1.frozen.weight", "layers.1.frozen.bias"}
    assert results["layers.1.float32.frozen"] == frozen
    trainable = {f.name: f.trainable for unit in plan for f in unit.flats}
    assert [name for name, on in trainable.items() if not on] == [
        f"layers.{k}.float32.frozen" for k in range(3)
    ]
    assert "2 frozen parameters" in str(plan[1])


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        ([], ["root"]),
        (["embed", "blocks.1"], ["root", "embed", "blocks.1"]),
        (["blocks.0.mlp", "blocks.0"], ["root", "blocks.0", "blocks.0.mlp"]),
    ],
)
def test_units_can_be_chosen(units, expected):
    model = build_gpt(GPT)
    plan = unit_plan(model, 2, units)
    assert [unit.name for unit in plan] == expected
    everything = [name for each in names(plan).values() for name in each]
    assert len(everything) == len(set(everything)) == len([*model.parameters()])


def test_no_unit_of_this_model():
    model = build_gpt(GPT)
    for units in (["blocks.9"], [nn.Linear(2, 2)], model.blocks, "blocks"):
        with pytest.raises(ValueError, match=" is no module of this model; its mod"):
            unit_plan(model, 2, units)


# ---- order ---------------------------------------------------------------------------


def ahead(order: Order, forward: list[int], backward: list[int]) -> tuple[list, list]:
    onward = [order.begin_forward(), *(order.forward(unit) for unit in forward)]
    order.end_forward()
    return onward, [
        order.begin_backward(),
        *(order.backward(unit) for unit in backward),
    ]


def test_what_is_gathered_ahead():
    order = Order([1, 2, 3], 1)
    onward, back = ahead(order, [1, 2, 3], [3, 2, 1])
    assert onward == [[1], [2], [3], []]
    assert back == [[3], [2], [1], []]
    assert ahead(Order([1, 2, 3], 0), [1, 2, 3], [3, 2, 1]) == ([[]] * 4, [[]] * 4)
    onward, back = ahead(Order([1, 2, 3], 2), [1, 2, 3], [3, 2, 1])
    assert onward == [[1, 2], [2, 3], [3], []]
    assert back == [[3, 2], [2, 1], [1], []]


def test_the_order_is_learnt_and_a_unit_may_be_used_twice():
    order = Order([1, 2, 3], 1)
    onward, back = ahead(order, [3, 1, 2, 1], [1, 2, 1, 3])
    assert onward == [[1], [], [], [], []]  # the guess was wrong
    assert back == [[1], [2], [1], [3], []]
    onward, _ = ahead(order, [3, 1, 2, 1], [])
    assert onward == [[3], [1], [2], [1], []]
    onward, back = ahead(order, [3, 1], [1, 3, 1, 3])  # it ends earlier; two backwards
    assert onward == [[3], [1], [2]]
    assert back == [[1], [3], [], [3], []]
    assert order.units == [3, 1]
    assert order.backward(7) == []  # never seen in forward


# ---- constructions -------------------------------------------------------------------


def constructions(odd: bool) -> dict:
    """Return what cannot be constructed, by words of the error. Rank 1 is odd."""
    layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    layers[0].requires_grad_(not odd)
    gpt = build_gpt(GPT)

    def one(module=gpt, **options):
        return lambda: Ours(module, **options)

    of_rank_1 = {
        "*weight is float32 *": one(nn.Linear(3, 5 if odd else 4)),
        "*requires_grad=True on rank*": one(layers),
        "*unit blocks.1 is blocks.1: * on ranks 0, 2, missing on rank 1*": one(
            units=["blocks.0"] if odd else ["blocks.1"]
        ),
        "*argument prefetch is 1 on ranks 0, 2, 2 on rank 1*": one(
            prefetch=2 if odd else 1
        ),
    }
    calls = of_rank_1 | {
        "*module is a list; it must be*": one([]),
        "*2: units: 'x' is no*": one(units=["x"]),
        "*units: 'int' object is not *": one(units=3),
        "*on the meta device*": one(nn.Linear(3, 3, device="meta")),
        "*prefetch is -1; it must be*": one(prefetch=-1),
        "*reshard_after_forward is 2; it can be True, False or None*": one(
            reshard_after_forward=2
        ),
        "*compute_dtype is torch.int8; it must be a floating-point dtype*": one(
            compute_dtype=torch.int8
        ),
        "*reduce_dtype is 'bf16'*": one(reduce_dtype="bf16"),
        "*cpu_offload is True, but the module is on the CPU, so *": one(
            cpu_offload=True
        ),
        "*is sharded already*": one(Ours(build_gpt(GPT))),
    }
    return {f"{words}Nothing was sent.": call for words, call in calls.items()}


def units_of_an_iterator() -> list[str]:
    plan = Ours(build_gpt(GPT), units=iter(["blocks.0", "blocks.1"])).plan
    return [unit.name for unit in plan]


def test_units_may_be_an_iterator_which_can_be_read_only_once():
    [names_of_rank_0] = spawn(units_of_an_iterator, world_size=1, output="none")
    assert names_of_rank_0 == ["root", "blocks.0", "blocks.1"]


def refused() -> dict[str, str]:
    return tried(constructions(dist.get_rank() == 1))


def test_wrong_constructions_are_refused_on_every_rank_and_nothing_is_sent():
    assert_refused(spawn(refused, nnodes=3, nproc_per_node=1, output="none"))

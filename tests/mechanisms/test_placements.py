"""Placements: parts of parts come together again, whatever was combined."""

import copy
import pickle
import sys
from unittest.mock import patch

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from on_ranks import error_of, launched
from torch import Tensor, nn

from ddp_course.launch import spawn
from ddp_course.mechanisms import assembly
from ddp_course.mechanisms.assembly import assemble
from ddp_course.mechanisms.divided import DividedModule, PlainModel
from ddp_course.mechanisms.placements import (
    Flat,
    OnRanks,
    Placed,
    Replicate,
    Shard,
    Step,
    place,
    placed,
    total_norm,
)
from ddp_course.mechanisms.whole_state import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)
from ddp_course.mesh import Mesh, make_groups

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def step(placement, rank, like, size=2):
    return Step(placement, rank, size, tuple(like.shape), tuple(like.stride()))


# ---- without a process ---------------------------------------------------------------


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_part_of_a_part_has_the_elements_that_its_way_says(layout):
    whole = torch.arange(4 * 6 * 2 * 3.0).view(4, 6, 2, 3).to(memory_format=layout)
    for rank in range(2):
        rows = whole[:, 3 * rank : 3 * rank + 3].contiguous(memory_format=layout)
        own = step(Flat(5, 19), 0, rows)
        way = Placed("w", tuple(whole.shape), (step(Shard(1), rank, whole), own))
        in_memory = rows.as_strided((rows.numel(),), (1,))
        assert torch.equal(way.part(whole), in_memory[5:19])
        assert own.part_shape == (14,)
        assert way.owned  # nobody else has them


def test_of_those_with_the_same_numbers_one_owns_them():
    w = torch.zeros(4)
    for first, second, owned in [
        (step(Replicate(), 0, w), step(Shard(0), 1, w), True),
        (step(Replicate(), 1, w), step(Shard(0), 0, w), False),
        (step(OnRanks((1,)), 1, w), step(Replicate(), 0, w), True),
        (step(OnRanks((0, 1)), 1, w), step(Flat(0, 2), 0, w), False),
    ]:
        assert Placed("w", (4,), (first, second)).owned is owned


def test_a_way_can_be_read_and_sent():
    way = Placed("w", (4, 2), (step(Shard(0), 1, torch.zeros(4, 2)),))
    assert str(way) == "w (4, 2): Shard(dim=0), 1 of 2"
    assert pickle.loads(pickle.dumps(way)) == way


@pytest.mark.parametrize("extra", [{"step": 1}, None, torch.ones(2)])
def test_a_model_with_extra_state_is_refused(extra):
    model = nn.Sequential(nn.Linear(2, 2))
    with patch.object(nn.Linear, "get_extra_state", lambda _: extra, create=True):
        assert "has 0._extra_state, which is neither" in error_of(
            lambda: PlainModel.of(model)
        )


# ---- 8 ranks: stages x matrices x pieces ---------------------------------------------


class Plain(nn.Module):
    """Matrices, a tied and a frozen parameter, a buffer, one that lies transposed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up = nn.Embedding(6, 5), nn.Linear(5, 8)
        self.down, self.head = nn.Linear(8, 5), nn.Linear(5, 6, bias=False)
        self.head.weight = self.embed.weight
        self.up.bias.requires_grad_(False)
        self.turned = nn.Parameter(torch.randn(3, 4, 2).transpose(0, 2))
        self.register_buffer("seen", torch.arange(3))


CUT = {"embed.weight": 0, "up.weight": 0, "up.bias": 0, "down.weight": 1, "turned": 1}
STAGES = {"embed.weight": (0, 1), "up.weight": (0,), "up.bias": (0,), "turned": (1,)}


def gradient_of(name: str, like: Tensor) -> Tensor:
    return torch.sin(torch.arange(like.numel()) + len(name)).view(like.shape)


class Divided(DividedModule, nn.Module):
    """What this rank has of `Plain`, by hand: a stage, cut in two, in pieces."""

    def __init__(self, axes) -> None:
        super().__init__()
        plain = Plain()
        self.plain = PlainModel.of(plain)
        pp, tp, dp = self.groups = tuple(axes.group(a) for a in ("pp", "tp", "dp"))
        self.gradients = {}
        for name, parameter in plain.named_parameters():
            ranks = STAGES.get(name, (1,))
            if dist.get_rank(pp) not in ranks:
                continue
            place(parameter, pp, OnRanks(ranks), name=name)
            how = Shard(CUT[name]) if name in CUT else Replicate()
            local = step(how, dist.get_rank(tp), parameter).part(parameter)
            local = local.detach().clone()  # keeps the order of dimensions in memory
            place(local, tp, how, like=parameter)
            edges = 0, local.numel() // 2 + 1, local.numel()
            at = dist.get_rank(dp)
            piece = nn.Parameter(
                step(Flat(*edges[at : at + 2]), 0, local).part(local),
                parameter.requires_grad,
            )
            place(piece, dp, Flat(*edges[at : at + 2]), like=local)
            self.register_parameter(name.replace(".", "_"), piece)
            if parameter.requires_grad:
                piece.grad = placed(piece).part(gradient_of(name, parameter)).clone()
        if axes.index("pp") == 1:
            self.register_buffer("seen", plain.seen)


def plain_run():
    plain = Plain()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for name, p in plain.named_parameters():
        p.grad = gradient_of(name, p) if p.requires_grad else None
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    optimizer.step()
    plain.seen += 1
    return plain, optimizer, norm


def divided():
    axes = make_groups(Mesh({"pp": 2, "dp": 2, "tp": 2}))
    expected, expected_optimizer, norm = plain_run()
    model = Divided(axes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    clipped = model.clip_grad_norm_(0.5)
    optimizer.step()
    for buffer in model.buffers():
        buffer += 1
    torch.testing.assert_close(clipped, norm)
    # The plain states, as every rank gets them
    whole, states = full_state_dict(model), full_optimizer_state_dict(model, optimizer)
    torch.testing.assert_close(dict(whole), dict(expected.state_dict()))
    theirs = expected_optimizer.state_dict()
    torch.testing.assert_close(states["state"], theirs["state"])
    assert states["param_groups"] == theirs["param_groups"]
    # and back, into another model that has forgotten everything
    again = Divided(axes)
    other = torch.optim.AdamW(again.parameters(), lr=7.0)
    load_full_state_dict(again, whole)
    load_full_optimizer_state_dict(again, other, states)
    assert other.param_groups[0]["lr"] == 0.1
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
        for key, value in optimizer.state[a].items():
            assert torch.equal(value, other.state[b][key])
    assert dict(again.named_buffers()).keys() == dict(model.named_buffers()).keys()
    return refusals(model, optimizer, whole, states)


def refusals(model, optimizer, whole, states):
    """What does not fit on one rank alone is refused on all, with the same words."""
    last = dist.get_rank() == 7
    wrong = copy.deepcopy(states)
    if last:
        whole = {**whole, "down.bias": torch.zeros(4)}
        wrong["state"][0]["exp_avg"] = torch.zeros(2)
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=1.0)
    return [
        error_of(lambda: load_full_state_dict(model, whole)),
        error_of(lambda: load_full_optimizer_state_dict(model, optimizer, wrong)),
        error_of(
            lambda: full_optimizer_state_dict(model, stranger if last else optimizer)
        ),
    ]


def test_a_model_in_stages_in_parts_in_pieces_is_whole_again(eight_ranks):
    results = eight_ranks["divided"]
    for texts in zip(*results, strict=True):
        assert len(set(texts)) == 1
        assert texts[0].startswith("ReplicaError: rank 7: ")
        assert texts[0].endswith("Nothing was sent.")
    shape, state, stranger = results[7]
    assert "down.bias as [4]; it must be [5]" in shape
    assert "the state exp_avg of turned has the shape [2]" in state
    assert "a tensor of shape [3] is no part of this model" in stranger


def counted_twice(parameters, groups):
    """The plant: everybody counts what everybody has."""
    power = sum((p.grad.double() ** 2).sum() for p in parameters if p.grad is not None)
    for group in groups:
        dist.all_reduce(power, group=group)
    return power.sqrt().float()


def norms():
    model = Divided(make_groups(Mesh({"pp": 2, "dp": 2, "tp": 2})))
    right = total_norm(model.parameters(), model.groups)
    return right, counted_twice(list(model.parameters()), model.groups)


def test_a_norm_that_counts_replicas_is_seen(eight_ranks):
    plain = Plain()
    grads = [gradient_of(n, p) for n, p in plain.named_parameters() if p.requires_grad]
    expected = nn.utils.get_total_norm(grads).double()
    for right, planted in eight_ranks["norms"]:
        torch.testing.assert_close(right, expected, rtol=1e-6, atol=0)
        assert planted > 1.05 * expected


def norms_with_a_nan():
    """Return the largest gradient if rank 0, rank 1 or no rank has a nan."""
    p, results = nn.Parameter(torch.zeros(2)), []
    for odd in range(3):
        p.grad = torch.tensor([-3.0, float("nan") if odd == dist.get_rank() else 1.0])
        results.append(str(total_norm([p], [dist.group.WORLD], float("inf")).item()))
    return results


def test_a_nan_of_any_rank_is_in_the_norm_of_all():
    both = spawn(norms_with_a_nan, world_size=2, output="none")
    assert both == [["nan", "nan", "3.0"]] * 2


def bits_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


WHOLES = {
    "signs": torch.tensor([-0.0, float("nan"), -float("inf"), 1e-45]),
    "payload": torch.tensor([0x7FC00001, 0x7F800001], dtype=torch.int32).view(
        torch.float32
    ),
    "turned": torch.arange(12.0).view(3, 4).t(),
    "short": torch.tensor([0.1, -0.0, 3.0], dtype=torch.bfloat16),
    "truth": torch.tensor([[True], [False]]),
    "complex": torch.arange(4).to(torch.complex64),
    "long": torch.tensor([-1, 2**62]),
    "nothing": torch.empty(0, 3),
}


def assembled() -> dict:
    """Return the bits of what two ranks had halves of, also where it was not cut."""
    tp = make_groups(Mesh({"pp": 2, "dp": 2, "tp": 2})).group("tp")
    own = {}
    for name, whole in WHOLES.items():
        for how in (Shard(0), Replicate()):
            part = step(how, dist.get_rank(tp), whole).part(whole).clone()
            place(part, tp, how, like=whole, name=name)
            own[f"{name} {how}"] = placed(part), {"": part, "step": torch.tensor(3.0)}
    wholes = assemble(own, [tp], own, everywhere=True)
    assert all(state["step"] == 3 for state in wholes.values())
    return {name: bits_of(state[""]) for name, state in wholes.items()}


def in_several_messages() -> list[dict]:
    """Sum each tensor alone, and a few of them together."""
    results = []
    for nbytes in (0, 30):
        with patch.object(assembly, "TOGETHER", nbytes):
            results.append(assembled())
    return results


def both_own() -> dict:
    """The plant: replicas that both write what they have."""
    with patch.object(Step, "owns", True):
        return assembled()


def test_what_ranks_assemble_has_every_bit(eight_ranks):
    both = eight_ranks["assembled"], eight_ranks["both_own"]
    for right, planted in zip(*both, strict=True):
        for name, bits in right.items():
            assert bits == bits_of(WHOLES[name.split(" ")[0]]), name
        assert planted["signs Shard(dim=0)"] == right["signs Shard(dim=0)"]
        assert planted["signs Replicate()"] != right["signs Replicate()"]
    for several, right in zip(
        eight_ranks["in_several_messages"], eight_ranks["assembled"], strict=True
    ):
        assert several == [right, right]


class Sliced(DividedModule, nn.Module):
    """A parameter and a buffer that are slices: their memory has gaps."""

    def __init__(self):
        super().__init__()
        whole = torch.arange(12.0).view(3, 4)
        self.weight = nn.Parameter(whole[:, :2])
        self.register_buffer("mask", whole[:, 2:])
        self.plain, self.groups = PlainModel.of(self), (dist.group.WORLD,)
        place(self.weight, None, OnRanks((0, 1)), name="weight")


def whole_of_slices():
    model = Sliced()
    plain, state = model.state_dict(), full_state_dict(model)
    return {key: torch.equal(value, plain[key]) for key, value in state.items()}


def test_slices_of_larger_tensors_are_whole_on_all_ranks():
    for rank in spawn(whole_of_slices, world_size=2, output="none"):
        assert rank == {"weight": True, "mask": True}


eight_ranks = launched(8, divided, norms, assembled, in_several_messages, both_own)

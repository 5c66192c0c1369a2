"""The hard inputs are as hard as their names say; who changes an argument is caught."""

import pytest
import torch
from torch import nn

from ddp_course.lab.answers import Answer, Hint
from ddp_course.lab.hard import HARD, hard_models, hard_tensors, unchanged

TENSORS = dict(hard_tensors(1, 3))
MODELS = {name: model for name, model, _ in hard_models()}


def test_tensors():
    assert not TENSORS["a strided tensor"].is_contiguous()
    assert TENSORS["an empty tensor"].numel() == 0
    assert not TENSORS["a tensor of zeros"].any()
    assert not TENSORS["a tensor of 11 x 13 numbers"].any()  # of rank 1 only
    assert dict(hard_tensors(0, 3))["a tensor of 11 x 13 numbers"].any()
    first = TENSORS["a tensor of 2 x 3 numbers"]
    assert (first != first.round()).any()
    double = TENSORS["a tensor of float64"]
    assert (double != double.float()).any()
    for every in zip(*(hard_tensors(r, 3) for r in range(3)), strict=True):
        name, tensors = every[0][0], [tensor for _, tensor in every]
        exact = sum(tensor.double() for tensor in tensors)
        assert torch.equal(sum(tensors).double(), exact), name
        assert torch.equal(sum(tensor / 3 for tensor in tensors).double() * 3, exact)


def test_models():
    for name, model, x in hard_models():
        assert model(x).shape == (3, 4)
        model(x).sum().backward()
        for parameter in model.parameters():
            assert (parameter.grad is not None) == parameter.requires_grad, name
    frozen = [one.requires_grad for one in MODELS["a frozen layer"].parameters()]
    assert frozen == [False, False, True, True]
    assert len(list(MODELS["a tied weight"].parameters())) == 3
    buffers = MODELS["a buffer of whole numbers and one that is not saved"]
    assert len(list(buffers.buffers())) == 2
    assert "table" not in buffers.state_dict()
    assert not MODELS["a strided weight"].last.weight.is_contiguous()
    assert MODELS["an empty parameter"].nothing.numel() == 0
    one, other = (next(iter(hard_models(seed)))[1] for seed in (0, 1))
    assert not torch.equal(one.last.weight, other.last.weight)


def test_what_an_exercise_has_no_room_for():
    names = [name for name, _, _ in hard_models(but=["tied", "of bfloat16"])]
    assert len(names) == len(HARD) - 2
    assert not any("tied" in name or "bfloat16" in name for name in names)


def add_a_buffer(model):
    model.register_buffer("new", torch.zeros(()))


@pytest.mark.parametrize(
    ("given", "change"),
    [
        ([3, 1, 2], lambda given: given.sort()),
        ({"a": [1]}, lambda given: given["a"].append(2)),
        ({"a": 1}, lambda given: given.update(b=2)),
        ([torch.zeros(2)], lambda given: given[0].add_(1)),
        (torch.zeros(2), lambda given: given.neg_()),  # -0.0 == 0.0
        (torch.zeros(2), lambda given: given.requires_grad_()),
        (torch.zeros(2, 3), lambda given: given.t_()),
        (nn.Linear(2, 2), lambda given: nn.init.zeros_(given.weight)),
        (nn.Linear(2, 2), lambda given: given(torch.ones(2)).sum().backward()),
        (nn.Linear(2, 2), lambda given: given.requires_grad_(False)),
        (nn.Linear(2, 2), add_a_buffer),
        (
            torch.optim.SGD([torch.zeros(2, requires_grad=True)]),
            lambda given: given.param_groups[0].update(lr=1.0),
        ),
    ],
)
def test_who_changes_an_argument_is_caught(given, change):
    with unchanged(given) as told:
        repr(given)
    assert told["kept"]
    with pytest.raises(Hint, match=f"changed the {type(given).__name__} that it was"):
        Answer("change", change).pure(given)


def test_a_pure_answer_returns_what_it_returns():
    assert Answer("total", sum).pure([1, 2]) == 3

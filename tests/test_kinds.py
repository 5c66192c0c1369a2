"""Calls with arguments of a wrong kind: what they are told, and what stays as it is."""

import inspect
import pickle
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from refusals import refused
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.optim import SGD, Optimizer

from ddp_course import kinds, pipeline, theory
from ddp_course.communication_order.pieces import InPieces
from ddp_course.gpt_config import GPTConfig
from ddp_course.kinds import explain_calls, explained, fits, in_words, shown
from ddp_course.pipeline import simulate_schedule


@explained
def share(rows: int, parts: Sequence[int], model: "nn.Module | None" = None) -> list:
    if rows == 14:
        return [1 // 0]
    return [rows // part for part in parts] + [p.numel() for p in model.parameters()]


@explained
def store(every: int | None = None, name: str | int = "", on: bool = True) -> int:
    return 1


test_a_string_is_neither_a_number_nor_true = refused(
    (lambda: store("8"), "every is '8'; it must be an integer or None"),
    (lambda: store(on="no"), "on is 'no'; it must be True or False"),
)


test_a_wrong_kind_is_told = refused(
    (lambda: share("8", [2]), "rows is '8'; it must be an integer"),
    (lambda: share(8, 2), "parts is 2; it must be a list of integers"),
    (lambda: share(8, [2, "2"]), r"parts is \[2, '2'\]; it must be a list of integers"),
    (lambda: share(8, [2], nn.Linear), "model is the class Linear; it must be an nn.M"),
    (lambda: share(8, [2], [nn.Linear(1, 1)]), "model is a list; it must be an nn.M"),
    (lambda: pipeline.gpipe(0, "2"), "num_ranks is 0; it must be an integer of 1 or"),
    (lambda: theory.server_bytes("4", 100), "workers is '4'; it must be an integer"),
    (lambda: theory.server_bytes(-1, 100), "workers is -1; it must be 0 or more"),
    (
        lambda: theory.gpt_peak(GPTConfig, 2),
        "config is the class GPTConfig; it must ",
    ),
    (lambda: theory.all_reduce_ring("4", 2), "world_size is '4'; it must be an integ"),
    (lambda: theory.bus_factor("all_reduce", 0), "world_size is 0; it must be above 0"),
    (lambda: theory.send_starts([1.0], []), "compute has 1 times and network 0; each"),
    (lambda: theory.all_reduce_ring(0, 2), "world_size is 0; it must be an integer of"),
    (lambda: theory.all_reduce_hierarchical(0, 2, 8), "nnodes is 0; it must be an int"),
    (lambda: InPieces(None, all_reduce, 0), "piece is 0; it must be 4 bytes or more"),
    (lambda: simulate_schedule("1f1b"), "schedule is '1f1b'; it must be a Schedule"),
    (lambda: simulate_schedule(None), "schedule is None; it must be a Schedule"),
)


def test_other_errors_and_right_calls_stay_as_they_are():
    model = nn.Linear(3, 1)
    for rows in (np.int64(8), 8, Fraction(8), torch.tensor(8)):
        assert share(rows, (2, 4), model) == [4, 2, 3, 1]
    assert store(8, name="8") == 1
    with pytest.raises(ZeroDivisionError):
        share(14, [2])
    with pytest.raises(AttributeError, match="no attribute 'parameters'"):
        share(8, [2])  # None is allowed, so its error must not be explained
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        share(8)
    with pytest.raises(TypeError, match="unexpected keyword argument 'row'"):
        share(row=8)


@pytest.mark.parametrize(
    ("value", "kind", "right"),
    [
        (1e9, int, True),
        (2.5, int, False),
        (None, int, False),
        (np.float32(2), float, True),
        ("2", float, False),
        ("yes", bool, False),
        (1, bool, True),
        ("abc", Iterable[str], False),
        (iter([1]), Iterable[int], True),
        ((1, 2), list[int], True),
        ((1, "a"), tuple[int, str], True),
        ((1, 2), tuple[int, ...], True),
        (torch.ones(2), Sequence[float], True),
        (SGD, Callable[..., Optimizer], True),
        (SGD, Optimizer, False),
        (SGD([torch.ones(1)], 0.1), Optimizer, True),
        ([1], Tensor | None, False),
        (None, Tensor | None, True),
        ({}, dict[str, int], True),
        ([], dict[str, int], False),
        (3, object, True),
    ],
)
def test_what_fits_an_annotation(value, kind, right):
    assert fits(value, kind) is right


def test_kinds_and_values_in_words():
    assert in_words(Sequence[int] | None) == "a list of integers or None"
    assert in_words(Iterable[nn.Module]) == "a list of nn.Modules"
    assert in_words(Callable[..., int]) == "a function or a class"
    assert shown(nn.Linear(1, 1)) == "a Linear" and shown(SGD) == "the class SGD"
    assert shown("x" * 99) == "a str" and shown(test_kinds_and_values_in_words)


def test_a_room_explains_its_public_calls():
    def plain(n: int) -> int:
        return n + 1

    names = "f", "_f"
    room = {"__name__": __name__} | dict.fromkeys(names, plain)
    explain_calls(room)
    assert room["_f"] is plain
    assert inspect.unwrap(room["f"]) is plain and room["f"] is not plain
    assert explained(room["f"]) is room["f"]
    assert pickle.loads(pickle.dumps(theory.fit)) is theory.fit
    assert "explained" in inspect.getsource(kinds) and pipeline.gpipe.__wrapped__

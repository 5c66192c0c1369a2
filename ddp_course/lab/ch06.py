"""The exercises of chapter 06 about what is kept. `ch06_steps` has the others."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn

from ddp_course.lab.answers import Answer, code, one_line
from ddp_course.lab.ch06_steps import check_my_recompute, check_step_in_backward
from ddp_course.lab.exercises import exercise, expect
from ddp_course.lab.solutions import ch06 as solutions
from ddp_course.measure import Ledger, MemoryLog, resident
from ddp_course.model import GPTConfig, build_gpt

__all__ = [
    "check_largest_batch",
    "check_my_ledger",
    "check_my_recompute",
    "check_step_in_backward",
]

# ---- my_ledger ---------------------------------------------------------------------

COUNTED = ("parameters", "gradients", "optimizer states")
Watched = tuple[nn.Module, torch.optim.Optimizer]


@exercise("my_ledger", solution=solutions.my_ledger)
def check_my_ledger(answer: Answer) -> str:
    """`my_ledger(model, optimizer)`: bytes by kind, each storage once."""
    cases = 0
    for told, look_at, (model, optimizer) in _kept():
        right = resident(model, optimizer)
        before = _tensors(model, optimizer)
        got = answer(model, optimizer)
        where = f"For {told},"
        fine = isinstance(got, dict) and set(got) == set(COUNTED)
        expect(
            fine,
            f"{where} your function returned {code(one_line(got))}; expected a "
            f"dictionary with {', '.join(map(code, COUNTED))}.",
        )
        for kind in COUNTED:
            expect(
                isinstance(got[kind], int) and got[kind] == right[kind],
                f"{where} {kind} are {code(one_line(got[kind]))} in yours; they "
                f"are {right[kind]:,} bytes. {look_at}",
            )
        after = _tensors(model, optimizer)
        same = len(before) == len(after) and all(
            a is b for a, b in zip(before, after, strict=True)
        )
        expect(
            same, f"{where} after your function there are other tensors than before."
        )
        cases += 1
    return (
        f"{cases} models: before and after a step, tied, with views, with gradients in "
        "a bucket, of two types: each storage once, with all its bytes"
    )


def _kept() -> Iterator[tuple[str, str, Watched]]:
    """Yield models and optimizers that each hide a difficulty, with what to look at."""
    model = nn.Linear(5, 3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    yield (
        "a layer before its first backward",
        "Where there is no gradient yet, `grad` is None.",
        (model, sgd),
    )
    model = nn.Linear(5, 3)
    yield (
        "a layer after a step of AdamW",
        "What does it keep in `optimizer.state[parameter]`? All tensors count.",
        _stepped(model, torch.optim.AdamW(model.parameters())),
    )
    model = nn.Linear(4, 4).double()
    model.bias.data = model.bias.data.float()
    yield (
        "a layer with a weight of 64 and a bias of 32 bits",
        "Not every number has four bytes.",
        _stepped(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)),
    )
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = nn.Parameter(model[0].weight.detach())  # another object
    yield (
        "two layers whose weights are two parameters with one storage",
        "Two tensors can look at one storage: it counts once.",
        _stepped(model, torch.optim.SGD(model.parameters(), lr=0.1)),
    )
    table = torch.zeros(10, 4)
    model = nn.Linear(4, 2)
    model.weight = nn.Parameter(table[3:5])
    yield (
        "a layer whose weight is two rows of a table of ten",
        "A view keeps all of its storage alive, so all of it counts.",
        (model, torch.optim.SGD(model.parameters(), lr=0.1)),
    )
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    bucket = torch.zeros(64)
    at = 0
    for parameter in model.parameters():
        part = bucket[at : at + parameter.numel()]
        parameter.grad = part.view_as(parameter)
        at += parameter.numel()
    yield (
        "a model whose gradients lie in one bucket with room to spare",
        "A view keeps all of its storage alive, and a storage counts once, wherever "
        "in it a view begins.",
        (model, torch.optim.SGD(model.parameters(), lr=0.1)),
    )


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> Watched:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return what must be the same objects after a count."""
    kept: list[Any] = [t for p in model.parameters() for t in (p, p.grad)]
    return kept + [s for state in optimizer.state.values() for s in state.values()]


# ---- largest_batch -----------------------------------------------------------------

CONFIGS = (
    GPTConfig(vocab_size=40, block_size=16, n_layer=2, n_head=2, d_model=16),
    GPTConfig(vocab_size=300, block_size=8, n_layer=1, n_head=1, d_model=24),
    GPTConfig(vocab_size=40, block_size=64, n_layer=3, n_head=8, d_model=16),
)


@exercise("largest_batch", solution=solutions.largest_batch)
def check_largest_batch(answer: Answer) -> str:
    """`largest_batch(config, memory)`: the most rows with which forward fits."""
    cases = 0
    for config in CONFIGS:
        always, of_a_row = measured_rows(config)
        for rows in (0, 1, 5, 17):
            memory = always + rows * of_a_row + of_a_row // 2
            got = answer(config, memory)
            where = f"For {code(str(config))} and {memory:,} bytes,"
            fine = isinstance(got, int) and not isinstance(got, bool) and got >= 0
            expect(
                fine,
                f"{where} your function returned {code(one_line(got))}; expected a "
                "whole number, 0 if not even one row fits.",
            )
            kept = always + got * of_a_row
            measured = (
                f"measured, forward with {got} rows keeps {kept:,} bytes: "
                f"{always:,} of them always, and {of_a_row:,} for each row."
            )
            expect(
                got <= rows,
                f"{where} your function says {got} rows, which do not fit: {measured} "
                "Parameters, optimizer states, blocks, head: is one of them missing?",
            )
            expect(
                got == rows,
                f"{where} your function says {got} rows, but {rows} would fit: "
                f"{measured} Do you count something that is not there at the end of "
                "forward?",
            )
            cases += 1
    return (
        f"{cases} cases, held against real forwards of {len(CONFIGS)} models under a "
        "`MemoryLog`"
    )


@cache
def measured_rows(config: GPTConfig) -> tuple[int, int]:
    """Return the bytes kept at the end of forward: always, and for each row."""
    one, two = (_kept_by_forward(config, rows).total for rows in (1, 2))
    return 2 * one - two, two - one


def _kept_by_forward(config: GPTConfig, rows: int) -> Ledger:
    """Return what is kept at the end of the second step's forward."""
    model = build_gpt(config)
    optimizer = torch.optim.AdamW(model.parameters())
    _stepped(model, optimizer)
    optimizer.zero_grad()
    x = torch.zeros(rows, config.block_size, dtype=torch.int64)
    with MemoryLog(model, optimizer) as log:
        loss = model(x, x)[1]  # with a name, the logits would be kept, too
        kept = log.moments[-1].ledger
    del loss
    return kept

"""The exercises of chapter 06 about what is kept. `ch06_steps` has the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ddp_course.chapters.ch06_memory import solutions
from ddp_course.lab.answers import Answer, code, one_line
from ddp_course.lab.exercises import exercise, expect
from ddp_course.measure import Ledger, MemoryLog, resident
from ddp_course.model import GPTConfig, build_gpt

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
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    yield (
        "a model with a frozen layer and with buffers",
        "A frozen parameter is a parameter; a buffer is none.",
        _stepped(model, torch.optim.SGD(trained, lr=0.1, momentum=0.9)),
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
    for parameter in filter(lambda p: p.requires_grad, model.parameters()):
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


# ---- my_recompute ------------------------------------------------------------------


CASES = (
    ("a function", 0.0, False),
    ("a function with dropout", 0.5, False),
    ("a function with a frozen bias", 0.0, True),
)


@exercise("my_recompute", solution=solutions.my_recompute)
def check_my_recompute(answer: Answer) -> str:
    """`my_recompute(function, x)`: keep x alone, and run the function again."""
    for told, dropout, frozen in CASES:
        plain = _run(lambda f, x: f(x), dropout, frozen)
        mine = _run(answer, dropout, frozen)
        where = f"With {told},"
        expect(
            isinstance(mine["out"], Tensor) and torch.equal(mine["out"], plain["out"]),
            f"{where} the result is not that of `function(x)`: "
            f"{code(one_line(mine['out']))}.",
        )
        expect(
            mine["kept"] <= plain["needs"],
            f"{where} forward kept {mine['kept']:,} bytes, and without recomputation "
            f"{plain['kept']:,}; the results themselves have {plain['needs']:,}. Does "
            "autograd record a graph while forward runs?",
        )
        expect(
            mine["calls"] == [2, 4],
            f"{where} twice in a row, the functions ran {mine['calls'][0]} times in "
            f"forward and {mine['calls'][1] - mine['calls'][0]} times in backward; "
            "expected 2 and 2.",
        )
        _judge_gradients(where, mine["gradients"], plain["gradients"], dropout)
        expect(
            torch.equal(mine["later"], plain["later"]),
            f"{where} random numbers that are drawn after backward are not those "
            "without recomputation: put the generator's state back as it was.",
        )
    return (
        "two functions in a row, with and without dropout: gradients of x and of all "
        "parameters bit for bit, nothing kept but what goes in, one more forward each, "
        "and the random generator as if nothing had happened"
    )


def _judge_gradients(
    where: str, mine: dict[str, Any], plain: dict[str, Tensor], dropout: float
) -> None:
    for name, right in plain.items():
        got = mine[name]
        if right is None:  # frozen
            expect(got is None, f"{where} {code(name)} is frozen, and has a gradient.")
            continue
        expect(
            got is not None,
            f"{where} {code(name)} has no gradient after backward. Parameters are not "
            "arguments of `function`: who tells autograd about them?",
        )
        why = (
            "In backward, is the same dropout mask drawn as in forward?"
            if dropout
            else "Each gradient should arrive once, times the one that comes in."
        )
        expect(
            torch.equal(got, right),
            f"{where} the gradient of {code(name)} is not bit for bit the one without "
            f"recomputation. {why}",
        )


def _run(recompute: Callable, dropout: float, frozen: bool) -> dict[str, Any]:
    """Run two functions after each other, and tell what can be judged."""
    torch_state = torch.get_rng_state()
    try:
        torch.manual_seed(3)
        return _run_seeded(recompute, dropout, frozen)
    finally:
        torch.set_rng_state(torch_state)


def _run_seeded(recompute: Callable, dropout: float, frozen: bool) -> dict[str, Any]:
    functions = [
        nn.Sequential(
            nn.Linear(8, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 8)
        )
        for _ in range(2)
    ]
    functions[1][0].bias.requires_grad_(not frozen)
    calls = []
    for function in functions:
        function.register_forward_pre_hook(lambda *_: calls.append(1))
    x = torch.randn(50, 8, requires_grad=True)
    model = nn.ModuleList(functions)
    with MemoryLog(model) as log:
        middle = recompute(functions[0], x)
        out = recompute(functions[1], middle)
        kept = log.moments[-1].ledger
    told: dict[str, Any] = {"calls": [len(calls)], "out": out}
    told["kept"] = kept.total - sum(p.nbytes for p in model.parameters())
    told["needs"] = 2 * x.nbytes
    if isinstance(out, Tensor) and out.requires_grad:
        weights = torch.arange(out.numel()).view_as(out)
        (out * weights).sum().backward()
    told["calls"].append(len(calls))
    told["later"] = torch.rand(4)
    named = {"x": x} | dict(model.named_parameters())
    told["gradients"] = {name: tensor.grad for name, tensor in named.items()}
    told["out"] = out.detach() if isinstance(out, Tensor) else out
    return told


# ---- step_in_backward --------------------------------------------------------------

LR = 0.02


@exercise("step_in_backward", solution=solutions.step_in_backward)
def check_step_in_backward(answer: Answer) -> str:
    """`step_in_backward(model, make_optimizer)`: no two gradients wait for a step."""
    for name, make in {
        "SGD": lambda parameters: torch.optim.SGD(parameters, lr=LR, momentum=0.9),
        "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=LR),
    }.items():
        wanted, _ = _train(make, None)
        got, told = _train(make, answer)
        where = f"With {name},"
        expect(
            told["left"] == 0,
            f"{where} {told['left']} parameters still have a gradient when backward "
            "has returned; set it to None as soon as it is used.",
        )
        for key, right in wanted.items():
            expect(
                torch.equal(got[key], right),
                f"{where} after three steps {code(key)} is not what the usual loop "
                "gives. Is every parameter stepped once in a step, with its states "
                "kept from step to step?",
            )
        expect(
            told["peak"] <= told["allowed"],
            f"{where} up to {told['peak']:,} bytes of gradients were there at the same "
            f"moment; expected at most {told['allowed']:,}, two matrices and a bias. "
            "Who keeps the others?",
        )
    return (
        "three steps of SGD with momentum and of AdamW, with a tied and a frozen "
        "parameter: the weights of the usual loop bit for bit, and never more than two "
        "gradients in memory"
    )


class _Tower(nn.Module):
    """Six layers; the last two share a weight, the second is frozen."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.layers[5].weight = self.layers[4].weight
        self.layers[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _train(
    make: Callable, step_in_backward: Answer | None
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Train three steps, in the usual way or in the reader's."""
    model = _Tower()
    dice = torch.Generator().manual_seed(1)
    batches = [torch.randn(4, 16, generator=dice) for _ in range(3)]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = None if step_in_backward else make(trained)
    told = {"left": 0, "allowed": 2 * 16 * 16 * 4 + 16 * 4}
    with MemoryLog(model) as log:  # it sees each gradient before the reader's hooks do
        if step_in_backward:
            step_in_backward(model, make)
        for x in batches:
            model(x).square().sum().backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            left = sum(p.grad is not None for p in trained)
            told["left"] = max(told["left"], left)
    told["peak"] = log.peak_of("gradients")
    return {k: v.clone() for k, v in model.state_dict().items()}, told

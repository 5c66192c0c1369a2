"""The exercises of chapter 06: bytes by kind, the largest batch, steps in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ddp_course.chapters.ch06_memory import solutions
from ddp_course.lab.answers import Answer, code, one_line
from ddp_course.lab.exercises import exercise, expect, judge
from ddp_course.lab.hard import hard_models
from ddp_course.lab.judge import copied
from ddp_course.lab.values import equal_values
from ddp_course.measure import MemoryLog
from ddp_course.model import GPTConfig, build_gpt

# ---- my_ledger ---------------------------------------------------------------------

COUNTED = ("parameters", "gradients", "optimizer states")
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
VIEW = "A view keeps all of its storage alive, and a storage counts once, wherever "
Watched = tuple[nn.Module, torch.optim.Optimizer]


@exercise("my_ledger", solution=solutions.my_ledger)
def check_my_ledger(answer: Answer) -> str:
    """`my_ledger(model, optimizer)`: bytes by kind, each storage once.

    Two tensors can share a storage, and a small view keeps a large storage alive. What
    do you count, and how do you count it only once?

    Make three lists: the parameters, their gradients unless None, the tensors in the
    optimizer's dictionaries. For each list, put the untyped storage of every tensor
    into a dictionary by its address, and add up the bytes of these storages.
    """
    cases = 0
    for title, look_at, (model, optimizer) in _kept():
        cases += 1
        right = solutions.my_ledger(model, optimizer)
        before, numbers = _seen(model, optimizer), copied(_kept_by(model, optimizer))
        settings = _settings(model, optimizer)
        got = answer(model, optimizer)
        where = f"For {title},"
        expect(
            isinstance(got, dict) and set(got) == set(COUNTED),
            f"{where} your function returned {code(one_line(got))}; expected a "
            f"dictionary with {', '.join(map(code, COUNTED))}.",
        )
        for kind in COUNTED:
            expect(
                isinstance(got[kind], int) and got[kind] == right[kind],
                f"{where} you count {code(one_line(got[kind]))} bytes of {kind}; "
                f"expected {right[kind]:,}. {look_at}",
            )
        expect(
            before == _seen(model, optimizer),
            f"{where} your function changed gradients or states. (Looking up "
            "`optimizer.state[parameter]` creates an empty state.)",
        )
        expect(
            equal_values(_kept_by(model, optimizer), numbers),
            f"{where} your function changed numbers of the model or the optimizer, or "
            "what is trained.",
        )
        expect(
            settings == _settings(model, optimizer),
            f"{where} your function changed the model's mode or the optimizer's "
            "`param_groups`.",
        )
        again = answer(model, optimizer)
        expect(
            again == got,
            f"{where} a second call returned {code(one_line(again))}, the first "
            f"{code(one_line(got))}; start from 0 in every call.",
        )
    return (
        f"{cases} models: before and after a step, tied, with views, with "
        "gradients in a bucket, with two dtypes, all in one buffer, with several "
        "groups: each storage once within its kind, with all its bytes"
    )


def _kept() -> Iterator[tuple[str, str, Watched]]:
    """Yield (description, hint, (model, optimizer)); each case hides a difficulty."""
    layer = nn.Linear(5, 3)
    yield (
        "a layer before its first backward",
        "Before the first backward, `grad` is None.",
        (layer, optimizer := MOMENTUM(layer.parameters())),
    )
    layer(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    yield (
        "the same layer after a step",
        "Start from 0 in every call.",
        (layer, optimizer),
    )
    yield (
        "a layer after a step of AdamW",
        "What does AdamW keep in `optimizer.state[parameter]`? All tensors count.",
        _stepped(nn.Linear(5, 3), torch.optim.AdamW),
    )
    double = nn.Linear(4, 4).double()
    double.bias.data = double.bias.data.bfloat16()
    yield (
        "a layer with a weight of 64 and a bias of 16 bits",
        "Not every number has four bytes.",
        _stepped(double, MOMENTUM),
    )
    layer, optimizer = _stepped(nn.Linear(5, 3), MOMENTUM)
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].to(torch.int8)
    state["large"] = torch.zeros(2**24 + 1, dtype=torch.int8)  # odd: float32 rounds it
    yield (
        "a layer whose optimizer keeps 8-bit integers",
        "All tensors in `optimizer.state` count.",
        (layer, optimizer),
    )
    shared = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    shared[1].weight = nn.Parameter(shared[0].weight.detach())  # same storage
    yield (
        "two layers whose weights are two parameters with one storage",
        "Two tensors can look at one storage: it counts once.",
        _stepped(shared, MOMENTUM),
    )
    frozen = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    frozen[0].requires_grad_(False)
    frozen[0].weight.grad = torch.ones(5, 5)  # from before it was frozen
    yield (
        "a model with a frozen layer and with buffers",
        "A frozen parameter is a parameter, and may have a gradient; a buffer is none.",
        _stepped(frozen, MOMENTUM),
    )
    rows = nn.Linear(4, 2)
    rows.weight = nn.Parameter(torch.zeros(10, 4)[3:5])
    yield (
        "a layer whose weight is two rows of a table of ten",
        f"{VIEW}in it a view begins.",
        (rows, MOMENTUM(rows.parameters())),
    )
    inner = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
    model = nn.Sequential(inner, nn.Linear(4, 2))
    parts = torch.zeros(64).split([*(p.numel() for p in model.parameters()), 34])
    for parameter, part in zip(model.parameters(), parts, strict=False):
        parameter.grad = part.view_as(parameter)
    yield (
        "a model whose gradients lie in one bucket with room to spare",
        f"{VIEW}in it a view begins.",
        (model, MOMENTUM(model.parameters())),
    )
    yield (
        "a model whose parameters, gradients and states lie in one buffer",
        "A storage counts once in each kind that uses it. A Python number has no "
        "storage.",
        _in_one_buffer(),
    )
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    groups = [{"params": [parameter]} for parameter in model[0].parameters()]
    optimizer = MOMENTUM(groups)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    yield (
        "a model with two trained parameters, each in its own group",
        "Count the model's parameters and gradients, and the states of all groups.",
        (model, optimizer),
    )
    for name, model, _ in hard_models():
        once = "Each storage counts once, with all its bytes."
        yield f"a model with {name}", once, _stepped(model, MOMENTUM)


def _stepped(model: nn.Module, make: Callable) -> Watched:
    """Return a model and its optimizer after one training step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = make(trained)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def _in_one_buffer() -> Watched:
    """Return a model and an optimizer whose tensors are views of one buffer."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer, parameters = MOMENTUM(model.parameters()), list(model.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    parts = iter(torch.zeros(100).split([*sizes * 3, 100 - 3 * sum(sizes)]))
    for parameter in parameters:
        parameter.data = next(parts).view_as(parameter)
    for parameter in parameters:
        parameter.grad = next(parts).view_as(parameter)
    for parameter in parameters:
        momentum = next(parts).view_as(parameter)
        state = {"momentum_buffer": momentum, "steps": 3, "rate": 0.5}
        optimizer.state[parameter] = state
    return model, optimizer


def _kept_by(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the objects that a count must not replace or change."""
    kept: list[Any] = [t for p in model.parameters() for t in (p, p.grad)]
    for parameter, state in optimizer.state.items():
        kept += [parameter, *state.values()]
    return kept


def _seen(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    return list(map(id, _kept_by(model, optimizer)))


def _settings(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the mode of each module, and the optimizer's groups."""
    groups = [
        {**group, "params": [*map(id, group["params"])]}
        for group in optimizer.param_groups
    ]
    return [[module.training for module in model.modules()], groups]


# ---- largest_batch -----------------------------------------------------------------

CONFIGS = (
    GPTConfig(vocab_size=40, block_size=16, n_layer=2, n_head=2, d_model=16),
    GPTConfig(vocab_size=300, block_size=8, n_layer=1, n_head=1, d_model=24, tied=True),
    GPTConfig(vocab_size=40, block_size=64, n_layer=3, n_head=8, d_model=16),
)
# In the last config one number per token makes some rows, and parameters and states are
# smaller than a row. The bytes of the most rows do not fit into 32 bits.
ROWS = (0, 1, 5, 17, 1234, 300_000)
QUARTERS = (1, 3)  # how much of one more row would fit: rounding must not count it
MEASURED = (
    "forward with {got} rows keeps {kept:,} bytes: as measured, {always:,} for any "
    "batch, and {of_a_row:,} for each row."
)
MISSING = (
    "Do you count parameters, optimizer states, blocks and head?",
    "You are close: LayerNorms and heads keep a few numbers per token.",
)
BATCH = {
    "whole": "returned {shown}; expected a whole number, 0 if not even one row fits.",
    "fits": "says {got} rows, which do not fit: " + MEASURED + " {missing}",
    "all": "says {got} rows, but {rows} would fit: " + MEASURED + " Do you count "
    "tensors that are not alive at the end of forward, or a tied matrix twice?",
}


@exercise("largest_batch", solution=solutions.largest_batch)
def check_largest_batch(answer: Answer) -> str:
    """`largest_batch(config, memory)`: the most rows with which forward fits.

    Which bytes do not depend on the number of rows, and which does every row add?

    Subtract 12 bytes for each parameter: the parameter and two states. Divide the rest
    by the activations of one row: this chapter's formula for a block, times the number
    of blocks, plus the formula for the head. Round down; less than 0 is 0. (The integer
    positions, created in forward, are kept too, once.)
    """
    for config in CONFIGS:
        always, of_a_row = measured_rows(config)
        fitting = [
            (always + (4 * rows + quarters) * of_a_row // 4, rows)
            for rows in ROWS
            for quarters in QUARTERS
        ]
        for memory, rows in [*fitting, (always // 2, 0)]:
            got = answer(config, memory)
            facts = {"whole": type(got) is int and got >= 0, "rows": rows, "got": got}
            facts |= {"shown": code(one_line(got)), "always": always}
            if facts["whole"]:
                facts |= {"kept": always + got * of_a_row, "of_a_row": of_a_row}
                facts |= {"fits": got <= rows, "all": got == rows}
                facts["missing"] = MISSING[rows < got < 1.1 * rows]
            where = f"For {code(str(config))} and {memory:,} bytes, your function"
            judge(where, facts, BATCH)
    cases = len(CONFIGS) * (len(ROWS) * len(QUARTERS) + 1)
    return (
        f"{cases} cases, compared with real forwards of {len(CONFIGS)} models under a "
        "`MemoryLog`"
    )


@cache
def measured_rows(config: GPTConfig) -> tuple[int, int]:
    """Return the bytes kept at the end of forward: for any batch, and per row."""
    one, two = (_kept_by_forward(config, rows) for rows in (1, 2))
    return 2 * one - two, two - one


def _kept_by_forward(config: GPTConfig, rows: int) -> int:
    """Return the bytes that are kept at the end of the second step's forward."""
    model, optimizer = _stepped(build_gpt(config), torch.optim.AdamW)
    optimizer.zero_grad()
    x = torch.zeros(rows, config.block_size, dtype=torch.int64)
    with MemoryLog(model, optimizer) as log:
        loss = model(x, x)[1]  # a variable for the logits would keep them, too
        kept = log.moments[-1].ledger.total
    del loss
    return kept


# ---- step_in_backward --------------------------------------------------------------

LR = 0.02
MAKERS = {
    "SGD": partial(torch.optim.SGD, lr=LR, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=LR),
}
STEPPED = {
    "freed": "{left} parameters still have a gradient when backward has returned; set "
    "a gradient to None as soon as it is used.",
    "trained": "after three steps {names} differ from the usual loop's. Is every "
    "parameter stepped once in a step, with its states kept from step to step?",
    "small": "up to {peak:,} bytes of gradients were alive at the same moment; "
    "expected at most {allowed:,}, two matrices and a bias. What keeps the others?",
}


@exercise("step_in_backward", solution=solutions.step_in_backward)
def check_step_in_backward(answer: Answer) -> str:
    """`step_in_backward(model, make_optimizer)`: no two gradients wait for a step.

    Autograd can call you when a parameter's gradient is complete. What can you do at
    that moment, and for how many parameters is the optimizer then?

    Make one optimizer for every trained parameter. In the hook after accumulation let
    that parameter's optimizer step, then set the gradient to None.
    """
    for name, make in MAKERS.items():
        wanted, _ = _train(make, None)
        got, facts = _train(make, answer)
        wrong = [key for key in wanted if not torch.equal(got[key], wanted[key])]
        facts |= {
            "freed": facts["left"] == 0,
            "trained": not wrong,
            "names": ", ".join(map(code, wrong[:3])),
            "small": facts["peak"] <= facts["allowed"],
        }
        judge(f"With {name},", facts, STEPPED)
    return (
        "three steps of SGD with momentum and of AdamW, with a tied and a frozen "
        "parameter: the weights of the usual loop bit for bit, and never more than two "
        "matrices' gradients in memory"
    )


class _Tower(nn.Module):
    """Six layers and a scale; the last two share a weight, the second is frozen."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.layers[5].weight = self.layers[4].weight
        self.layers[1].requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale


def _train(
    make: Callable, step_in_backward: Answer | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Train three steps, in the usual way or with the reader's function.

    Returns the final state and facts about the gradients that were kept.
    """
    model = _Tower()
    dice = torch.Generator().manual_seed(1)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = None if step_in_backward else make(trained)
    facts = {"left": 0, "allowed": 2 * 16 * 16 * 4 + 16 * 4}
    with MemoryLog(model) as log:  # it sees each gradient before the reader's hooks do
        if step_in_backward:
            step_in_backward(model, make)
        for step in range(3):
            x = torch.randn(4, 16, generator=dice)
            x = x if step < 2 else 0 * x  # then some gradients are zero
            model(x).square().sum().backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            left = sum(p.grad is not None for p in trained)
            facts["left"] = max(facts["left"], left)
    facts["peak"] = log.peak_of("gradients")
    return {k: v.clone() for k, v in model.state_dict().items()}, facts

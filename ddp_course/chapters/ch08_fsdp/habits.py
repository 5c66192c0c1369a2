"""A table of facts: which uses of a wrapped model each strategy supports.

`tests/mechanisms/test_guards.py` runs every entry. PyTorch's two columns show what
torch 2.13 does on the CPU.
"""

from __future__ import annotations

from types import MappingProxyType

from IPython.display import Markdown

STRATEGIES = ("ddp", "zero1", "zero3", "tp", "pp", "DDP", "fully_shard")
NOTES = MappingProxyType(
    {
        "right": "as in one process",
        "refused": "an error that says what to do, at the latest at the first step",
        "per rank": "each rank for its own rows, not as in one process",
        "waits": "the rank is a step behind the others, and at the end waits for a "
        "rank that has returned",
        "wrong": "wrong numbers, and no error",
        "error": "an error of PyTorch or of gloo",
        "-": "does not arise",
    }
)
HABITS = MappingProxyType(
    {
        "two backwards add up": (
            "right    right    right    right    right    right    right"
        ),
        "an optimizer made before wrapping": (
            "right    -        refused  refused  right    right    wrong"
        ),
        "`clip_grad_norm_` of torch": (
            "right    refused  refused  refused  refused  right    right"
        ),
        "an inf on one rank, `GradScaler`": (
            "right    right    right    right    right    right    right"
        ),
        "`copy.deepcopy`": (
            "refused  right    refused  refused  refused  right    error"
        ),
        "`torch.save(model)`": (
            "refused  right    refused  refused  refused  right    error"
        ),
        "a layer unfrozen later": (
            "refused  refused  refused  right    right    wrong    right"
        ),
        "a layer frozen later": (
            "refused  right    refused  right    right    error    right"
        ),
        "a parameter replaced later": (
            "refused  right    refused  refused  refused  error    error"
        ),
        "a hook on a gradient, made later": (
            "right    right    refused  right    right    right    wrong"
        ),
        "weights changed in `forward`": (
            "right    right    refused  right    right    right    wrong"
        ),
        "a gradient penalty": (
            "right    right    refused  refused  -        right    error"
        ),
        "an unused parameter, weight decay": (
            "refused  right    right    -        right    error    right"
        ),
        "BatchNorm in training": (
            "per_rank per_rank per_rank -        refused  per_rank per_rank"
        ),
        "an error that one rank catches": (
            "refused  waits    refused  refused  refused  waits    error"
        ),
    }
)


def outcome(habit: str, strategy: str) -> str:
    """Return the outcome of a habit; `strategy` is one of STRATEGIES."""
    words = HABITS[habit].split()
    return words[STRATEGIES.index(strategy)].replace("_", " ")


def habits() -> Markdown:
    """Return the table, with an explanation of its words below it."""
    heads = ["ddp", "zero1, zero2", "zero3", "tp", "pp"]
    heads += [f"PyTorch's `{name}`" for name in STRATEGIES[-2:]]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for habit in HABITS:
        outcomes = (outcome(habit, strategy) for strategy in STRATEGIES)
        lines.append(f"| {habit} | {' | '.join(outcomes)} |")
    notes = "; ".join(f"*{word}*: {means}" for word, means in NOTES.items())
    return Markdown("\n".join(lines) + f"\n\n{notes}.")

"""`plan`: what fits on a GPU with which ZeRO stage, and what it costs to send.

Everything is computed in `theory.plan`; here it is asked for, and written down.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from ddp_course.commands import CommandError, check_file, write
from ddp_course.theory import MODELS, Model, Row, fewest_gpus, plan

GB = 1e9  # decimal, as GPUs are sold
SHAPE = ("layers", "hidden", "heads", "sequence", "vocab")
LAYOUTS_ONLY = ("node", "network", "step_tokens", "tokens", "price", "top")
KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer states": "optimizer states",
    "activations": "activations",
    "gathered": "communication buffers",
}


def command(told: Namespace) -> int:
    """Print the table for what was `told`, advice, and what it leaves out."""
    if told.gpu or told.anchors or told.accelerators:
        from ddp_course.commands import plan_layouts

        return plan_layouts.command(told)
    for name in LAYOUTS_ONLY:
        if getattr(told, name) is not None:
            option = name.replace("_", "-")
            raise CommandError(f"--{option} goes with --gpu, which predicts layouts")
    check_file(told.json)
    told.memory, told.batch = told.memory or 80, told.batch or 1
    told.recompute = told.recompute or "none"
    names = "optimizer", "precision", "batch", "recompute"
    options = {name: getattr(told, name) for name in names}
    options["fused_attention"] = not told.scores
    memory = told.memory * GB
    bandwidth = None if told.bandwidth is None else told.bandwidth * GB
    try:
        model, assumed = model_told(told)
        rows = plan(model, told.gpus, memory, bandwidth=bandwidth, **options)
    except ValueError as error:
        raise CommandError(str(error)) from None
    console = Console(soft_wrap=True, highlight=False)
    console.print(_head(told, model), markup=False)
    console.print(table(rows))
    for sentence in (*notes(rows, assumed), advice(model, rows, memory, options)):
        console.print(sentence, markup=False)
    write(told.json, [asdict(row) | {"ledger": dict(row.ledger)} for row in rows])
    return 0


def model_told(told: Namespace) -> tuple[Model, str]:
    """Return the model that was named or described, and what was assumed, in words.

    With layers and hidden, activations are counted: what they need and was not told is
    as in many models. ValueError if it makes no sense.
    """
    shape = {name: getattr(told, name) for name in SHAPE}
    given = {name: value for name, value in shape.items() if value is not None}
    if told.preset is not None:
        if given:
            wrong = next(iter(given))
            raise ValueError(f"--{wrong} goes with --parameters: a preset has a shape")
        return MODELS[told.preset], ""
    usual = {}
    if told.layers and told.hidden:
        heads = max(1, told.hidden // 64)
        while told.hidden % heads:
            heads -= 1
        usual = {"heads": heads, "sequence": 2048, "vocab": 50_257} | given
    words = [f"--{n} {value}" for n, value in usual.items() if n not in given]
    return Model(told.parameters, **usual or given), " ".join(words)


def table(rows: list[Row]) -> Table:
    """Return a column for each strategy, in the unit that suits the largest number."""
    size, unit = _unit(max(max(row.ledger.total, row.bytes_sent) for row in rows))
    shown = Table(f"{unit} per GPU")
    for row in rows:
        shown.add_column(row.name.replace(" + ", "\n+ "), justify="right", no_wrap=True)

    lines = {
        name: [_number(row.ledger[kind] / size) for row in rows]
        for name, kind in KINDS.items()
    }
    lines["total"] = [_number(row.ledger.total / size) for row in rows]
    lines["fits"] = [{True: "yes", False: "no", None: "?"}[row.fits] for row in rows]
    lines["sent in a step"] = [_number(row.bytes_sent / size) for row in rows]
    lines["times DDP"] = [_number(row.times_ddp) for row in rows]
    if rows[0].seconds is not None:
        lines["seconds for it"] = [f"{row.seconds:.3g}" for row in rows]
    for name, cells in lines.items():
        shown.add_row(name, *cells, end_section=name in ("gathered", "fits"))
    return shown


def notes(rows: list[Row], assumed: str) -> list[str]:
    """Return what a number leaves out or stands for, in sentences."""
    host, bus = _in_words(rows[-1].on_host), _in_words(rows[-1].host_bytes)
    told = [
        f"With offload each GPU's {host} of shards are in the host's memory, and {bus} "
        "pass PCIe in a step."
    ]
    if assumed:
        told.append(f"Taken as usual: {assumed}.")
    if not rows[0].ledger["activations"]:
        told.append(
            "Not counted: activations, and what stage 3 gathers; so nobody can tell "
            'what fits ("?"). Say --layers and --hidden.'
        )
    return told


def advice(
    model: Model, rows: list[Row], memory: float, options: dict[str, Any]
) -> str:
    """Return the first strategy that fits, or what would have to change.

    `options` are those of `theory.plan`.
    """
    first = next((row for row in rows if row.fits is not False), None)
    if first is not None and not first.on_host:
        if first.fits is None:
            return (
                f"{first.name} is the first whose states fit; whether activations do, "
                "too, is not known."
            )
        if first.stage == 0:
            return "DDP fits: nothing need be sharded."
        return f"{first.name} is the first that fits."
    enough = fewest_gpus(model, memory, **options)
    counted = "ZeRO-3" if rows[0].ledger["activations"] else "the states of ZeRO-3"
    if enough is not None:
        told = f"{counted} would fit on {enough:,} GPU{'s' * (enough > 1)}"
    else:
        told = (
            "activations and gathered layers alone are too much on any number of GPUs"
        )
        ways = ["a smaller --batch"] if options["batch"] > 1 else []
        ways += ["--recompute full"] if options["recompute"] != "full" else []
        told += f" (try {', '.join(ways)})" if ways else ""
    if first is None:
        return f"Nothing fits: {told}."
    if first.fits is None:
        return f"Without offload nothing fits: {told}."
    return f"Only {first.name} fits: {told}."


def _head(told: Namespace, model: Model) -> str:
    name = told.preset or "a model"
    return (
        f"{name}: {model.parameters:,} parameters, {told.optimizer}, {told.precision}, "
        f"{told.gpus:,} GPU{'s' * (told.gpus > 1)} of {told.memory:g} GB "
        "(1 GB = 10^9 bytes)"
    )


def _unit(nbytes: float) -> tuple[float, str]:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= size:
            return size, unit
    return 1.0, "bytes"


def _in_words(nbytes: float) -> str:
    size, unit = _unit(nbytes)
    return f"{_number(nbytes / size)} {unit}"


def _number(value: float | None) -> str:
    return "-" if not value else f"{value:,.2f}"

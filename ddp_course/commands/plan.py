"""`plan`: print which ZeRO stages fit on a GPU, and how many bytes each sends.

`theory.plan` computes everything; this module reads the options and prints the table.
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


def command(args: Namespace) -> int:
    """Print the table, notes on what it leaves out, and advice."""
    if args.gpu or args.anchors or args.accelerators:
        from ddp_course.commands import plan_layouts

        return plan_layouts.command(args)
    for name in LAYOUTS_ONLY:
        if getattr(args, name) is not None:
            option = name.replace("_", "-")
            raise CommandError(
                f"--{option} has no effect without --gpu, which predicts layouts"
            )
    check_file(args.json)
    args.memory, args.batch = args.memory or 80, args.batch or 1
    args.recompute = args.recompute or "none"
    args.precision = args.precision or "mixed"
    names = "optimizer", "precision", "batch", "recompute"
    options = {name: getattr(args, name) for name in names}
    options["fused_attention"] = not args.scores
    memory = args.memory * GB
    bandwidth = None if args.bandwidth is None else args.bandwidth * GB
    try:
        model, assumed = model_of(args)
        rows = plan(model, args.gpus, memory, bandwidth=bandwidth, **options)
    except ValueError as error:
        raise CommandError(str(error)) from None
    console = Console(soft_wrap=True, highlight=False)
    console.print(_head(args, model), markup=False)
    console.print(table(rows))
    for sentence in (*notes(rows, assumed), advice(model, rows, memory, options)):
        console.print(sentence, markup=False)
    write(args.json, [asdict(row) | {"ledger": dict(row.ledger)} for row in rows])
    return 0


def model_of(args: Namespace) -> tuple[Model, str]:
    """Return the model that the options describe, and the options that were assumed.

    With --layers and --hidden, activations are counted; then heads, sequence length and
    vocabulary have defaults. Raises ValueError if no model can have these sizes.
    """
    shape = {name: getattr(args, name) for name in SHAPE}
    typed = {name: value for name, value in shape.items() if value is not None}
    if args.preset is not None:
        if typed:
            wrong = next(iter(typed))
            raise ValueError(
                f"--{wrong} cannot be combined with --preset, which sets it; use it "
                "with --parameters"
            )
        return MODELS[args.preset], ""
    sizes = typed
    if args.layers and args.hidden:
        heads = max(1, args.hidden // 64)
        while args.hidden % heads:
            heads -= 1
        sizes = {"heads": heads, "sequence": 2048, "vocab": 50_257} | typed
    words = [f"--{n} {value}" for n, value in sizes.items() if n not in typed]
    return Model(args.parameters, **sizes), " ".join(words)


def table(rows: list[Row]) -> Table:
    """Return a table with a column per strategy; its unit suits the largest number."""
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
        lines["seconds to send"] = [f"{row.seconds:.3g}" for row in rows]
    for name, cells in lines.items():
        shown.add_row(name, *cells, end_section=name in ("gathered", "fits"))
    return shown


def notes(rows: list[Row], assumed: str) -> list[str]:
    """Return sentences about what the numbers assume and leave out."""
    host, bus = _in_words(rows[-1].on_host), _in_words(rows[-1].host_bytes)
    sentences = [
        f"With offload, {host} of each GPU's shards are in the host's memory, and "
        f"{bus} cross PCIe in a step."
    ]
    if assumed:
        sentences.append(f"Assumed: {assumed}.")
    if not rows[0].ledger["activations"]:
        sentences.append(
            "Not counted: activations, and the parameters that stage 3 gathers. So it "
            'is unknown what fits ("?"). Add --layers and --hidden.'
        )
    return sentences


def advice(
    model: Model, rows: list[Row], memory: float, options: dict[str, Any]
) -> str:
    """Return a sentence: the first strategy that fits, or what would have to change.

    `options` are those of `theory.plan`.
    """
    first = next((row for row in rows if row.fits is not False), None)
    if first is not None and not first.on_host:
        if first.fits is None:
            return (
                f"{first.name} is the first whose states fit; whether activations fit, "
                "too, is unknown."
            )
        if first.stage == 0:
            return "DDP fits: nothing need be sharded."
        return f"{first.name} is the first that fits."
    enough = fewest_gpus(model, memory, **options)
    counted = "ZeRO-3" if rows[0].ledger["activations"] else "the states of ZeRO-3"
    if enough is not None:
        change = f"{counted} would fit on {enough:,} GPU{'s' * (enough > 1)}"
    else:
        change = (
            "activations and gathered layers alone are too large on any number of GPUs"
        )
        ways = ["a smaller --batch"] if options["batch"] > 1 else []
        ways += ["--recompute full"] if options["recompute"] != "full" else []
        change += f" (try {', '.join(ways)})" if ways else ""
    if first is None:
        return f"Nothing fits: {change}."
    if first.fits is None:
        return f"Without offload nothing fits: {change}."
    return f"Only {first.name} fits: {change}."


def _head(args: Namespace, model: Model) -> str:
    name = args.preset or "a model"
    return (
        f"{name}: {model.parameters:,} parameters, {args.optimizer}, {args.precision}, "
        f"{args.gpus:,} GPU{'s' * (args.gpus > 1)} of {args.memory:g} GB "
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

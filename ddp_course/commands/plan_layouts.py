"""`plan --gpu`: which layout is fastest on a cluster, and what training costs.

`planning` predicts everything; this module reads the options and prints the
predictions.
"""

from __future__ import annotations

import math
import statistics
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from ddp_course.commands import CommandError, check_file, write
from ddp_course.planning.accelerators import ACCELERATORS, Cluster
from ddp_course.planning.anchors import ANCHORS
from ddp_course.planning.search import Found, divisors, search
from ddp_course.planning.step_time import Prediction, Software
from ddp_course.planning.workload import Workload
from ddp_course.spec import ZERO
from ddp_course.theory.memory import PRECISIONS, model_states
from ddp_course.theory.plan import MODELS

GB = 1e9  # decimal, as on data sheets
SHAPE = ("layers", "hidden", "heads", "sequence", "vocab")
SEQUENCE, VOCAB, STEP_TOKENS = 4096, 128_256, 4_000_000  # defaults of these options
NETWORK = 50  # GB/s of each GPU: 400 Gb/s
SOURCES = (
    "bfloat16 (V100: float16), dense; links in one direction; -: not published. From "
    "stas00/ml-engineering, jax-ml/scaling-book, Google Cloud and NVIDIA's briefs"
)


def command(args: Namespace) -> int:
    """Print the fastest layouts, the costs of the best, and why others do not fit."""
    check_file(args.json)
    args.top, args.step_tokens = args.top or 10, args.step_tokens or STEP_TOKENS
    args.precision = args.precision or Software.precision
    if args.price is not None and not args.tokens:
        raise CommandError(f"--price {args.price:g} has no effect without --tokens")
    console = Console(soft_wrap=True, highlight=False)
    if args.accelerators or args.anchors:
        if args.json:
            raise CommandError(f"--json {args.json} needs --preset or --parameters")
        console.print(accelerators() if args.accelerators else anchors())
        return 0
    try:
        workload, usual = workload_of(args)
        cluster, software = cluster_of(args), software_of(args)
        found = search(workload, cluster, software, args.recompute)
    except ValueError as error:
        raise CommandError(str(error)) from None
    for line in head(args, workload, cluster, usual):
        console.print(line, markup=False)
    console.print(layouts(found, workload, cluster, args.top))
    for line in (
        *best(args, found, workload, cluster),
        *too_large(found),
        NOT_PREDICTED,
        prediction_errors(),
    ):
        console.print(line, markup=False)
    write(
        args.json, [as_json(p, workload, cluster) for p in fastest(found)[: args.top]]
    )
    return 0 if found.best else 1


def workload_of(args: Namespace) -> tuple[Workload, list[str]]:
    """Return the model and its batch, and the options that were assumed."""
    typed = {name: getattr(args, name) for name in SHAPE}
    typed = {name: value for name, value in typed.items() if value is not None}
    if args.preset is not None:
        if typed:
            wrong = next(iter(typed))
            raise ValueError(f"--{wrong} needs --parameters: a preset has all sizes")
        known = MODELS[args.preset]
        shape = [getattr(known, name) for name in SHAPE]
        rows = rows_of(args, known.sequence)
        return Workload(known.parameters, *shape, rows, tied=True), []
    sequence, vocab = typed.get("sequence", SEQUENCE), typed.get("vocab", VOCAB)
    rows = rows_of(args, sequence)
    if ("layers" in typed) != ("hidden" in typed):
        raise ValueError("set both --layers and --hidden, or neither")
    if "hidden" in typed:
        most = max(1, typed["hidden"] // 128)
        heads = max(n for n in divisors(typed["hidden"]) if n <= most)
        shape = {"heads": heads, "sequence": sequence, "vocab": vocab} | typed
        workload = Workload(args.parameters, rows=rows, **shape)
    elif "heads" in typed:
        raise ValueError(f"--heads {typed['heads']} needs --layers and --hidden")
    else:
        workload = Workload.of_size(args.parameters, sequence, vocab, rows)
    usual = [f"--{n} {getattr(workload, n)}" for n in SHAPE if n not in typed]
    return workload, usual


def rows_of(args: Namespace, sequence: int) -> int:
    """Return the rows of a step: the allowed number that is nearest to --step-tokens.

    Allowed are multiples of --gpus or, if there are fewer rows than GPUs, divisors, so
    that the ranks of dp can share the rows equally. Raises ValueError below one row.
    """
    rows = args.step_tokens / sequence
    if rows < 1:
        raise ValueError(
            f"--step-tokens {args.step_tokens} is less than a row of {sequence} tokens"
        )
    if rows >= args.gpus:
        return round(rows / args.gpus) * args.gpus
    return min(divisors(args.gpus), key=lambda number: abs(number - rows))


def cluster_of(args: Namespace) -> Cluster:
    """Return the GPUs, their nodes and links."""
    gpu = ACCELERATORS[args.gpu]
    if args.memory is not None:
        gpu = replace(gpu, memory=args.memory * GB)
    network = (args.network or NETWORK) * GB
    return Cluster(gpu, args.gpus, args.node or gpu.node, network)


def software_of(args: Namespace) -> Software:
    """Return the options of the training software.

    Raises ValueError for options that cannot be combined with --gpu.
    """
    half = [n for n, each in PRECISIONS.items() if each.activation == 2]  # bytes
    if args.precision not in half:
        allowed = ", ".join(half)
        raise ValueError(
            f"--precision is {args.precision}; with --gpu it can be {allowed}: data "
            "sheets are for products of 16-bit numbers"
        )
    if args.bandwidth is not None:
        raise ValueError(
            f"--bandwidth {args.bandwidth:g} cannot be combined with --gpu; use "
            "--network, the GB/s that a GPU sends to other nodes"
        )
    if args.batch is not None:
        raise ValueError(
            f"--batch {args.batch} cannot be combined with --gpu: layouts are tried "
            "with microbatches of 1 to 16 rows, and --step-tokens is a step's whole "
            "batch"
        )
    if args.recompute == "selective" and not args.scores:
        raise ValueError(
            "--recompute selective needs --scores: fused attention keeps no scores "
            "that could be computed again"
        )
    return Software(
        fused_attention=not args.scores,
        precision=args.precision,
        optimizer=args.optimizer,
    )


# ---- what is printed -----------------------------------------------------------------


def head(
    args: Namespace, workload: Workload, cluster: Cluster, usual: list[str]
) -> list[str]:
    """Return sentences that describe the model, the steps and the cluster."""
    name = args.preset or "a model"
    lines = [
        f"{name}: {workload.parameters:,} parameters, {args.optimizer}, "
        f"{args.precision}, steps of {workload.rows:,} row{'s' * (workload.rows > 1)} "
        f"of {workload.sequence:,} tokens",
        f"{cluster.gpus:,} x {args.gpu} ({cluster.gpu.memory / GB:g} GB), "
        f"{cluster.node} in a node ({cluster.gpu.link / GB:g} GB/s each), "
        f"{cluster.network / GB:g} GB/s to other nodes each (1 GB = 10^9 bytes)",
    ]
    return lines + ([f"Assumed: {' '.join(usual)}."] if usual else [])


def layouts(found: Found, workload: Workload, cluster: Cluster, top: int) -> Table:
    """Return a table of the fastest layout of each mesh, with at most `top` rows."""
    table = Table("layout", title=None)
    for name in ("rows", "step s", "MFU", "tokens/s a GPU", "waits", "GB a GPU"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in fastest(found)[:top]:
        waits = 1 - each.parts["compute"] / each.seconds
        speed = workload.tokens / each.seconds / cluster.gpus
        table.add_row(
            str(each.candidate),
            f"{each.candidate.microbatch}",
            f"{each.seconds:.3g}",
            f"{each.mfu(workload, cluster):.1%}",
            f"{speed:,.0f}",
            f"{waits:.0%}",
            f"{each.ledger.total / GB:.1f}",
        )
    return table


def fastest(found: Found) -> list[Prediction]:
    """Return the fastest layout of each mesh, the fastest mesh first."""
    meshes: dict[tuple[int, ...], Prediction] = {}
    for each in found.best:
        meshes.setdefault(each.candidate[:4], each)
    return list(meshes.values())


def best(
    args: Namespace, found: Found, workload: Workload, cluster: Cluster
) -> list[str]:
    """Return the costs of the fastest layout's steps and of the whole training run."""
    if not found.best:
        kept = model_states(
            workload.parameters, 1, optimizer=args.optimizer, precision=args.precision
        )
        gpus = math.ceil(kept.total / found.limit)
        return [
            "No layout fits: weights, gradients and the optimizer's states are "
            f"{kept.total / GB:,.0f} GB; {gpus:,} GPUs could hold these alone."
        ]
    first = found.best[0]
    seconds = {k: v for k, v in first.parts.items() if v >= 0.005 * first.seconds}
    kinds = {k: v for k, v in first.ledger.items() if v}
    sent = {k: v for k, v in first.sent.items() if v}
    lines = [
        f"The fastest: {first.candidate}.",
        f"  a step's seconds: {_listed(seconds, 1, '.3g')}",
        f"  GB on a GPU: {_listed(kinds, GB, '.1f')}; "
        f"{found.limit / GB:.1f} can be filled",
        f"  GB sent by a GPU in a step: {_listed(sent, GB, '.3g')}",
    ]
    if args.tokens:
        lines += training(args, workload, cluster, first.seconds)
    return lines


def training(
    args: Namespace, workload: Workload, cluster: Cluster, seconds: float
) -> list[str]:
    """Return the days and energy of a whole training run, and with a price its cost."""
    days = workload.days(args.tokens, seconds)
    hours = days * 24 * cluster.gpus
    lines = [f"  {args.tokens:,.3g} tokens: {days:,.1f} days, {hours:,.0f} GPU-hours"]
    if watts := cluster.gpu.watts:
        lines.append(
            f"  {hours * watts / 1e6:,.1f} MWh at {watts:g} W a GPU (hosts, network "
            "and cooling not counted)"
        )
    if args.price is not None:
        lines.append(f"  {hours * args.price:,.0f} at {args.price:g} a GPU-hour")
    return lines


def too_large(found: Found) -> list[str]:
    """Return lines about layouts that are too large, and the least that they need.

    They are dp alone, by ZeRO stage, and all layouts without pp, tp or cp.
    """
    lines = []
    for zero in ZERO:
        named = f"dp alone, ZeRO-{zero}" if zero else "dp alone"
        alone = [p for p in found.too_large if _only_dp(p) and p.candidate.zero == zero]
        fits = any(_only_dp(p) and p.candidate.zero == zero for p in found.best)
        if alone and not fits:
            each = alone[0]
            kind, most = max(each.ledger.items(), key=lambda item: item[1])
            lines.append(
                f"  {named}: at least {each.ledger.total / GB:,.1f} GB, of which "
                f"{most / GB:,.1f} are {kind}"
            )
    for axis in ("pp", "tp", "cp") if found.best else ():
        without = [p for p in found.best if getattr(p.candidate, axis) == 1]
        others = [p for p in found.too_large if getattr(p.candidate, axis) == 1]
        if others and not without:
            least = others[0].ledger.total / GB
            lines.append(f"  all layouts without {axis}: at least {least:,.1f} GB")
    tried = len(found.best) + len(found.too_large)
    head = f"{tried:,} layouts were predicted; {len(found.best):,} of them fit."
    if not lines:
        return [head]
    return [head, f"Too large for {found.limit / GB:.1f} GB:", *lines]


NOT_PREDICTED = (
    "Not tried: ZeRO-3 in a pipeline, tp across nodes, replicas of shards (HSDP). "
    "Not predicted: experts, 8-bit numbers, launches of kernels, slow or crowded "
    "links, stragglers, loading, saving, failures. Good software comes near to a "
    "prediction."
)


def prediction_errors() -> str:
    """Return how far predictions are from published numbers."""
    errors = [anchor.error for anchor in ANCHORS if not anchor.fitted]
    half = statistics.median(map(abs, errors))
    return (
        f"Of {len(errors)} published training runs to which nothing was fitted, half "
        f"were predicted within {half:.0%}; the worst predictions were "
        f"{max(errors):.0%} too fast and {-min(errors):.0%} too slow (ddp-course plan "
        "--anchors)."
    )


def accelerators() -> Table:
    """Return the data sheets as a table."""
    columns = "TFLOP/s", "GB", "TB/s", "link GB/s", "W", "FLOP/byte"
    table = Table("accelerator", caption=SOURCES)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for name, gpu in ACCELERATORS.items():
        numbers = gpu.flops / 1e12, gpu.memory / GB, gpu.bandwidth / 1e12
        more = gpu.link / GB, gpu.watts, round(gpu.ridge)
        cells = ("-" if n is None else f"{n:g}" for n in (*numbers, *more))
        table.add_row(name, *cells)
    return table


def anchors() -> Table:
    """Return published and predicted shares of the data sheet's FLOP/s."""
    table = Table("training", "published", "predicted", "error", "source", "assumed")
    for anchor in ANCHORS:
        table.add_row(
            anchor.name,
            f"{anchor.mfu:.1%}",
            f"{anchor.predicted():.1%}",
            f"{anchor.error:+.0%}",
            anchor.source,
            anchor.assumed,
        )
    return table


def as_json(each: Prediction, workload: Workload, cluster: Cluster) -> dict[str, Any]:
    """Return a prediction as plain data for JSON."""
    return each.candidate._asdict() | {
        "seconds": each.seconds,
        "mfu": each.mfu(workload, cluster),
        "parts": each.parts,
        "ledger": dict(each.ledger),
        "sent": each.sent,
    }


def _only_dp(each: Prediction) -> bool:
    return each.candidate.dp == each.candidate.ranks


def _listed(numbers: dict[str, float], unit: float, form: str) -> str:
    items: Iterable[str] = (f"{k} {v / unit:{form}}" for k, v in numbers.items())
    return ", ".join(items) or "none"

"""The command `ddp-course`: parse the command line and call a module of `commands`.

Errors are printed to stderr after `ddp-course:`, usually in one line. Exit codes: 0 for
success, 1 for a failure, 2 for an option that cannot be read, 130 after Ctrl-C; `lab`
returns JupyterLab's. PyTorch is imported when a command begins: `--help` and errors in
the command line need only `spec`, which has all choices and defaults.
"""

from __future__ import annotations

import argparse
import errno
import math
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import Field, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import ddp_course
from ddp_course import spec
from ddp_course.bench import benches
from ddp_course.commands import (
    CommandError,
    chapters,
    check_file,
    lab_options,
    tell,
    train_options,
)
from ddp_course.planning.accelerators import ACCELERATORS

RANKS = ("lab", "train", "doctor", "report", "bench")  # commands that may launch ranks


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    at_first = signal.getsignal(signal.SIGINT)
    try:
        top = parser()
        args = top.parse_args(argv)
        if args.module is None:
            top.print_help()
            code = 0
        else:
            # Let PyTorch's idle threads sleep, not spin, in notebook kernels too. When
            # other processes shared two cores, a step took 6 s with spinning, not 0.3.
            os.environ.setdefault("OMP_WAIT_POLICY", "passive")
            args.before(args)
            command = import_module(f"ddp_course.commands.{args.module}").command
            if args.module in RANKS:
                ddp_course.get_ready()
            if at_first is ddp_course.stop:  # Ctrl-C must now clean up, not only exit
                signal.signal(signal.SIGINT, signal.default_int_handler)
            code = command(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        tell("stopped")
        return 130
    except Exception as error:
        if not _is_the_users(error):
            raise
        if isinstance(error, OSError):  # the disk is full, or the pipe was closed
            what = f"cannot write {error.filename or 'all of this'}"
            if error.errno in (errno.EMFILE, errno.ENFILE):
                what = "start fewer ranks, or raise the limit, `ulimit -n 4096`"
            error = f"{what}: {error.strerror}"
            with suppress(OSError, ValueError):  # else Python's flush at exit fails too
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        tell(error)
        return 1
    finally:  # ignore Ctrl-C once the command has ended
        ended = at_first is ddp_course.stop
        signal.signal(signal.SIGINT, signal.SIG_IGN if ended else at_first)


def _is_the_users(error: Exception) -> bool:
    """Return whether the user can correct the error: then no traceback is printed."""
    launch = sys.modules.get("ddp_course.launch")
    known = () if launch is None else (launch.LaunchError,)
    return isinstance(error, (CommandError, OSError, *known))


class Parser(argparse.ArgumentParser):
    """A parser whose error messages are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message and the command that shows help; exit with code 2."""
        tell(f"{message} (see `{self.prog} --help`)")
        sys.exit(2)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; refuse unknown arguments here, so that the error names the command.

        argparse would read -7e9 and -7b as options, but -7 as a value. Here all three
        are values.
        """
        words = [*(sys.argv[1:] if args is None else args)]
        for k in range(len(words) - 1, 0, -1):
            if words[k - 1].startswith("--") and re.fullmatch(r"-[\d.]\S*", words[k]):
                words[k - 1 : k + 1] = [f"{words[k - 1]}={words[k]}"]
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    def option(self, each: Field) -> None:
        """Add the option for a field of `spec`; its value is None if not typed."""
        about, default = each.metadata["about"], each.default
        how: dict[str, Any] = {"help": about}
        if default is not None and each.name != "dp":
            how["help"] = f"{about} (default: {default})"
        if each.name == "dp":
            how["help"] = f"{about} (default: all ranks that the other axes leave)"
        if choices := each.metadata["choices"]:
            read = type(next(iter(choices)))
            how |= {"choices": tuple(choices), "type": read}
            if "zero_bubble" in choices:
                how["type"] = lambda text: text.replace("-", "_")  # accept zero-bubble
        elif not each.type.startswith("str"):
            how |= {"type": _number(each), "metavar": "N"}
        else:
            how["metavar"] = "FOLDER" if each.name == "checkpoint" else "HOW"
        self.add_argument(_option(each.name), **how)

    def numbers(self, **options: tuple[Callable, Any, str]) -> None:
        """Add an option for each number: {name: (parser, default, help text)}."""
        for name, (read, default, text) in options.items():
            about = text if default is None else f"{text} (default: {default})"
            how = {"type": read, "default": default, "metavar": "N", "help": about}
            self.add_argument(_option(name), **how)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _flags(where: Any, **about: str) -> None:
    """Add options without a value to a parser or group: {name: help text}."""
    for name, text in about.items():
        where.add_argument(_option(name), action="store_true", help=text)


def _files(where: Any, metavar: str = "FILE", **about: str) -> None:
    """Add options with a path to a parser or group: {name: help text}."""
    for name, text in about.items():
        where.add_argument(_option(name), type=Path, metavar=metavar, help=text)


def parser() -> Parser:
    """Return the parser of all commands."""
    top = Parser(
        prog="ddp-course",
        description="Distributed deep-learning training, from real processes up.",
        epilog="Begin with `ddp-course lab`. Options: `ddp-course COMMAND --help`.",
    )
    version = f"ddp-course {ddp_course.__version__}"
    top.add_argument("--version", action="version", version=version)
    top.set_defaults(module=None, before=lambda args: None)
    commands = top.add_subparsers(metavar="COMMAND")
    first = (_lab, _run, _progress, _train)
    for add in (*first, _notebooks, _site, _doctor, _bench, _plan):
        add(partial(_command, commands))
    return top


def _command(
    commands: Any,
    name: str,
    about: str,
    *examples: str,
    module: str = "",
    more: str = "",
) -> Parser:
    command = commands.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog="\n  ".join(["examples:", *examples]) + more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(module=module or name, name=name)
    return command


def _list(head: str, table: dict[str, str], width: int) -> str:
    lines = (f"  {name:<{width}} {about}" for name, about in table.items())
    return "\n".join([f"\n\n{head}:", *lines])


# Each function adds the arguments of one command; a module of `commands` executes it.


def _lab(add: Callable[..., Parser]) -> None:
    lab = add(
        "lab",
        "prove that ranks run on this machine, then open a copy of the course in "
        "JupyterLab",
        "ddp-course lab",
        "ddp-course lab my-course --no-browser --port 8890",
    )
    about = "folder of your copy; what you change in it stays (default: ddp-course)"
    lab.add_argument("folder", nargs="?", metavar="FOLDER", help=about)
    _flags(
        lab,
        here="open the course itself and not a copy, as its authors do",
        no_browser="print the address, but open no browser",
    )
    lab.numbers(
        port=(
            _whole(65535),
            None,
            "port (default: 8888, or the next free one)",
        )
    )
    lab.add_argument("--ip", default="localhost", help="address (default: %(default)s)")
    lab.set_defaults(before=lab_options.check_typed)


def _run(add: Callable[..., Parser]) -> None:
    run = add(
        "run",
        "execute chapters without a browser; nothing is stored",
        "ddp-course run 00",
        "ddp-course run all",
        "ddp-course run notebooks/01_ranks.ipynb",
    )
    about = "a number such as 00, the path of a notebook, or all"
    run.add_argument("chapters", nargs="+", metavar="CHAPTER", help=about)
    run.set_defaults(before=_check_chapters)
    run.numbers(timeout=_TIMEOUT)


def _check_chapters(args: argparse.Namespace) -> None:
    """Raise CommandError for a chapter that does not exist."""
    chapters.find(args.chapters)


def _progress(add: Callable[..., Parser]) -> None:
    progress = add(
        "progress",
        "show which exercises of your copy have passed, and what is next",
        "ddp-course progress",
        "ddp-course progress --report /shared/our-class",
        "ddp-course progress --collect /shared/our-class",
    )
    what = progress.add_mutually_exclusive_group()
    about = "write a report without your name to a new .json file, or into a folder"
    _files(what, report=about)
    _files(what, "FOLDER", collect="count the passed exercises of a class")


def _train(add: Callable[..., Parser]) -> None:
    stages = {str(stage): about for stage, about in spec.ZERO.items()}
    train = add(
        "train",
        "train the course's GPT in one process or many, with any parallelism",
        "ddp-course train --ranks 4",
        "ddp-course train --zero 3 --ranks 4",
        "ddp-course train --dp 2 --tp 2 --pp 2 --zero 1",
        "ddp-course train --pp 4 --schedule gpipe --microbatches 8",
        "ddp-course train --threads 2 --steps 50",
        "ddp-course train --ranks 2 --steps 200 --checkpoint runs/a --every 20",
        "torchrun --nproc-per-node 4 -m ddp_course train --zero 1",
        more=_list("--zero", stages, 11)
        + _list("--data-parallel", spec.DATA_PARALLEL, 11)
        + _list("--attention", spec.ATTENTION, 11)
        + _list("--precision", {n: p.about for n, p in spec.PRECISIONS.items()}, 11)
        + _list("--outer", spec.OUTER, 11),
    )
    train.set_defaults(before=train_options.check_typed)
    axes = f"{', '.join([*spec.AXES][:-1])} and {[*spec.AXES][-1]}"
    most = train_options.MOST
    ranks = f"processes, 1 to {most} (default: as many as {axes} need)"
    train.numbers(ranks=(_whole(most), None, ranks))
    for each in (*fields(spec.Training), *fields(spec.Layout)):
        train.option(each)
    for gone in ("strategy", "replicas"):
        train.add_argument(_option(gone), type=_gone(gone), help=argparse.SUPPRESS)
    _files(train, json="write the loss curve to this file")


def _notebooks(add: Callable[..., Parser]) -> None:
    notebooks = add(
        "notebooks",
        "execute chapters and store their outputs, or check what is stored",
        "ddp-course notebooks --save 00 01",
        "ddp-course notebooks --check",
        module="author",
    )
    what = notebooks.add_mutually_exclusive_group(required=True)
    check = "list stored cells that break the rules"
    _flags(what, save="execute and store", check=check)
    about = "a number such as 00, or a path (default: all)"
    notebooks.add_argument("chapters", nargs="*", metavar="CHAPTER", help=about)
    notebooks.set_defaults(before=_check_chapters)
    notebooks.numbers(timeout=_TIMEOUT)


def _site(add: Callable[..., Parser]) -> None:
    site = add(
        "site",
        "make web pages of the course; in a clone of its repository only",
        "ddp-course site",
        "ddp-course site --out /srv/www/ddp-course",
        module="author",
    )
    about = "a new folder, or one with an older edition (default: %(default)s)"
    _files(site, "FOLDER", out=about)
    site.set_defaults(out=Path("ddp-course-site"))


def _doctor(add: Callable[..., Parser]) -> None:
    doctor = add(
        "doctor",
        "describe this machine, and prove that ranks run on it",
        "ddp-course doctor",
        "ddp-course doctor --report",
    )
    about = "print a text to send when you ask for help: no names, no folders"
    instead = {"dest": "module", "action": "store_const", "const": "report"}
    doctor.add_argument("--report", **instead, help=about)


def _bench(add: Callable[..., Parser]) -> None:
    bench = add(
        "bench",
        "measure the course's code beside PyTorch's own, in one run",
        "ddp-course bench launch",
        "ddp-course bench launch --quick --json launch.json",
        "ddp-course bench all-reduce --figure all_reduce.svg",
        "ddp-course bench --list",
    )
    bench.add_argument("bench", nargs="?", metavar="NAME", help="see --list")
    _flags(bench, list="list the benches, and what each compares")
    about = "draw the rows to this .svg, .png or .pdf file"
    _files(bench, json="write the rows to this file", figure=about)
    _flags(bench, quick="measure fewer cases, fewer times")
    bench.set_defaults(before=_check_bench)


def _check_bench(args: argparse.Namespace) -> None:
    """Raise CommandError for an unknown bench, or a file that cannot be written."""
    known = benches()
    if not args.list and args.bench not in known:
        wrong = f"there is no bench {args.bench!r};" if args.bench else "which bench?"
        raise CommandError(f"{wrong} there are: {', '.join(known)}")
    check_file(args.json)
    check_file(args.figure, (".svg", ".png", ".pdf"))


def _plan(add: Callable[..., Parser]) -> None:
    plan = add(
        "plan",
        "say which layout fits on your GPUs, how fast it is, and what it sends",
        "ddp-course plan --preset gpt2-xl --gpus 8 --memory 24",
        "ddp-course plan --parameters 7.5b --gpus 64 --memory 32",
        "ddp-course plan --parameters 6.6b --layers 32 --hidden 4096 --bandwidth 50",
        "ddp-course plan --parameters 70b --tokens 15t --gpus 512 --gpu h100 --node 8",
        more=_list("--precision", spec.PLANNED, 20),
    )
    model = plan.add_mutually_exclusive_group(required=True)
    model.add_argument("--preset", choices=spec.MODELS, help="a known model")
    about = "number of parameters, such as 7.5e9, 7.5b or 350m; without experts"
    model.add_argument("--parameters", "--params", type=_many, metavar="N", help=about)
    _flags(
        model,
        accelerators="print the data sheets of all accelerators",
        anchors="print published training runs beside the predictions for them",
    )
    many = _whole(10**9)
    about = "the accelerator; adds each layout's predicted step time, and sorts by it"
    plan.add_argument("--gpu", choices=tuple(ACCELERATORS), help=about)
    plan.numbers(
        layers=(many, None, "number of layers; with --hidden, counts activations, too"),
        hidden=(many, None, "width of a layer"),
        heads=(many, None, "attention heads of a layer (default: hidden / 64)"),
        sequence=(many, None, "tokens of a row (default: 2048)"),
        vocab=(many, None, "tokens of the vocabulary (default: 50257)"),
        gpus=(many, 8, "number of GPUs, all data parallel"),
        memory=(
            _positive,
            None,
            "memory of one GPU in GB, 10^9 bytes each (default: 80, or --gpu's)",
        ),
        batch=(many, None, "without --gpu: rows of a step on one GPU (default: 1)"),
        bandwidth=(
            _positive,
            None,
            "without --gpu: GB/s that a GPU can send; adds a column of seconds",
        ),
        node=(many, None, "with --gpu: GPUs in a node (default: as they are sold)"),
        network=(
            _positive,
            None,
            "with --gpu: GB/s that a GPU can send to other nodes (default: 50)",
        ),
        step_tokens=(
            _many,
            None,
            "with --gpu: tokens of a step on all GPUs (default: 4m)",
        ),
        tokens=(
            _many,
            None,
            "with --gpu: tokens of the whole training; adds days and energy",
        ),
        price=(
            _positive,
            None,
            "with --gpu and --tokens: price of a GPU-hour; adds the cost",
        ),
        top=(_whole(1000), None, "with --gpu: layouts to print (default: 10)"),
    )
    about = "the optimizer (default: %(default)s)"
    plan.add_argument(
        "--optimizer", choices=spec.OPTIMIZERS, default="adamw", help=about
    )
    about = (
        "number formats; see below (default: mixed; with --gpu mixed-fp32-gradients, "
        "the one in which predictions were compared with published training runs)"
    )
    plan.add_argument("--precision", choices=tuple(spec.PLANNED), help=about)
    about = "activations to recompute (default: none; with --gpu, try all choices)"
    plan.add_argument("--recompute", choices=spec.RECOMPUTE, help=about)
    _flags(plan, scores="attention is not fused: its scores are kept for backward")
    _files(plan, json="write the rows to this file")


# Parsers of values


def _whole(most: int, least: int = 1) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number from {least} to {most}"
            )
        return int(text)

    return read


def _real(**limits: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not spec.within(value, **limits) or value == math.inf:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a number {spec.in_words(**limits)}"
            )
        return value

    return read


_positive = _real(above=0)


def _number(each: Field) -> Callable[[str], float]:
    """Return a parser for a field's number that enforces the field's limits."""
    limits = each.metadata["limits"]
    if each.type.startswith("int"):
        most = 64 if each.name in (*spec.AXES, "shard") else 10**9
        return _whole(2**31 if each.name == "seed" else most, limits["least"])
    return _real(**limits)


def _gone(option: str) -> Callable[[str], str]:
    """Return a parser that refuses a former option and names its successor."""

    def read(text: str) -> str:
        raise argparse.ArgumentTypeError(spec.successor(option, text))

    return read


def _many(text: str) -> int:
    power = {"m": 6, "b": 9, "t": 12}.get(text[-1:].lower(), 0)
    number = text[:-1] if power else text
    try:
        float(number)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number such as 7.5e9, 7.5b or 350m"
        ) from None
    value = _positive(number) * 10**power
    if not 1 <= value <= 10**15:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 1000t")
    return round(value)


_TIMEOUT = (_whole(10**6), 600, "stop a cell after this many seconds")


if __name__ == "__main__":
    sys.exit(main())

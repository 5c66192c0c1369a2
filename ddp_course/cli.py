"""The command `ddp-course`: reads what was typed and hands it to `commands` or `bench`.

Errors are told on stderr after `ddp-course:`, in one line if one will do. Exit codes: 0
it went well, 1 it did not, 2 an option cannot be read, 130 it was stopped with Ctrl-C;
`lab` passes on that of JupyterLab.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import ddp_course
from ddp_course.commands import CommandError, tell
from ddp_course.launch import LaunchError


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    told = parser().parse_args(argv)
    try:
        return told.run(told)
    except (CommandError, LaunchError) as error:
        tell(error)
    except KeyboardInterrupt:
        tell("stopped")
        return 130
    return 1


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with what was typed, and where to look, and leave."""
        tell(f"{message} (see `{self.prog} --help`)")
        sys.exit(2)


def parser() -> Parser:
    """Return the parser of all commands."""
    top = Parser(
        prog="ddp-course",
        description="Distributed deep-learning training, from real processes up.",
        epilog="example: ddp-course lab",
    )
    version = f"ddp-course {ddp_course.__version__}"
    top.add_argument("--version", action="version", version=version)
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    for add in (
        _add_lab,
        _add_run,
        _add_train,
        _add_notebooks,
        _add_doctor,
        _add_bench,
        _add_plan,
    ):
        add(commands)
    return top


def _at(name: str) -> Any:
    """Import what a command needs when it runs: `--help` should not wait for it."""
    return importlib.import_module(f"ddp_course.commands.{name}")


# One function for each command: its arguments, and what they are handed to.


def _add_lab(commands: Any) -> None:
    lab = _command(
        commands,
        "lab",
        lambda told: _at("jupyter").lab(not told.no_browser, told.port, told.ip),
        "prove that ranks run on this machine, then open JupyterLab at chapter 00",
        "ddp-course lab",
        "ddp-course lab --no-browser --port 8890",
    )
    lab.add_argument("--no-browser", action="store_true", help="only print the address")
    about = "default: 8888, or the next free one"
    lab.add_argument("--port", type=_whole(65535), help=about)
    lab.add_argument("--ip", default="localhost", help="listen here; %(default)s")


def _add_run(commands: Any) -> None:
    command = _command(
        commands,
        "run",
        lambda told: _at("notebooks").run(told.chapters, told.timeout),
        "execute chapters without a browser, and store nothing",
        "ddp-course run 00",
        "ddp-course run all",
        "ddp-course run notebooks/01_ranks.ipynb",
    )
    command.add_argument(
        "chapters", nargs="+", metavar="CHAPTER", help="00, all, or a path"
    )
    command.add_argument("--timeout", **_TIMEOUT)


def _add_train(commands: Any) -> None:
    from ddp_course.model import PRESETS
    from ddp_course.parallelize import SCHEDULES, STRATEGIES

    about = "\n".join(f"  {name:<11} {what}" for name, what in STRATEGIES.items())
    command = _command(
        commands,
        "train",
        lambda told: _at("train").command(told),
        "train the course's GPT with a strategy, on one process or many",
        "ddp-course train --strategy ddp --ranks 4",
        "ddp-course train --strategy dp --replicas 2 --steps 50",
        "ddp-course train --dp 2 --tp 2 --pp 2 --zero 1",
        "ddp-course train --strategy pp --ranks 4 --schedule gpipe --microbatches 8",
        "ddp-course train --ranks 2 --steps 200 --checkpoint runs/a --every 20",
        "torchrun --nproc-per-node 4 -m ddp_course train --strategy ddp",
        f"\nstrategies:\n{about}",
    )
    command.add_argument(
        "--strategy",
        choices=tuple(STRATEGIES),
        metavar="NAME",
        help="how the work is divided, see below; ddp",
    )
    command.add_argument(
        "--zero",
        type=int,
        choices=(0, 1, 2, 3),
        help="the stage of ZeRO along dp: --strategy zero1, zero2, zero3; 0 is ddp",
    )
    command.add_argument(
        "--ranks",
        type=_whole(64),
        metavar="N",
        help="1 to 64 processes; by default as many as these say, or 1:",
    )
    for name, about in (
        ("--dp", "ranks with other rows of the batch"),
        ("--pp", "ranks with other layers"),
        ("--tp", "ranks with other parts of every matrix"),
        ("--shard", "with --zero 3: ranks along dp that have one copy together; all"),
    ):
        command.add_argument(name, type=_whole(64), metavar="N", help=about)
    for name, kind, default, about in (
        ("--replicas", _whole(10**9), None, "threads of the strategy dp; 4"),
        ("--steps", _whole(10**9), 20, "steps of AdamW"),
        ("--batch-size", _whole(10**9), 8, "rows of a step, shared by all ranks"),
        ("--lr", _positive, 3e-4, "learning rate"),
        ("--clip", _positive, None, "the largest norm of a step's gradient"),
        ("--seed", _whole(2**31, least=0), 0, "of the weights and the batches"),
        ("--every", _whole(10**9), None, "steps between two checkpoints; 10"),
        (
            "--microbatches",
            _whole(10**9),
            None,
            "parts in which a pipeline takes its rows; 4",
        ),
    ):
        about += "" if default is None else "; %(default)s"
        command.add_argument(name, type=kind, default=default, metavar="N", help=about)
    command.add_argument(
        "--preset", default="1m", choices=tuple(PRESETS), help="model; %(default)s"
    )
    command.add_argument(
        "--schedule",
        type=lambda text: text.replace("-", "_"),  # zero-bubble, too
        choices=tuple(SCHEDULES),
        help="the order of work in a pipeline; 1f1b",
    )
    command.add_argument(
        "--checkpoint",
        metavar="FOLDER",
        help="save there, and go on from the newest checkpoint in it",
    )
    command.add_argument("--json", **_FILE, help="write the loss curve there")


def _add_notebooks(commands: Any) -> None:
    def run(told: argparse.Namespace) -> int:
        names = told.chapters or ["all"]
        if told.check:
            return _at("notebooks").check(names)
        return _at("notebooks").save(names, told.timeout)

    command = _command(
        commands,
        "notebooks",
        run,
        "execute chapters and store clean outputs, or check that they are stored so",
        "ddp-course notebooks --save 00 01",
        "ddp-course notebooks --check",
    )
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("--save", action="store_true", help="execute and store")
    what.add_argument("--check", action="store_true", help="report what is not clean")
    command.add_argument(
        "chapters", nargs="*", metavar="CHAPTER", help="00, or a path; all by default"
    )
    command.add_argument("--timeout", **_TIMEOUT)


def _add_doctor(commands: Any) -> None:
    _command(
        commands,
        "doctor",
        lambda _: _at("doctor").doctor(),
        "say what this machine has and what will run how on it, and prove it",
        "ddp-course doctor",
    )


def _add_bench(commands: Any) -> None:
    def run(told: argparse.Namespace) -> int:
        from ddp_course import bench
        from ddp_course.lab.bench import plot_bench

        return bench.command(
            told.name, told.list, told.json, told.quick, told.figure, plot_bench
        )

    command = _command(
        commands,
        "bench",
        run,
        "measure the course's code beside PyTorch's own, in one run",
        "ddp-course bench launch",
        "ddp-course bench launch --quick --json launch.json",
        "ddp-course bench all-reduce --figure all_reduce.svg",
        "ddp-course bench --list",
    )
    command.add_argument("name", nargs="?", metavar="NAME", help="which bench")
    command.add_argument("--list", action="store_true", help="list the benches")
    command.add_argument("--json", **_FILE, help="write the rows there")
    about = "draw the rows there (svg, png, pdf)"
    command.add_argument("--figure", **_FILE, help=about)
    command.add_argument("--quick", action="store_true", help="few turns of few cases")


def _add_plan(commands: Any) -> None:
    from ddp_course.theory import MODELS, OPTIMIZERS, PRECISIONS, RECOMPUTE

    command = _command(
        commands,
        "plan",
        lambda told: _at("plan").command(told),
        "tell which ZeRO stage fits on which GPUs, and what it sends",
        "ddp-course plan --preset gpt2-xl --gpus 8 --memory 24",
        "ddp-course plan --parameters 7.5b --gpus 64 --memory 32",
        "ddp-course plan --parameters 6.6b --layers 32 --hidden 4096 --bandwidth 50",
        "\nprecisions:\n"
        + "\n".join(f"  {name:<20} {p.about}" for name, p in PRECISIONS.items()),
    )
    model = command.add_mutually_exclusive_group(required=True)
    model.add_argument("--preset", choices=tuple(MODELS), help="a model by name")
    model.add_argument(
        "--parameters", type=_many, metavar="N", help="how many; 7.5e9, 7.5b, 350m"
    )
    for name, about in (
        ("--layers", "of the model, with --hidden"),
        ("--hidden", "channels of a layer"),
        ("--heads", "of a layer"),
        ("--sequence", "tokens of a row"),
        ("--vocab", "words"),
    ):
        command.add_argument(name, type=_whole(10**9), metavar="N", help=about)
    for name, kind, default, about in (
        ("--gpus", _whole(10**9), 8, "that share the data"),
        ("--memory", _positive, 80, "GB of one GPU, 1 GB = 10^9 bytes"),
        ("--batch", _whole(10**9), 1, "rows at a time on one GPU"),
    ):
        about += "; %(default)s"
        command.add_argument(name, type=kind, default=default, metavar="N", help=about)
    for name, among, default in (
        ("--optimizer", OPTIMIZERS, "adamw"),
        ("--precision", PRECISIONS, "mixed"),
        ("--recompute", RECOMPUTE, "none"),
    ):
        command.add_argument(
            name, choices=tuple(among), default=default, help="%(default)s"
        )
    command.add_argument(
        "--scores", action="store_true", help="attention is not fused: it keeps scores"
    )
    command.add_argument(
        "--bandwidth", type=_positive, metavar="N", help="GB/s that a GPU sends"
    )
    command.add_argument("--json", **_FILE, help="write the rows there")


def _command(
    commands: Any, name: str, run: Callable, about: str, *examples: str
) -> Parser:
    command = commands.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog="\n  ".join(["examples:", *examples]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    return command


def _whole(most: int, least: int = 1) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number from {least} to {most}"
            )
        return int(text)

    return read


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _many(text: str) -> int:
    power = {"m": 6, "b": 9, "t": 12}.get(text[-1:].lower(), 0)
    value = _positive(text[:-1] if power else text) * 10**power
    if not 1 <= value <= 10**15:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 1000t")
    return round(value)


_FILE = {"type": Path, "metavar": "FILE"}
_TIMEOUT: dict[str, Any] = {
    "type": _whole(10**6),
    "default": 600,
    "metavar": "SECONDS",
    "help": "how long a cell may run; %(default)s",
}


if __name__ == "__main__":
    sys.exit(main())

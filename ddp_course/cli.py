"""The command `ddp-course`: reads what was typed and hands it to one of `commands`.

Errors are told on stderr after `ddp-course:`, in one line if one will do. Exit codes: 0
it went well, 1 it did not, 2 an option cannot be read, 130 it was stopped with Ctrl-C;
`lab` passes on that of JupyterLab. PyTorch is imported when a command begins, and not
for `--help`: so the names that can be typed stand here once more.
"""

from __future__ import annotations

import argparse
import errno
import math
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import ddp_course
from ddp_course.commands import CommandError, tell

STRATEGIES = {
    "average": "one all-reduce per parameter, by the training loop, after backward",
    "dp": "one process, a thread for each replica",
    "naive": "one all-reduce per parameter, when backward is through",
    "flat": "one all-reduce for all parameters, when backward is through",
    "ddp": "all-reduces of buckets, while backward runs",
    "ddp-shared": "the same, with buckets in memory that all ranks see",
    "pytorch": "PyTorch's DistributedDataParallel",
    "zero1": "optimizer states are sharded",
    "zero2": "and gradients",
    "zero3": "and parameters: fully sharded data parallelism",
    "tp": "tensor parallelism: every rank has a part of every matrix",
    "pp": "pipeline parallelism: every rank has some of the layers",
}
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zero_bubble")
PRESETS = ("1m", "8m")
OF_TRAIN = ("fp32", "bf16", "fp16", "bf16-pure")
MODELS = (*PRESETS, "gpt2", "gpt2-xl", "gpt3-175b")
OPTIMIZERS = ("adamw", "adam", "sgd", "sgd-momentum")
PRECISIONS = {
    "fp32": "all in float32",
    "bf16": "float32, and products by autocast; ZeRO-3 gathers in 16 bits",
    "fp16": "the same bytes",
    "bf16-pure": "all in bfloat16, no copy",
    "fsdp-bf16": "float32 shards, gathered and reduced in bfloat16 (FSDP2)",
    "mixed": "half, and the optimizer has a float32 copy (the ZeRO paper)",
    "mixed-fp32-gradients": "as mixed, gradients added up in float32 (Megatron-LM)",
    "mixed-both-gradients": "as mixed, and a float32 copy of them (Megatron-LM, fp16)",
}
RECOMPUTE = ("none", "selective", "full")
RANKS = ("lab", "train", "doctor", "report", "bench")  # who may start some


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    at_first = signal.getsignal(signal.SIGINT)
    try:
        top = parser()
        told = top.parse_args(argv)
        if told.module is None:
            top.print_help()
            code = 0
        else:
            # PyTorch's threads, in kernels, too, sleep while they have nothing to do.
            # Else they spin: beside others on two cores, a step took 6 s and not .3.
            os.environ.setdefault("OMP_WAIT_POLICY", "passive")
            command = import_module(f"ddp_course.commands.{told.module}").command
            if told.module in RANKS:
                ddp_course.get_ready()
            if at_first is ddp_course.stop:  # from now on there is more to end
                signal.signal(signal.SIGINT, signal.default_int_handler)
            code = command(told)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        tell("stopped")
        return 130
    except Exception as error:
        if not _is_told(error):
            raise
        if isinstance(error, OSError):  # a full disk, or nobody reads what is printed
            what = f"cannot write {error.filename or 'all of this'}"
            if error.errno in (errno.EMFILE, errno.ENFILE):
                what = "start fewer ranks, or raise the limit, `ulimit -n 4096`"
            error = f"{what}: {error.strerror}"
            with suppress(OSError, ValueError):  # or Python tries once more at its end
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        tell(error)
        return 1
    finally:  # a command that has ended cannot be stopped any more
        ended = at_first is ddp_course.stop
        signal.signal(signal.SIGINT, signal.SIG_IGN if ended else at_first)


def _is_told(error: Exception) -> bool:
    """Tell whether an error is the reader's to put right, without a traceback."""
    launch = sys.modules.get("ddp_course.launch")
    known = () if launch is None else (launch.LaunchError,)  # nothing was launched
    return isinstance(error, (CommandError, OSError, *known))


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with what was typed, and where to look, and leave."""
        tell(f"{message} (see `{self.prog} --help`)")
        sys.exit(2)

    def numbers(self, **about: tuple[Callable, Any, str]) -> None:
        """Add an option for each number: how it is read, its default, what it is."""
        for name, (read, default, text) in about.items():
            told = text if default is None else f"{text}; {default}"
            how = {"type": read, "default": default, "metavar": "N", "help": told}
            self.add_argument(_option(name), **how)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _flags(where: Any, **about: str) -> None:
    """Add options that stand alone to a parser, or a group: name -> what it is."""
    for name, text in about.items():
        where.add_argument(_option(name), action="store_true", help=text)


def _files(where: Any, metavar: str = "FILE", **about: str) -> None:
    """Add options that name a file, likewise."""
    for name, text in about.items():
        where.add_argument(_option(name), type=Path, metavar=metavar, help=text)


def parser() -> Parser:
    """Return the parser of all commands."""
    top = Parser(
        prog="ddp-course",
        description="Distributed deep-learning training, from real processes up.",
        epilog="example: ddp-course lab",
    )
    version = f"ddp-course {ddp_course.__version__}"
    top.add_argument("--version", action="version", version=version)
    top.set_defaults(module=None)
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


# One function for each command: its arguments; the module of `commands` takes them.


def _lab(add: Callable[..., Parser]) -> None:
    lab = add(
        "lab",
        "prove that ranks run on this machine, then open a copy of the course in "
        "JupyterLab",
        "ddp-course lab",
        "ddp-course lab my-course --no-browser --port 8890",
    )
    about = "your copy, made or brought up to date; what you have changed stays; "
    lab.add_argument("folder", nargs="?", metavar="FOLDER", help=f"{about}ddp-course")
    _flags(
        lab,
        here="edit the course itself, as its authors do",
        no_browser="only print the address",
    )
    lab.numbers(port=(_whole(65535), None, "default: 8888, or the next free one"))
    lab.add_argument("--ip", default="localhost", help="listen here; %(default)s")


def _run(add: Callable[..., Parser]) -> None:
    run = add(
        "run",
        "execute chapters without a browser, and store nothing",
        "ddp-course run 00",
        "ddp-course run all",
        "ddp-course run notebooks/01_ranks.ipynb",
        module="notebooks",
    )
    about = "00, all, or a path"
    run.add_argument("chapters", nargs="+", metavar="CHAPTER", help=about)
    run.numbers(timeout=_TIMEOUT)


def _progress(add: Callable[..., Parser]) -> None:
    progress = add(
        "progress",
        "show which exercises of your copy have passed, and what is next",
        "ddp-course progress",
        "ddp-course progress --report /shared/our-class",
        "ddp-course progress --collect /shared/our-class",
    )
    what = progress.add_mutually_exclusive_group()
    about = "write it there without your name; into a folder, under any name"
    _files(what, report=about)
    _files(what, "FOLDER", collect="count the reports of a class")


def _train(add: Callable[..., Parser]) -> None:
    train = add(
        "train",
        "train the course's GPT with a strategy, on one process or many",
        "ddp-course train --strategy ddp --ranks 4",
        "ddp-course train --strategy dp --replicas 2 --steps 50",
        "ddp-course train --dp 2 --tp 2 --pp 2 --zero 1",
        "ddp-course train --strategy pp --ranks 4 --schedule gpipe --microbatches 8",
        "ddp-course train --ranks 2 --steps 200 --checkpoint runs/a --every 20",
        "torchrun --nproc-per-node 4 -m ddp_course train --strategy ddp",
        more=_list("strategies", STRATEGIES, 11),
    )
    about = "how the work is divided, see below; ddp"
    names = tuple(STRATEGIES)
    train.add_argument("--strategy", choices=names, metavar="NAME", help=about)
    about = "the stage of ZeRO along dp: --strategy zero1, zero2, zero3; 0 is ddp"
    train.add_argument("--zero", type=int, choices=(0, 1, 2, 3), help=about)
    ranks, many = _whole(64), _whole(10**9)
    train.numbers(
        ranks=(ranks, None, "1 to 64 processes; by default as many as these say, or 1"),
        dp=(ranks, None, "ranks with other rows of the batch"),
        pp=(ranks, None, "ranks with other layers"),
        tp=(ranks, None, "ranks with other parts of every matrix"),
        shard=(ranks, None, "with --zero 3: ranks of dp that share one copy; all"),
        replicas=(many, None, "threads of the strategy dp; 4"),
        steps=(many, 20, "steps of AdamW"),
        batch_size=(many, 8, "rows of a step, shared by all ranks"),
        lr=(_positive, 3e-4, "learning rate"),
        clip=(_positive, None, "the largest norm of a step's gradient"),
        seed=(_whole(2**31, least=0), 0, "of the weights and the batches"),
        every=(many, None, "steps between two checkpoints; 10"),
        microbatches=(many, None, "parts in which a pipeline takes its rows; 4"),
        local_steps=(many, None, "with ddp: steps alone, then the parameters' mean"),
        outer_lr=(_positive, None, "of the outer optimizer; 0.7"),
        outer_momentum=(float, None, "of the outer optimizer; 0.9"),
    )
    about = "model; %(default)s"
    train.add_argument("--preset", default="1m", choices=PRESETS, help=about)
    about = "fp32; bf16 or fp16: products by autocast; bf16-pure: everything"
    train.add_argument("--precision", default="fp32", choices=OF_TRAIN, help=about)
    about = "the order of work in a pipeline; 1f1b"
    read = {"type": lambda text: text.replace("-", "_")}  # zero-bubble, too
    train.add_argument("--schedule", **read, choices=SCHEDULES, help=about)
    about = "what is done with the mean: taken; or an outer step (DiLoCo); average"
    train.add_argument("--outer", choices=("average", "nesterov"), help=about)
    about = "with ddp, gradients travel in fewer bytes: fp16, bf16, int8, sign, "
    about += "topk:0.01, randomk:0.01, powersgd:4"
    train.add_argument("--compress", metavar="HOW", help=about)
    about = "save there, and go on from the newest checkpoint in it"
    train.add_argument("--checkpoint", metavar="FOLDER", help=about)
    _files(train, json="write the loss curve there")


def _notebooks(add: Callable[..., Parser]) -> None:
    notebooks = add(
        "notebooks",
        "execute chapters and store clean outputs, or check that they are stored so",
        "ddp-course notebooks --save 00 01",
        "ddp-course notebooks --check",
    )
    what = notebooks.add_mutually_exclusive_group(required=True)
    _flags(what, save="execute and store", check="report what is not clean")
    about = "00, or a path; all by default"
    notebooks.add_argument("chapters", nargs="*", metavar="CHAPTER", help=about)
    notebooks.numbers(timeout=_TIMEOUT)


def _site(add: Callable[..., Parser]) -> None:
    site = add(
        "site",
        "make web pages of the course, from the stored notebooks",
        "ddp-course site",
        "ddp-course site --out /srv/www/ddp-course",
    )
    about = "a new folder, or one with an older edition; %(default)s"
    _files(site, "FOLDER", out=about)
    site.set_defaults(out=Path("ddp-course-site"))


def _doctor(add: Callable[..., Parser]) -> None:
    doctor = add(
        "doctor",
        "say what this machine has and what will run how on it, and prove it",
        "ddp-course doctor",
        "ddp-course doctor --report",
    )
    about = "as text to send when asking for help: no names, no folders"
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
    bench.add_argument("bench", nargs="?", metavar="NAME", help="which bench")
    _flags(bench, list="list the benches, and what each compares")
    about = "draw the rows there (svg, png, pdf)"
    _files(bench, json="write the rows there", figure=about)
    _flags(bench, quick="few turns of few cases")


def _plan(add: Callable[..., Parser]) -> None:
    plan = add(
        "plan",
        "tell which ZeRO stage fits on which GPUs, and what it sends",
        "ddp-course plan --preset gpt2-xl --gpus 8 --memory 24",
        "ddp-course plan --parameters 7.5b --gpus 64 --memory 32",
        "ddp-course plan --parameters 6.6b --layers 32 --hidden 4096 --bandwidth 50",
        more=_list("precisions", PRECISIONS, 20),
    )
    model = plan.add_mutually_exclusive_group(required=True)
    model.add_argument("--preset", choices=MODELS, help="a model by name")
    about = "how many; 7.5e9, 7.5b, 350m"
    model.add_argument("--parameters", type=_many, metavar="N", help=about)
    many = _whole(10**9)
    plan.numbers(
        layers=(many, None, "of the model, with --hidden: then activations count, too"),
        hidden=(many, None, "channels of a layer"),
        heads=(many, None, "of a layer; one for 64 channels"),
        sequence=(many, None, "tokens of a row; 2048"),
        vocab=(many, None, "words; 50,257"),
        gpus=(many, 8, "that share the data"),
        memory=(_positive, 80, "GB of one GPU, 1 GB = 10^9 bytes"),
        batch=(many, 1, "rows at a time on one GPU"),
        bandwidth=(_positive, None, "GB/s that a GPU sends"),
    )
    for name, among, default in (
        ("--optimizer", OPTIMIZERS, "adamw"),
        ("--precision", tuple(PRECISIONS), "mixed"),
        ("--recompute", RECOMPUTE, "none"),
    ):
        plan.add_argument(name, choices=among, default=default, help="%(default)s")
    _flags(plan, scores="attention is not fused: it keeps scores")
    _files(plan, json="write the rows there")


# How what was typed is read


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


_TIMEOUT = (_whole(10**6), 600, "seconds that a cell may run")


if __name__ == "__main__":
    sys.exit(main())

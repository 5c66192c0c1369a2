"""Run a notebook's function under torchrun, also on many machines.

    torchrun --nproc-per-node 4 -m ddp_course.launch MODULE:FUNCTION [ARGUMENT ...]

calls FUNCTION of MODULE on every rank with the process group ready, as `spawn` does.
Rank 0 prints what each rank returned, in rank order. An ARGUMENT is a Python value
(`12`, `0.5`, `"text"`) or `name=value`.

    torchrun --nproc-per-node 4 -m ddp_course.launch ddp_course.train:train steps=5

On several machines, run on each of them (A is any one of them):

    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d \\
        --rdzv-endpoint A:29400 -m ddp_course.launch ddp_course.train:train

With `--strict`, NCCL's rules apply on the CPU (`launch.strict`). `--strict` also runs
any program that creates its process group itself:

    torchrun --nproc-per-node 4 -m ddp_course.launch --strict program.py [ARGUMENT ...]

Restarts (`--max-restarts 3`) work: each attempt has its own rendezvous.
"""

import argparse
import ast
import importlib
import os
import reprlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from ddp_course.launch import strict
from ddp_course.launch.topology import here
from ddp_course.launch.torchrun import join, leave, report_cause_first, under_torchrun


@record  # lets torchrun show the traceback of the rank that failed first
def main(argv: list[str] | None = None) -> None:
    """Run one rank of a torchrun job."""
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node 4 -m ddp_course.launch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--strict", action="store_true", help="apply NCCL's rules, on the CPU"
    )
    parser.add_argument("function", metavar="MODULE:FUNCTION")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT")
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--strict"] and argv[1:] and argv[1].endswith(".py"):
        with report_cause_first():
            strict.run_program(*argv[1:])
        return
    options = parser.parse_args(argv)
    if options.strict:
        strict.wrap_batches()  # before the function's module is imported
    try:
        fn = find_function(options.function)
        args, kwargs = parse_arguments(options.arguments)
    except ValueError as error:
        parser.error(str(error))
    if not under_torchrun():
        unset = "RANK and MASTER_ADDR are not set"
        parser.error(f"{unset}: start it with torchrun, which sets them")
    with report_cause_first():
        store = join(backend=strict.NAME) if options.strict else join()
        value = fn(*args, **kwargs)
        print_in_rank_order(value, store)
        leave()


def find_function(name: str) -> Callable:
    """Return the function that "package.module:function" names.

    Raises ValueError, which says which part of the name is wrong.
    """
    module_name, colon, function_name = name.partition(":")
    if not colon or module_name[:1] in ("", ".") or not function_name:
        problem = f"{name!r} is not of the form MODULE:FUNCTION"
        if name.endswith(".py"):
            program = f"torchrun --nproc-per-node 4 {name}"
            problem += f"; a program that creates its process group runs by {program}"
        raise ValueError(problem)
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does; torchrun does not
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"no module {error.name!r} (from {name!r})") from None
    fn = getattr(module, function_name, None)
    if not callable(fn):
        raise ValueError(f"module {module_name!r} has no function {function_name!r}")
    return fn


def parse_arguments(words: list[str]) -> tuple[list[Any], dict[str, Any]]:
    """Return positional and keyword arguments from words like `12` and `name=value`."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name.isidentifier():
            kwargs[name] = _literal(value)
        elif kwargs:
            raise ValueError(f"{word!r} comes after an argument of the form name=value")
        else:
            args.append(_literal(word))
    return args, kwargs


def print_in_rank_order(value: Any, store: dist.Store) -> None:
    """Print on rank 0 what every rank returned, shortened; skip ranks with None."""
    place = here()
    text = "" if value is None else _shorten(value)
    store.set(f"returned/{place.rank}", text)
    if place.rank == 0:
        for rank in range(place.world_size):
            text = store.get(f"returned/{rank}").decode()
            if text:
                print(f"[rank {rank}] returned {text}", flush=True)


def _shorten(value: Any) -> str:
    brief = reprlib.Repr()
    brief.maxother = brief.maxstring = 200
    return brief.repr(value)


def _literal(word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return word


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # now and then, PyTorch's threads abort a rank that exits normally

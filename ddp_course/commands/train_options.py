"""The options of `ddp-course train`, checked before ranks start, without PyTorch.

The options are the fields of `spec.Training` and `spec.Layout`; an option that was not
typed is None.
"""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any

from ddp_course.commands import CommandError, check_file
from ddp_course.spec import AXES, Layout, Training, layout_for

MOST = 64  # ranks that the command starts on this machine
OF_LAYOUT = [each.name for each in fields(Layout)]


def settings_of(args: Namespace) -> dict[str, Any]:
    """Return the value of each option, by name: as typed, or the default."""
    both = (*fields(Training), *fields(Layout))
    settings = {each.name: getattr(args, each.name) for each in both}
    defaults = {each.name: each.default for each in both if each.name != "dp"}
    return {n: defaults.get(n) if v is None else v for n, v in settings.items()}


def ranks_of(args: Namespace) -> int:
    """Return how many ranks to start: as typed, or as many as the axes need."""
    if args.ranks:
        return args.ranks
    typed = {axis: size for axis in AXES if (size := getattr(args, axis))}
    return Layout(**{"dp": args.ep or 1} | typed).ranks


def check_typed(args: Namespace) -> None:
    """Raise CommandError for options without effect, wrong files, impossible layouts.

    Under torchrun, only `train` checks the layout: it knows the number of ranks.
    """
    pipeline = "a pipeline, as with --pp 2"
    for name, used, by in (
        ("schedule", (args.pp or 1) > 1, pipeline),
        ("microbatches", (args.pp or 1) > 1, pipeline),
        ("attention", (args.cp or 1) > 1, "a divided sequence, as with --cp 2"),
        ("shard", args.zero == 3, "--zero 3"),
        ("every", args.checkpoint is not None, "--checkpoint"),
        ("save", args.checkpoint is not None, "--checkpoint"),
        ("experts_per_token", args.experts is not None, "--experts"),
        ("capacity", args.experts is not None, "--experts"),
        ("balance", args.experts is not None, "--experts"),
    ):
        if getattr(args, name) is not None and not used:
            option = name.replace("_", "-")
            raise CommandError(f"--{option} has no effect without {by}")
    check_file(args.json)
    if args.checkpoint is not None:
        check_folder(args.checkpoint)
    if "RANK" not in os.environ:
        check_layout(args)


def check_folder(folder: str) -> None:
    """Raise CommandError if a file stands where the checkpoints' folder should be."""
    for place in (Path(folder), *Path(folder).parents):
        if place.exists() and not place.is_dir():
            raise CommandError(
                f"--checkpoint {folder}: {place} is a file; name a folder"
            )


def check_layout(args: Namespace) -> None:
    """Raise CommandError unless the typed options are a valid layout."""
    settings, ranks = settings_of(args), ranks_of(args)
    if ranks > MOST:
        raise CommandError(
            f"the axes need {ranks} ranks; at most {MOST} are started on one machine: "
            "use smaller axes, or torchrun on many machines"
        )
    try:
        layout = layout_for(ranks, **{name: settings[name] for name in OF_LAYOUT})
        model = {each.name: settings[each.name] for each in fields(Training)}
        config = Training(**model).config
        layout.check(batch_size=settings["batch_size"], config=config)
    except ValueError as error:
        raise CommandError(str(error)) from None
    if layout.local_steps is not None and ranks == 1:
        raise CommandError(
            f"local_steps is {layout.local_steps}, and ranks is 1; averaging needs two "
            "ranks or more: --ranks 2"
        )

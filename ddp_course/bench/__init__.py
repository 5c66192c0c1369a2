"""Floor 4: the course's code side by side with PyTorch's own (`ddp-course bench`).

    turns           measure any number of contenders in turns; pairs, and their rows;
                    the share of the machine that other programs took
    steps           training steps as contenders, and their cases
    table           the printed table
    all_reduce      every all-reduce of the course beside gloo's
    ddp             a training step under our DDP beside PyTorch's
    zero            a training step under our ZeRO and FSDP beside PyTorch's
    tp              a training step under our tensor parallelism beside PyTorch's
    attention       attention over a divided sequence, beside one process and PyTorch's
    experts         dispatch and combine of experts, beside bare all-to-alls
    pp              a training step under our pipeline beside PyTorch's, and bubbles
    async_          a parameter server beside its formulas, bare messages and rpc
    order           priority over our DDP on slow links, beside a simulation
    precision       a training step in 16 bits, ours beside PyTorch's
    interval        time lost to saves and failures, at several intervals
    killed          ranks that are killed at random, and continue from checkpoints
    predict         a step of twenty layouts, beside its predicted time and memory
    emulated        ranks with a memory limit, a slow chip and slow links
    compression     a training step that sends gradients in fewer bytes
    launch          `spawn` beside `torch.multiprocessing.spawn`
    launch_process  one of these two launchers, in its own process

A bench is a module here with ABOUT, a sentence; PAIRS, its comparisons; and
`bench(quick)`, which yields rows. To add a bench, add a file: it is found by its
contents. (`async` is a keyword of Python, so that module's name ends in an underscore.)
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path
from types import ModuleType


def benches() -> dict[str, str]:
    """Return the sentence ABOUT of each bench, by the bench's name.

    Reads the sources only: importing a bench would import PyTorch.
    """
    found = {}
    for module in pkgutil.iter_modules(__path__):
        path = Path(module.module_finder.path, f"{module.name}.py")
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ABOUT":
                name = module.name.rstrip("_").replace("_", "-")
                found[name] = ast.literal_eval(node.value)
    return found


def load(name: str) -> ModuleType:
    """Return the imported module of the bench `name`."""
    module = name.replace("-", "_")
    known = {found.name for found in pkgutil.iter_modules(__path__)}
    end = "" if module in known else "_"
    return importlib.import_module(f"{__name__}.{module}{end}")

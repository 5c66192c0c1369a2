"""Floor 4: the course's code side by side with PyTorch's own (`ddp-course bench`).

    turns           any number of contenders, measured in turns; pairs, and their rows;
                    how much of the machine other programs took meanwhile
    steps           training steps as contenders, and the cases in which they meet
    table           what is printed
    all_reduce      every all-reduce of the course beside gloo's
    ddp             a training step under our DDP beside PyTorch's
    zero            a training step under our ZeRO and FSDP beside PyTorch's
    tp              a training step under our tensor parallelism beside PyTorch's
    pp              a training step under our pipeline beside PyTorch's, and bubbles
    async_          a parameter server beside its formulas, bare messages and rpc
    order           priority over our DDP on slow links, beside what was simulated
    precision       a training step in 16 bits, ours beside PyTorch's
    launch          `spawn` beside `torch.multiprocessing.spawn`
    launch_process  one of the two, in a process of its own

A bench is a module here with ABOUT, a sentence; PAIRS, what is laid over what; and
`bench(quick)`, which yields rows. It is found by looking: to add one is to add a file.
(A module cannot be imported as `async`, so that one ends in an underscore.)
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def benches() -> dict[str, ModuleType]:
    """Return the benches that there are, by name."""
    modules = [
        importlib.import_module(f"{__name__}.{found.name}")
        for found in pkgutil.iter_modules(__path__)
    ]
    return {
        module.__name__.rpartition(".")[2].rstrip("_").replace("_", "-"): module
        for module in modules
        if all(hasattr(module, name) for name in ("ABOUT", "PAIRS", "bench"))
    }

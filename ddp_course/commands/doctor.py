"""`doctor`: what this machine has, what will run how on it, and the proof."""

from __future__ import annotations

import platform
from importlib import metadata

from rich.console import Console
from rich.table import Table

from ddp_course.commands.machine import Machine, in_words, this_machine
from ddp_course.commands.proofs import prove_all_reduce
from ddp_course.launch.devices import choose
from ddp_course.launch.topology import Topology

PACKAGES = ("torch", "ipykernel", "jupyterlab", "ddp-course")
MIB, GIB = 2**20, 2**30


def doctor() -> int:
    """Print the facts, what follows from them, and the proof. Returns the exit code."""
    machine = this_machine()
    table = Table(show_header=False)
    for row in facts(machine).items():
        table.add_row(*row)
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    for sentence in (*advice(machine), prove_all_reduce()):
        console.print(sentence, markup=False)
    return 0


def facts(machine: Machine) -> dict[str, str]:
    """Return what there is: name -> a few words."""
    cores = f"{machine.cores:g}"
    if machine.cores < machine.all_cores:
        cores += f" of the machine's {machine.all_cores}"
    memory = in_words(machine.memory)
    if machine.memory != machine.all_memory:
        memory += f" of the machine's {in_words(machine.all_memory)}"
    missing = [b for b in ("gloo", "nccl", "mpi", "ucc") if b not in machine.backends]
    return {
        "cores": cores,
        "memory": memory,
        "GPUs": ", ".join(machine.gpus) or "none",
        "backends": ", ".join(machine.backends)
        + (f" (not in this PyTorch: {', '.join(missing)})" if missing else ""),
        "shared memory": "no /dev/shm"
        if machine.shared_memory is None
        else f"{in_words(machine.shared_memory)} in /dev/shm",
        "versions": ", ".join(
            [f"Python {platform.python_version()}", *map(_version, PACKAGES)]
        ),
    }


def advice(machine: Machine, ranks: int = 4) -> list[str]:
    """Return in plain words what will run how, and what will not."""
    return [how_ranks_run(machine, ranks), *warnings(machine)]


def how_ranks_run(machine: Machine, ranks: int) -> str:
    """Return where `ranks` ranks run, over what, and how many of them at a time."""
    gpus = len(machine.gpus)
    placement = choose(Topology(1, ranks), gpus=gpus)
    if placement.gpus:
        return f"{ranks} ranks run on {ranks} GPUs, one each, over NCCL."
    cores = f"{machine.cores:g} core" + "s" * (machine.cores != 1)
    text = f"{ranks} ranks run on {cores} over {placement.backend}; "
    if gpus:
        text += f"the {gpus} GPU{'s are' if gpus > 1 else ' is'} used by up to {gpus} "
        text += "ranks, or shared with share_gpus=True. "
    else:
        text += "there is no GPU. "
    if machine.cores >= ranks:
        return text + "Every rank has a core of its own."
    return text + (
        f"They take turns, so {ranks} ranks are not faster than one here; numbers, "
        "bytes and order of messages are as on a cluster."
    )


def warnings(machine: Machine) -> list[str]:
    """Return what is too small here, what that breaks, and what to do."""
    found = []
    if machine.memory is not None and machine.memory < 2 * GIB:
        found.append(
            f"Memory is scarce: {in_words(machine.memory)}. JupyterLab, a notebook and "
            "4 ranks want about 1.5 GiB; close other notebooks."
        )
    if machine.shared_memory is not None and machine.shared_memory <= 64 * MIB:
        found.append(
            f"/dev/shm has {in_words(machine.shared_memory)}, what a container gets by "
            "default. Ranks run, but DataLoader workers and large tensors shared "
            'between processes die with "Bus error": start the container with '
            "--shm-size=2g or --ipc=host."
        )
    return found


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"no {package}"

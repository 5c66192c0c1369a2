"""Which device and which backend a rank gets: decided before any process starts.

NCCL wants a GPU of its own for every rank ("each process must have exclusive access
to every GPU it uses"); gloo does not mind. So: a GPU for each rank if there are
enough, otherwise the CPU and gloo, in both cases with one line that says so. Several
ranks share a GPU only when asked to. Explained in chapter 01.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ddp_course.launch.topology import Place, Topology, here

BACKENDS = ("auto", "gloo", "strict", "nccl", "mpi", "ucc")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a launch run, and what they talk over.

    `gpus[r]` is the number of the GPU that rank r uses, as this machine counts them;
    it is empty when the ranks run on the CPU.
    """

    backend: str
    gpus: tuple[int, ...]
    sentence: str

    def environment(self, place: Place) -> dict[str, str]:
        """Return what the rank at `place` must know about its device.

        An emulated node sees only its own GPUs, as a real one does: that makes
        `cuda:local_rank` right on every node, unless ranks share GPUs.
        """
        if not self.gpus:
            return {"DDP_COURSE_DEVICE": "cpu"}
        first = place.node_rank * place.topology.nproc_per_node
        mine = self.gpus[first : first + place.topology.nproc_per_node]
        seen = sorted(set(mine))
        visible = _visible_gpus()
        return {
            "DDP_COURSE_DEVICE": f"cuda:{seen.index(self.gpus[place.rank])}",
            "CUDA_VISIBLE_DEVICES": ",".join(
                visible[gpu] if visible else str(gpu) for gpu in seen
            ),
        }


def choose(
    topology: Topology,
    *,
    device: str = "auto",
    backend: str = "auto",
    share_gpus: bool = False,
    gpus: int | None = None,
) -> Placement:
    """Decide device and backend for every rank of `topology`. Pure: starts nothing.

    `gpus` is the number of GPUs of this machine (default: ask PyTorch). Raises
    ValueError, naming the value and what is allowed.
    """
    n = topology.world_size
    have = torch.cuda.device_count() if gpus is None else gpus
    if device not in DEVICES:
        raise ValueError(f"device is {device!r}; it can be one of {_listed(DEVICES)}")
    if backend not in BACKENDS:
        raise ValueError(
            f"backend is {backend!r}; it can be one of {_listed(BACKENDS)}"
        )
    if backend in ("mpi", "ucc") and not _built_in(backend):
        raise ValueError(
            f"backend is {backend!r}, but this PyTorch was built without it; 'gloo' "
            "works everywhere"
        )
    if device == "cuda" and have == 0:
        raise ValueError("device is 'cuda', but this machine has no GPU; use 'cpu'")
    if backend == "strict" and device != "cuda":
        return _on_cpu(n, backend, "NCCL's rules, on any machine")
    if backend == "strict":
        raise ValueError("backend is 'strict', which is for the CPU; device is 'cuda'")
    if backend == "nccl":
        _demand_gpus_for_nccl(n, have, device, share_gpus)
    if device == "cpu" or have == 0:
        why = "this machine has no GPU" if have == 0 else "as asked"
        return _on_cpu(n, backend, why)
    if share_gpus and n > have:
        backend = "gloo" if backend == "auto" else backend
        return Placement(
            backend,
            tuple(rank % have for rank in range(n)),
            f"{_ranks(n)} share {_gpus(have)} and talk over {backend}, since NCCL "
            f"wants a GPU for each rank.",
        )
    if n > have:
        if device == "cuda":
            raise ValueError(
                f"{n} ranks want a GPU each, but this machine has {have}; start at "
                f"most {have}, or let them share with share_gpus=True"
            )
        return _on_cpu(n, backend, f"this machine has {_gpus(have)}, too few for all")
    if backend == "auto":
        # Both: NCCL for tensors on the GPUs, gloo for those on the CPU.
        backend = "cpu:gloo,cuda:nccl"
    return Placement(
        backend, tuple(range(n)), f"{_ranks(n)} on {_gpus(n)}, talking over {backend}."
    )


def device(environ: Mapping[str, str] = os.environ) -> torch.device:
    """Return the device of the calling process: its own GPU, or the CPU.

    In a rank of `spawn` it is what the launcher chose. Under torchrun it is
    `cuda:LOCAL_RANK` if the machine has a GPU for each of its ranks, else the CPU.
    """
    chosen = environ.get("DDP_COURSE_DEVICE")
    if chosen is not None:
        return torch.device(chosen)
    place = here(environ)
    if place.topology.nproc_per_node <= torch.cuda.device_count():
        return torch.device("cuda", place.local_rank)
    return torch.device("cpu")


def _demand_gpus_for_nccl(n: int, have: int, device: str, share_gpus: bool) -> None:
    needs = "backend is 'nccl', which needs a GPU for each"
    if have == 0:
        raise ValueError(f"{needs} rank, but this machine has none; use 'gloo'")
    if device == "cpu":
        raise ValueError(f"{needs} rank, but device is 'cpu'; use 'gloo'")
    if share_gpus:
        raise ValueError(
            f"{needs} rank, but share_gpus is True; this machine has {have}. Use 'gloo'"
        )
    if n > have:
        raise ValueError(
            f"{needs} of the {n} ranks; this machine has {have}. Start at most {have}, "
            "or use 'gloo'"
        )


def _on_cpu(n: int, backend: str, why: str) -> Placement:
    backend = "gloo" if backend == "auto" else backend
    return Placement(
        backend, (), f"{_ranks(n)} on the CPU, talking over {backend}: {why}."
    )


def _visible_gpus() -> list[str]:
    """The names in CUDA_VISIBLE_DEVICES, which the caller's own numbers refer to."""
    return [g for g in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if g]


def _built_in(backend: str) -> bool:
    return getattr(torch.distributed, f"is_{backend}_available")()


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(repr(name) for name in names)

"""Choose the device and the backend of each rank, before any process starts.

NCCL requires a separate GPU for every rank ("each process must have exclusive access to
every GPU it uses"); gloo does not. So each rank gets a GPU if there are enough,
otherwise all ranks run on the CPU over gloo; a printed sentence says which. Ranks share
GPUs only if `share_gpus` is True. Chapter 01.
"""

import os
from dataclasses import dataclass

import torch

from ddp_course.launch.topology import Place, Topology

BACKENDS = ("auto", "gloo", "strict", "nccl")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Placement:
    """The devices of a launch's ranks, and the backend that they talk over.

    `gpus[r]` is the index of rank r's GPU among those that PyTorch sees; `gpus` is
    empty if the ranks run on the CPU. `sentence` says where the ranks run, and why.
    """

    backend: str
    gpus: tuple[int, ...]
    sentence: str

    def environment(self, place: Place) -> dict[str, str]:
        """Return the environment variables for the device of the rank at `place`.

        An emulated node sees only its own GPUs, as a real one does: that makes
        `cuda:local_rank` right on every node, unless ranks share GPUs.
        """
        if not self.gpus:
            return {"DDP_COURSE_DEVICE": "cpu"}
        first = place.node_rank * place.topology.nproc_per_node
        mine = self.gpus[first : first + place.topology.nproc_per_node]
        # If this variable is set, `gpus` are indices in its list.
        allowed = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        visible, seen = [gpu for gpu in allowed.split(",") if gpu], sorted(set(mine))
        names = [visible[gpu] if visible else str(gpu) for gpu in seen]
        return {
            "DDP_COURSE_DEVICE": f"cuda:{seen.index(self.gpus[place.rank])}",
            "CUDA_VISIBLE_DEVICES": ",".join(names),
        }


def choose(
    topology: Topology,
    *,
    device: str = "auto",
    backend: str = "auto",
    share_gpus: bool = False,
    gpus: int | None = None,
) -> Placement:
    """Choose device and backend for every rank of `topology`; start nothing.

    `gpus` is the number of GPUs of this machine (None: ask PyTorch). Raises ValueError,
    which names the value and what is allowed.
    """
    n = topology.world_size
    have = torch.cuda.device_count() if gpus is None else gpus
    asked = ("device", device, DEVICES), ("backend", backend, BACKENDS)
    for name, value, known in asked:
        if value not in known:
            can = ", ".join(map(repr, known))
            raise ValueError(f"{name} is {value!r}; it can be one of {can}")
    if device == "cuda" and have == 0:
        raise ValueError("device is 'cuda', but this machine has no GPU; use 'cpu'")
    if backend == "strict" and device != "cuda":
        return _on_cpu(n, backend, "NCCL's rules, on any machine")
    if backend == "strict":
        raise ValueError("backend is 'strict', which is for the CPU; device is 'cuda'")
    if backend == "nccl":
        _require_gpus_for_nccl(n, have, device, share_gpus)
    if device == "cpu" or have == 0:
        why = "this machine has no GPU" if have == 0 else "as asked"
        return _on_cpu(n, backend, why)
    if share_gpus and n > have:
        backend = "gloo" if backend == "auto" else backend
        sentence = (
            f"{_ranks(n)} share {_gpus(have)} and talk over {backend}, since NCCL "
        )
        sentence += "wants a GPU for each rank."
        return Placement(backend, tuple(rank % have for rank in range(n)), sentence)
    if n > have:
        if device == "cuda":
            raise ValueError(
                f"{n} ranks want a GPU each, but this machine has {have}; start at "
                f"most {have}, or let them share with share_gpus=True"
            )
        return _on_cpu(n, backend, f"this machine has {_gpus(have)}, too few for all")
    if backend == "auto":
        # NCCL for tensors on the GPUs, gloo for those on the CPU.
        backend = "cpu:gloo,cuda:nccl"
    sentence = f"{_ranks(n)} on {_gpus(n)}, talking over {backend}."
    return Placement(backend, tuple(range(n)), sentence)


def _require_gpus_for_nccl(n: int, have: int, device: str, share_gpus: bool) -> None:
    sentence = (
        f"of the {n} ranks; this machine has {have}. Start at most {have}, or use"
    )
    refused = {
        "rank, but this machine has none; use": have == 0,
        "rank, but device is 'cpu'; use": device == "cpu",
        f"rank, but share_gpus is True; this machine has {have}. Use": share_gpus,
        sentence: n > have,
    }
    for why in (why for why, is_so in refused.items() if is_so):
        needs = "backend is 'nccl', which needs a GPU for each"
        raise ValueError(f"{needs} {why} 'gloo'")


def _on_cpu(n: int, backend: str, why: str) -> Placement:
    backend = "gloo" if backend == "auto" else backend
    sentence = f"{_ranks(n)} on the CPU, talking over {backend}: {why}."
    return Placement(backend, (), sentence)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"

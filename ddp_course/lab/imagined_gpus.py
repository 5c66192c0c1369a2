"""Imagined GPUs: tensors stay on the CPU, and their placements are recorded.

    with ImaginedGPUs(2) as gpus:
        torch.cuda.set_device(1)
        model.cuda()
    gpus.used  # {1}: the numbers of the GPUs that tensors were put on

So a script for GPUs runs on a machine without GPUs, and does not use real ones.
`ImaginedGPUs` imitates `torch.cuda` with a number of GPUs and a current one; `.to`,
`.cuda` and `device=`, which may name a GPU; files, in which every tensor is on the
current GPU unless `.cpu()` has copied it; and `torch.load`, with its own rules. It does
not imitate speed, memory, streams, or errors about tensors on different devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode


class ImaginedGPUs(TorchFunctionMode):
    """A context manager in which this thread sees `count` imagined GPUs.

    Attributes:
        used: the numbers of the GPUs on which tensors were placed, `loaded` included.
        loaded: the numbers of the GPUs on which `torch.load` placed tensors.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.current = count, 0
        self.used: set[int] = set()
        self.loaded: set[int] = set()
        self._placed: dict[int, int] = {}  # {address of a tensor: number of its GPU}
        self._host: dict[int, Any] = {}  # {address: tensor on the host}
        self._patches = ExitStack()

    def __enter__(self) -> ImaginedGPUs:
        """Replace PyTorch's functions for GPUs, until the block ends."""
        seed = torch.default_generator.manual_seed
        of_cuda = {
            "is_available": lambda: True,
            "device_count": lambda: self.count,
            "current_device": lambda: self.current,
            "set_device": self._set_device,
            "device": self._device_block,
            "synchronize": lambda device=None: None,
            "manual_seed": seed,  # dropout draws from the CPU's generator here
            "manual_seed_all": seed,
        }
        for name, function in of_cuda.items():
            self._patch(torch.cuda, name, function)
        self._patch(torch.serialization, "location_tag", self._location)
        self._patch(torch.serialization, "default_restore_location", self._restore)
        self._patch(torch.UntypedStorage, "cuda", self._storage_cuda())
        self._patch(DistributedDataParallel, "__init__", self._ddp_init())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Restore PyTorch's functions."""
        super().__exit__(*error)
        self._patches.close()

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Call a function of PyTorch on the CPU, and note the GPU that it names."""
        kwargs = dict(kwargs or {})
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.cuda:
            index = self._use(args[1] if len(args) > 1 else kwargs.get("device"))
            self._placed[args[0].data_ptr()] = index
            return args[0]
        index, to_host = None, func is Tensor.cpu
        if func is Tensor.to and names_device(args):
            index = self._use(args[1])
            to_host = index is None
            args = (args[0], torch.device("cpu"), *args[2:])
        if kwargs.get("device") is not None:
            index = self._use(kwargs["device"])
            kwargs["device"] = torch.device("cpu")
        result = func(*args, **kwargs)
        if index is not None and isinstance(result, Tensor):
            self._placed[result.data_ptr()] = index
        if to_host:
            result = result.clone()
            self._host[result.data_ptr()] = result
        return result

    def number_of(self, tensor: Tensor) -> int | None:
        """Return the number of the GPU that a tensor was put on, or None."""
        return self._placed.get(tensor.data_ptr())

    def _patch(self, owner: Any, name: str, new: Any) -> None:
        self._patches.enter_context(mock.patch.object(owner, name, new))

    def _index(self, device: Any) -> int | None:
        """Return the number of the GPU that is named; None if it is the CPU."""
        if device is None:
            return self.current
        device = torch.device("cuda", device) if type(device) is int else device
        device = torch.device(device)
        if device.type != "cuda":
            return None
        index = self.current if device.index is None else device.index
        if index >= self.count:
            raise RuntimeError(
                f"invalid device ordinal: cuda:{index}; this machine has {self.count} "
                "(imagined) GPUs, and the first is cuda:0"
            )
        return index

    def _use(self, device: Any) -> int | None:
        index = self._index(device)
        if index is not None:
            self.used.add(index)
        return index

    def _set_device(self, device: Any) -> None:
        index = self._index(device)
        if index is None:
            raise ValueError(f"set_device got {device}, which is not a GPU; try 0")
        self.current = index

    @contextlib.contextmanager
    def _device_block(self, device: Any) -> Iterator[None]:
        before = self.current
        self._set_device(device)
        try:
            yield
        finally:
            self.current = before

    def _location(self, storage: Any) -> str:
        """Return the device that a file records for a tensor's numbers."""
        return "cpu" if storage.data_ptr() in self._host else f"cuda:{self.current}"

    def _restore(self, storage: Any, location: Any) -> Any:
        """Record the device of a loaded tensor; its numbers stay on the CPU."""
        index = self._use(location)
        if index is None:
            self._host[storage.data_ptr()] = storage
        else:
            self.loaded.add(index)
        return storage

    def _storage_cuda(self) -> Callable:
        def cuda(storage: Any, device: Any = None, non_blocking: bool = False) -> Any:
            return self._restore(storage, device)

        return cuda

    def _ddp_init(self) -> Callable:
        """Return DDP's constructor, which refuses `device_ids` for modules on CPUs."""
        init = DistributedDataParallel.__init__

        def imagined(
            ddp: Any,
            module: Any,
            device_ids: Any = None,
            output_device: Any = None,
            *args: Any,
            **options: Any,
        ) -> None:
            for device in device_ids or ():
                self._use(device)
            init(ddp, module, None, None, *args, **options)

        return imagined


def names_device(args: tuple) -> bool:
    """Return whether the arguments of `Tensor.to` begin with a device."""
    return len(args) > 1 and isinstance(args[1], (str, int, torch.device))

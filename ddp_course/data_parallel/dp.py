"""DataParallel: one process, one thread for each replica, and replica 0 in the middle.

A forward is four steps, each a function:

    scatter           cut the inputs into one part for each replica  (scatter_gather)
    replicate         copy the module from replica 0 to the others, in every forward
    parallel_apply    run each replica on its part, in a thread of its own
    gather            join the replicas' outputs on replica 0        (scatter_gather)

The backward needs no code: autograd passes a copy's gradient on to the parameter that
was copied, and so adds up the gradients of all replicas in the original module. They
are summed, not averaged: the loss of the gathered output is one number for the whole
batch, and each replica's gradient is its part of that number's gradient.

PyTorch's class does this on GPUs only; without GPUs it just calls the module. Ours runs
CPU replicas, too, so that they can be studied. DataParallel is slower than DDP because:

- All threads share one Python interpreter and its lock (chapter 04 measures that).
- Parameters, inputs, outputs and gradients all pass through replica 0 (`moves` counts
  them), and it alone has the gathered outputs and the optimizer's state. (PyTorch's
  class, if NCCL is available, broadcasts the parameters and reduces the gradients.)
- CPU replicas run forward in threads, but autograd runs their backward in one thread
  (it has one thread for each GPU).

PyTorch: torch/nn/parallel/data_parallel.py, replicate.py and parallel_apply.py.
Explained in chapter 04.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin
from torch.overrides import _get_current_function_mode_stack

from ddp_course.data_parallel.moves import Moves
from ddp_course.data_parallel.scatter_gather import gather, scatter

Device = torch.device
Call = tuple[tuple, dict[str, Any]]  # a replica's args and kwargs
Copies = dict[Tensor, Tensor]  # parameter or buffer -> the replica's tensor for it


class DataParallel(nn.Module):
    """A wrapper that runs a replica of `module` on each device, each in its own thread.

    Its inputs and outputs are those of `module`. Tensors in the inputs, also inside
    lists, tuples and dicts, are cut by rows; any other object goes to all replicas.
    Tensors in the outputs are joined on devices[0]; scalar tensors become a vector, one
    number for each replica (its mean is a mean of means if the parts are unequal). A
    batch may have fewer rows than there are devices. Backward adds up the gradients of
    all replicas in `module`.

    Replica 0 works with the parameters and buffers of `module` itself; the other
    replicas work with copies, and changes to these are lost. So BatchNorm's running
    statistics are those of the first part. All CPU replicas draw from one random
    generator, in an order that the threads' timing decides: with dropout, no two runs
    are equal.

    Args:
        module: has its parameters and buffers on devices[0].
        devices: one for each replica; an integer is a GPU's index; None means all GPUs,
            or one CPU if there is none.
        record: record in `moves` every tensor that leaves or reaches replica 0.

    Raises TypeError or ValueError for unusable arguments before anything is copied, and
    RuntimeError, with the replica's number, if a replica raises. Chapter 04.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[int | str | Device] | None = None,
        record: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"module is a {type(module).__name__}; it must be a torch.nn.Module"
            )
        self.module = module
        self.devices = usable_devices(devices)
        self.moves = Moves() if record else None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Scatter, replicate, run, gather."""
        check_replicable(self.module, self.devices[0])
        calls = scatter((inputs, kwargs), self.devices)
        if len(self.devices) == 1:
            args, kwargs = calls[0]
            return self.module(*args, **kwargs)
        devices = self.devices[: len(calls)]
        copies = copy_states(self.module, devices)
        replicas = [replicate(self.module, states) for states in copies]
        outputs = parallel_apply(replicas, calls, devices)
        if self.moves is not None:
            outputs = self.moves.note_forward(self.module, copies, calls, outputs)
        return gather(outputs, self.devices[0])


def copy_states(module: nn.Module, devices: Sequence[Device]) -> list[Copies]:
    """Return, for each replica, its own tensor for each parameter and buffer.

    Replica 0 shares the module's memory, the others have copies. To autograd a copy is
    a result computed from the parameter, so its gradient flows back to the parameter. A
    tensor that the module uses in several places is copied once, and stays tied.
    """
    parameters, buffers = list(module.parameters()), list(module.buffers())
    shared = {p: p.view_as(p) for p in parameters} | {b: b for b in buffers}
    return [shared] + [
        {tensor: tensor.to(device, copy=True) for tensor in parameters + buffers}
        for device in devices[1:]
    ]


def replicate(module: nn.Module, copies: Copies) -> nn.Module:
    """Return a module like `module`, with `copies` in place of its tensors.

    The modules and their parameters, buffers and children are new; all replicas share
    the object of any other attribute. Parameters become ordinary attributes: they are
    no leaves, and `replica.parameters()` is empty, as in PyTorch.
    """
    twins = {m: m._replicate_for_data_parallel() for m in module.modules()}
    for original, twin in twins.items():
        for name, child in original._modules.items():
            twin._modules[name] = None if child is None else twins[child]
        for name, parameter in original._parameters.items():
            if parameter is None:
                twin._parameters[name] = None
            else:
                setattr(twin, name, copies[parameter])
        for name, buffer in original._buffers.items():
            twin._buffers[name] = None if buffer is None else copies[buffer]
    return twins[module]


def parallel_apply(
    replicas: Sequence[nn.Module], calls: Sequence[Call], devices: Sequence[Device]
) -> list[Any]:
    """Call each replica in a thread of its own; return the replicas' outputs in order.

    Waits for all threads. If replicas raised, raises RuntimeError with the error of the
    first such replica.
    """
    outputs: list[Any] = [None] * len(replicas)
    errors: dict[int, BaseException] = {}
    modes = [modes_of_this_thread(device) for device in devices]

    def run(k: int) -> None:
        args, kwargs = calls[k]
        try:
            with modes[k]():
                outputs[k] = replicas[k](*args, **kwargs)
        except BaseException as error:
            errors[k] = error

    threads = [
        Thread(target=run, args=(k,), name=f"replica {k}") for k in range(len(replicas))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k, error in sorted(errors.items()):
        raise RuntimeError(
            f"replica {k} of {len(replicas)}, on {devices[k]}, raised "
            f"{type(error).__name__}: {error}"
        ) from error
    return outputs


def modes_of_this_thread(device: Device) -> Callable[[], AbstractContextManager]:
    """Return a function that opens a context with this thread's modes, in any thread.

    `torch.no_grad`, `torch.autocast` and the current stream belong to one thread: a new
    thread starts without them.
    """
    kind = device.type
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast = {
        "device_type": kind,
        "dtype": torch.get_autocast_dtype(kind),
        "enabled": torch.is_autocast_enabled(kind),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }
    functions = _get_current_function_mode_stack()  # such as our Autocast
    stream = torch.cuda.current_stream(device) if kind == "cuda" else None

    @contextmanager
    def modes() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(torch.autocast(**autocast))
            for mode in functions:
                stack.enter_context(mode)
            if stream is not None:
                stack.enter_context(torch.cuda.device(device))
                stack.enter_context(torch.cuda.stream(stream))
            yield

    return modes


def usable_devices(devices: Sequence[int | str | Device] | None) -> list[Device]:
    """Return `devices` as torch.device objects; raise ValueError if one is unusable."""
    if devices is None:
        devices = list(range(torch.cuda.device_count())) or ["cpu"]
    if isinstance(devices, (int, str, Device)) or len(devices) == 0:
        raise ValueError(
            f"devices is {devices!r}; it must be a list of one or more devices"
        )
    cpu, gpus = torch.device("cpu"), torch.cuda.device_count()
    usable = []
    for device in devices:
        try:
            one = torch.device(f"cuda:{device}" if isinstance(device, int) else device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"{device!r} is not a device: {error}") from None
        if one == torch.device("cuda"):
            one = torch.device("cuda", torch.cuda.current_device())
        if one != cpu and (one.type != "cuda" or one.index >= gpus):
            raise ValueError(
                f"device {device!r} does not exist: this machine has a CPU and {gpus} "
                f"GPUs"
            )
        usable.append(one)
    if len({device.type for device in usable}) > 1:
        raise ValueError(f"devices is {devices}; they must be all CPUs or all GPUs")
    return usable


def check_replicable(module: nn.Module, device: Device) -> None:
    """Raise ValueError if a tensor of the module has no shape or is not on `device`."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if isinstance(tensor, UninitializedTensorMixin):
            raise ValueError(
                f"{name} has no shape yet: the module is lazy; run it once before you "
                f"wrap it"
            )
        if tensor.device != device:
            raise ValueError(
                f"{name} is on {tensor.device}; parameters and buffers must be on "
                f"devices[0], which is {device}: use module.to({str(device)!r})"
            )

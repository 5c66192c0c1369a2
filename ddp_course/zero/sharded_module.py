"""What both stage 3 modules are: a model of which each rank has only its shards.

How it comes to that, what an optimizer sees of it, its whole state and its gradients'
norm. When units are gathered and freed is what `stage3_naive` and `stage3` differ in.
Chapter 08.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from ddp_course.collectives import communicator
from ddp_course.mechanisms.norm import total_norm
from ddp_course.mechanisms.replicas import (
    broadcast_all,
    check_same,
    form_of,
    problem_with,
)
from ddp_course.mechanisms.whole import HasWholeState
from ddp_course.zero import full_state
from ddp_course.zero.freed import ShardedError, is_sharded, places_in
from ddp_course.zero.gather import Messages, SharedMemory
from ddp_course.zero.live import LiveFlat, LiveUnit
from ddp_course.zero.offload import Home, OnCPU
from ddp_course.zero.units import Chosen, UnitPlan, unit_plan


class ShardedModule(HasWholeState, nn.Module):
    """Holds `module` in shards: `parameters()` are this rank's 1/N of every unit.

    Any elementwise optimizer can step them (SGD, AdamW, ...): to it they are a few long
    vectors, one for each flat (`units`), with their mean gradients. Options of the
    optimizer, such as weight decay, can differ between flats and not within one, and a
    parameter without a gradient counts as one whose gradient is zero if others of its
    flat have one.
    """

    GATHERING = full_state

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None,
        units: Chosen,
        all_gather: Callable[..., Any] | None,
        reduce_scatter: Callable[..., Any] | None,
        *,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        cpu_offload: bool = False,
        in_shared_memory: bool = False,
        problem: str | None = None,
        **told: Any,
    ) -> None:
        super().__init__()
        plan = _agreed_plan(
            module,
            process_group,
            units,
            problem,
            all_gather=_name_of(all_gather),
            reduce_scatter=_name_of(reduce_scatter),
            compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype,
            cpu_offload=cpu_offload,
            in_shared_memory=in_shared_memory,
            **told,
        )
        self.process_group, self.comm = process_group, communicator(process_group)
        self.plan, self.compute_dtype = plan, compute_dtype
        self._names = [name for name, _ in module.named_parameters()]
        self._places = full_state.places(module)
        self.way = Messages(process_group, all_gather, reduce_scatter)
        if in_shared_memory:
            self.way = SharedMemory(process_group)
        self.home = OnCPU() if cpu_offload else Home()
        broadcast_all(module.buffers(), self.comm.ranks[0], process_group)
        parameters, places = dict(module.named_parameters()), places_in(module)
        self.units: list[LiveUnit] = []
        for unit in plan:  # one after the other: only one is there twice at a time
            types = compute_dtype, reduce_dtype
            flats = [
                LiveFlat(flat, parameters, self.way, self.home, *types)
                for flat in unit.flats
            ]
            self.units.append(LiveUnit(unit, flats, places))
        self.root, self.module = self.units[0], module

    @property
    def flats(self) -> dict[str, LiveFlat]:
        """All flats, by name, in the order of the plan."""
        return {flat.plan.name: flat for unit in self.units for flat in unit.flats}

    # ---- what torch.nn.Module would do with parameters that are not there ------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's shards, by the names of the flats."""
        for name, flat in self.flats.items():
            yield prefix + ("." if prefix else "") + name, flat.shard

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        raise ShardedError(
            f"{type(self).__name__} cannot be moved or cast any more (to, cuda, half, "
            "...): do that with the module before it is sharded"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Raise ShardedError: which state is meant has to be said."""
        raise ShardedError(
            "state_dict() could be the whole state or this rank's part: call "
            "full_state_dict(), or zero.sharded_checkpoint.save(folder, ...)"
        )

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ShardedError: which state is meant has to be said."""
        raise ShardedError(
            "call load_full_state_dict(state), or zero.sharded_checkpoint.load(folder, "
            "...)"
        )

    # ---- gradients -------------------------------------------------------------------

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; return it.

        The norm is that of the whole model's mean gradient, as it was before; called by
        all ranks. Raises ValueError for a `norm_type` that is not above 0. As
        torch.nn.utils.clip_grad_norm_.
        """
        device = self.root_device
        norm = total_norm(self.parameters(), device, norm_type, self.process_group)
        clip_grads_with_norm_(self.parameters(), max_norm, norm)
        return norm.float()

    @property
    def root_device(self) -> torch.device:
        """Where the parameters are computed with."""
        return (
            self.plan[0].flats[0].sharded.bucket.device
            if self.plan[0].flats
            else (self.plan[1].flats[0].sharded.bucket.device)
        )

    def extra_repr(self) -> str:
        """Tell what is gathered together."""
        return "\n".join(map(str, self.plan))


def _agreed_plan(
    module: nn.Module,
    group: dist.ProcessGroup | None,
    units: Chosen,
    problem: str | None,
    **told: Any,
) -> tuple[UnitPlan, ...]:
    """Return the plan, if all ranks make the same of it; else raise, on all."""
    plan, form = (), {}
    if isinstance(module, nn.Module) and is_sharded(module):
        problem = "the module is sharded already"
    problem = problem or problem_with(module) or _unfit(module, group, **told)
    if not problem:
        try:
            plan = unit_plan(module, dist.get_world_size(group), units)
        except ValueError as error:
            problem = str(error)
        form = form_of(module, **told)
        form |= {f"unit {unit.name}": str(unit) for unit in plan}
    check_same(form, problem, group)
    return plan


def _unfit(
    module: nn.Module,
    group: dist.ProcessGroup | None,
    *,
    compute_dtype: Any,
    reduce_dtype: Any,
    cpu_offload: bool,
    in_shared_memory: bool,
    **others: Any,
) -> str | None:
    """Return why the arguments cannot be used together, or None."""
    for name, dtype in (
        ("compute_dtype", compute_dtype),
        ("reduce_dtype", reduce_dtype),
    ):
        floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        if dtype is not None and not floating:
            return f"{name} is {dtype!r}; it must be a floating-point dtype or None"
    devices = {p.device for p in module.parameters()}
    if len(devices) > 1:
        return f"the module is on {', '.join(map(str, devices))}; it must be on one"
    (device,) = devices
    if cpu_offload and device.type == "cpu":
        return (
            "cpu_offload is True, but the module computes on the CPU: there is nothing "
            "to offload. It must be on a GPU"
        )
    if in_shared_memory and device.type != "cpu":
        return (
            f"in_shared_memory is True, but the module is on {device}; it must be cpu"
        )
    comm = communicator(group)
    together = comm.size == 1 or (len(comm.nodes) == 1 and comm.shares_memory)
    if in_shared_memory and not together:
        return "in_shared_memory is True, but these ranks share no memory"
    return None


def _name_of(function: Any) -> str | None:
    if function is None:
        return None
    module, name = (getattr(function, k, "") for k in ("__module__", "__qualname__"))
    return f"{module}.{name}"

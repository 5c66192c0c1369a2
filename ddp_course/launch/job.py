"""What a launch is to do: every argument checked, before anything is started."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ddp_course.launch import devices
from ddp_course.launch.devices import Placement
from ddp_course.launch.links import Links
from ddp_course.launch.reports import LaunchArgumentError
from ddp_course.launch.topology import Topology

MAX_WORLD_SIZE = 64  # a rank is a process: 64 of them want about 2 GB
OURS = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "DDP_COURSE_")
OUTPUTS = ("rank", "live", "none")
START_METHODS = ("forkserver", "spawn")


@dataclass(frozen=True)
class Job:
    """A launch, decided: who runs where, with what, for how long."""

    fn: Callable
    args: tuple
    topology: Topology
    placement: Placement
    links: Links
    timeout: float
    threads: int
    init: bool
    output: str
    max_lines: int
    env: Mapping[str, str]
    start_method: str | None

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.topology.world_size


def plan(
    fn: Callable,
    args: tuple,
    *,
    world_size: int | None,
    nnodes: int | None,
    nproc_per_node: int | None,
    timeout: float,
    device: str,
    backend: str,
    share_gpus: bool,
    threads: int,
    init: bool,
    output: str,
    max_lines: int,
    links: Links | None,
    env: Mapping[str, str] | None,
    start_method: str | None,
) -> Job:
    """Check the arguments of `spawn` and return the job. Raises LaunchArgumentError."""
    if not callable(fn):
        raise LaunchArgumentError(
            f"fn is {_short(fn)}; it must be a function, to be called on every rank"
        )
    _number("timeout", timeout, above=0)
    if output not in OUTPUTS:
        raise LaunchArgumentError(
            f"output is {output!r}; it can be 'rank' (in rank order), 'live' or 'none'"
        )
    if start_method is not None and start_method not in START_METHODS:
        raise LaunchArgumentError(
            f"start_method is {start_method!r}; it can be 'forkserver' or 'spawn'"
        )
    _environment(env)
    if links is not None and not isinstance(links, Links):
        raise LaunchArgumentError(
            f"links is {_short(links)}; it must be Links(inside=..., between=...)"
        )
    topology = _topology(world_size, nnodes, nproc_per_node)
    try:
        placement = devices.choose(
            topology, device=device, backend=backend, share_gpus=share_gpus
        )
    except ValueError as error:
        raise LaunchArgumentError(str(error)) from None
    return Job(
        fn=fn,
        args=args,
        topology=topology,
        placement=placement,
        links=links or Links(),
        timeout=float(timeout),
        threads=_whole("threads", threads, 1, 1024),
        init=bool(init),
        output=output,
        max_lines=_whole("max_lines", max_lines, 0, 10**9),
        env=dict(env or {}),
        start_method=start_method,
    )


def _environment(env: Any) -> None:
    if env is not None and not isinstance(env, Mapping):
        raise LaunchArgumentError(f"env is {_short(env)}; it must be a dict of strings")
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise LaunchArgumentError(
                f"env[{name!r}] is {value!r}; names and values must be strings"
            )
        if name.startswith(OURS):
            raise LaunchArgumentError(
                f"env[{name!r}] is {_short(value)}; the launcher itself sets {name}"
            )
        if not name or "=" in name or "\0" in name + value:
            raise LaunchArgumentError(
                f"env[{name!r}] is {_short(value)}; no environment can hold that"
            )


def _topology(
    world_size: int | None, nnodes: int | None, nproc_per_node: int | None
) -> Topology:
    if world_size is not None:
        _whole("world_size", world_size, 1, MAX_WORLD_SIZE)
    if nnodes is not None:
        _whole("nnodes", nnodes, 1, MAX_WORLD_SIZE)
    if nproc_per_node is not None:
        _whole("nproc_per_node", nproc_per_node, 1, MAX_WORLD_SIZE)
    nodes = nnodes or 1
    if nproc_per_node is not None:
        topology = Topology(nodes, nproc_per_node)
    else:
        total = 4 if world_size is None else world_size
        if total % nodes:
            raise LaunchArgumentError(
                f"{total} ranks do not fit on {nodes} nodes with as many on each"
            )
        topology = Topology(nodes, total // nodes)
    if world_size is not None and topology.world_size != world_size:
        raise LaunchArgumentError(
            f"world_size is {world_size}, but nnodes * nproc_per_node is "
            f"{topology.nnodes} * {topology.nproc_per_node} = {topology.world_size}"
        )
    _whole("nnodes * nproc_per_node", topology.world_size, 1, MAX_WORLD_SIZE)
    return topology


def _whole(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise LaunchArgumentError(
            f"{name} is {_short(value)}; it must be a whole number, {low} to {high}"
        )
    if not low <= value <= high:
        raise LaunchArgumentError(f"{name} is {value}; it can be {low} to {high}")
    return value


def _number(name: str, value: Any, *, above: float) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not above < value < sys.float_info.max:
        raise LaunchArgumentError(
            f"{name} is {_short(value)}; it must be a number of seconds above {above}"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

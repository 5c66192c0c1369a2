"""The arguments of a launch, all checked before any process is started."""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ddp_course.launch.devices import Placement
from ddp_course.launch.links import Links
from ddp_course.launch.reports import LaunchArgumentError
from ddp_course.launch.topology import Topology

MAX_WORLD_SIZE = 64  # a rank is a process; 64 of them use about 2 GB
RESERVED = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "DDP_COURSE_")


@dataclass(frozen=True)
class Job:
    """The checked arguments of a launch; `spawn` explains them.

    Raises LaunchArgumentError, which names the value and what is allowed.
    """

    fn: Callable
    args: tuple
    topology: Topology
    placement: Placement
    links: Links
    timeout: float
    threads: int
    init: bool
    output: str
    env: Mapping[str, str]
    may_fail: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check the fields that `cluster`, `choose` and `variables` do not check."""
        _check_whole_number("threads", self.threads, 1, 1024)
        number = isinstance(self.timeout, (int, float)) and self.timeout is not True
        if not number or not 0 < self.timeout < sys.float_info.max:
            must = "it must be a finite number of seconds above 0"
            _refuse("timeout", self.timeout, must)
        if not callable(self.fn):
            must = (
                "it must be a function that every rank calls: spawn(f), not spawn(f())"
            )
            _refuse("fn", self.fn, must)
        _check_arguments(self.fn, self.args)
        if self.output not in ("rank", "live", "none"):
            can = "'rank' (in rank order), 'live' or 'none'"
            _refuse("output", self.output, f"it can be {can}")
        for rank in self.may_fail:
            _check_whole_number("may_fail", rank, 0, self.world_size - 1)
        if not isinstance(self.links, Links):
            can = "Links(inside=..., between=...)"
            _refuse("links", self.links, f"it must be {can}")

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.topology.world_size


def cluster(
    world_size: int | None, nnodes: int | None, nproc_per_node: int | None
) -> Topology:
    """Return the requested number of nodes and ranks per node; 1 x 4 by default."""
    asked = {"world_size": world_size, "nnodes": nnodes}
    for name, value in {**asked, "nproc_per_node": nproc_per_node}.items():
        if value is not None:
            _check_whole_number(name, value, 1, MAX_WORLD_SIZE)
    nodes = nnodes or 1
    if nproc_per_node is None:
        total = world_size or 4
        if total % nodes:
            raise LaunchArgumentError(
                f"{total} ranks cannot be divided equally among {nodes} nodes"
            )
        nproc_per_node = total // nodes
    topology = Topology(nodes, nproc_per_node)
    n = topology.world_size
    if world_size not in (None, n):
        raise LaunchArgumentError(
            f"world_size is {world_size}, but nnodes * nproc_per_node is "
            f"{nodes} * {nproc_per_node} = {n}"
        )
    _check_whole_number("nnodes * nproc_per_node", n, 1, MAX_WORLD_SIZE)
    return topology


def variables(env: Mapping[str, str] | None) -> dict[str, str]:
    """Return a copy of `env` after checking its names and values."""
    if env is not None and not isinstance(env, Mapping):
        _refuse("env", env, "it must be a dict of strings")
    for name, value in (env or {}).items():
        entry = f"env[{name!r}]"
        if not isinstance(name, str) or not isinstance(value, str):
            _refuse(entry, value, "names and values must be strings")
        for own in (own for own in RESERVED if name.startswith(own)):
            why = f"names that begin with {own} are the launcher's; choose another"
            _refuse(entry, value, why)
        if not name or "=" in name or "\0" in name + value:
            _refuse(entry, value, "an environment cannot hold this name or value")
    return dict(env or {})


def ranks_of(may_fail: Iterable[int]) -> tuple[int, ...]:
    """Return the ranks in `may_fail`, which `Job` compares with the world size."""
    if not isinstance(may_fail, Iterable):
        _refuse("may_fail", may_fail, "it must be a list of ranks, such as [1]")
    return tuple(may_fail)


def _check_arguments(fn: Callable, args: tuple) -> None:
    """Raise LaunchArgumentError unless `fn(*args)` fits the parameters of `fn`."""
    try:  # a decorator's own parameters count, not those of the decorated function
        parameters = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):
        return  # some functions written in C do not name their parameters
    try:
        parameters.bind(*args)
    except TypeError as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        text = " ".join(", ".join(map(repr, args)).split())  # in one line
        call = f"{name}({text if len(text) <= 60 else text[:57] + '...'})"
        raise LaunchArgumentError(
            f"every rank would call {call}, which fails: {error}; spawn(f, a, b) makes "
            "every rank call f(a, b), and options of spawn itself need their names, "
            "such as world_size=4"
        ) from None


def _check_whole_number(name: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int:
        _refuse(name, value, f"it must be a whole number, {low} to {high}")
    if not low <= value <= high:
        _refuse(name, value, f"it can be {low} to {high}")


def _refuse(name: str, value: Any, why: str) -> NoReturn:
    text = repr(value)
    short = text if len(text) <= 60 else text[:57] + "..."
    raise LaunchArgumentError(f"{name} is {short}; {why}")

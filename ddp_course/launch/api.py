"""`spawn`: call a function on every rank, and return the ranks' results."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ddp_course.launch import reports
from ddp_course.launch.devices import choose
from ddp_course.launch.job import Job, cluster, ranks_of, variables
from ddp_course.launch.links import Links
from ddp_course.launch.parent import Launch
from ddp_course.launch.reports import LaunchArgumentError

_announced: set[str] = set()  # the sentences that `_print_once` has printed


def spawn(
    fn: Callable,
    *args: Any,
    world_size: int | None = None,
    nnodes: int | None = None,
    nproc_per_node: int | None = None,
    timeout: float = 120.0,
    check: bool = True,
    output: str = "rank",
    device: str = "auto",
    backend: str = "auto",
    share_gpus: bool = False,
    threads: int = 1,
    init: bool = True,
    links: Links | None = None,
    env: Mapping[str, str] | None = None,
    may_fail: Iterable[int] = (),
) -> list[Any]:
    """Call `fn(*args)` on every rank and return what each returned, in rank order.

    Every rank is a new process that ends with this call. `fn` finds the process group
    ready (`dist.get_rank()` works, as under torchrun) and may be any function: of a
    module or a notebook cell, a closure, a lambda. Tensors come back on the CPU. A view
    is sent together with the whole tensor behind it, so `clone()` a small part of a
    large tensor. Under torchrun the same `fn` runs with
    `torchrun --nproc-per-node 4 -m ddp_course.launch MODULE:FUNCTION`.

    Args:
        fn: the function that every rank calls.
        args: its arguments, the same for all ranks.
        world_size: the number of ranks, 1 to 64; by default nnodes * nproc_per_node, or
            4 if nproc_per_node is None.
        nnodes: the number of (emulated) nodes.
        nproc_per_node: the number of ranks on each node.
        timeout: seconds after which the launch is ended, whatever the ranks are doing.
        check: raise if a rank fails. With False, return a `RankReport` for each rank
            instead (status, value, output, traceback, line of code reached, seconds).
        output: how to show what the ranks print: "rank" (in rank order, the same on
            every run), "live" (as it is printed) or "none"; at most 500 lines of each
            rank are shown, a report holds all of them (up to 32 MiB).
        device: "auto" (a GPU for each rank if there are enough), "cpu" or "cuda".
        backend: "auto" (NCCL on GPUs, else gloo), "gloo", "nccl", or "strict": NCCL's
            rules on the CPU.
        share_gpus: let several ranks use the same GPU, over gloo.
        threads: threads that PyTorch may use in each rank.
        init: create the process group. With False, `fn` calls `init_process_group`.
        links: latency and bandwidth inside and between the nodes (`Links`), for
            messages of this course; PyTorch's own collectives are not delayed.
        env: more environment variables for the ranks.
        may_fail: ranks whose failure does not end the launch. If one of them fails, its
            result is its `RankReport`. (torchrun's agent would end all ranks.)

    Raises:
        LaunchArgumentError: an argument has an invalid value; nothing was started.
        CannotSendError: `fn` or an argument cannot be sent; names the object at fault.
        RankError: a rank failed; shows its traceback, and where the other ranks were.
        RankTimeout: the deadline passed; shows the line in which each rank hangs.
        RankInterrupted: Jupyter's stop button or Ctrl-C; shows the same lines.

    Chapters 00 and 01.
    """
    topology = cluster(world_size, nnodes, nproc_per_node)
    wanted = {"device": device, "backend": backend, "share_gpus": share_gpus}
    try:
        placement = choose(topology, **wanted)
    except ValueError as error:
        raise LaunchArgumentError(str(error)) from None
    job = Job(
        fn=fn,
        args=args,
        topology=topology,
        placement=placement,
        links=Links() if links is None else links,
        timeout=timeout,
        threads=threads,
        init=bool(init),
        output=output,
        env=variables(env),
        may_fail=ranks_of(may_fail),
    )
    if output != "none":
        _print_once(job.placement.sentence)
    rank_reports = Launch(job).run()
    if not check:
        return rank_reports
    error = reports.failure(rank_reports, job.may_fail) or reports.timeout_error(
        rank_reports, job.timeout
    )
    if error is not None:
        raise error
    return [report if report.failed else report.value for report in rank_reports]


def _print_once(sentence: str) -> None:
    """Print where the ranks run, but only once per process."""
    about = sentence.split(" ", 2)[2]  # without "4 ranks"
    if about not in _announced:
        _announced.add(about)
        print(sentence)

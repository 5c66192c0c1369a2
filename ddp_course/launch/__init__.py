"""Floor 0: how ranks start, and how they end.

`spawn(fn, *args, world_size=4)` calls `fn` in four processes and returns their results.
Read the modules in this order:

    topology    node, rank, local_rank, node_rank, and a rank's own device
    devices     which GPUs or CPU and which backend a launch gets
    links       how long a message takes between two ranks
    lines, wire the slow lines of a rank, and how a sender finds them
    job         the checked arguments of a launch
    naive       a first launcher: torch.multiprocessing and nothing else
    api         `spawn`
    parent      the launcher's side: start the ranks, listen, end them, report
    rank        the rank's side: prepare, call the function, send the result
    server      the fork server, which makes starting fast
    rendezvous  how ranks find each other
    reports     what each rank did, which rank caused a failure; errors
    stacks, transcript, packing, scratch: helpers of the modules above
    torchrun    joining and leaving the process group under torchrun
    strict, strict_rules
                a backend with NCCL's rules, for any machine
    calls       notes of each rank's last collectives, so that a failure can name them
    deadlock    how ranks notice that they wait for each other forever
    __main__    run the same function under torchrun, on one machine or many
"""

from ddp_course.launch.api import spawn
from ddp_course.launch.links import Link, Links, current_links, send_over_link
from ddp_course.launch.reports import (
    CannotSendError,
    LaunchArgumentError,
    LaunchError,
    RankError,
    RankInterrupted,
    RankReport,
    RankTimeout,
)
from ddp_course.launch.server import warm
from ddp_course.launch.topology import Place, Topology, device, here

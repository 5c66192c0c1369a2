"""Links between ranks: how long a message takes, and how to slow messages down.

On a laptop all ranks run on one machine and every link is the same. A real cluster has
fast links inside a node (NVLink: hundreds of GB/s) and slow links between nodes
(Ethernet, InfiniBand: 1 to 50 GB/s). A `Link` models the time of a message by two
numbers, `latency + bytes / bandwidth` (Hockney 1994, the "alpha-beta model" of chapter
02), and `send_over_link` waits that long. Waiting costs no CPU, so the model holds for
twelve ranks on two cores, too.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from numbers import Real

import torch
import torch.distributed as dist

from ddp_course.launch.topology import Place, here

VARIABLE = "DDP_COURSE_LINKS"


@dataclass(frozen=True)
class Link:
    """One direction of a connection: `latency` in seconds, `bandwidth` in bytes/s.

    The default is a link that adds no time of its own.
    """

    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        """Raise ValueError for a negative latency or no bandwidth."""
        for name, value in vars(self).items():
            if not isinstance(value, Real):
                raise ValueError(f"{name} is {value!r}; it must be a number")
        if not 0 <= self.latency < math.inf:
            must = "it must be finite and 0 or more"
            raise ValueError(f"latency is {self.latency!r} s; {must}")
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth is {self.bandwidth!r} B/s; it must be above 0")

    def seconds(self, nbytes: int) -> float:
        """Return how long a message of `nbytes` bytes takes."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Links:
    """The links of a cluster: inside a node, between nodes, and to a rank's host.

    A link limits what a rank sends, not what it receives: if many ranks send to one, a
    real network would delay them there, and this model does not. `host` connects a
    rank's device with the memory of the CPU, which `mechanisms.host_memory` emulates;
    each rank has its own, and both directions are in use at the same time.
    """

    inside: Link = field(default_factory=Link)
    between: Link = field(default_factory=Link)
    host: Link = field(default_factory=Link)

    def __post_init__(self) -> None:
        """Raise ValueError for a field that is not a Link."""
        for name, link in vars(self).items():
            if not isinstance(link, Link):
                must = "it must be a Link, such as Link(latency=0.001, bandwidth=10e6)"
                raise ValueError(f"{name} is {link!r}; {must}")

    def link_to(self, peer: int, place: Place) -> Link:
        """Return the link from the rank at `place` to rank `peer`."""
        return self.inside if place.same_node(peer) else self.between

    def environment(self) -> dict[str, str]:
        """Return the variable that carries these links to the ranks."""
        return {VARIABLE: json.dumps(asdict(self), default=float)}


def current_links(environ: Mapping[str, str] = os.environ) -> Links:
    """Return the links that the calling rank was started with."""
    settings = json.loads(environ.get(VARIABLE, "{}"))
    return Links(**{name: Link(**numbers) for name, numbers in settings.items()})


def send_over_link(tensor: torch.Tensor, dst: int) -> None:
    """Send `tensor` to rank `dst` after waiting as long as the link to that rank takes.

    The tensor may have any shape and must be contiguous. The receiver calls
    `dist.recv`.
    """
    link = current_links().link_to(dst, here())
    time.sleep(link.seconds(tensor.numel() * tensor.element_size()))
    dist.send(tensor, dst)

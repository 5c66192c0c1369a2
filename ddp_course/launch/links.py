"""Links between ranks: how long a message takes, and how to make one take longer.

On a laptop all ranks sit in one machine and every link is the same. A real cluster
has fast links inside a node (NVLink: hundreds of GB/s) and slow ones between nodes
(Ethernet, InfiniBand: 1 to 50 GB/s). A `Link` is the usual two-number model of
that, `latency + bytes / bandwidth` (Hockney 1994, the "alpha-beta model" of chapter
02), and `send_over_link` obeys it by waiting. Waiting costs no CPU, so twelve ranks on
two cores still see honest links.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

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
        """Refuse what no link can be."""
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency is {self.latency!r} s; it must be 0 or more")
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth is {self.bandwidth!r} B/s; it must be above 0")

    def seconds(self, nbytes: int) -> float:
        """Return how long `nbytes` bytes are on the way."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Links:
    """The links of a cluster: one kind inside a node, one kind between nodes.

    A link limits what a rank sends, not what it receives: if many send to one rank, a
    real network would hold them up there, and this one does not.
    """

    inside: Link = field(default_factory=Link)
    between: Link = field(default_factory=Link)

    def to(self, peer: int, place: Place) -> Link:
        """Return the link from the rank at `place` to rank `peer`."""
        return self.inside if place.same_node(peer) else self.between

    def environment(self) -> dict[str, str]:
        """Return the variable that carries these links to the ranks."""
        return {VARIABLE: json.dumps(asdict(self))}


def links_here(environ: Mapping[str, str] = os.environ) -> Links:
    """Return the links that the calling rank was started with."""
    given = json.loads(environ.get(VARIABLE, "{}"))
    return Links(**{name: Link(**numbers) for name, numbers in given.items()})


def send_over_link(tensor: torch.Tensor, dst: int) -> None:
    """Send `tensor` to rank `dst`, and take as long as the link to that rank does.

    A `dist.send` (any shape, contiguous) that first waits for the link. The receiver
    needs nothing special, `dist.recv` will do.
    """
    link = links_here().to(dst, here())
    time.sleep(link.seconds(tensor.numel() * tensor.element_size()))
    dist.send(tensor, dst)

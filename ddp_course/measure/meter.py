"""A meter for the bytes that each rank sends to each other rank.

    with ByteMeter() as meter:
        all_reduce(tensor)
    return meter.report()

The collectives of this course count in every meter that is open when they are called.
They count the payload, `tensor.numel() * tensor.element_size()` for each message, as
the formulas do. The operating system's count (`SystemBytes`) shows that no byte is
missing. Explained in chapter 02.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from ddp_course.launch.topology import Place, here
from ddp_course.measure.blocks import METERS, MeasuredBlock


class Totals:
    """The sums over all peers, for a meter and its report."""

    sent: dict[int, int]
    received: dict[int, int]
    messages: dict[int, int]

    @property
    def total_sent(self) -> int:
        """Bytes sent to all peers together."""
        return sum(self.sent.values())

    @property
    def total_received(self) -> int:
        """Bytes received from all peers together."""
        return sum(self.received.values())

    @property
    def total_messages(self) -> int:
        """Messages sent to all peers together."""
        return sum(self.messages.values())

    def sent_to(self, peers: Iterable[int]) -> int:
        """Return the bytes sent to these global ranks, such as those of a group.

        Along an axis of a mesh: `meter.sent_to(dist.get_process_group_ranks(group))`.
        Two ranks of this group are together in no other axis's group.
        """
        return sum(self.sent.get(peer, 0) for peer in set(peers))


@dataclass(frozen=True)
class Bytes(Totals):
    """The report of one rank's meter, in bytes (`messages`: the number sent).

    `inside` is the part sent to peers on this rank's node, `between` the part sent to
    other nodes. Two reports are equal if all their numbers are.
    """

    rank: int
    sent: dict[int, int]
    received: dict[int, int]
    messages: dict[int, int]
    inside: int
    between: int

    def __repr__(self) -> str:
        to = "".join(f", {n:,} to {peer}" for peer, n in self.sent.items())
        links = f"inside the node: {self.inside:,}, between nodes: {self.between:,}"
        return (
            f"rank {self.rank} sent {self.total_sent:,} bytes{to} (messages: "
            f"{self.total_messages:,}, bytes {links}) and received "
            f"{self.total_received:,}"
        )


class ByteMeter(Totals, MeasuredBlock):
    """A meter of the bytes that this rank sends to and receives from each peer.

    A context manager. Several meters may be open at once, and all of them count. A
    meter that is entered again continues to count. A collective that starts within the
    block is counted even if it ends after the block (`async_op=True`): wait for it
    before you read the meter.

    Attributes:
        sent: peer (a global rank) -> bytes sent to it.
        received: peer -> bytes received from it.
        messages: peer -> number of messages sent to it.
        place: the rank that is measured; by default the calling process.
    """

    opened: ClassVar = METERS

    def __init__(self, place: Place | None = None) -> None:
        super().__init__()
        self.place = here() if place is None else place
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}
        self.messages: dict[int, int] = {}

    def count_sent(self, peer: int, nbytes: int) -> None:
        """Count one message (also an empty one) to rank `peer`; any thread may call.

        Raises ValueError if `nbytes` is negative.
        """
        with self._lock:
            self.sent[peer] = self.sent.get(peer, 0) + _checked(nbytes)
            self.messages[peer] = self.messages.get(peer, 0) + 1

    def count_received(self, peer: int, nbytes: int) -> None:
        """Count `nbytes` bytes received from rank `peer`; any thread may call."""
        with self._lock:
            self.received[peer] = self.received.get(peer, 0) + _checked(nbytes)

    def report(self) -> Bytes:
        """Return the counts so far as data that a rank can return.

        Raises ValueError if a peer is no rank of this job.
        """
        with self._lock:
            inside = self.sent_to(filter(self.place.same_node, self.sent))
            by_peer = self.sent, self.received, self.messages
            in_order = (dict(sorted(counts.items())) for counts in by_peer)
            links = inside, self.total_sent - inside
            return Bytes(self.place.rank, *in_order, *links)

    def __repr__(self) -> str:
        return f"<ByteMeter of rank {self.place.rank}: {self.total_sent:,} bytes sent>"


def table(reports: Iterable[Bytes]) -> str:
    """Return a Markdown table of the bytes sent from each rank to each, with sums.

    It has a row for each sender and a column for each receiver. Raises ValueError if
    two reports are of the same rank, and TypeError for a single report.
    """
    if isinstance(reports, Bytes):
        raise TypeError(
            f"reports is the report of rank {reports.rank} alone; it must be a list of "
            "reports, one of each rank"
        )
    reports = list(reports)
    sent = {report.rank: report.sent for report in reports}
    if len(sent) < len(reports):
        raise ValueError("two reports are of the same rank")
    ranks = sorted({*sent, *(peer for peers in sent.values() for peer in peers)})
    counts = [[sent.get(a, {}).get(b, 0) for b in ranks] for a in ranks]
    counts = [[*row, sum(row)] for row in counts]
    counts.append([sum(column) for column in zip(*counts, strict=True)])
    heads = [*(f"rank {rank}" for rank in ranks), "sum"]
    rows = [["sent: from \\ to", *map(str, ranks), "sum"]]
    for head, row in zip(heads, counts, strict=True):
        rows.append([head, *(f"{n:,}" if n else "-" for n in row)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.rjust, row, widths)) + " |" for row in rows]
    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _checked(nbytes: int) -> int:
    if nbytes < 0:
        raise ValueError(f"nbytes is {nbytes}; a message has 0 bytes or more")
    return int(nbytes)

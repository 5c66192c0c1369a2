"""Data sheets: what one accelerator computes, keeps, sends and draws.

FLOP/s are dense, in bfloat16 (NVIDIA's headlines count 2:4 sparsity and are twice as
large); links count one direction (NVLink's 900 GB/s are 450 each way). `matmul` is the
share of the FLOP/s that the largest measured product of matrices reaches; where no
measurement was found, it is assumed to be 0.8.

Sources: stas00/ml-engineering, compute/accelerator and network (GPUs, links, measured
products); jax-ml/scaling-book, tpus.md, and Google Cloud's pages (TPUs); NVIDIA's
product briefs (H100 PCIe, power). B200 is printed with 180 and with 192 GB, MI300X with
1300 and with 1307 TFLOP/s. Chapter 18.
"""

from __future__ import annotations

from dataclasses import dataclass

GB, TERA = 1e9, 1e12


@dataclass(frozen=True)
class Accelerator:
    """One row of the table.

    Attributes:
        flops: FLOP/s in bfloat16 (V100: float16), dense.
        memory: bytes.
        bandwidth: bytes/s between the chip and its memory.
        link: bytes/s that it sends to other accelerators of its node.
        watts: the maximum power; None if it was not published.
        matmul: the share of `flops` that large products of matrices reach.
        node: the number of accelerators that such links join.
    """

    flops: float
    memory: float
    bandwidth: float
    link: float
    watts: float | None
    matmul: float = 0.8
    node: int = 8

    @property
    def ridge(self) -> float:
        """FLOPs per byte of memory traffic above which computing is the limit."""
        return self.flops / self.bandwidth


def _sheet(
    teraflops: float,
    gigabytes: float,
    bandwidth: float,
    link: float,
    watts: float | None,
) -> tuple[float, float, float, float, float | None]:
    """Return a data sheet's numbers in FLOP/s, bytes, bytes/s and watts."""
    return teraflops * TERA, gigabytes * GB, bandwidth * TERA, link * GB, watts


ACCELERATORS = {
    "v100": Accelerator(*_sheet(125, 32, 0.9, 150, 300)),
    "a100-40": Accelerator(*_sheet(312, 40, 1.555, 300, 400), matmul=0.87),
    "a100": Accelerator(*_sheet(312, 80, 2.04, 300, 400), matmul=0.87),
    "h100": Accelerator(*_sheet(989, 80, 3.35, 450, 700), matmul=0.80),
    "h100-pcie": Accelerator(*_sheet(756, 80, 2.0, 63, 350)),
    "h200": Accelerator(*_sheet(989, 141, 4.8, 450, 700)),
    "b200": Accelerator(*_sheet(2250, 180, 8.0, 900, 1000), matmul=0.78),
    "mi300x": Accelerator(*_sheet(1307, 192, 5.3, 448, 750), matmul=0.51),
    "tpu-v4": Accelerator(*_sheet(275, 32, 1.2, 270, 192), node=3072),
    "tpu-v5p": Accelerator(*_sheet(459, 95, 2.765, 600, None), node=8960),
}


@dataclass(frozen=True)
class Cluster:
    """Accelerators of one kind in equal nodes.

    Attributes:
        gpu: the accelerator.
        gpus: the number of accelerators.
        node: the number of accelerators in a node; the last node may have fewer.
        network: bytes/s that one accelerator sends to other nodes (400 Gb/s: 50e9).
        latency: seconds of one message, inside a node; between nodes it is twice that.
        reached: the share of a link's bytes/s that collectives reach. Eight H200 reach
            368 GB/s of 450 without the switch's own adding; all-to-alls across nodes
            44 of 50.
        rails: whether collectives run as in a library: over several nodes they use the
            network cards of all ranks, and small ones take a tree. Otherwise they run
            in one ring, as on emulated links.
    """

    gpu: Accelerator
    gpus: int
    node: int = 8
    network: float = 50 * GB
    latency: float = 5e-6
    reached: float = 0.82
    rails: bool = True

    def __post_init__(self) -> None:
        """Raise ValueError if `gpu` is no Accelerator."""
        if not isinstance(self.gpu, Accelerator):
            raise ValueError(
                f"gpu is {self.gpu!r}; it must be an Accelerator, such as "
                'ACCELERATORS["h100"]'
            )

    def bandwidth(self, ranks: int, stride: int = 1) -> float:
        """Return the bytes/s that each of a group's ranks sends in a ring.

        Args:
            ranks: the group's size.
            stride: the difference between the numbers of two neighbouring ranks.

        A group inside a node uses the node's links. Otherwise g of its ranks lie in
        each node, and a ring leaves each node once. So g rings, each over its own
        network card, send g times as much, up to what links inside the node carry.
        """
        if self.inside(ranks, stride):
            return self.reached * self.gpu.link
        beside = max(1, min(ranks, self.node // stride)) if self.rails else 1
        return self.reached * min(self.gpu.link, beside * self.network)

    def inside(self, ranks: int, stride: int = 1) -> bool:
        """Return whether a group of `ranks`, `stride` apart, lies in one node."""
        return ranks * stride <= self.node

    def delay(self, ranks: int, stride: int = 1) -> float:
        """Return the seconds of latency in a group of `ranks`, `stride` apart."""
        return self.latency if self.inside(ranks, stride) else 2 * self.latency

"""How often machines fail: published counts, and the time until one of N fails.

If failures are independent and their rate does not change with time, the time between
two failures of one device is exponential with mean M(1), and N devices have N times the
rate: M(N) = M(1) / N. All times here are in the unit of `one`. Chapter 19.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class FailureCount:
    """A published count: `failures` while devices ran for `device_hours` in all.

    `devices` is how many ran at the same time.
    """

    name: str
    devices: int
    device_hours: float
    failures: float
    source: str

    @property
    def one(self) -> float:
        """M(1): the mean hours from one failure of a device to its next."""
        return self.device_hours / self.failures


LLAMA_3 = {  # unplanned interruptions in 54 days, by cause: arXiv 2407.21783, table 5
    "faulty GPU": 148,
    "HBM3 memory": 72,
    "software": 54,
    "network": 35,
    "host maintenance": 32,
    "SRAM": 19,
    "GPU's processor": 17,
    "NIC": 7,
    "NCCL watchdog": 7,
    "silent data corruption": 6,
    "thermal": 6,
    "SSD": 3,
    "power supply": 3,
    "five other causes": 10,
}
PUBLISHED = (
    FailureCount(
        "Llama 3 405B", 16_384, 16_384 * 54 * 24, sum(LLAMA_3.values()), "2407.21783"
    ),
    # at least 35 manual restarts, and about 70 automatic ones, in about two months
    FailureCount("OPT-175B", 992, 992 * 60 * 24, 105, "2205.01068, section 2.5"),
    FailureCount("BLOOM", 384, 384 * 7 * 24, 1, "its chronicles: about a GPU a week"),
    # failures per 1,000 days of a node with 8 GPUs, as others quote the paper; the
    # clusters have 16,000 and 8,000 GPUs
    FailureCount("Meta RSC-1", 16_000, 8000 * 24, 6.50, "2410.21680"),
    FailureCount("Meta RSC-2", 8_000, 8000 * 24, 2.34, "2410.21680"),
)


def mean_time(one: float, devices: int) -> float:
    """Return M(N), the mean time between failures of a job on N devices."""
    if not (one > 0 and devices > 0):
        raise ValueError(f"one is {one} and devices {devices}; both must be above 0")
    return one / devices


def first_failure(devices: int, one: float, dice: Random) -> float:
    """Draw a time to failure for every device, and return the earliest."""
    return min(dice.expovariate(1 / one) for _ in range(devices))

"""The schematic figures of the course: pure functions that return drawings.

`IMAGES` names every file of `images/` and the call that draws it. After a change, write
them anew with `python -m ddp_course.lab.figures`: a test compares them byte by byte.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from ddp_course.lab.drawing import Drawing
from ddp_course.lab.figures.calculator import memory_calculator
from ddp_course.lab.figures.ch00 import one_or_many
from ddp_course.lab.figures.ch01 import cluster, groups, rendezvous
from ddp_course.lab.figures.ch02 import before_after, collectives
from ddp_course.lab.figures.ch03 import hierarchy, ring
from ddp_course.lab.figures.ch04 import dp_step
from ddp_course.lab.figures.ch05 import buckets
from ddp_course.lab.figures.ch06 import memory_of_a_step
from ddp_course.lab.figures.ch07 import zero_stages
from ddp_course.lab.figures.ch08 import fully_sharded
from ddp_course.lab.figures.ch09 import cut_products
from ddp_course.lab.figures.ch10 import staircase
from ddp_course.lab.figures.ch11 import four_schedules
from ddp_course.lab.figures.course_map import course_map
from ddp_course.lab.figures.deadlock import deadlock
from ddp_course.lab.figures.dp_and_ddp import dp_and_ddp
from ddp_course.lab.figures.fsdp_schedule import fsdp_step
from ddp_course.lab.figures.fsdp_timeline import fsdp_timeline
from ddp_course.lab.figures.matrix_cut import matrix_cut
from ddp_course.lab.figures.overlapped import overlapped
from ddp_course.lab.figures.pipeline_timeline import pipeline_timeline, who_works
from ddp_course.lab.figures.schedule_view import schedule_view
from ddp_course.lab.figures.shard_map import shard_map
from ddp_course.lab.figures.six_ways import six_ways
from ddp_course.lab.figures.steps import collective, plan_step, plan_steps
from ddp_course.lab.figures.timeline import timeline

__all__ = [
    "IMAGES",
    "before_after",
    "buckets",
    "cluster",
    "collective",
    "collectives",
    "course_map",
    "cut_products",
    "deadlock",
    "dp_and_ddp",
    "dp_step",
    "four_schedules",
    "fsdp_step",
    "fsdp_timeline",
    "fully_sharded",
    "groups",
    "hierarchy",
    "matrix_cut",
    "memory_calculator",
    "memory_of_a_step",
    "one_or_many",
    "overlapped",
    "pipeline_timeline",
    "plan_step",
    "plan_steps",
    "rendezvous",
    "ring",
    "schedule_view",
    "shard_map",
    "six_ways",
    "staircase",
    "timeline",
    "who_works",
    "write_images",
    "zero_stages",
]

IMAGES: dict[str, Callable[[], Drawing]] = {
    "course_map.svg": course_map,
    "00_one_or_four.svg": one_or_many,
    "01_cluster_3x4.svg": partial(cluster, 3, 4, formula=False),
    "01_rendezvous.svg": rendezvous,
    "01_groups.svg": partial(groups, 3, 4),
    "02_collectives.svg": collectives,
    "02_deadlock.svg": deadlock,
    "03_ring.svg": ring,
    "03_six_ways.svg": six_ways,
    "03_hierarchy.svg": partial(hierarchy, 2, 4),
    "04_dp_vs_ddp.svg": dp_and_ddp,
    "05_overlap.svg": overlapped,
    "06_memory.svg": memory_of_a_step,
    "07_zero.svg": zero_stages,
    "08_fsdp.svg": fully_sharded,
    "09_tensor_parallel.svg": cut_products,
    "10_pipeline_parallel.svg": staircase,
    "11_pipeline_schedules.svg": four_schedules,
}


def write_images(folder: Path) -> list[Path]:
    """Draw every image of the course into `folder`, and return their paths."""
    folder.mkdir(exist_ok=True)
    paths = [folder / name for name in IMAGES]
    for path in paths:
        IMAGES[path.name]().save(path)
    return paths

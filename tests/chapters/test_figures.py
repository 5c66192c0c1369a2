"""The figures: what they say, that nothing overlaps, that `images/` is up to date."""

import itertools
import re
from functools import partial
from pathlib import Path

import pytest
from drawings import fills, laid_out, problems, words
from refusals import refused

from ddp_course.chapters import images, write_images
from ddp_course.chapters.ch00_start_here.figures import course_map, one_or_four
from ddp_course.chapters.ch01_ranks.figures import cluster, groups, rendezvous
from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.palette import rank_color

FOLDER = Path(__file__).parents[2] / "images"
SHAPES = list(itertools.product((1, 2, 3, 4, 5, 8), repeat=2))


# images/


def stale(folder):
    """The files of `folder` that are not what the rooms draw."""
    want = {name: draw().svg().encode() for name, draw in images().items()}
    have = {path.name: path.read_bytes() for path in folder.iterdir()}
    return sorted(name for name in want | have if want.get(name) != have.get(name))


def test_images_are_up_to_date():
    assert stale(FOLDER) == [], "run: python -m ddp_course.chapters"


def test_a_stale_a_missing_and_an_unregistered_image_are_seen(tmp_path):
    write_images(tmp_path)
    assert stale(tmp_path) == []
    (tmp_path / "course_map.svg").write_text("<svg/>")
    (tmp_path / "01_groups.svg").unlink()
    (tmp_path / "old.svg").write_text("<svg/>")
    assert stale(tmp_path) == ["01_groups.svg", "course_map.svg", "old.svg"]


# The layout: every text is large enough, in the picture, and on nothing else.


test_the_layout = laid_out(
    course_map,
    one_or_four,
    (cluster, SHAPES),
    partial(cluster, 2, 8, gpus=0),
    (groups, SHAPES),
    (rendezvous, range(2, 9)),
)


@pytest.mark.parametrize(
    ("texts", "rects", "says"),
    [
        ([(50, 50, "x", 10)], [], "'x' is 10.0 px small"),
        ([(95, 50, "too wide for this", 13)], [], "leaves the picture"),
        ([(50, 50, "one", 13), (55, 52, "two", 13)], [], "'one' overlaps 'two'"),
        ([(50, 25, "name", 13)], [(0, 0, 50, 50)], "crosses the edge of a rectangle"),
        ([], [(60, 0, 50, 50)], "a rectangle leaves the picture"),
    ],
)
def test_a_bad_layout_is_seen(texts, rects, says):
    drawing = Drawing(100, 100, title="t")
    for rect in rects:
        drawing.rect(*rect)
    for x, y, text, size in texts:
        drawing.text(x, y, text, size=size)
    assert any(says in result for result in problems(drawing))


# What the figures say.


@pytest.mark.parametrize(("nnodes", "size"), SHAPES)
def test_cluster_shows_every_rank_once(nnodes, size):
    d = cluster(nnodes, size)
    said = words(d)
    for rank in range(nnodes * size):
        assert fills(d, f"rank {rank}") == [rank_color(rank)]
    for local_rank in range(size):
        assert said.count(f"local_rank {local_rank}") == nnodes
        assert said.count(f"cuda:{local_rank}") == nnodes
    for node_rank in range(nnodes):
        assert said.count(f"node_rank {node_rank}") == 1
    assert f"world_size = {nnodes} × {size} = {nnodes * size}" in said


def test_cluster_writes_the_local_rank_below_its_rank():
    said = words(cluster(3, 4))
    for rank in range(12):
        assert said[said.index(f"rank {rank}") + 1] == f"local_rank {rank % 4}"
        assert said[said.index(f"rank {rank}") + 2] == f"cuda:{rank % 4}"


def test_cluster_with_too_few_gpus_uses_the_cpu():
    for gpus in (0, 3):
        said = words(cluster(2, 4, gpus))
        assert "CPU cores" in said
        assert not any("cuda" in word for word in said)
    assert "CPU cores" not in words(cluster(2, 4, gpus=4))


def test_groups_shows_both_grids():
    d = groups(3, 4)
    for rank in range(12):
        assert fills(d, f"{rank}").count(rank_color(rank)) == 2
    outlines = re.findall(r'width="(\d+)" height="(\d+)" rx="9"', d.svg())
    assert outlines == [("172", "40")] * 3 + [("40", "128")] * 4


def test_rendezvous_connects_every_pair_once():
    for n in (2, 3, 4, 8):
        assert rendezvous(n).svg().count("<path") == n * (n - 1) // 2


def test_one_or_four_shares_the_batch():
    d = one_or_four()
    for sample in range(8):
        whole, part = fills(d, f"{sample}")
        assert part == rank_color(sample // 2)
        assert whole not in map(rank_color, range(8))


def test_course_map_names_every_way():
    said = " ".join(words(course_map()))
    ways = ("DP, DDP", "ZeRO-1, ZeRO-2", "FSDP", "tensor parallel", "pipeline")
    for way in (*ways, "context parallel", "expert parallel"):
        assert way in said


test_what_cannot_be_drawn = refused(
    (lambda: cluster(0, 4), "nnodes is 0; it must be a whole number, 1 or more"),
    (lambda: cluster(2, -1), "nproc_per_node is -1; it must be a whole number"),
    (lambda: cluster(2.5, 4), "nnodes is 2.5; it must be a whole number"),
    (lambda: cluster(True, 4), "nnodes is True; it must be a whole number"),
    (lambda: cluster(2, 4, gpus=-1), "gpus is -1; it must be a whole number, 0 or"),
    (lambda: groups(0, 1), "nnodes is 0; it must be a whole number"),
    (lambda: groups(2, "4"), "nproc_per_node is '4'; it must be a whole number"),
    (lambda: rendezvous(1), "world_size is 1; it must be a whole number, 2 or more"),
)

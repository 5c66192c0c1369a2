"""The figures of chapter 05 show what they are about, and nothing else."""

import itertools
import re

import pytest
from drawings import laid_out, rects, words
from refusals import refused

from ddp_course.chapters.ch05_ddp_internals.figures import (
    buckets,
    cells_of,
    overlapped,
    schedule,
)
from ddp_course.data_parallel import bucket_plan
from ddp_course.model import build_gpt

GPT = dict(build_gpt("1m").named_parameters())
CAPS = (0.02, 0.25, 0.5, 1, 2, 4, 25)
SETTINGS = [*itertools.product(("1m", "8m"), CAPS), ("8m", 0.25, 0.25)]
test_the_layout = laid_out(overlapped, (buckets, SETTINGS))


@pytest.mark.parametrize("cap", CAPS)
def test_every_parameter_is_drawn_once_with_its_bytes(cap):
    plan = bucket_plan(GPT.items(), cap)
    cells = cells_of(plan)
    assert len(cells) == len(GPT) == 49
    assert sum(cell.nbytes for cell in cells) == sum(p.nbytes for p in GPT.values())
    for bucket in plan:
        mine = [cell for cell in cells if cell.bucket == bucket.index]
        assert [c.nbytes for c in mine] == [GPT[n].nbytes for n in bucket.parameters]
        assert all(
            name.startswith(cell.layer)
            for name, cell in zip(bucket.parameters, mine, strict=True)
        )
    drawing = buckets("1m", cap)
    assert f"bucket_cap_mb = {cap:g}: {len(plan)} bucket" in drawing.title
    assert any(f"in {len(plan)} all-reduce" in text for text in words(drawing))
    # A white sheet, the 49 parameters, the buckets that are sent; and numbers on them.
    wide = [width for _, _, width, high, _ in rects(drawing) if high == 24]
    assert len(wide) == 49 + len(plan)
    sent = wide[49:]
    total = sum(bucket.nbytes for bucket in plan)
    shares = [bucket.nbytes / total for bucket in plan]
    assert [w / sum(sent) for w in sent] == pytest.approx(shares, abs=1e-3)


def test_layers_stand_in_the_order_of_backward():
    shown = [t for t in words(buckets()) if re.match(r"head|blocks|embed", t)]
    assert shown == ["head", *(f"blocks.{k}" for k in (3, 2, 1, 0)), "embed"]


def test_an_overlap_is_one():
    flat, bucketed = schedule(1), schedule(4)
    sent = [run.lanes[1].blocks for run in (flat, bucketed)]
    ready = [b.end for b in bucketed.lanes[0].blocks if b.look == "B"]
    assert [b.start for b in sent[0]] == ready[-1:]
    assert [b.start < ready[-1] for b in sent[1]] == [True, True, True, False]
    for k, block in enumerate(sent[1]):
        assert block.start == max([ready[k]] + [b.end for b in sent[1][:k]])
    times = [sum(b.end - b.start for b in blocks) for blocks in sent]
    assert times[0] == pytest.approx(times[1])  # the same bytes
    ends = [run.lanes[0].blocks[-1].end for run in (flat, bucketed)]
    three = sum(b.end - b.start for b in sent[1][:3])
    assert ends[0] - ends[1] == pytest.approx(three)
    text = overlapped().description
    assert "network: bucket 0 bucket 1 bucket 2 bucket 3" in text
    assert "layer 0 waits update; network: all gradients." in text


test_what_cannot_be_drawn = refused(
    (lambda: buckets("7m"), "the preset is '7m'; it can be '1m', '8m'"),
    (lambda: buckets("1m", 0), "bucket_cap_mb is 0"),
)

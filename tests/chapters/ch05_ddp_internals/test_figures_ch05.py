"""The figures of chapter 05 show what they are about, and nothing else."""

import itertools
import re
from xml.etree import ElementTree

import pytest
from drawings import boxes, elements, no_texts_overlap, problems, words

from ddp_course.chapters.ch05_ddp_internals.figures import buckets, cells_of
from ddp_course.chapters.ch05_ddp_internals.measured import plot_bucket_sweep
from ddp_course.chapters.ch05_ddp_internals.overlapped import overlapped, schedule
from ddp_course.chapters.ch05_ddp_internals.timeline import bucket_numbers, timeline
from ddp_course.data_parallel import bucket_plan
from ddp_course.lab import rank_color
from ddp_course.lab.draw.bars import PLOT_W, visible
from ddp_course.measure import Event
from ddp_course.model import build_gpt

GPT = dict(build_gpt("1m").named_parameters())


PLAN = bucket_plan(GPT.items(), 1)


def step_of(rank, plan=PLAN, tagged=False, at=0.0, on_its_way=0.009):
    """What a rank records in a backward: a bucket is ready every 10 ms."""
    events, late = [], 0.001 * rank + at
    for k in range(len(plan)):
        a, b = late + k * 0.01, late + k * 0.01 + 0.0099
        tag = {"bucket": k} if tagged else {}
        events += [
            Event(rank, "backward", a, b, lane="compute", detail={"bucket": k}),
            Event(rank, "launch", b, b + 1e-4, lane="launch", detail={"bucket": k}),
            Event(rank, "ring", b, b + on_its_way, 9, "communication", tag),
        ]
    end = late + len(plan) * 0.01
    return [*events, Event(rank, "wait", end, end + on_its_way, lane="wait")]


EVENTS = [event for rank in range(4) for event in step_of(rank)]


AT_ONCE = [e for rank in range(4) for e in step_of(rank, bucket_plan(GPT.items(), 0.1),
                                                   on_its_way=0.2)]  # fmt: skip


MANY = [
    Event(rank, op, t * 1e-4, t * 1e-4 + 5e-5, nbytes)
    for rank in range(2)
    for t in range(5000)
    for op, nbytes in (("backward", 0), ("send", 8))
]


CAPS = (0.02, 0.25, 0.5, 1, 2, 4, 25)


DRAWINGS = {
    **{
        f"{preset}, {cap} MiB": lambda preset=preset, cap=cap: buckets(preset, cap)
        for preset, cap in itertools.product(("1m", "8m"), CAPS)
    },
    **{
        f"{name} from {start}, {width} wide": lambda e=events, s=start, w=width: (
            timeline(e, s, w)
        )
        for name, events in (("few", EVENTS), ("at once", AT_ONCE), ("many", MANY))
        for start, width in ((0, None), (3, 20), (11, 0.5), (900, 10), (9.99, 1e-3))
    },
    "another first bucket": lambda: buckets("8m", 0.25, 0.25),
    "overlap": overlapped,
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_the_layout(name):
    drawing = DRAWINGS[name]()
    assert list(problems(drawing)) == []
    assert drawing.svg() == DRAWINGS[name]().svg()
    assert len(drawing.description) > 60
    assert drawing.width <= 1100


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
    _, rects, _ = boxes(drawing)
    high = [rect for rect in rects[1:] if rect[3] - rect[1] == 24]
    assert len(high) == 49 + len(plan)
    sent = [rect[2] - rect[0] for rect in high[49:]]
    total = sum(bucket.nbytes for bucket in plan)
    shares = [bucket.nbytes / total for bucket in plan]
    assert [w / sum(sent) for w in sent] == pytest.approx(shares, abs=1e-3)


def test_layers_stand_in_the_order_of_backward():
    shown = [t for t in words(buckets()) if re.match(r"head|blocks|embed", t)]
    assert shown == ["head", *(f"blocks.{k}" for k in (3, 2, 1, 0)), "embed"]


def test_an_overlap_is_one():
    flat, bucketed = schedule(False), schedule(True)
    over = max(b.end for b in flat if b.kind == "backward")
    sent = [[b for b in blocks if b.kind == "send"] for blocks in (flat, bucketed)]
    assert [b.start for b in sent[0]] == [over]
    assert [b.start < over for b in sent[1]] == [True, True, True, False]
    for k, block in enumerate(sent[1]):
        ready = [b for b in bucketed if b.kind == "backward"][k].end
        assert block.start == max([ready] + [b.end for b in sent[1][:k]])
    times = [sum(b.end - b.start for b in blocks) for blocks in sent]
    assert times[0] == pytest.approx(times[1])  # the same bytes
    saved = flat[-1].end - bucketed[-1].end
    assert saved == pytest.approx(sum(b.end - b.start for b in sent[1][:3]))
    assert "saved: buckets 0 to 2" in words(overlapped())


def test_messages_are_told_apart_by_their_order():
    numbers = bucket_numbers(EVENTS)
    sent = [e for e in EVENTS if e.lane == "communication"]
    assert [numbers[id(e)] for e in sent] == [0, 1, 2, 3] * 4
    without = [e for e in EVENTS if e.lane != "launch"]
    assert not {id(e) for e in sent} & set(bucket_numbers(without))


def test_only_what_is_in_the_window_is_drawn():
    line = [e for e in EVENTS if e.rank == 0 and e.lane == "compute"]
    bars = visible(line, 0.012, PLOT_W / 0.01)  # 12 to 22 ms
    assert [bar[2].detail["bucket"] for bar in bars] == [1, 2]
    assert all(0 <= left < right <= PLOT_W for left, right, *_ in bars)
    assert bars[0][1] == pytest.approx(PLOT_W * 0.79)  # at 19.9 ms
    names = words(timeline(EVENTS, 12, 10))
    assert "backward, bucket 1" in names
    assert not any("bucket 3" in name for name in names)
    assert "12" in names and "22" in names  # the axis


def test_many_events_are_few_bars():
    drawing = timeline(MANY)
    assert len(drawing.svg()) < 600_000
    says = " ".join(words(drawing))
    shared = int(re.search(r"(\d+) events share their pixel", says)[1])
    assert 10_000 < shared <= len(MANY)
    line = [e for e in MANY if e.rank == 0 and e.op == "send"]
    bars = visible(line, 0, PLOT_W / 0.5)
    assert sum(n for *_, n in bars) == len(line)
    assert len(bars) <= PLOT_W


def test_messages_at_once_do_not_hide_each_other():
    assert any(re.fullmatch(r"\d+ messages", text) for text in words(timeline(AT_ONCE)))
    tops = {box[1] for text, _, box in boxes(timeline(AT_ONCE))[0] if "bucket" in text}
    assert len(tops) > 4


@pytest.mark.parametrize("bucket", [3, 12])
def test_a_label_leaves_a_message_hatched(bucket):
    sent = Event(0, "ring", 0, 0.01, 9, "communication", {"bucket": bucket})
    labels = set()
    for width in range(50, 800, 5):  # ms, of which the message takes 10
        drawing = timeline([sent], 0, width)
        root = ElementTree.fromstring(drawing.svg())
        rects = [e for e, *_ in elements(root) if e.tag.endswith("rect")]
        labels |= {text for text in words(drawing) if text.endswith(f"{bucket}")}
        for bar, label in itertools.pairwise(rects[1:]):  # without the white sheet
            if label.get("fill") == "#FFFFFF" and label.get("stroke") == "none":
                assert float(bar.get("width")) - float(label.get("width")) > 7.9
    assert labels >= {f"bucket {bucket}", f"{bucket}"}


def test_an_empty_window_says_so():
    gap = [*EVENTS, Event(0, "backward", 3, 3.5, lane="compute")]
    for start, empty in ((0, False), (2000, True), (2990, False), (4000, True)):
        says = " ".join(words(timeline(gap, start, 100)))
        assert ("Nothing was recorded here" in says) == empty
        assert ("the last event ends at 3500 ms" in says) == empty


def test_rows_are_in_the_ranks_colours():
    svg = timeline(EVENTS[::-1]).svg()
    places = [svg.index(f'fill="{rank_color(rank)}"') for rank in range(4)]
    assert places == sorted(places)


ROWS = [(0.02, 19, 0.31, 0.25), (1, 4, 0.16, 0.14), (4, 1, 0.21, 0.19)]


def test_the_sweep_marks_its_minimum():
    (axes,) = plot_bucket_sweep(ROWS[::-1], 0.115).axes
    lines = {line.get_label(): line for line in axes.lines}
    assert set(lines) == {
        "measured", "theory", "fastest: 1 MiB, 160 ms", "without communication"
    }  # fmt: skip
    assert list(lines["measured"].get_xdata()) == [0.02, 1, 4]
    assert list(lines["theory"].get_ydata()) == pytest.approx([250, 140, 190])
    assert lines["without communication"].get_ydata()[0] == pytest.approx(115)
    assert axes.get_xscale() == "log" and "[ms]" in axes.get_ylabel()
    assert len(plot_bucket_sweep([row[:3] for row in ROWS]).axes[0].lines) == 2


FIGURES = {
    "sweep": lambda: plot_bucket_sweep(ROWS, 0.115),
}


@pytest.mark.parametrize("name", FIGURES)
def test_texts_do_not_overlap(name):
    no_texts_overlap(FIGURES[name])


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (lambda: buckets("7m"), "the preset is '7m'; it can be '1m', '8m'"),
        (lambda: buckets("1m", 0), "bucket_cap_mb is 0"),
        (lambda: timeline([]), "no events"),
        (lambda: timeline(EVENTS, -1), "start is -1"),
        (lambda: timeline(EVENTS, 0, 0), "width is 0"),
        (lambda: plot_bucket_sweep([]), "no rows"),
        (lambda: plot_bucket_sweep([(1, 2)]), "a row is"),
        (lambda: plot_bucket_sweep([(1, 2, 0)]), "a number is 0.0"),
    ],
)
def test_what_cannot_be_drawn(bad, says):
    with pytest.raises(ValueError, match=says):
        bad()

"""What the ranks print: the same text in whatever order and pieces it arrives."""

import contextlib
import io
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddp_course.launch import transcript
from ddp_course.launch.transcript import Transcript

Key = tuple[int, str]  # rank, stream
KEYS = [(rank, stream) for rank in range(3) for stream in ("stdout", "stderr")]


class Shown:
    """A transcript, and what it has shown so far."""

    def __init__(self, world_size=3, order="rank", max_lines=500):
        self.transcript = Transcript(world_size, order)
        self.transcript.max_lines = max_lines
        self.out, self.err = io.StringIO(), io.StringIO()

    def add(self, rank: int, data: bytes, stream: str = "stdout") -> str:
        """Take in `data`; return what is on the screen now."""
        self.transcript.add(rank, stream, data)
        return self.show()

    def end(self, rank: int) -> str:
        """Both streams of `rank` end; return what is on the screen now."""
        for stream in ("stdout", "stderr"):
            self.transcript.end(rank, stream)
        return self.show()

    def show(self, **how) -> str:
        with (
            contextlib.redirect_stdout(self.out),
            contextlib.redirect_stderr(self.err),
        ):
            self.transcript.show(**how)
        return self.out.getvalue()


# ---- the same text on every run ----------------------------------------------------


def shown_of(events: list[tuple[Key, bytes | None]], **how) -> tuple[str, str]:
    """Both screens after events (stream, what came; None: its end)."""
    shown = Shown(**how)
    for (rank, stream), data in events:
        if data is None:
            shown.transcript.end(rank, stream)
        else:
            shown.transcript.add(rank, stream, data)
        shown.show()
    shown.show(final=True)
    return shown.out.getvalue(), shown.err.getvalue()


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """`data` in pieces."""
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    pieces = [data[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    return [piece for piece in pieces if piece]


def at_once(written: dict[Key, bytes]) -> list[tuple[Key, bytes | None]]:
    """One rank after the other, each stream in one piece."""
    return [
        event for key in KEYS for event in ((key, written.get(key, b"")), (key, None))
    ]


text = st.lists(
    st.sampled_from(
        ["a", "bc", "\n", "\n", "\n\n", "\r", "é", "日", "🙂", " ", "10%\r20%", "\t"]
    ),
    max_size=8,
).map(lambda parts: "".join(parts).encode())
outputs = st.fixed_dictionaries(dict.fromkeys(KEYS, text))


@st.composite
def arrivals(draw, outputs=outputs):
    """What was written, and one order in which it may arrive."""
    written = draw(outputs)
    left = {
        key: [*cut(data, draw(st.lists(st.integers(0, 99), max_size=4))), None]
        for key, data in written.items()
    }
    events = []
    while left:
        key = draw(st.sampled_from(sorted(left)))
        events.append((key, left[key].pop(0)))
        if not left[key]:
            del left[key]
    return written, events


@given(arrivals(), st.sampled_from([0, 1, 2, 4, 500]))
@example(
    (
        {(0, "stdout"): b"a\n\nb\n"},
        [((0, "stdout"), b"a\n\n"), ((0, "stdout"), b"b\n")],
    ),
    2,
)
def test_the_text_is_the_same_in_whatever_order_and_pieces_it_arrives(arrived, most):
    written, events = arrived
    once = shown_of(at_once(written), max_lines=most)
    assert shown_of(events, max_lines=most) == once


def test_only_in_the_order_of_arrival_the_order_matters():
    lines = [((rank, "stdout"), b"I am %d\n" % rank) for rank in range(3)]
    for order in ("rank", "live"):
        same = shown_of(lines, order=order) == shown_of(lines[::-1], order=order)
        assert same == (order == "rank")


@given(arrivals())
def test_every_line_is_shown_once_under_its_ranks_name(arrived):
    written, events = arrived
    for order in ("rank", "live"):
        screens = shown_of(events, order=order)
        for screen, stream in zip(screens, ("stdout", "stderr"), strict=True):
            for rank in range(3):
                wanted = written[rank, stream].decode().count("\n")
                last = written[rank, stream].rsplit(b"\n", 1)[-1]
                wanted += bool(last)
                assert screen.count(f"[rank {rank}] ") == wanted


@given(st.binary(max_size=60), st.lists(st.integers(0, 99), max_size=4))
def test_any_bytes_can_be_shown(data, places):
    events = [((0, "stdout"), piece) for piece in cut(data, places)]
    shown = shown_of(events)[0]
    assert shown.encode().decode() == shown  # no half characters


# ---- when what is shown ------------------------------------------------------------


def test_rank_0_is_shown_as_it_prints_and_the_others_when_all_before_are_done():
    shown = Shown()
    assert shown.add(1, b"one\n") == ""
    assert shown.add(0, b"zero\n") == "[rank 0] zero\n"
    assert shown.add(2, b"two\n") == "[rank 0] zero\n"
    assert shown.end(2) == "[rank 0] zero\n"
    shown.transcript.end(0, "stdout")
    assert shown.show() == "[rank 0] zero\n"  # its stderr has not ended
    assert shown.end(0) == "[rank 0] zero\n[rank 1] one\n"
    assert shown.add(1, b"more\n").endswith("[rank 1] one\n[rank 1] more\n")
    assert shown.end(1).endswith("[rank 1] more\n[rank 2] two\n")


def test_live_lines_are_shown_when_they_are_whole():
    shown = Shown(order="live")
    assert shown.add(2, b"two\nha") == "[rank 2] two\n"
    assert shown.add(0, b"zero\n") == "[rank 2] two\n[rank 0] zero\n"
    assert shown.add(2, b"lf\n").endswith("[rank 0] zero\n[rank 2] half\n")


def test_none_shows_nothing_and_keeps_all():
    shown = Shown(order="none")
    shown.add(0, b"zero\n")
    shown.add(0, b"oops\n", "stderr")
    shown.end(0)
    assert shown.show(final=True) == ""
    assert shown.err.getvalue() == ""
    assert shown.transcript.text(0, "stdout") == "zero\n"
    assert shown.transcript.text(0, "stderr") == "oops\n"


def test_the_end_of_the_launch_shows_what_was_held_back():
    shown = Shown()
    shown.add(2, b"two")
    shown.add(1, b"one\n")
    assert shown.show(final=True) == "[rank 1] one\n[rank 2] two\n"
    assert shown.show(final=True) == "[rank 1] one\n[rank 2] two\n", "shown twice"


def test_the_names_of_twelve_ranks_are_equally_wide():
    shown = Shown(world_size=12, order="live")
    shown.add(3, b"x\n")
    assert shown.add(11, b"y\n") == "[rank  3] x\n[rank 11] y\n"


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("10%\r50%\r100%\n", ["100%"]),  # of a progress bar the last state
        ("windows\r\n", ["windows"]),
        ("10%\r100%\r\n", ["100%"]),
        ("\r\n", [""]),
        ("a\n\n\nb\n", ["a", "", "", "b"]),
        ("a\n\n\n", ["a", "", ""]),
        ("é日🙂\n", ["é日🙂"]),
        ("a\nno end yet", ["a"]),
        ("1\n2\n3\n4\n", ["1", "2", "3", "4"]),  # as many as allowed
        ("1\n2\n3\n4\n5\n6\n", [*"1234", "... more than 4 lines, not shown"]),
    ],
)
def test_lines(written, shown):
    """However they are cut, also between the bytes of a letter; for each stream."""
    data = written.encode()
    wanted = "".join(f"[rank 0] {line}\n" for line in shown)
    for size in range(1, len(data) + 1):
        screen = Shown(order="live", max_lines=4)
        for start in range(0, len(data), size):
            screen.add(0, data[start : start + size])
            screen.add(0, data[start : start + size], "stderr")
        assert screen.show() == screen.err.getvalue() == wanted
        assert screen.transcript.text(0, "stdout") == written


# ---- much of it --------------------------------------------------------------------


@pytest.mark.parametrize("order", ["rank", "live"])
@pytest.mark.parametrize("line", [b"x" * 79 + b"\n", b"x" * 1000], ids=len)
def test_ten_times_the_output_takes_no_hundred_times_as_long(line, order):
    """In pieces as a pipe delivers them, for short lines and one without end."""
    seconds = []
    for nbytes in (1_000_000, 10_000_000):
        data = line * (nbytes // len(line))
        shown = Shown(world_size=2, order=order, max_lines=10)
        start = time.process_time()
        for at in range(0, len(data), 65_536):
            shown.transcript.add(0, "stdout", data[at : at + 65_536])
            shown.show()
        shown.end(0)
        seconds.append(time.process_time() - start)
        assert shown.transcript.text(0, "stdout") == data.decode()
    assert seconds[1] < 40 * max(seconds[0], 0.005)  # less cannot be measured


@given(st.lists(st.binary(max_size=9)), st.integers(0, 20))
def test_nothing_is_lost_count_of(pieces, keep):
    whole = Transcript(1, "none")
    before, transcript.KEEP = transcript.KEEP, keep
    try:
        for data in pieces:
            whole.add(0, "stdout", data)
    finally:
        transcript.KEEP = before
    everything = b"".join(pieces)
    expected = everything[:keep].decode(errors="replace")
    if len(everything) > keep:
        expected += f"\n... and {len(everything) - keep} bytes more"
    assert whole.text(0, "stdout") == expected

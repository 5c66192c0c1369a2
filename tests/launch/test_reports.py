"""Who is to blame, and how it is told: the same on every run, the cause first."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
import sys
import traceback
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_course import launch
from ddp_course.launch import (
    CannotSendError,
    LaunchArgumentError,
    LaunchError,
    RankError,
    RankInterrupted,
    RankReport,
    RankTimeout,
    parent,
    reports,
    server,
)

# "spawn" in a test's name means that it starts ranks; none of these does.
launch_it = launch.spawn

# What gloo, NCCL and the stores really say when a peer has gone.
LOST = [
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] "
    "Connection closed by peer [127.0.0.1]:43381",
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/buffer.cc:72] "
    "Read error [127.0.0.1]:2481: Connection reset by peer",
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:145] "
    "writev [127.0.0.1]:24861: Broken pipe",
    "RuntimeError: Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/"
    "transport/tcp/pair.cc:144] no error",
    "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was "
    "likely closed. Did the remote server shutdown or crash?",
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:77, "
    "remote process exited or there was a network error, NCCL version 2.27.5",
]
WAITED = [
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] "
    "Timed out waiting 1000ms for recv operation to complete",
    "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /x/0",
    "torch.distributed.DistBackendError: Watchdog caught collective operation timeout",
]
REAL = [
    ("raised", "ValueError: two is enough"),
    ("raised", "KeyError: 'weight'"),
    ("raised", "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB."),
    ("exited", "SystemExit: 3"),
    ("exited", "ended with exit code 7 before it returned"),
    ("killed", "killed by SIGKILL"),
    ("killed", "killed by SIGSEGV"),
    ("killed", "killed by SIGABRT: terminate called after throwing 'std::bad_alloc'"),
]


def ok(rank: int, value=None) -> RankReport:
    return RankReport(rank, "ok", value=value)


def failed(rank, status, error, ended_at=0.0, **more) -> RankReport:
    return RankReport(rank, status, error=error, ended_at=ended_at, **more)


def lost(rank, ended_at=0.0, text=LOST[0], **more) -> RankReport:
    return failed(rank, "raised", text, ended_at, **more)


def unfinished(rank, where=None) -> RankReport:
    return RankReport(rank, "unfinished", where=where)


# ---- the cause ---------------------------------------------------------------------


def assert_the_cause_is_found(cause) -> None:
    """Fail unless `cause` finds the one real failure, in whatever order all ended."""
    for culprit, order in itertools.product(range(3), itertools.permutations(range(3))):
        for status, error in REAL:
            told = [
                failed(rank, status, error, order[rank])
                if rank == culprit
                else lost(rank, order[rank], LOST[rank])
                for rank in range(3)
            ]
            assert cause(told).rank == culprit, (error, order)


def earliest(told):
    """A planted mistake: who ends first is to blame."""
    return min((r for r in told if r.failed), key=lambda r: r.ended_at)


def lowest_exception(told):
    """A planted mistake: only exceptions are looked at."""
    return min((r for r in told if r.status == "raised"), key=lambda r: r.lost_a_peer)


def test_who_lost_a_peer_is_never_the_cause_when_another_failed_by_itself():
    assert_the_cause_is_found(reports.cause)


@pytest.mark.parametrize("wrong", [earliest, lowest_exception])
def test_wrong_causes_are_caught(wrong):
    with pytest.raises(AssertionError):
        assert_the_cause_is_found(wrong)


times = st.floats(0, 10)
bystanders = st.one_of(
    st.tuples(st.just("raised"), st.sampled_from(LOST + WAITED), times),
    st.tuples(st.just("ok"), st.none(), times),
    st.tuples(st.just("unfinished"), st.none(), times),
)


@given(
    st.lists(bystanders, max_size=8), st.sampled_from(REAL), times, st.integers(0, 8)
)
def test_a_real_failure_is_found_in_any_crowd(crowd, culprit, when, position):
    crowd.insert(position, (*culprit, when))
    told = [failed(rank, *each) for rank, each in enumerate(crowd)]
    assert reports.cause(told).error == culprit[1]
    assert reports.failure(told).rank == min(position, len(crowd) - 1)


@given(st.lists(bystanders, max_size=8))
def test_there_is_a_cause_exactly_if_a_rank_failed(crowd):
    told = [failed(rank, *each) for rank, each in enumerate(crowd)]
    someone_failed = any(status == "raised" for status, _, _ in crowd)
    assert (reports.cause(told) is not None) == someone_failed
    assert (reports.failure(told) is not None) == someone_failed


@pytest.mark.parametrize("text", WAITED)
def test_who_tired_of_waiting_comes_after_real_errors(text):
    told = [failed(0, "raised", text, 0.0), failed(1, "raised", REAL[0][1], 5.0)]
    assert reports.cause(told).rank == 1


@pytest.mark.parametrize("text", WAITED)
def test_who_tired_of_waiting_comes_before_those_that_lost_it(text):
    told = [lost(0, 0.0), failed(1, "raised", text, 5.0), lost(2, 1.0)]
    assert reports.cause(told).rank == 1


@pytest.mark.parametrize("text", LOST)
def test_a_lost_peer_is_known_by_its_words(text):
    assert lost(0, text=text).lost_a_peer
    assert lost(0, text=text).headline == "lost the connection to another rank"


@pytest.mark.parametrize(("status", "error"), REAL)
def test_a_real_error_is_not_taken_for_a_lost_peer(status, error):
    assert not failed(0, status, error).lost_a_peer
    assert failed(0, status, error).headline == error


def test_a_rank_that_was_killed_after_a_warning_is_still_the_cause():
    """Its last words are part of its error; TCPStore warns of every retry."""
    words = "killed by SIGKILL: [W socket.cpp:757] Connection refused, retrying"
    told = [lost(0, 0.0), failed(1, "killed", words, 0.1), lost(2, 0.2)]
    assert reports.cause(told).rank == 1
    assert "SIGKILL" in str(reports.failure(told))


@pytest.mark.parametrize(
    "error",
    [
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "urllib.error.URLError: <urlopen error [Errno 111] Connection refused>",
        "BrokenPipeError: [Errno 32] Broken pipe",
    ],
)
def test_a_readers_own_connection_is_not_that_to_another_rank(error):
    """A download that fails, a pipe of one's own: the error itself must be told."""
    told = [failed(rank, "raised", error, rank) for rank in range(2)]
    assert error in str(reports.failure(told))


# ---- a rank that returned early ----------------------------------------------------


def test_a_rank_that_returned_early_is_named():
    error = reports.failure([ok(0), lost(1), lost(2)])
    assert str(error) == "rank 0 returned while rank 1 still wanted to communicate"
    assert error.rank is None


def test_several_ranks_that_returned_early_are_named():
    error = reports.failure([ok(0), lost(1), ok(2), ok(3)])
    assert str(error) == (
        "ranks 0, 2 and 3 returned while rank 1 still wanted to communicate"
    )


def test_who_returned_early_is_not_to_blame_for_a_real_error():
    error = reports.failure([ok(0), failed(1, "raised", "ValueError: x", 9), lost(2)])
    assert str(error) == "rank 1: ValueError: x"


def test_nothing_went_wrong():
    assert reports.failure([ok(0), ok(1)]) is None
    assert reports.cause([ok(0), unfinished(1)]) is None


# ---- headlines ---------------------------------------------------------------------


@given(
    st.integers(1024, 65535),
    st.integers(1024, 65535),
    st.permutations(range(3)),
    st.sampled_from(["[127.0.0.1]:{}", "[::1]:{}", "[localhost]:{}"]),
)
def test_headlines_hold_no_ports(one, two, order, address):
    def run(port):
        text = f"RuntimeError: [pair.cc:534] Connection closed by peer {address}"
        told = [lost(rank, order[rank], text.format(port)) for rank in range(3)]
        error = reports.failure([*told, ok(3)])
        return str(error).replace("rank 1", "rank 0").replace("rank 2", "rank 0"), [
            report.line for report in error.reports
        ]

    assert run(one) == run(two)
    assert not re.search(r"\d{4,}", run(one)[0])


@given(st.permutations(range(4)), st.sampled_from(REAL))
def test_the_same_error_on_all_ranks_gives_the_same_headline_on_every_run(order, real):
    """A mistake in the function itself: all ranks fail, in another order each time."""
    told = [failed(rank, *real, ended_at=order[rank]) for rank in range(4)]
    assert str(reports.failure(told)) == f"rank 0: {real[1]}"


@given(st.permutations(range(4)))
def test_of_many_who_lost_a_peer_it_is_always_the_same_who_tells(order):
    told = [ok(0), *(lost(rank, order[rank]) for rank in range(1, 4))]
    assert str(reports.failure(told)) == (
        "rank 0 returned while rank 1 still wanted to communicate"
    )


def test_a_long_error_is_told_by_its_first_line():
    assert failed(0, "raised", "ValueError: a\nb\nc").headline == "ValueError: a ..."
    assert failed(0, "raised", "ValueError: a\n").headline == "ValueError: a"
    assert failed(0, "exited", None).headline == "exited"
    assert failed(0, "raised", "").headline == "raised"


def test_a_syntax_error_is_called_so():
    """Python tells the file first, and "SyntaxError" last."""
    from ddp_course.launch.rank import _describe

    with pytest.raises(SyntaxError) as caught:
        compile("a b", "/home/ada/broken.py", "exec")
    what = _describe(caught.value, {})
    headline = failed(0, "raised", what["error"]).headline
    assert headline.startswith("SyntaxError: invalid syntax")
    assert "/home" not in headline


# ---- one line for each rank --------------------------------------------------------


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (ok(0), "returned"),
        (unfinished(0, "Cell In[5], line 3: f()"), "in Cell In[5], line 3: f()"),
        (unfinished(0), "outside of your code"),
        (failed(0, "killed", "killed by SIGKILL"), "killed by SIGKILL"),
        (
            failed(0, "raised", "ValueError: x", where="a.py, line 1: f()"),
            "ValueError: x, in a.py, line 1: f()",
        ),
        (
            lost(0, where="a.py, line 1: dist.recv(x)"),
            "lost the connection to another rank, in a.py, line 1: dist.recv(x)",
        ),
    ],
)
def test_the_line_of_a_rank(report, line):
    assert report.line == line


def test_failed_means_ended_by_itself_but_not_by_returning():
    by_status = {
        status: RankReport(0, status).failed
        for status in ("ok", "raised", "exited", "killed", "unfinished")
    }
    assert by_status == {
        "ok": False,
        "raised": True,
        "exited": True,
        "killed": True,
        "unfinished": False,
    }


# ---- the exceptions ----------------------------------------------------------------

TRACEBACK = "Traceback (most recent call last):\n  Cell In[5], line 2\nValueError: x\n"


def some_error() -> RankError:
    told = [
        lost(0, 0.0, where="Cell In[5], line 1: f()"),
        failed(1, "raised", "ValueError: x", 1.0, traceback=TRACEBACK),
    ]
    return reports.failure(told)


def some_timeout() -> RankTimeout:
    return reports.late([ok(0), unfinished(1, "Cell In[5], line 3: f()")], 1.5)


def some_interrupt() -> RankInterrupted:
    return reports.stopped([unfinished(0), unfinished(1)])


ERRORS = [some_error, some_timeout, some_interrupt]


def test_which_exceptions_they_are_too():
    assert isinstance(some_error(), (RankError, LaunchError, RuntimeError))
    assert isinstance(some_timeout(), (RankError, TimeoutError))
    assert isinstance(some_timeout(), TimeoutError)
    assert isinstance(some_interrupt(), KeyboardInterrupt)
    assert not isinstance(some_interrupt(), Exception)
    assert not isinstance(some_error(), (TimeoutError, KeyboardInterrupt))


@pytest.mark.parametrize("make", ERRORS)
def test_an_error_is_its_headline(make):
    """TimeoutError is an OSError, which likes to make errno and file of arguments."""
    error = make()
    assert str(error) == error.headline
    assert error.args == (error.headline,)
    assert getattr(error, "errno", None) is None
    assert getattr(error, "filename", None) is None


@pytest.mark.parametrize("make", ERRORS)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_survives_pickling(make, protocol):
    error = make()
    for back in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
        assert type(back) is type(error)
        assert str(back) == str(error)
        assert back.args == error.args
        assert back.rank == error.rank
        assert back.reports == error.reports
        assert back.story == error.story


@given(st.text(), st.integers(0, 3) | st.none())
def test_any_headline_survives_pickling(headline, rank):
    for kind in (RankError, RankTimeout, RankInterrupted):
        error = kind(headline, [ok(r) for r in range(4)], rank)
        back = pickle.loads(pickle.dumps(error))
        assert (str(back), back.args, back.rank) == (headline, (headline,), rank)


@pytest.mark.parametrize("kind", [LaunchArgumentError, CannotSendError])
def test_the_other_errors_survive_pickling(kind):
    back = pickle.loads(pickle.dumps(kind("x is 3; it can be 4")))
    assert type(back) is kind
    assert str(back) == "x is 3; it can be 4"


def test_the_story_is_the_causes_traceback_and_one_line_for_each_rank():
    assert some_error().story == TRACEBACK + (
        "\n"
        "  rank 0: lost the connection to another rank, in Cell In[5], line 1: f()\n"
        "  rank 1: ValueError: x"
    )


def test_the_story_of_a_deadlock_is_where_each_rank_hangs():
    assert some_timeout().story == (
        "  rank 0: returned\n  rank 1: in Cell In[5], line 3: f()"
    )


def test_the_ranks_of_a_story_stand_below_each_other():
    lines = RankError("x", [ok(rank) for rank in range(12)]).story.splitlines()
    assert lines[0] == "  rank  0: returned"
    assert lines[11] == "  rank 11: returned"


def test_a_launch_that_was_stopped_before_any_rank_was_there_has_a_story():
    assert reports.stopped([]).story == ""


@pytest.mark.parametrize("make", ERRORS)
def test_a_notebook_shows_the_story_and_not_the_launcher(make):
    def as_the_launcher_does():
        raise make()

    with pytest.raises((RankError, RankInterrupted)) as caught:
        as_the_launcher_does()
    shown = caught.value._render_traceback_()
    assert all(isinstance(line, str) and "\n" not in line for line in shown)
    assert type(caught.value).__name__ in shown[0] and str(caught.value) in shown[0]
    assert "\n".join(shown[1:]) == caught.value.story
    for frame in (*sys.path, "ddp_course/launch", "as_the_launcher_does", ".py"):
        assert not frame or frame not in "\n".join(shown)


def test_ipythons_own_rendering_would_show_frames():
    """What the test above looks for is there without `_render_traceback_`."""
    try:
        raise some_error()
    except RankError as error:
        plain = "".join(traceback.format_exception(error))
    assert "test_reports.py" in plain


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no notes before")
@pytest.mark.parametrize("make", ERRORS)
def test_outside_of_a_notebook_the_story_is_told_too(make):
    """In a script, and in pytest, Python itself prints the exception."""
    error = make()
    assert error.story in "".join(traceback.format_exception(error))
    assert error.story in "".join(
        traceback.format_exception(pickle.loads(pickle.dumps(error)))
    )


# ---- the deadline ------------------------------------------------------------------


def test_who_is_late_is_named():
    assert str(reports.late([ok(0), unfinished(1)], 2)) == (
        "rank 1 has not returned after 2 s"
    )
    told = [unfinished(0), ok(1), unfinished(2), unfinished(3)]
    assert str(reports.late(told, 0.25)) == (
        "ranks 0, 2 and 3 have not returned after 0.25 s"
    )


def test_nobody_is_late_who_has_returned():
    """Also not a rank whose answer came while it was asked where it stood."""
    assert reports.late([ok(0), ok(1)], 2) is None


def launched(monkeypatch, told: list[RankReport], **how):
    """What a launch returns or raises whose ranks ended as `told` says."""
    monkeypatch.setattr(parent.Launch, "run", lambda launch: told)
    return launch_it(print, world_size=len(told), output="none", **how)


def test_all_have_returned(monkeypatch):
    assert launched(monkeypatch, [ok(0, "a"), ok(1, "b")]) == ["a", "b"]


def test_a_rank_that_has_not_returned_when_time_is_up_is_late(monkeypatch):
    with pytest.raises(RankTimeout, match="rank 1 has not returned after 3 s"):
        launched(monkeypatch, [ok(0), unfinished(1)], timeout=3)


def test_a_failure_shortly_before_the_deadline_is_not_told_as_lateness(monkeypatch):
    """The others get a moment to notice; the deadline may pass meanwhile."""
    with pytest.raises(RankError, match="rank 0: ValueError: x") as caught:
        launched(monkeypatch, [failed(0, "raised", "ValueError: x"), unfinished(1)])
    assert not isinstance(caught.value, RankTimeout)


@pytest.mark.parametrize(
    "told",
    [[ok(0), ok(1)], [ok(0), unfinished(1)], [lost(0), failed(1, *REAL[0])]],
    ids=["good", "late", "failed"],
)
def test_unchecked_the_reports_themselves_come_back(told, monkeypatch):
    assert launched(monkeypatch, told, check=False) is told


# ---- what arrives from a rank ------------------------------------------------------


def some_launch() -> parent.Launch:
    """A launch that has not started."""
    return parent.Launch(SimpleNamespace(world_size=1, output="none", max_lines=0))


def told_by(data: bytes, cuts: list[int]) -> RankReport:
    """The report made of an answer that arrives in pieces."""
    launch = some_launch()
    rank = parent.Rank(0, None, None, {})
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        if data[start:end]:
            assert rank.report is None, "an answer was taken before it was all there"
            launch._take_answer(rank, data[start:end])
    return rank.report


def framed(message: tuple) -> bytes:
    payload = pickle.dumps(message)
    return len(payload).to_bytes(8, "big") + payload


@given(st.lists(st.integers(0, 10**6), max_size=6), st.binary(max_size=300))
def test_an_answer_may_come_in_any_pieces(cuts, value):
    report = told_by(framed(("ok", 1.5, value)), cuts)
    assert (report.status, report.seconds, report.value) == ("ok", 1.5, value)


@pytest.mark.parametrize(
    ("kind", "status"), [("SystemExit", "exited"), ("ValueError", "raised")]
)
def test_an_exception_arrives_as_a_report(kind, status):
    what = {"kind": kind, "error": f"{kind}: 3", "traceback": "t", "where": "w"}
    report = told_by(framed(("raised", 0.5, what)), [])
    assert (report.status, report.error) == (status, f"{kind}: 3")
    assert (report.traceback, report.where, report.seconds) == ("t", "w", 0.5)


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        (-9, "killed", "killed by SIGKILL"),
        (-11, "killed", "killed by SIGSEGV"),
        (-36, "killed", "36"),  # a real-time signal: Python has no name for it
        (0, "exited", "exit code 0 before it returned"),
        (7, "exited", "exit code 7"),
    ],
)
@pytest.mark.parametrize(
    "pieces",
    [b"", b"\0\0", framed(("ok", 1.0, b"x" * 50))[:-1]],
    ids=["nothing", "half a length", "half an answer"],
)
def test_a_rank_that_ends_without_an_answer(code, status, words, pieces, monkeypatch):
    monkeypatch.setattr(server, "ended", lambda process, seconds: True)
    launch = some_launch()
    rank = parent.Rank(0, SimpleNamespace(exitcode=code), None, {})
    if pieces:
        launch._take_answer(rank, pieces)
    launch._take_answer(rank, b"")
    assert rank.report.status == status
    assert words in rank.report.error

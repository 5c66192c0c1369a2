"""Who is to blame, and how it is told: the same on every run, the cause first."""

import copy
import itertools
import pickle
import traceback
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ddp_course import launch
from ddp_course.launch import (
    LaunchError,
    RankError,
    RankInterrupted,
    RankReport,
    RankTimeout,
    calls,
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
    results = [failed(rank, *each) for rank, each in enumerate(crowd)]
    assert reports.cause(results).error == culprit[1]
    assert reports.failure(results).rank == min(position, len(crowd) - 1)


@given(st.lists(bystanders, max_size=8))
def test_there_is_a_cause_exactly_if_a_rank_failed(crowd):
    results = [failed(rank, *each) for rank, each in enumerate(crowd)]
    someone_failed = any(status == "raised" for status, _, _ in crowd)
    assert (reports.cause(results) is not None) == someone_failed
    assert (reports.failure(results) is not None) == someone_failed


@pytest.mark.parametrize("text", WAITED)
def test_who_tired_of_waiting_comes_between_real_errors_and_those_that_lost_it(text):
    tired = failed(1, "raised", text, 5.0)
    assert reports.cause([lost(0, 0.0), tired, lost(2, 1.0)]).rank == 1
    assert reports.cause([failed(0, *REAL[0], 9.0), tired]).rank == 0


def test_a_lost_peer_is_known_by_its_words_and_nothing_else_is():
    for text in LOST:
        assert lost(0, text=text).lost_a_peer
        assert lost(0, text=text).headline == "lost the connection to another rank"
    # Last words are part of an error, and TCPStore warns of every retry; a download
    # that fails, or a pipe of one's own, is the reader's: the error must be told.
    refused = "[Errno 111] Connection refused"
    for status, error in [
        *REAL,
        ("killed", "killed by SIGKILL: [W socket.cpp:757] Connection refused, retry"),
        ("raised", f"ConnectionRefusedError: {refused}"),
        ("raised", f"urllib.error.URLError: <urlopen error {refused}>"),
        ("raised", "BrokenPipeError: [Errno 32] Broken pipe"),
    ]:
        assert not failed(0, status, error).lost_a_peer
        results = [lost(0, 0.0), failed(1, status, error, 0.1), lost(2, 0.2)]
        assert str(reports.failure(results)) == f"rank 1: {error}"


@pytest.mark.parametrize(
    ("message", "headline"),
    [
        ([ok(0), lost(1), lost(2)], "rank 0 returned while rank 1 still wanted to"),
        ([ok(0), lost(1, 2.0), lost(2, 1.0)], "rank 0 returned while rank 1 still"),
        ([ok(0), lost(1), ok(2), ok(3)], "ranks 0, 2 and 3 returned while rank 1 st"),
        ([ok(0), failed(1, "raised", "ValueError: x", 9), lost(2)], "rank 1: ValueErr"),
    ],
)
def test_ranks_that_returned_early_are_named_unless_there_is_a_real_error(
    message, headline
):
    error = reports.failure(message)
    assert str(error).startswith(headline)
    assert error.rank == (1 if headline.startswith("rank 1: ") else None)


def test_ranks_that_returned_are_not_named_if_one_failed_that_may_fail():
    """The connection may have been lost to that one."""
    message = [ok(0), failed(1, "killed", "killed by SIGKILL"), lost(2, 1.0)]
    error = reports.failure(message, may_fail=[1])
    assert str(error) == "rank 2: lost the connection to another rank"
    assert error.rank == 2


# ---- headlines ---------------------------------------------------------------------


@given(st.permutations(range(4)), st.sampled_from(REAL))
def test_the_same_error_on_all_ranks_gives_the_same_headline_on_every_run(order, real):
    """A mistake in the function itself: all ranks fail, in another order each time."""
    results = [failed(rank, *real, ended_at=order[rank]) for rank in range(4)]
    assert str(reports.failure(results)) == f"rank 0: {real[1]}"


def test_a_syntax_error_is_called_so():
    """Python tells the file first, and "SyntaxError" last."""
    from ddp_course.launch.rank import _describe

    with pytest.raises(SyntaxError) as caught:
        compile("a b", "/home/ada/broken.py", "exec")
    what = _describe(caught.value, {})
    headline = failed(0, "raised", what["error"]).headline
    assert headline.startswith("SyntaxError: invalid syntax")
    assert "/home" not in headline


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (ok(0), "returned"),
        (unfinished(0, "Cell In[5], line 3: f()"), "in Cell In[5], line 3: f()"),
        (unfinished(0), "outside of your code"),
        (failed(0, "killed", "killed by SIGKILL"), "killed by SIGKILL"),
        (failed(0, "raised", "ValueError: a\nb\nc"), "ValueError: a ..."),
        (failed(0, "raised", "ValueError: a\n"), "ValueError: a"),
        (failed(0, "exited", None), "exited"),
        (failed(0, "raised", "ValueError: x", where="a.py"), "ValueError: x, in a.py"),
        (lost(0, where="a.py"), "lost the connection to another rank, in a.py"),
    ],
)
def test_the_line_of_a_rank(report, line):
    assert report.line == line
    assert report.failed == (report.status not in ("ok", "unfinished"))


# ---- the exceptions ----------------------------------------------------------------

TRACEBACK = "Traceback (most recent call last):\n  Cell In[5], line 2\nValueError: x\n"


def some_error() -> RankError:
    results = [
        lost(0, 0.0, where="Cell In[5], line 1: f()"),
        failed(1, "raised", "ValueError: x", 1.0, traceback=TRACEBACK),
    ]
    return reports.failure(results)


def some_timeout() -> RankTimeout:
    return reports.timeout_error([ok(0), unfinished(1, "Cell In[5], line 3: f()")], 1.5)


def some_interrupt() -> RankInterrupted:
    return reports.interrupt_error([unfinished(0), unfinished(1)])


ERRORS = [some_error, some_timeout, some_interrupt]


@pytest.mark.parametrize(
    ("make", "kinds", "others"),
    [
        (some_error, (RankError, LaunchError, RuntimeError), (OSError,)),
        (some_timeout, (RankTimeout, RankError, TimeoutError), (KeyboardInterrupt,)),
        (some_interrupt, (RankInterrupted, KeyboardInterrupt), (Exception,)),
    ],
)
def test_an_error_is_its_headline_and_survives_pickling(make, kinds, others):
    """TimeoutError is an OSError, which likes to make errno and file of arguments."""
    error = make()
    assert all(isinstance(error, kind) for kind in kinds)
    assert not isinstance(error, others)
    assert getattr(error, "errno", None) is getattr(error, "filename", None) is None
    copies = [pickle.loads(pickle.dumps(error, k)) for k in range(6)]
    for back in (*copies, copy.copy(error)):
        assert type(back) is type(error)
        assert str(back) == str(error) == error.headline
        assert back.args == error.args == (error.headline,)
        assert (back.rank, back.reports) == (error.rank, error.reports)
        assert back.story == error.story


def test_the_story_is_the_causes_traceback_and_one_line_for_each_rank():
    assert some_error().story == TRACEBACK + (
        "\n"
        "  rank 0: lost the connection to another rank, in Cell In[5], line 1: f()\n"
        "  rank 1: ValueError: x"
    )
    assert some_timeout().story == (
        "  rank 0: returned\n  rank 1: in Cell In[5], line 3: f()"
    )
    lines = RankError("x", [ok(rank) for rank in range(12)]).story.splitlines()
    assert (lines[0], lines[11]) == ("  rank  0: returned", "  rank 11: returned")
    assert reports.interrupt_error([]).story == ""  # before any rank was there


@pytest.mark.parametrize("make", ERRORS)
def test_a_notebook_shows_the_story_and_not_the_launcher(make):
    """A script and pytest show it, too, with the frames that Python adds."""

    def as_the_launcher_does():
        raise make()

    with pytest.raises((RankError, RankInterrupted)) as caught:
        as_the_launcher_does()
    error = caught.value
    shown = error._render_traceback_()
    assert all(isinstance(line, str) and "\n" not in line for line in shown)
    assert type(error).__name__ in shown[0] and str(error) in shown[0]
    assert "\n".join(shown[1:]) == error.story
    plain = "".join(traceback.format_exception(error))
    for frame in ("as_the_launcher_does", ".py"):
        assert frame not in "\n".join(shown) and frame in plain
    assert error.story in plain
    back = pickle.loads(pickle.dumps(error))
    assert error.story in "".join(traceback.format_exception(back))


# ---- the deadline ------------------------------------------------------------------


def test_who_is_late_is_named():
    results = [unfinished(0), ok(1), unfinished(2), unfinished(3)]
    assert str(reports.timeout_error(results, 0.25)) == (
        "ranks 0, 2 and 3 have not returned after 0.25 s"
    )
    assert reports.timeout_error([ok(0), ok(1)], 2) is None


def launched(monkeypatch, results: list[RankReport], **how):
    """What a launch returns or raises whose ranks ended as `told` says."""
    monkeypatch.setattr(parent.Launch, "run", lambda launch: results)
    return launch_it(print, world_size=len(results), output="none", **how)


def test_what_comes_of_the_reports(monkeypatch):
    good, late = [ok(0, "a"), ok(1, "b")], [ok(0), unfinished(1)]
    assert launched(monkeypatch, good) == ["a", "b"]
    with pytest.raises(RankTimeout, match="rank 1 has not returned after 3 s"):
        launched(monkeypatch, late, timeout=3)
    for result in (good, late, [lost(0), failed(1, *REAL[0])]):
        assert launched(monkeypatch, result, check=False) is result


def test_a_failure_shortly_before_the_deadline_is_not_told_as_lateness(monkeypatch):
    """The others get a moment to notice; the deadline may pass meanwhile."""
    with pytest.raises(RankError, match="rank 0: ValueError: x") as caught:
        launched(monkeypatch, [failed(0, "raised", "ValueError: x"), unfinished(1)])
    assert not isinstance(caught.value, RankTimeout)


# ---- what arrives from a rank ------------------------------------------------------


def some_launch() -> parent.Launch:
    """A launch that has not started."""
    return parent.Launch(SimpleNamespace(world_size=1, output="none"))


def told_by(data: bytes, cuts: list[int]) -> RankReport:
    """The report made of an answer that arrives in pieces."""
    launch = some_launch()
    rank = parent.Rank(0, None, None, {})
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        if data[start:end]:
            assert rank.report is None, "an answer was taken before it was all there"
            launch._read_answer(rank, data[start:end])
    return rank.report


def framed(message: tuple) -> bytes:
    payload = pickle.dumps(message)
    return len(payload).to_bytes(8, "big") + payload


@given(st.lists(st.integers(0, 10**6), max_size=6), st.binary(max_size=300))
def test_an_answer_may_come_in_any_pieces(cuts, value):
    answer = {"status": "ok", "seconds": 1.5, "value": value}
    report = told_by(framed(answer), cuts)
    assert (report.status, report.seconds, report.value) == ("ok", 1.5, value)


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        (-9, "killed", "killed by SIGKILL"),
        (-11, "killed", "killed by SIGSEGV"),
        (-36, "killed", "36"),  # a real-time signal: Python has no name for it
        (0, "exited", "exit code 0 before it returned"),
        (7, "exited", "exit code 7"),
        (255, "exited", "exit code 255"),  # of `exit(-1)` in C, among others
    ],
)
@pytest.mark.parametrize(
    "pieces",
    [b"", b"\0\0", framed({"status": "ok", "value": b"x" * 50})[:-1]],
    ids=["nothing", "half a length", "half an answer"],
)
def test_a_rank_that_ends_without_an_answer(code, status, words, pieces, monkeypatch):
    monkeypatch.setattr(server, "wait_for_end", lambda process, seconds: True)
    launch = some_launch()
    rank = parent.Rank(0, SimpleNamespace(exitcode=code), None, {})
    if pieces:
        launch._read_answer(rank, pieces)
    launch._read_answer(rank, b"")
    assert rank.report.status == status
    assert words in rank.report.error


# ---- calls that do not fit ---------------------------------------------------------


def test_calls_are_compared_by_group_number_type_and_count_not_by_shape():
    same = {("0", 0): ("all_reduce 6", "all_reduce(float32 [6])")}
    shaped = {("0", 0): ("all_reduce 6", "all_reduce(float32 [2, 3])")}
    alone = {("1", 0): ("all_reduce 9", "all_reduce(float32 [9])")}
    assert calls.first_difference([same, shaped, {**same, **alone}, {}]) == {}
    wrong = {**same, ("0", 1): ("x", "a"), ("0", 2): ("y", "b")}
    right = {**same, ("0", 1): ("z", "c"), ("0", 2): ("z", "d")}
    assert calls.first_difference([right, wrong]) == {0: "c", 1: "a"}


def test_a_call_of_a_group_without_this_rank_is_not_noted(tmp_path, monkeypatch):
    """PyTorch ignores it; ranks of two groups would seem to call different things."""
    for name in calls.NOTED:  # else `install` would replace PyTorch's own functions
        monkeypatch.setattr(dist, name, lambda *args, **options: None)
    notes = tmp_path / "notes"
    calls.allocate(notes, 1)
    calls.install(notes, 0)
    dist.all_reduce(torch.ones(3), group=dist.GroupMember.NON_GROUP_MEMBER)
    assert calls.read_calls(notes, 0) == {}
    dist.all_reduce(torch.ones(3), group=SimpleNamespace(group_name="7"))
    assert list(calls.read_calls(notes, 0)) == [("7", 0)]


def test_a_sparse_tensor_may_be_reduced_asynchronously(tmp_path, monkeypatch):
    for name in calls.NOTED:
        monkeypatch.setattr(dist, name, lambda *args, **options: "under way")
    monkeypatch.setattr(calls, "_started", [])
    calls.allocate(tmp_path / "notes", 1)
    calls.install(tmp_path / "notes", 0)
    group = SimpleNamespace(group_name="0")
    sparse = torch.eye(2).to_sparse()
    assert dist.all_reduce(sparse, group=group, async_op=True) == "under way"
    assert calls._started == ["under way"]


def test_a_failure_of_another_kind_does_not_speak_of_unequal_calls():
    reports_ = [ok(0), failed(1, *REAL[0])]
    for number, report in enumerate(reports_):
        report.calls = {("0", 0): (f"{number}", f"all_reduce(float32 [{number}])")}
    assert str(reports.failure(reports_)) == "rank 1: ValueError: two is enough"
    results = str(reports.failure([reports_[0], lost(1, calls=reports_[1].calls)]))
    assert results.endswith(
        "0: all_reduce(float32 [0]); rank 1: all_reduce(float32 [1])"
    )

"""Every exercise has answers, hints and a solution to show; verdicts are clear."""

import ast
import contextlib
import inspect
import json
import re
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from answer_lists import ANSWERS, EXERCISES, ON_RANKS, RIGHT, WRONG
from slips import slip

from ddp_course.chapters import hint, show_solution
from ddp_course.lab import answers
from ddp_course.lab.answers import on_ranks
from ddp_course.lab.exercises import (
    NOT_YET,
    PASSED,
    UNTOUCHED,
    exercise,
    expect,
    expect_call,
)
from ddp_course.launch import RankInterrupted


@pytest.mark.parametrize(
    ("wrong", "after"),
    [
        ("dist.all_reduce(tensor) => if True:\n=>     tensor += 1", [0.25, 0.25]),
        ("    dist.all_reduce(tensor)\n    => tensor += 4", [1, 1]),
        ("tensor /= dist.get_world_size() =>\ndist.all_reduce => len", [0, 0]),
        ("if True:\n    tensor += added", [2, 2]),  # another body; a name of the file
    ],
)
def test_a_slip_is_the_solution_but_for_what_is_wrong(wrong, after):
    slipped = slip(EXERCISES["my_average"].reference, "another", wrong, {"added": 2})
    tensor = torch.zeros(2)
    with mock.patch.multiple(dist, get_world_size=lambda: 4, all_reduce=len):
        slipped(tensor)
    assert (slipped.__name__, tensor.tolist()) == ("another", after)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("tensr => t", "0 times 'tensr'"),
        ("tensor => t", ". times 'tensor'"),
        ("dist.all_reduce => len\ntensor", "no => after 'tensor'"),
    ],
)
def test_a_slip_that_changes_nothing_is_refused(wrong, message):
    with pytest.raises(AssertionError, match=f"wrong: {message}"):
        slip(EXERCISES["my_average"].reference, "wrong", wrong, {})


def test_every_exercise_has_answers():
    """Two right ones, or more; wrong ones, three or more."""
    count = Counter(name for name, _ in RIGHT), Counter(name for name, _ in WRONG)
    assert set(ANSWERS) == set(count[0]) == set(EXERCISES)
    assert min(count[0].values()) >= 2 and min(count[1].values()) >= 3


NOT_ATTEMPTED = (
    "○ {}: not attempted yet. Put your code in place of "
    "`raise NotImplementedError`, and run again."
)


@pytest.mark.parametrize("name", [n for n in EXERCISES if n not in ON_RANKS])
def test_an_untouched_stub_is_not_attempted_yet(name):
    def stub(*args):
        raise NotImplementedError

    verdict = EXERCISES[name](stub)
    assert verdict.status == UNTOUCHED
    assert repr(verdict) == NOT_ATTEMPTED.format(name)


def test_chapters_run_the_stubs_of_exercises_on_ranks():
    """nbval runs the cells, and compares: the same here would start all ranks again."""
    cells = [
        cell
        for path in Path(__file__).parents[2].glob("notebooks/[0-9]*.ipynb")
        for cell in json.loads(path.read_text())["cells"]
    ]
    for name in ON_RANKS:
        call = f"check_{name}({name})"
        (stub,) = [cell for cell in cells if "".join(cell["source"]).endswith(call)]
        assert "tags" not in stub["metadata"]  # its output is not ignored
        shown = "".join(stub["outputs"][0]["data"]["text/plain"])
        assert shown == NOT_ATTEMPTED.format(name)


@pytest.mark.parametrize("name", EXERCISES)
def test_the_solution_is_shown(name):
    shown = show_solution(name).data
    assert f"def {name}(" in shown
    assert shown == EXERCISES[name].solution().data


def test_names_and_questions():
    for name, each in EXERCISES.items():
        assert each.__name__ == f"check_{name}"
        assert each.question.startswith(f"`{name}(")
        assert each._repr_markdown_() == f"**Exercise {name}.** {each.question}"


@pytest.mark.parametrize("show", [hint, show_solution])
def test_an_unknown_exercise(show):
    with pytest.raises(
        ValueError, match="no exercise is called 'rank'; there are my_s"
    ):
        show("rank")


def said_too_much(hints: list[str], solution: Callable) -> list[str]:
    """Return what of a solution's code is in its hints: a statement, or a long part."""
    squeezed = re.sub("[^a-z0-9=+*/%<>()[\\]-]", "", " ".join(hints).lower())
    tree = ast.parse(textwrap.dedent(inspect.getsource(solution)))
    parts = [ast.unparse(n) for n in ast.walk(tree) if isinstance(n, CODE)]
    codes = (re.sub("[^a-z0-9=+*/%<>()[\\]-]", "", part.lower()) for part in parts)
    return [part for part in codes if len(part) > 12 and part in squeezed]


CODE = (ast.Assign, ast.AugAssign, ast.Return, ast.BinOp, ast.Call, ast.Subscript)


@pytest.mark.parametrize("name", EXERCISES)
def test_two_hints_come_before_the_solution(name):
    first, second = EXERCISES[name].hints
    assert "?" in first
    assert len(first) < len(second)
    assert said_too_much([first, second], EXERCISES[name].reference) == []
    assert hint(name).data == f'**Hint 1.** {first} (More: `hint("{name}", 2)`.)'
    assert hint(name, 2).data.endswith(f'{second} (More: `show_solution("{name}")`.)')
    with pytest.raises(ValueError, match="step is 3; .* has 2 hints"):
        hint(name, 3)


def test_a_hint_that_is_the_solution_is_seen():
    solution = EXERCISES["my_average"].reference
    for planted in (
        "Then write `tensor /= dist.get_world_size()`.",
        "It is dist.all_reduce(tensor), and a division.",
    ):
        assert said_too_much(["Which collective?", planted], solution)


def test_chapters_offer_hints_where_they_offer_solutions():
    for path in Path(__file__).parents[2].glob("notebooks/[0-9]*.ipynb"):
        text = path.read_text()
        assert text.count("show_solution(") == text.count(", 2)` then `show_") == 1


# The frame itself, with exercises made up here.


def made_up(check):
    return exercise("double", solution=lambda x: 2 * x)(check)


@made_up
def check_double(answer):
    """`double(x)`: twice x."""
    expect_call(answer, 3, returns=6, because="3 + 3 is 6")
    expect(answer(0) == 0, hint="Twice nothing is nothing.")
    return "two numbers"


def test_the_three_verdicts():
    def stub(x):
        raise NotImplementedError("your turn")

    assert check_double(stub).status == UNTOUCHED
    assert repr(check_double(lambda x: 2 * x)) == (
        "✓ double: passed. Verified: two numbers."
    )
    assert check_double(lambda x: x + 3)._repr_markdown_() == (
        "✗ **double: not yet.** Twice nothing is nothing."
    )
    assert check_double(lambda x: x).message == (
        "`double(3)` returned `3`; expected `6`, because 3 + 3 is 6."
    )


def test_what_is_long_is_compared_to_its_end():
    @made_up
    def check_counted(answer):
        """`double(n)`: the numbers below it."""
        expect_call(answer, 99, returns=list(range(99)), because="98 is the last")
        return "one list"

    assert check_counted(lambda n: list(range(n))).status == PASSED
    common = "88, 89, 90, 91, 92, 93, 94, 95, 96, 97"
    assert check_counted(lambda n: [*range(n - 1), 0]).message == (
        f"`double(99)` returned `...{common}, 0]`; expected `...{common}, 98]`, "
        "because 98 is the last."
    )


class Unwritable:
    def __repr__(self):
        raise RuntimeError


class Undecided:
    def __repr__(self):
        return "6"

    def __eq__(self, other):
        raise RuntimeError("cannot\nbe compared")


def loop(x):
    while True:
        with contextlib.suppress(Exception):
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "Give the check your function itself"),
        (6, "Give the check your function itself"),
        (lambda: 6, "takes 0 positional arguments"),
        (lambda x: sys.exit("bye"), "raised `SystemExit: bye`"),
        (lambda x: 1 / 0, "raised `ZeroDivisionError: division by zero`, in test_ex"),
        (lambda x: Unwritable(), "returned `<Unwritable>`"),
        (lambda x: Undecided(), "cannot use what your function returned"),
        (lambda x: object(), "returned `<object object>`"),
        (lambda x: "`a`\n" * 100, "returned `''a'\\n'a'"),
        (lambda x: torch_raises(), "raised `NotImplementedError: Could not run`"),
        (loop, "`double(3)` had not returned after 0.2 s"),
    ],
)
def test_nothing_raises_or_hangs(answer, hint, monkeypatch):
    if answer is loop:  # all others have time, also on a busy machine
        monkeypatch.setattr(answers, "TIMEOUT", 0.2)
    monkeypatch.setattr("os.getloadavg", lambda: (0, 0, 0))
    verdict = check_double(answer)
    assert verdict.status == NOT_YET
    assert hint in verdict.message
    assert "\n" not in verdict.message
    assert len(verdict.message) < 300


def test_checks_are_patient_where_a_class_works(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for load, seconds in ((0, 20), (8, 20), (80, 200)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0, 0))
        assert answers.patient(20) == seconds
    monkeypatch.delattr("os.getloadavg")  # Windows
    assert answers.patient(20) == 20


def torch_raises():
    error = NotImplementedError
    raise error("Could not run")  # as PyTorch does; not the stub's


def test_the_stop_button_is_not_swallowed():
    def pressed(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_double(pressed)


def test_the_stop_button_during_a_launch_is_not_swallowed(monkeypatch):
    def pressed(*args, **options):
        raise RankInterrupted("stopped by hand", [])

    monkeypatch.setattr(answers, "spawn", pressed)
    with pytest.raises(KeyboardInterrupt):
        check_on_ranks(lambda rank: rank)


def test_a_timer_that_was_set_before_goes_on():
    import signal

    before = signal.setitimer(signal.ITIMER_REAL, 100)
    try:
        check_double(lambda x: 2 * x)
        assert 50 < signal.getitimer(signal.ITIMER_REAL)[0] <= 100
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)


@made_up
def check_on_ranks(answer):
    """`double(x)`, on ranks."""
    on_ranks(double_my_rank, answer, world_size=2, hint="Look at the ranks.")
    return "two ranks"


def double_my_rank(double):
    return double(dist.get_rank())


def test_a_stub_on_one_rank_only():
    def stub(rank):
        if rank == 1:
            raise NotImplementedError
        return 0

    assert check_on_ranks(stub).status == UNTOUCHED


def test_the_ranks_get_the_bare_function():
    assert check_on_ranks(lambda rank: 2 * rank).status == PASSED


def without_gradients(x):
    torch.set_grad_enabled(False)
    return 2 * x


def in_float64(x):
    torch.set_default_dtype(torch.float64)
    return 2 * x


@pytest.mark.parametrize(
    ("wrong", "setting"),
    [
        (without_gradients, "torch.is_grad_enabled()"),
        (in_float64, "torch.get_default_dtype()"),
    ],
)
@pytest.mark.parametrize("check", [check_double, check_on_ranks])
def test_a_setting_that_is_left_changed(check, wrong, setting):
    before = torch.is_grad_enabled(), torch.get_default_dtype()
    verdict = check(wrong)
    assert verdict.status == NOT_YET
    assert verdict.message == (
        f"`{wrong.__name__}` leaves a setting of the whole process changed: "
        f"`{setting}`. Set it back."
    )
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == before


def test_a_setting_that_is_changed_for_a_block_is_right():
    @torch.no_grad()
    def double(x):
        with torch.device("cpu"), torch.enable_grad():
            return 2 * x

    assert check_double(double).status == PASSED


def test_what_cannot_be_sent_to_the_ranks():
    import threading

    lock = threading.Lock()
    verdict = check_on_ranks(lambda rank: lock)
    assert verdict.status == NOT_YET
    assert "cannot be sent to the ranks" in verdict.message


def test_a_mistake_that_python_names_is_told_with_its_line_alone():
    verdict = check_on_ranks(lambda rank: 1 / rank)
    assert verdict.message.startswith(
        "On real ranks: `rank 0: ZeroDivisionError: division by zero`, in test_ex"
    )
    assert "Look at the ranks." not in verdict.message


def one_returns(rank):
    if rank == 0:
        dist.barrier()


def of_two_sizes(rank):
    if rank == 0:
        dist.send(torch.zeros(8), 1)
    else:
        dist.recv(torch.zeros(2), 0)
    dist.barrier()


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [(one_returns, "Look at the ranks."), (of_two_sizes, answers.MIXED_UP)],
)
def test_a_hint_goes_with_what_it_is_about(wrong, hint):
    assert check_on_ranks(wrong).message.endswith(hint)

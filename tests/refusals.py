"""Tests that calls and commands are refused: tables of them, and what each is told."""

from collections.abc import Callable

import pytest


def refused(*cases: tuple[Callable[[], object], str]) -> Callable:
    """Return a test that each call raises a ValueError which matches the words."""

    @pytest.mark.parametrize(
        ("call", "message"), cases, ids=[message for _, message in cases]
    )
    def test(call, message):
        with pytest.raises(ValueError, match=message):
            call()

    return test


def said(kinds, call: Callable, *args, **options) -> str:
    """Call it, and return what an error of these kinds says; "" if there is none."""
    try:
        call(*args, **options)
    except kinds as error:
        return str(error)
    return ""


def complaint(typed: list[str] | str, capsys, shows=False) -> tuple[int, str]:
    """Type a command that ends badly; return its exit code and the line that says why.

    It must be one line on stderr that says who speaks; and all, unless it `shows` more.
    """
    from ddp_course.cli import main  # not above: ranks import this file, too

    try:
        code = main(typed.split() if isinstance(typed, str) else typed)
    except SystemExit as end:  # argparse has answered
        code = end.code
    out, err = capsys.readouterr()
    assert err.startswith("ddp-course: ") and err.count("\n") == 1, err
    assert shows or not out, out
    return code, err


def answered(command, code: int, *cases: tuple[str, str], fixtures=("capsys",)):
    """Return a test that a command, typed so, ends with `code` and a line with words.

    `given` are the fixtures under which all of it is typed.
    """

    @pytest.mark.usefixtures(*fixtures)
    @pytest.mark.parametrize(("typed", "message"), cases, ids=[c for c, _ in cases])
    def test(typed, message, capsys):
        ended, line = complaint(f"{command} {typed}", capsys)
        assert ended == code and message in line, line
        assert ("--help" in line) == (code == 2), line

    return test


@pytest.fixture
def nothing_starts(monkeypatch) -> None:
    """`ddp-course train` starts no rank: the test fails if it would."""
    starts = lambda *_, **__: pytest.fail("started")  # noqa: E731
    monkeypatch.setattr("ddp_course.commands.train.spawn", starts)

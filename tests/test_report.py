"""`doctor --report`: one block of text, and nobody's name in it."""

import getpass
import re
import socket
from pathlib import Path

import pytest

from ddp_course.cli import main
from ddp_course.commands import CommandError, report

SECRET = "hunter2 in a token"


def test_spawn_a_report_says_much_and_tells_nobodys_name(monkeypatch, capsys):
    monkeypatch.setenv("JUPYTER_TOKEN", SECRET)
    monkeypatch.setenv("https_proxy", f"http://anna:{SECRET}@proxy:3128")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("ANNAS_DIARY", SECRET)
    assert main(["doctor", "--report"]) == 0
    output = capsys.readouterr().out
    for said in ("torch 2.", "in /dev/shm", "open files: at most", "each got 10"):
        assert said in output
    (line,) = re.findall("^variables set: (.*)", output, re.MULTILINE)
    assert {"GLOO_SOCKET_IFNAME", "JUPYTER_TOKEN", "https_proxy"} <= {*line.split(", ")}
    for private in (SECRET, "ANNAS_DIARY", str(Path.home()), socket.gethostname()):
        assert private not in output
    assert not re.search(rf"\b{re.escape(getpass.getuser())}\b", output)


def fail():
    raise CommandError(f"no {Path.home()}/course/x.py on {socket.gethostname()} for me")


def test_a_report_tells_that_the_ranks_failed(monkeypatch, capsys):
    monkeypatch.setattr(report, "prove_all_reduce", fail)
    assert main(["doctor", "--report"]) == 1
    output = capsys.readouterr().out
    assert "The ranks failed: no <path> on <name> for me\n" in output


@pytest.mark.parametrize(
    "kept", ["1/2 of it", "in /dev/shm", "a 3/4/5 b", "http://x/y"]
)
def test_what_is_no_folder_stays(kept):
    assert report.without_names(kept) == kept

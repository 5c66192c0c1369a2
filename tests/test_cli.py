"""The command: what is typed, what is answered, and how it ends."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import replace
from datetime import date
from functools import partial
from importlib import metadata
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from unittest.mock import Mock

import cloudpickle
import nbformat
import pytest
from conftest import alive, descendants, names_in, none_left
from refusals import answered, complaint

import ddp_course
from ddp_course import compression, pipeline, spec, theory
from ddp_course.cli import main, parser
from ddp_course.commands import CommandError, doctor, lab, lab_options, proofs
from ddp_course.context_parallel.gpt import ATTENTIONS
from ddp_course.data_parallel.axis import WRAPPERS
from ddp_course.launch import LaunchError, here
from ddp_course.model import GPTConfig
from ddp_course.zero.axis import OPTIMIZERS

COMMANDS = ["lab", "run", "progress", "train", "notebooks", "site", "doctor", "bench"]
COMMANDS += ["plan"]
# Ranks need not import all that this file imports.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

TINY = GPTConfig(block_size=8, n_layer=1, n_head=2, d_model=8)


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A folder with two empty chapters, in which we stand."""
    folder = tmp_path / "a clone/notebooks"
    folder.mkdir(parents=True)
    for name in ("00_start_here", "01_ranks"):
        nbformat.write(nbformat.v4.new_notebook(), folder / f"{name}.ipynb")
    monkeypatch.chdir(folder.parent)
    return folder.parent


def begun(typed: str, environ: dict[str, str], **options) -> subprocess.Popen:
    """Start a command in a process of its own."""
    words = [sys.executable, "-m", "ddp_course", *typed.split()]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, env=environ, **pipes, **options)


# What is typed


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"ddp-course {ddp_course.__version__}\n"


def test_every_command_has_help_with_an_example_of_itself(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert [command for command in COMMANDS if command not in shown] == []
    for command in ("", *COMMANDS):
        with pytest.raises(SystemExit, match="0"):
            main([*command.split(), "--help"])
        output = capsys.readouterr().out
        if command:
            assert f"ddp-course {command}" in output.split("examples:")[1]
        else:
            assert output == shown


def test_each_name_that_can_be_typed_stands_in_the_package():
    for known, names in (
        (WRAPPERS, spec.DATA_PARALLEL),
        ({0, *OPTIMIZERS, 3}, spec.ZERO),
        (compression.named.CLASSES, spec.COMPRESSORS),
        (pipeline.SCHEDULES, spec.SCHEDULES),
        (theory.MODELS, spec.MODELS),
        (theory.OPTIMIZERS, spec.OPTIMIZERS),
        (theory.PRECISIONS, spec.PLANNED),
        (ATTENTIONS, spec.ATTENTION),
    ):
        assert {*known} == {*names}


def test_ctrl_c_while_pytorch_is_imported(tmp_path):
    (tmp_path / "torch.py").write_text("print(flush=True)\nimport time; time.sleep(60)")
    command = begun("doctor", os.environ | {"PYTHONPATH": str(tmp_path)})
    assert command.stdout.readline() == "\n"
    command.send_signal(signal.SIGINT)
    output = command.communicate(timeout=30)[1]
    assert (command.returncode, output) == (130, "ddp-course: stopped\n")


def test_what_nobody_can_write_is_told(capsys):
    output = complaint("plan --preset 1m --json /dev/full", capsys, shows=True)
    full = "No space left on device\n"
    assert output == (1, f"ddp-course: cannot write /dev/full: {full}")
    with Path("/dev/full").open("w") as nowhere:
        typed = [sys.executable, "-m", "ddp_course.cli", "plan", "--preset", "1m"]
        done = subprocess.run(typed, stdout=nowhere, stderr=subprocess.PIPE, text=True)
    assert done.stderr == f"ddp-course: cannot write all of this: {full}"
    assert done.returncode == 1


test_what_is_typed_wrongly_is_answered_in_one_line = answered(
    "",
    2,
    ("fly", "'train', 'notebooks', 'site', 'doctor', 'bench', 'plan'"),
    ("run", "CHAPTER"),
    ("lab --port 0", "'0' is not a whole number from 1 to 65535"),
    ("lab --port http", "'http' is not a whole number"),
    ("run 00 --timeout -1", "--timeout"),
    ("notebooks", "--save --check"),
    ("notebooks --save --check", "not allowed with"),
    ("train --strategy dpp", "strategy 'dpp' does not exist; see --data-parallel"),
    ("train --strategy zero3 --ranks 4", "strategy 'zero3' is --zero 3 now"),
    ("train --strategy dp --replicas 2", "strategy 'dp' is --threads N now"),
    ("train --replicas 2", "replicas is called threads now: --threads N"),
    ("train --data-parallel dp", "choose from 'average', 'naive', 'flat', 'ddp'"),
    ("train --lr 0", "'0' is not a number above 0"),
    ("train --ranks 65", "'65' is not a whole number from 1 to 64"),
    ("train --lr nan", "'nan' is not a number above 0"),
    ("train --seed -1", "--seed"),
    ("plan", "--preset --parameters/--params --accelerators --anchors is"),
    ("plan --preset gpt5", "invalid choice: 'gpt5'"),
    ("plan --preset 1m --parameters 7b", "not allowed with"),
    ("plan --parameters 7q", "'7q' is not a number"),
    ("plan --parameters 7.5bn", "is not a number such as 7.5e9, 7.5b or 350m"),
    ("plan --parameters 0", "is not a number above 0"),
    ("plan --parameters -7b", "'-7' is not a number above 0"),
    ("plan --parameters 7b --memory -1e-3", "'-1e-3' is not a number above 0"),
    ("plan --parameters 0.2", "'0.2' is not a number from 1 to 1000t"),
    ("plan --parameters 1e30", "'1e30' is not a number from 1"),
    ("plan --parameters 7b --gpus 0", "'0' is not a whole number from 1"),
    ("plan --parameters 7b --memory nan", "'nan' is not a number above 0"),
    ("plan --parameters 7b --precision fp8", "invalid choice: 'fp8'"),
)
test_what_does_not_exist_is_answered_in_one_line = answered(
    "",
    1,
    ("run 7", "no chapter '7'; name one of 00_start_here, 01"),
    ("run 00 nix", "no chapter 'nix'"),
    ("run nix.ipynb", "no file nix.ipynb"),
    ("lab --ip no.such.host.invalid", "no.such.host.invalid"),
    ("lab --ip 192.0.2.1", "192.0.2.1"),  # an address of no machine (RFC 5737)
    fixtures=["clone"],
)


def test_without_a_clone_lab_says_where_to_run_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ddp_course.learners_copy.PACKAGE", tmp_path / "site/pkg")
    monkeypatch.setattr("importlib.metadata.files", lambda name: None)  # no wheel
    assert "run this in a clone" in complaint("lab", capsys)[1]


def test_what_a_command_raises_is_one_line(monkeypatch, capsys):
    wrong = LaunchError("rank 1: it went wrong"), KeyboardInterrupt()
    monkeypatch.setattr(doctor, "command", Mock(side_effect=wrong))
    for answer in ((1, "rank 1: it went wrong"), (130, "stopped")):
        assert complaint("doctor", capsys) == (answer[0], f"ddp-course: {answer[1]}\n")


# What a machine has


def control_group(root: Path, mine: str, files: dict[str, str]) -> Path:
    """Make a root folder with /proc/self/cgroup and the `files` of the groups."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(mine)
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


def version_1(quota: str) -> dict[str, str]:
    cpu, memory = "cpu/cpu.cfs", "memory/memory.limit_in_bytes"
    return {f"{cpu}_quota_us": quota, f"{cpu}_period_us": "100000", memory: "4096"}


@pytest.mark.parametrize(
    ("mine", "files", "cores", "memory"),
    [
        ("0::/", {}, None, None),
        ("0::/", {"cpu.max": "max 100000", "memory.max": "max"}, None, None),
        ("0::/", {"cpu.max": "50000 100000", "memory.max": "1048576"}, 0.5, 2**20),
        # a limit above one's own group counts too; the smallest wins
        ("0::/a/b", {"a/cpu.max": "1 4", "a/b/cpu.max": "1 2"}, 0.25, None),
        ("0::/a/b", {"a/memory.max": "4096", "a/b/memory.max": "8192"}, None, 4096),
        # version 1, and a container that sees its path outside
        ("3:memory:/docker/a\n1:cpu,cpuacct:/docker/a", version_1("75000"), 0.75, 4096),
        ("1:cpu:/", version_1("-1"), None, None),  # the memory's tree is not ours
    ],
)
def test_limits_of_control_groups_and_of_affinity(
    mine, files, cores, memory, tmp_path, monkeypatch
):
    root = control_group(tmp_path, mine, files)
    assert doctor.cores(root) == (cores or len(os.sched_getaffinity(0)))
    assert doctor.memory(root) == (memory or doctor.physical_memory())
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3}, raising=False)
    assert doctor.cores(root) == min(cores or 1, 1)


def test_sizes_in_words():
    sizes = (None, 0, 1000, 64 * 2**20, 1.5 * 2**30, 2**50)
    words = ["unknown", "0 B", "1000 B", "64 MiB", "1.5 GiB", "1024 TiB"]
    assert [doctor.in_words(size) for size in sizes] == words


USUAL = doctor.Machine(2, 2, 2**34, 2**34, (), ("gloo",), shared_memory=2**33)


@pytest.mark.parametrize(
    ("differences", "phrases"),
    [
        ({}, ["4 ranks run on 2 cores over gloo", "no GPU", "take turns"]),
        ({"cores": 8}, ["a core of its own"]),
        ({"cores": 1}, ["on 1 core over"]),
        ({"cores": 0.5}, ["on 0.5 cores over"]),
        ({"gpus": ("H200",)}, ["2 cores over gloo", "the 1 GPU is", "share_gpus=True"]),
        ({"gpus": ("H200",) * 4}, ["4 ranks run on 4 GPUs, one each, over NCCL"]),
        ({"shared_memory": 64 * 2**20}, ["64 MiB", "Bus error", "--shm-size"]),
        ({"memory": 2**30}, ["Memory is scarce: 1 GiB"]),
        ({"shared_memory": None, "memory": None}, ["take turns"]),
    ],
)
def test_the_doctor_says_what_runs_how(differences, phrases):
    results = doctor.advice(replace(USUAL, **differences))
    assert [phrase for phrase in phrases if phrase not in " ".join(results)] == []
    scarce = any(differences.get(name) for name in ("memory", "shared_memory"))
    assert len(results) == 1 + scarce  # it warns only when there is a reason


def test_the_doctor_tells_what_a_container_takes_away():
    facts = doctor.facts(replace(USUAL, cores=1.5, memory=2**30))
    assert facts["cores"] == "1.5 of the machine's 2"
    assert facts["memory"] == "1 GiB of the machine's 16 GiB"
    assert facts["backends"] == "gloo (not in this PyTorch: nccl, mpi, ucc)"
    assert f"torch {metadata.version('torch')}" in facts["versions"]


def test_the_doctor_tells_when_gpus_were_tried(tmp_path):
    file, today = tmp_path / "results.json", date(2026, 3, 9)
    assert "never been tested on a GPU" in doctor.tried_on_gpus(file)
    record = {"date": "2026-02-27", "gpus": ["H100", "H100"], "torch": "2.13.0"}
    record |= {
        "nccl": "2.27",
        "passed": ["a", "b"],
        "failed": ["memory"],
        "skipped": [],
    }
    file.write_text(json.dumps(record))
    assert doctor.tried_on_gpus(file, today) == (
        "On GPUs (H100, torch 2.13.0, NCCL 2.27) 2 tests passed 10 days ago, failed: "
        "memory."
    )
    assert "passed 1 day ago, f" in doctor.tried_on_gpus(file, date(2026, 2, 28))


# Proofs: each must hold here, and must fail for ranks that do it wrong


def test_spawn_doctor_proves_itself(capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "one all_reduce, each got 10" in shown and "over gloo" in shown


def test_spawn_the_doctor_fails_when_the_ranks_do_not_talk(monkeypatch, capsys):
    alone = partial(proofs.prove_all_reduce, fn=lambda: here().rank + 1)
    monkeypatch.setattr(doctor, "prove_all_reduce", alone)
    code, output = complaint("doctor", capsys, shows=True)
    assert (
        code == 1 and "returned [1, 2, 3, 4] on the ranks; each must get 10" in output
    )


def tiny_training(spoil=lambda module: None):
    """Return `train` on a tiny model; `spoil` changes the module, inside the ranks."""

    def work(**options):
        from ddp_course import train as module

        spoil(module)
        return module.train(**options, preset=TINY, data_parallel="average")

    return work


def test_spawn_training_agrees_in_two_lines():
    lines = proofs.prove_training(steps=2, fn=tiny_training())
    assert len(lines) == 2 and all("\n" not in line for line in lines)
    assert max(map(len, lines)) <= 88
    assert "4 processes trained one GPT for 2 steps" in lines[0]
    assert "They agree" in lines[1]


def no_average(module):
    module.average = lambda tensor: tensor


def same_rows_for_all(module):
    original = module.shard
    module.shard = lambda rows, rank, world_size: original(rows, 0, world_size)


def everyone_alone(module):
    module.dist = SimpleNamespace(is_initialized=lambda: False)


def nothing_but_nan(module):
    original = module.average
    module.average = lambda tensor: original(tensor).mul_(float("nan"))


WRONG = {
    no_average: "the 4 ranks differ",
    same_rows_for_all: "and one do not train the same model",
    everyone_alone: "did not find each other",
    nothing_but_nan: "differ by nan",
}


@pytest.mark.parametrize(("spoil", "answer"), WRONG.items())
def test_spawn_a_training_that_is_wrong_is_found(spoil, answer):
    with pytest.raises(CommandError, match=answer):
        proofs.prove_training(steps=2, fn=tiny_training(spoil))


# JupyterLab


@pytest.fixture
def proven(monkeypatch):
    """Take the proof as done: these tests are about what comes after."""
    monkeypatch.setattr(lab, "prove_training", lambda: ("one", "two"))


@pytest.fixture
def no_server(monkeypatch):
    start = "jupyterlab.labapp.LabApp.initialize_server"
    monkeypatch.setattr(start, lambda *_: pytest.fail("a server was started"))


def test_a_port_that_is_taken(clone, no_server, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, output = complaint(f"lab --port {port}", capsys)
    assert code == 1 and f"port {port} is taken" in output
    instead = int(re.search(r"ddp-course lab --port (\d+)$", output)[1])
    assert lab_options.is_free(instead, "localhost") and instead > port
    assert lab_options.is_free(port, "localhost")  # given up, so it is free
    assert 1024 <= lab_options.next_free(65535, "localhost") < 65535


def test_in_a_jupyterhub_seat_there_is_no_second_server(
    clone, proven, no_server, monkeypatch, capsys
):
    monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", "/user/ada/")
    assert main(["lab"]) == 0
    lines = capsys.readouterr().out.splitlines()
    mine = clone / "ddp-course"
    assert lines[:3] == ["one", "two", f"Your copy of the course: {mine}"]
    assert str(mine / "notebooks/00_start_here.ipynb") in lines[3] and len(lines) == 4


@pytest.mark.parametrize(
    ("environ", "platform", "obstacle"),
    [
        ({}, "linux", "no display"),
        ({"DISPLAY": ":0"}, "linux", None),
        ({"WAYLAND_DISPLAY": "wayland-0"}, "linux", None),
        ({"DISPLAY": ":10", "SSH_CONNECTION": "10.0.0.9 1 10.0.0.5"}, "linux", "SSH"),
        ({"SSH_TTY": "/dev/pts/1"}, "darwin", "SSH"),
        ({}, "darwin", None),
        ({}, "win32", None),
    ],
)
def test_where_a_browser_can_be_shown(environ, platform, obstacle):
    found = lab.no_display(environ, platform)
    assert found is None if obstacle is None else obstacle in found


def test_the_tunnel_leads_to_the_address_that_ssh_used():
    environ = {"SSH_CONNECTION": "10.0.0.9 50000 10.0.0.5 22"}
    output = lab.tunnel(8889, environ)
    assert re.search(r"`ssh -L 8889:localhost:8889 \S+@10.0.0.5`", output)
    assert f"@{socket.gethostname()}`" in lab.tunnel(8889, {})


@pytest.mark.parametrize(
    ("display", "wanted", "can_open", "opened", "answer"),
    [
        (True, True, True, 1, "opens this address now"),
        (True, True, False, 1, "Open this address"),
        (True, False, True, 0, "Open this address"),
        (False, True, True, 0, "ssh -L 8888"),
        (False, False, True, 0, "ssh -L 8888"),
    ],
)
def test_a_browser_is_opened_only_where_it_can_be_seen(
    display, wanted, can_open, opened, answer, monkeypatch
):
    tried = []
    open_it = lambda url: tried.append(url) or can_open  # noqa: E731
    monkeypatch.setattr(lab.webbrowser, "open", open_it)
    obstacle = None if display else "There is no display here."
    monkeypatch.setattr(lab, "no_display", lambda *_: obstacle)
    assert answer in lab.open_or_say_how("http://x", 8888, wanted)
    assert len(tried) == opened


def test_the_address_is_escaped_and_has_the_token_if_there_is_one():
    path = Path("my notebooks/00_start_here.ipynb")
    where = "http://localhost:8888/lab/tree/my%20notebooks/00_start_here.ipynb"
    for token, url in (("abc", f"{where}?token=abc"), ("", where)):
        assert lab.address("http://localhost:8888/", token, path) == url


def asked(url: str, data: bytes | None = None) -> bytes:
    return urllib.request.urlopen(url, data, timeout=200).read()


@pytest.mark.kernel
@pytest.mark.timeout(900)  # two imports of PyTorch, a server and a kernel
def test_lab_really(clone, tmp_path):
    """Two lines, an address that answers, and after Ctrl-C nothing is left."""
    places = {name: tmp_path / name for name in ("HOME", "TMPDIR")}
    for place in places.values():
        place.mkdir()
    runtime = Path(tempfile.mkdtemp(prefix="ddp-")) / "r"  # a short name
    hidden = ("DISPLAY", "WAYLAND_DISPLAY", "JUPYTERHUB_SERVICE_PREFIX")
    environ = {k: v for k, v in os.environ.items() if k not in hidden}
    environ |= {name: str(place) for name, place in places.items()}
    environ["JUPYTER_RUNTIME_DIR"] = str(runtime)
    command = begun("lab --no-browser", environ, cwd=clone, start_new_session=True)
    try:
        proof = [command.stdout.readline(), command.stdout.readline()]
        assert "4 processes trained" in proof[0] and "They agree" in proof[1]
        assert command.stdout.readline().endswith(f"{clone / 'ddp-course'}\n")
        url = re.fullmatch(r"JupyterLab: (\S+)\n", command.stdout.readline())[1]
        assert "ssh -L" in command.stdout.readline()  # no display
        base, token = url.split("lab/tree/")[0], url.split("token=")[1]
        assert url.startswith(f"{base}lab/tree/notebooks/00_start_here.ipynb?")
        page = clone / "ddp-course" / lab.PAGE
        assert url.replace("&", "&amp;") in page.read_text()
        assert page.stat().st_mode & 0o777 == 0o600
        contents = f"{base}api/contents/notebooks/00_start_here.ipynb?token="
        assert asked(contents + token)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            asked(contents + "wrong")
        shown = asked(url).decode()
        assert f'"disabledExtensions": ["{lab.NEWS}"]' in shown  # no popup asks

        kernel = json.loads(asked(f"{base}api/kernels?token={token}", b"{}"))["id"]
        family = descendants(command.pid)
        assert [pid for pid in family if kernel in command_line(pid)]
        assert names_in(runtime) > {"jupyter_cookie_secret"}
        assert runtime.stat().st_mode & 0o077 == 0
        connection = (runtime / f"kernel-{kernel}.json").read_text()
        assert ('"transport": "ipc"' in connection) == (len(str(runtime)) < lab.LONGEST)

        os.killpg(command.pid, signal.SIGINT)  # as a terminal does: to the whole group
        time.sleep(0.3)
        os.killpg(command.pid, signal.SIGINT)  # a second one must not cut it short
        out, err = command.communicate(timeout=300)
        assert (command.returncode, out) == (0, "")
        assert "lab.py" not in err  # a kernel that was starting may complain
        assert none_left(family)
        assert names_in(runtime) <= {"jupyter_cookie_secret"}
        assert not page.exists()
        # torch makes a folder there for its compiler, torchinductor_ADA
        left = names_in(places["TMPDIR"])
        assert [name for name in left if "torchinductor" not in name] == []
    finally:
        for pid in [*descendants(command.pid), command.pid]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(runtime.parent)


def command_line(pid: int) -> str:
    """Return the words with which a process was started; "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_pytorchs_threads_sleep_while_they_wait(monkeypatch, capsys):
    """In commands, and in the kernels that they start; unless somebody chose."""
    for chosen in (None, "active"):
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        if chosen:
            monkeypatch.setenv("OMP_WAIT_POLICY", chosen)
        assert main(["plan", "--preset", "1m", "--gpus", "2"]) == 0
        assert os.environ["OMP_WAIT_POLICY"] == (chosen or "passive")


def test_too_few_files_that_may_be_open_are_told(tmp_path):
    """And what lies in the current folder is imported by nobody."""
    for name in ("random", "sympy", "cloudpickle", "typing_extensions"):
        (tmp_path / f"{name}.py").write_text(f"open('{tmp_path}/ran', 'w'); 1 / 0")
    command = Path(sys.executable).with_name("ddp-course")
    words = "train --ranks 16 --steps 1 --batch-size 16"
    done = subprocess.run(
        ["sh", "-c", f"ulimit -n 64; exec {command} {words}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert not (tmp_path / "ran").exists(), done
    assert done.returncode == 1, done
    assert done.stderr.endswith("`ulimit -n 4096`: Too many open files\n"), done.stderr
    assert "Traceback" not in done.stderr


REFUSED_AT_ONCE = {  # in a folder with `afile` and with `full/other.ipynb`
    "lab": ("--ip nowhere", "--port 99999", "full", "afile", "a b"),
    "run": ("99", "no.ipynb", "00 --timeout 0"),
    "progress": ("--report afile", "--report no/x.json", "--collect no", "what"),
    "train": (
        "--tp 8",
        "--pp 4 --schedule interleaved",
        "--ranks 2 --compress topk:7",
        "--every 3",
        "--json no/x",
        "--checkpoint afile",
        "--checkpoint afile/x",
    ),
    "notebooks": ("--save 99", "--check no.ipynb", "00"),
    "site": ("what",),  # `--out full` can be refused where Sphinx is installed
    "doctor": ("what",),
    "bench": ("lunch", "", "launch --json no/x", "launch --figure x.doc"),
    "plan": (
        "",
        "--parameters 3m --layers 3",
        "--parameters 1b --layers 2 --hidden 10 --heads 3 --sequence 5",
        "--preset gpt2-xl --layers 3",
        "--preset gpt2-xl --json no/x",
        "--preset gpt2-xl --gpu h100 --batch 3",
        "--preset gpt2-xl --gpu h100 --json no/x",
    ),
}
HEAVY = ("torch", "numpy", "nbformat", "IPython", "jupyterlab", "matplotlib")


def lines_with_an_unknown_name() -> list[str]:
    """Return lines for each command: those above, unknown options, unknown choices."""
    (commands,) = [a for a in parser()._actions if a.choices]
    assert commands.choices.keys() == REFUSED_AT_ONCE.keys()
    lines = ["nothing", "--nothing"]
    for name, command in commands.choices.items():
        ends = [*REFUSED_AT_ONCE[name], "--nothing", "--nothing=3"]
        for option in command._actions:
            if option.choices or option.metavar == "N":
                ends.append(f"{option.option_strings[0]} nothing")
        lines += [f"{name} {end}" for end in ends]
    return lines


def test_help_and_refusals_do_not_wait_for_pytorch(tmp_path):
    """Also of what only makes no sense together, or for a model."""
    (tmp_path / "full").mkdir()
    for name in ("full/other.ipynb", "afile"):
        (tmp_path / name).touch()
    ask = f"""
    import json, sys
    from ddp_course.cli import main, parser
    for typed in json.load(sys.stdin):
        try:
            code = main(typed.split())
        except SystemExit as end:
            code = end.code
        heavy = [name for name in {HEAVY} if name in sys.modules]
        print(json.dumps([typed, code, heavy]), flush=True)
        if heavy:
            break"""
    helps = [f"{name} --help" for name in COMMANDS]
    lines = lines_with_an_unknown_name()
    done = subprocess.run(
        [sys.executable, "-c", dedent(ask) + "\n", "ddp_course"],
        input=json.dumps([*helps, *lines, "run full/other.ipynb"]),  # a plant: nbformat
        capture_output=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(ddp_course.__path__[0]).parent)},
        text=True,
    )
    ends = [json.loads(line) for line in done.stdout.splitlines() if line[:2] == '["']
    answered_or_heavy = [e[0] for e in ends if e[1] not in (1, 2) or e[2]]
    assert answered_or_heavy == [*helps, "run full/other.ipynb"]
    assert len(ends) == len(helps) + len(lines) + 1 > 80
    output = done.stderr.splitlines()  # one for each, none of them a traceback
    assert len(output) == len(lines) + 1 and all(
        t.startswith("ddp-course: ") for t in output
    )
    assert not (tmp_path / "ddp-course").exists()  # no copy was made

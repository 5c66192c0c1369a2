"""SIGTERM to one rank: all save after the same step, leave, and go on from there."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from ddp_course.cli import main
from ddp_course.failures.notice import Notice
from ddp_course.launch import RankError, spawn
from ddp_course.model import GPTConfig
from ddp_course.train import History, average, train

SMALL = GPTConfig(block_size=16, n_layer=1, n_head=2, d_model=8)
CURVE = {"batch_size": 12, "preset": SMALL}
STEPS = 6


def itself(tensor):
    return tensor


def test_a_signal_is_noted_and_read_with_the_loss():
    before = signal.getsignal(signal.SIGTERM)
    with Notice() as notice:
        assert notice.share(torch.tensor(0.1), itself) == float(torch.tensor(0.1))
        assert (notice.noted, notice.agreed) == (None, False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert notice.noted is not None and not notice.agreed
        notice.share(torch.tensor(2.0), itself)
        assert notice.agreed
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_nobody_has_read_is_delivered_at_the_end():
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append("delivered"))
    try:
        with Notice() as notice:
            notice.share(torch.tensor(1.0), itself)
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen == []
        assert seen == ["delivered"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_notes_nothing():
    errors = []

    def enter():
        with contextlib.suppress(ValueError), Notice():
            return
        errors.append("raised")

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert errors == []


def with_signal(at: int) -> Callable:
    """Return a backward pass before which, in step `at`, this process gets SIGTERM."""
    backward, steps = torch.Tensor.backward, []

    def in_step(self, *args, **options):
        steps.append(1)
        if len(steps) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return backward(self, *args, **options)

    return in_step


def preempted(folder, victim: int, at: int, after=None, **layout) -> History:
    """Train; rank `victim` gets SIGTERM in step `at`, before its backward pass."""
    if dist.get_rank() == victim:
        torch.Tensor.backward = with_signal(at)
    if after is not None:
        after()
    return train(STEPS, **CURVE, **layout, checkpoint=folder, every=100)


@pytest.mark.parametrize("layout", [{}, {"zero": 3, "save": "async"}])
def test_all_ranks_leave_after_the_same_step_and_go_on_bit_for_bit(layout, tmp_path):
    ranks = spawn(lambda: preempted(tmp_path, 1, 3, **layout), world_size=3)
    assert [(len(h.losses), h.stopped) for h in ranks] == [(3, True)] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003.pt"]

    def both():
        whole = train(STEPS, **CURVE, **layout)
        return whole, train(STEPS, **CURVE, **layout, checkpoint=tmp_path)

    for whole, rest in spawn(both, world_size=3):
        assert (rest.resumed_at, rest.stopped) == (3, False)
        assert (rest.losses, rest.checksum) == (whole.losses, whole.checksum)


def alone():
    """The plant: each rank looks at its own note only."""

    def share(self, loss, average):
        self.agreed = self.noted is not None
        return float(average(loss))

    Notice.share = share


def test_ranks_that_do_not_agree_are_caught(tmp_path):
    with pytest.raises(RankError):  # rank 1 has left, and rank 0 waits for it
        spawn(lambda: preempted(tmp_path, 1, 3, alone), world_size=2, timeout=60)


def test_without_a_folder_sigterm_ends_a_rank():
    def killed():
        os.kill(os.getpid(), signal.SIGTERM)
        train(1, **CURVE)

    [report] = spawn(killed, world_size=1, check=False)
    assert (report.status, report.error) == ("killed", "killed by SIGTERM")


def test_the_last_step_is_no_stop(tmp_path):
    for history in spawn(lambda: preempted(tmp_path, 0, STEPS), world_size=2):
        assert (len(history.losses), history.stopped) == (STEPS, False)


def test_no_message_more_and_the_same_loss():
    def shared():
        loss = torch.tensor(0.1 + dist.get_rank())
        with Notice() as notice:
            return notice.share(loss.clone(), average), float(average(loss))

    for beside, single in spawn(shared, world_size=3):
        assert beside == single


# As a user stops it


@contextlib.contextmanager
def started(*words: str):
    """Start a command; end it, if it has not ended."""
    run = subprocess.Popen(
        [sys.executable, "-m", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield run
    finally:
        run.kill()
        run.communicate()


def stopped(run: subprocess.Popen) -> tuple[str, str]:
    """Send SIGTERM when the second step is printed; return the rest of the output."""
    for line in run.stdout:
        if "step" in line and " 2 of " in line:
            break
    run.send_signal(signal.SIGTERM)
    return run.communicate(timeout=300)


def test_a_command_in_one_process_says_so_and_goes_on(tmp_path, monkeypatch, capsys):
    folder, file = tmp_path / "checkpoints", tmp_path / "curve.json"
    words = ["train", "--ranks=1", "--steps=4", f"--checkpoint={folder}", "--every=9"]
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", with_signal(2))
        assert main(words) == 143
    out, err = capsys.readouterr()
    assert f"stopped by SIGTERM after step 2 of 4, saved in {folder}" in out
    assert out.strip().endswith("the same command goes on from there") and not err
    assert main([*words, f"--json={file}"]) == 0
    record = json.loads(file.read_text())
    assert (record["resumed_at"], len(record["losses"])) == (2, 4)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", ["spawn", "torchrun"])
def test_a_stopped_command_on_ranks_says_so(launcher, tmp_path):
    words = ["ddp_course", "train", "--steps=40", "--every=40"]
    words.append(f"--checkpoint={tmp_path}")
    if launcher == "spawn":
        words.append("--ranks=2")
    else:
        words = ["torch.distributed.run", "--nproc-per-node=2", "-m", *words]
    with started(*words) as run:
        out, err = stopped(run)
    done = int(next(tmp_path.glob("step-*.pt")).stem[5:])
    assert f"stopped by SIGTERM after step {done} of 40, saved in {tmp_path}" in out
    if launcher == "torchrun":  # its agent has an exit code of its own
        assert run.returncode != 0
    else:
        assert (run.returncode, err) == (143, "")

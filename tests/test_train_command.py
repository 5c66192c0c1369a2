"""`ddp-course train`: what is typed, what is printed, what is refused."""

import json

import pytest
from refusals import answered, complaint, nothing_starts  # noqa: F401

from ddp_course.cli import main, parser
from ddp_course.commands.train import Progress
from ddp_course.commands.train_options import ranks_of
from ddp_course.train import train


def typed(words: str, capfd) -> tuple[int, list[str], str]:
    """Run a command; return its exit code, the lines printed, and the errors."""
    code = main(["train", *words.split()])
    out, err = capfd.readouterr()
    return code, out.splitlines(), err


def test_one_process_or_many_the_same_curve_goes_to_the_file(tmp_path, capfd):
    """Threads, and ranks; the next test has every axis."""
    curves = {}
    for ranks, option, value in ((1, "threads", 4), (1, "zero", 0), (2, "zero", 3)):
        file = tmp_path / f"{option}{value}{ranks}.json"
        code, lines, err = typed(
            f"--ranks {ranks} --{option} {value} --steps 3 --json {file}", capfd
        )
        assert (code, err) == (0, "")
        record = json.loads(file.read_text())
        assert (record[option], record["world_size"]) == (value, ranks)
        assert [line for line in lines if " step 1 of 3 " in f" {line}"]
        assert f"rank{'s' * (ranks > 1)}, 3 steps, loss" in lines[-2]
        assert lines[-1].endswith(f"bit by bit: {record['checksum']}")
        curves[file.stem] = record
    one = train(3)
    record = curves["zero01"]
    assert (record["losses"], record["checksum"]) == (one.losses, one.checksum)
    for record in curves.values():
        assert record["losses"] == pytest.approx(one.losses, abs=1e-5)


def test_sizes_make_a_mesh_and_say_how_many_ranks(tmp_path, capfd):
    one, file = train(2), tmp_path / "curve.json"
    all_axes = "--dp 2 --tp 2 --pp 2 --zero 1 --schedule zero-bubble --microbatches 2"
    for words, ranks, names in (
        ("--dp 4 --shard 2 --zero 3 --clip 100", 4, (3, "1f1b")),
        (all_axes, 8, (1, "zero_bubble")),
    ):
        code, lines, err = typed(f"{words} --steps 2 --json {file}", capfd)
        assert (code, err) == (0, "")
        assert f"{ranks} ranks, 2 steps, loss" in lines[-2]
        record = json.loads(file.read_text())
        assert (record["zero"], record["schedule"]) == names
        assert record["losses"] == pytest.approx(one.losses, abs=1e-5)


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("", 1),
        ("--cp 2 --tp 2", 4),
        ("--dp 3 --pp 2", 6),
        ("--ep 4", 4),  # ranks along ep are ranks of dp
        ("--ep 2 --dp 4 --tp 2", 8),
        ("--ranks 6 --tp 2", 6),
    ],
)
def test_sizes_say_how_many_ranks_start(words, ranks):
    assert ranks_of(parser().parse_args(["train", *words.split()])) == ranks


def test_it_goes_on_from_where_it_was(tmp_path, capfd):
    words = f"--ranks 2 --every 2 --checkpoint {tmp_path}"
    typed(f"{words} --steps 3", capfd)
    code, lines, _ = typed(f"{words} --steps 4", capfd)
    assert code == 0
    assert "2 ranks, 4 steps (3 of them by an earlier run)" in lines[-2]
    assert sum("step" in line and "of 4" in line for line in lines) == 1


test_what_cannot_be_is_one_line_and_nothing_is_started = answered(
    "train",
    1,
    ("--ranks 3", "8 rows cannot be shared equally by 3 ranks; make the batch size"),
    ("--dp 3 --tp 2 --ranks 4", "a mesh dp 3 x tp 2 needs 6 ranks, and the"),
    ("--dp 2 --shard 2", "--shard has no effect without --zero 3"),
    ("--json no/such/folder/file", "there is no folder"),
    ("--checkpoint /dev/null/runs", "/dev/null is a file; name a folder"),
    ("--json /tmp", "cannot write /tmp: it is a folder"),
    ("--pp 1 --schedule gpipe", "--schedule has no effect without a pipeline"),
    ("--local-steps 8 --outer nesterov", "averaging needs two ranks or more"),
    ("--ranks 4 --microbatches 8", "--microbatches has no effect without a pipe"),
    ("--attention ulysses", "--attention has no effect without a divided sequence"),
    ("--capacity 1.25", "--capacity has no effect without --experts"),
    ("--every 5", "--every has no effect without --checkpoint"),
    ("--save async", "--save has no effect without --checkpoint"),
    ("--dp 64 --pp 2 --batch-size 512", "the axes need 128 ranks; at most 64 are"),
    ("--tp 8", "n_head is 12, which 8 ranks cannot share equally"),
    ("--checkpoint /proc/nowhere", "/proc/nowhere, cannot be used"),
    fixtures=["nothing_starts"],
)


def test_ranks_are_torchruns_business_under_torchrun(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    code, output = complaint("train --ranks 2", capsys)
    assert code == 1 and "--ranks cannot be used under torchrun" in output
    for missing in ("WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(missing, raising=False)
    code, output = complaint("train", capsys)
    assert code == 1 and "WORLD_SIZE, MASTER_PORT: not set. Start" in output


@pytest.mark.parametrize(("steps", "lines"), [(1, 1), (7, 7), (20, 20), (399, 22)])
def test_progress_is_about_twenty_lines_with_the_first_and_the_last(
    steps, lines, capsys
):
    tell = Progress(steps)
    for done in range(1, steps + 1):
        tell(done, 0.5)
    output = capsys.readouterr().out.splitlines()
    assert len(output) == lines
    assert " 1 of" in output[0] and f"{steps} of {steps}   loss 0.5000" in output[-1]

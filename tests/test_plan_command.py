"""`ddp-course plan`: the table, the advice, and what it says to nonsense."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from refusals import answered

from ddp_course.chapters.ch18_how_fast.figures import MODEL
from ddp_course.cli import main
from ddp_course.planning.accelerators import ACCELERATORS, Cluster
from ddp_course.planning.anchors import ANCHORS
from ddp_course.planning.search import search
from ddp_course.planning.step_time import Software
from ddp_course.theory import MODELS, plan


def shown(capsys, typed: str) -> str:
    assert main(["plan", *typed.split()]) == 0
    return capsys.readouterr().out


def line(text: str, name: str) -> list[str]:
    """Return the cells of one line of the table."""
    (found,) = [row for row in text.splitlines() if re.match(rf"│ {name} ", row)]
    return [cell.strip() for cell in found.strip("│").split("│")][1:]


def test_the_zero_papers_example(capsys):
    text = shown(capsys, "--parameters 7.5b --gpus 64 --memory 32 --bandwidth 10")
    assert "7,500,000,000 parameters" in text and "64 GPUs of 32 GB" in text
    assert line(text, "total")[:4] == ["120.00", "31.41", "16.64", "1.88"]
    assert line(text, "fits") == ["no", "?", "?", "?", "?"]  # activations are not known
    assert line(text, "times DDP") == ["1.00", "1.00", "1.00", "1.50", "1.50"]
    assert line(text, "seconds to send")[0] == "2.95"
    assert "Add --layers" in text
    assert text.splitlines()[-1].startswith("ZeRO-1 is the first whose states fit;")
    assert "yes" not in text


BIG = "--preset gpt3-175b --recompute full"
ADVICE = {
    "--preset 1m": "DDP fits: nothing need be sharded.",
    "--preset gpt2-xl --memory 24": "ZeRO-1 is the first that fits.",
    "--parameters 7.5b --gpus 4 --memory 16": "of ZeRO-3 would fit on 8 GPUs.",
    f"{BIG} --gpus 16": "Only ZeRO-3 + CPU offload fits: ZeRO-3 would fit on 46 GPUs.",
    "--preset gpt3-175b": "on any number of GPUs (try --recompute full).",
    f"{BIG} --memory 10 --batch 2": "number of GPUs (try a smaller --batch).",
}


@pytest.mark.parametrize("typed", ADVICE)
def test_advice(typed, capsys):
    assert shown(capsys, typed).splitlines()[-1].endswith(ADVICE[typed])


def test_the_rows_can_be_written(tmp_path, capsys):
    file = tmp_path / "plan.json"
    text = shown(capsys, f"--preset gpt2 --gpus 4 --memory 2 --batch 8 --json {file}")
    written, rows = json.loads(file.read_text()), plan(MODELS["gpt2"], 4, 2e9, batch=8)
    assert [row["name"] for row in written] == [row.name for row in rows]
    assert [row["ledger"] for row in written] == [dict(row.ledger) for row in rows]
    assert [row["fits"] for row in written] == [row.fits for row in rows]
    totals = [f"{row.ledger.total / 1e9:.2f}" for row in rows]
    assert line(text, "total") == totals


def test_what_is_not_counted_is_told_and_never_fits(capsys):
    shape = "--layers 32 --hidden 4096"
    text = shown(capsys, f"--parameters 6.6b {shape} --sequence 1024")
    assert "Assumed: --heads 64 --vocab 50257." in text
    assert "ot counted" not in text and line(text, "fits")[1] == "yes"
    whole = f"{shape} --heads 64 --sequence 1024 --vocab 50257"
    assert shown(capsys, f"--parameters 6.6b {whole}") == re.sub(
        "Assumed.*\n", "", text
    )
    assert "1 GPU of 2 GB" in shown(capsys, "--preset 1m --gpus 1 --memory 2")
    for gpus in (1, 8, 64, 10**6):
        text = shown(capsys, f"--parameters 175b --gpus {gpus}")
        assert not re.search(r"yes|ZeRO-\d fits|(?<!states of )ZeRO-3 would", text)
        assert "Not counted: activations" in text


def test_the_table_fits_an_ordinary_terminal(capsys):
    text = shown(capsys, "--preset gpt3-175b --gpus 8 --bandwidth 1")
    table = [row for row in text.splitlines() if row[:1] in "┃│"]
    assert max(map(len, table)) <= 80 and not any("…" in row for row in table)


test_nonsense_is_answered_in_one_line = answered(
    "plan",  # test_cli.py has what cannot even be read
    1,
    ("--parameters 7b --layers 3", "layers is 3 and hidden 0"),
    ("--parameters 1m --layers 3 --hidden 4096", "more than the model's"),
    ("--preset 1m --layers 3", "--layers cannot be combined with --preset"),
    ("--preset 1m --json /no/such/folder/x", "cannot write /no/such/folder/x"),
    ("--parameters 1b --layers 2 --hidden 10 --heads 3 --sequence 5", "heads must div"),
)


@pytest.mark.parametrize(
    ("typed", "numel"),
    [("7.5e9", 7_500_000_000), ("7.5B", 7_500_000_000), ("350m", 350_000_000),
     ("1t", 10**12), ("12", 12)],
)  # fmt: skip
def test_parameters_can_be_typed_short(typed, numel, capsys):
    assert f" {numel:,} parameters" in shown(capsys, f"--parameters {typed}")


@pytest.mark.parametrize("gpu", [[], ["--gpu", "h100"], ["--gpu", "nix"]])
def test_a_plan_needs_no_pytorch(gpu):
    typed = [shutil.which("ddp-course"), "plan", "--preset", "gpt2-xl", *gpu]
    command = [sys.executable, "-X", "importtime", *typed]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == (2 if "nix" in gpu else 0)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "ddp_course.planning.accelerators" in imported
    assert "torch" not in imported


# ---- layouts -------------------------------------------------------------------------


def test_layouts_are_sorted_and_the_best_is_explained(capsys, tmp_path):
    file = tmp_path / "plan.json"
    typed = "--params 70e9 --tokens 15e12 --gpus 512 --gpu h100 --node 8 --price 2"
    text = shown(capsys, f"{typed} --json {file}")
    rows = json.loads(file.read_text())
    assert len(rows) == 10
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    first = rows[0]
    assert first["dp"] * first["pp"] * first["cp"] * first["tp"] == 512
    assert sum(first["parts"].values()) == pytest.approx(first["seconds"])
    days = 15e12 / 4096 / 1024 * first["seconds"] / 86_400
    assert f"{days:,.1f} days" in text
    hours = float(re.search(r"([\d,]+) GPU-hours", text)[1].replace(",", ""))
    assert hours == pytest.approx(days * 24 * 512, rel=1e-3)
    assert f"{2 * hours:,.0f}"[:5] in text, "the price"
    assert "dp alone: at least 1,269.4 GB, of which 840.0 are optimizer states" in text
    assert "Assumed: --layers 88 --hidden 8192" in text
    assert "Not predicted: experts" in text


def test_the_command_finds_what_the_chapter_finds(capsys):
    """And in the number formats of `ANCHORS`, whose errors it prints."""
    cluster = Cluster(ACCELERATORS["h100"], 512)
    first = search(MODEL, cluster).best[0]
    text = shown(capsys, "--parameters 70b --tokens 15t --gpus 512 --gpu h100 --node 8")
    assert f"The fastest: {first.candidate}." in text
    assert {anchor.software.precision for anchor in ANCHORS} == {Software().precision}
    other = shown(capsys, "--params 70b --gpus 512 --gpu h100 --precision mixed")
    assert f"The fastest: {first.candidate}." not in other, "formats do matter"


def test_a_typed_shape_is_the_only_one_that_must_fit_the_parameters(capsys):
    """A GPT of 10 million parameters in the usual shape is too small for the words."""
    assert main(["plan", "--params", "10m", "--gpu", "h100"]) == 1
    assert "words in 128 channels alone" in capsys.readouterr().err
    text = shown(capsys, "--params 10m --gpu h100 --layers 4 --hidden 32")
    assert "10,000,000 parameters" in text and "The fastest: " in text


def test_nothing_fits(capsys):
    assert main(["plan", "--params", "405b", "--gpus", "8", "--gpu", "h100"]) == 1
    assert "No layout fits" in (text := capsys.readouterr().out)
    assert "7,290 GB; 100 GPUs could hold these" in text, "18 bytes a parameter"
    typed = "--params 405b --gpu h100 --optimizer sgd"
    assert main(["plan", *typed.split()]) == 1
    assert "4,050 GB" in capsys.readouterr().out, "no moments, and 10 bytes"


def test_tables_of_data_sheets_and_published_trainings(capsys):
    text = shown(capsys, "--accelerators")
    assert line(text, "h100") == ["989", "80", "3.35", "450", "700", "295"]
    assert line(text, "tpu-v5p")[-2:] == ["-", "166"], "its power is not published"
    text = shown(capsys, "--params 7b --gpus 8 --gpu tpu-v5p --tokens 1t")
    assert "days" in text and "MWh" not in text
    assert "Ultra-Scale" in shown(capsys, "--anchors")


test_what_goes_with_what = answered(
    "plan",
    1,
    ("--params 7b --tokens 1t", "--tokens has no effect without --gpu"),
    ("--params 7b --step-tokens 1m", "--step-tokens has no effect without --gpu"),
    ("--params 7b --gpu h100 --batch 2", "--batch 2 cannot be combined with"),
    ("--params 7b --gpu h100 --bandwidth 9", "--bandwidth 9 cannot be combined"),
    ("--params 7b --gpu h100 --precision fp32", "is fp32; with --gpu it can be bf16"),
    ("--params 7b --gpu h100 --recompute selective", "selective needs --scores"),
    ("--params 7b --gpu h100 --layers 3", "set both --layers and --hidden"),
    ("--params 7b --gpu h100 --heads 3", "--heads 3 needs --layers and --hidden"),
    ("--preset gpt2 --gpu h100 --heads 3", "--heads needs --parameters"),
    ("--params 7b --gpu h100 --price 2", "--price 2 has no effect without --tokens"),
    ("--params 7b --gpu h100 --step-tokens 99", "99 is less than a row of 4096 tokens"),
    ("--anchors --json x.json", "--json x.json needs --preset or --parameters"),
    ("--params 1m --gpu h100", "the embeddings of 128,256 words"),
    ("--params 70b --gpu h100 --gpus 1000003", "no layout of 1000003 GPUs divides"),
)

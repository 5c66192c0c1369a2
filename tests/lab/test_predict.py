"""A prediction: written down, compared, and never silently wrong."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from ddp_course.lab import Prediction
from ddp_course.lab.beliefs import BELIEFS


def table(markdown):
    """The rows of the table, and the sentence below it."""
    lines = markdown.data.splitlines()
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in lines if "|" in line]
    assert lines[1] == "|:--|--:|--:|"
    return rows[:1] + rows[2:], lines[-1]


def test_the_whole_table():
    sent = Prediction("How many bytes does each rank send?", 12, unit="bytes")
    assert sent.compare(measured=2400, theory=2400).data == (
        "| How many bytes does each rank send? | | ratio to theory |\n"
        "|:--|--:|--:|\n"
        "| your prediction | 12 bytes | 0.005 |\n"
        "| measured | 2,400 bytes | 1 |\n"
        "| theory | 2,400 bytes | 1 |\n"
        "\n"
        "Your prediction is too low by a factor of 200."
    )


@pytest.mark.parametrize(
    ("guess", "sentence"),
    [
        (None, "No prediction was written down: next time, guess first."),
        (1000, "Your prediction is exactly right."),
        (1100, "Your prediction is close: within 10 %."),
        (910, "Your prediction is close: within 10 %."),
        (1101, "Your prediction is too high by a factor of 1.1."),
        (900, "Your prediction is too low by a factor of 1.1."),
        (250, "Your prediction is too low by a factor of 4."),
        (1_234_000, "Your prediction is too high by a factor of 1,234."),
        (0, "Not quite: it is 1,000 bytes."),
    ],
)
def test_the_sentence(guess, sentence):
    p = Prediction("?", guess, unit="bytes")
    assert table(p.compare(measured=1, theory=1000))[1] == sentence


def test_a_truth_of_zero():
    assert table(Prediction("?", 0).compare(measured=0, theory=0))[1].endswith("right.")
    rows, sentence = table(Prediction("?", 5).compare(measured=3, theory=0))
    assert [row[2] for row in rows[1:]] == ["", "", ""]
    assert sentence == "Not quite: it is 0."


def test_without_a_theory_the_measurement_counts():
    rows, sentence = table(Prediction("?", 2, unit="s").compare(measured=0.5))
    assert rows[0][2] == "ratio to measured"
    assert rows[1:] == [["your prediction", "2 s", "4"], ["measured", "0.5 s", "1"]]
    assert sentence == "Your prediction is too high by a factor of 4."


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (1_038_240, "1,038,240 bytes"),
        (1, "1 byte"),
        (0, "0 bytes"),
        (2.0, "2 bytes"),
        (0.123456, "0.1235 bytes"),
        (12345.678, "12,346 bytes"),
        (1e-7, "1e-07 bytes"),
        (torch.tensor(7), "7 bytes"),
        (np.int64(1_000_000), "1,000,000 bytes"),
        (np.float32(0.5), "0.5 bytes"),
    ],
)
def test_how_a_number_is_written(value, written):
    rows, _ = table(Prediction("?", unit="bytes").compare(measured=value, theory=8))
    assert rows[2][1] == written


@pytest.mark.parametrize(
    ("unit", "written"),
    [("messages", "1 message"), ("s", "1 s"), ("loss", "1 loss"), ("", "1")],
)
def test_one_of_a_unit(unit, written):
    rows, _ = table(Prediction("?", unit=unit).compare(measured=1))
    assert rows[2][1] == written


def test_written_down_later():
    p = Prediction("How many?", unit="ranks")
    assert "No number is written down yet" in p._repr_markdown_()
    assert p.guess(4) is p
    assert p._repr_markdown_() == "**Predict.** How many? *You say: 4 ranks.*"
    assert p.guess(None)._repr_markdown_().count("No number") == 1


@pytest.mark.parametrize("bad", [[1], True, 1j, torch.tensor([1, 2])])
def test_what_is_no_number(bad):
    for attempt in (
        lambda: Prediction("?", bad),
        lambda: Prediction("?").guess(bad),
        lambda: Prediction("?").compare(measured=bad, theory=1),
        lambda: Prediction("?").compare(measured=1, theory=bad),
        lambda: Prediction("?").compare(measured="12", theory=1),
    ):
        with pytest.raises(TypeError, match="write a number, such as 12"):
            attempt()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("12", "12 bytes"),
        (" 1,024 ", "1,024 bytes"),
        ("3/4", "0.75 bytes"),
        ("24 bytes", "24 bytes"),
        ("1e3", "1,000 bytes"),
        ("1,038,240.5", "1,038,240 bytes"),
        ("27,3", "27.3 bytes"),
        ("0,125", "0.125 bytes"),
        ("1,2,3", "“1,2,3”"),
        ("a quarter\nof it", "“a quarter of it”"),
        ("1/0", "“1/0”"),
        ("", "“nothing”"),
    ],
)
def test_text_is_taken_for_what_it_is(text, says):
    p = Prediction("?", text, unit="bytes")
    assert p._repr_markdown_().endswith(f"*You say: {says}.*")
    rows, sentence = table(p.compare(measured=8, theory=8))
    if says.startswith("“"):
        assert rows[1][2] == ""
        assert sentence == (
            "Your prediction is not a number, so it cannot be compared: the answer is "
            "8 bytes."
        )
    else:
        assert "Your prediction is" in sentence


def test_a_common_belief_is_named(monkeypatch):
    beliefs = {250: "Whole gradients.", (1600, 2000): "Both ways?", 1050: "Close."}
    monkeypatch.setitem(BELIEFS, "?", beliefs)
    results = [
        table(Prediction("?", guess).compare(measured=1000))[1].partition(". ")[2]
        for guess in (250, "249", 260, 1000, None, "a quarter", 1600, 1800, 2100, 1050)
    ]
    both = ["Both ways?", "Both ways?", ""]
    first = ["Whole gradients.", "Whole gradients.", ""]
    assert results == [*first, "", "", "", *both, ""]


def predictions() -> dict[str, float]:
    """Return what is asked in all chapters, and what was measured there, as stored."""
    asked, truths = [], {}
    for path in sorted(Path(__file__).parents[2].glob("notebooks/[0-9]*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            asked += re.findall(r'Prediction\(\s*"(.*?)"', "".join(cell["source"]))
            for output in cell.get("outputs", ()):
                text = "".join(output.get("data", {}).get("text/markdown", ()))
                row = re.match(
                    r"\| (.*) \| \| ratio to .*\| [a-z]+ \| ([\d,.]+)", text, re.S
                )
                if row:
                    truths[row[1]] = float(row[2].replace(",", ""))
    assert truths.keys() == {*asked}
    return truths


def unfounded(beliefs: dict, truths: dict[str, float]) -> list[str]:
    """Return the questions without a wrong guess, and the guesses that are right."""
    wrong = [question for question in truths if not beliefs.get(question)]
    for question, guesses in beliefs.items():
        for guess, why in guesses.items():
            number = guess if isinstance(guess, (int, float)) else sum(guess) / 2
            verdict = Prediction(question, number).compare(measured=truths[question])
            if why not in verdict.data:
                wrong.append(why)
    return wrong


def test_every_prediction_names_a_wrong_belief():
    assert unfounded(BELIEFS, predictions()) == []
    assert BELIEFS.keys() == predictions().keys()


def test_a_belief_that_is_true_is_seen(monkeypatch):
    monkeypatch.setitem(BELIEFS, "All-reduces for each block and step", {4: "True."})
    monkeypatch.delitem(BELIEFS, "The bubble of 1F1B")
    assert unfounded(BELIEFS, predictions()) == ["The bubble of 1F1B", "True."]


@pytest.mark.parametrize("bad", [-1, -0.5, math.nan, math.inf, torch.tensor(-3)])
def test_what_is_no_amount(bad):
    with pytest.raises(ValueError, match="must be a number, 0 or more"):
        Prediction("?", unit="bytes").guess(bad)


def test_a_bad_guess_changes_nothing():
    p = Prediction("?", 3)
    with pytest.raises(ValueError):
        p.guess(-1)
    assert "You say: 3" in p._repr_markdown_()


def test_nothing_measured():
    with pytest.raises(TypeError, match="measured is None"):
        Prediction("?").compare(measured=None, theory=1)


def test_a_bar_in_the_question_does_not_break_the_table():
    header = Prediction("|x| = ?").compare(measured=1).data.splitlines()[0]
    assert header == r"| \|x\| = ? | | ratio to measured |"
    assert Prediction("?", "a|b")._repr_markdown_().endswith(r"“a\|b”.*")

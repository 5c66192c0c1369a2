"""The figures of chapter 06 show what they are about, and nothing else."""

import itertools
import re
from dataclasses import dataclass

import pytest
from drawings import (
    MIB,
    apart,
    check_sliders,
    laid_out,
    ledger,
    problems,
    rects,
    words,
)
from refusals import refused

from ddp_course.chapters.ch06_memory.calculator import (
    BAR,
    FITS,
    ORDER,
    PLOT,
    Unit,
    memory_calculator,
)
from ddp_course.chapters.ch06_memory.figures import SIXTEEN, memory_of_a_step, moments
from ddp_course.chapters.ch08_fsdp.fsdp_schedule import fsdp_step
from ddp_course.lab.draw.kinds import KIND_LOOKS
from ddp_course.lab.draw.memory import STACK, plot_memory
from ddp_course.measure import KINDS, Event
from ddp_course.theory import MODELS, Model, plan

test_the_layout = laid_out(memory_of_a_step)


def test_kinds_are_those_of_the_ledger():
    assert tuple(KIND_LOOKS) == KINDS
    assert set(STACK) == set(ORDER) == set(KINDS)


def test_activations_rise_and_fall_and_gradients_stay():
    columns = moments(4)
    assert [len(m.activations) for m in columns] == [1, 2, 3, 4, 3, 2, 1, 0, 0, 0]
    assert [len(m.gradients) for m in columns] == [0, 0, 0, 0, 1, 2, 3, 4, 4, 0]
    for moment in columns:
        if moment.phase == "backward":  # what is computed with is what is freed
            layer = int(moment.name.split()[1])
            assert layer in moment.gradients and layer not in moment.activations
    peak = max(columns, key=lambda m: m.height)
    assert (peak.phase, peak.name) == ("forward", "layer 3")


def test_every_parameter_has_16_bytes():
    for parts in SIXTEEN.values():
        assert sum(part.count for part in parts) == 16
    said = words(memory_of_a_step())
    assert "4 + 4 + 8 = 16 bytes" in said
    assert "2 + 2 + 12 = 16 bytes" in said
    for name in ("exp_avg", "exp_avg_sq", "parameter in fp32"):
        assert name in said


CALCULATORS = [
    {"model": model, "gpus": gpus, "stage": stage, "precision": precision,
     "memory_gb": memory, "optimizer": optimizer}
    for (model, gpus, stage), (precision, optimizer), memory in itertools.product(
        (("1m", 1, None), ("1m", 1024, 3), ("gpt2", 2, 0), ("gpt3-175b", 64, 2),
         (1000, 3, 1), (7.5e9, 64, None)),
        (("mixed", "adamw"), ("fp32", "sgd"), ("fsdp-bf16", "sgd-momentum")),
        (0.01, 80),
    )
]  # fmt: skip


@pytest.mark.parametrize("setting", CALCULATORS, ids=str)
def test_the_calculator_shows_what_the_plan_says(setting):
    drawing = memory_calculator(**setting)
    assert list(problems(drawing)) == []
    known = MODELS.get(setting["model"]) or Model(int(setting["model"]))
    how = {name: setting[name] for name in ("optimizer", "precision")}
    rows = plan(known, setting["gpus"], setting["memory_gb"] * 1e9, **how)[:4]
    said = words(drawing)
    unit = Unit.of(max(row.ledger.total for row in rows))
    totals = [word for word in said if re.fullmatch(r"[\d.,]+ [MG]B", word)]
    assert totals == [unit(row.ledger.total) for row in rows]
    fits = [word for word in said if word in FITS.values()]
    assert fits == [FITS[row.fits] for row in rows]
    if setting["stage"] is not None:
        row = rows[setting["stage"]]
        (sentence,) = [word for word in said if word.startswith("Each GPU sends")]
        assert unit(row.bytes_sent) in sentence
        assert any(word.startswith(f"{row.name}: ") for word in said)


def test_the_calculator_gives_the_numbers_of_the_paper():
    drawing = memory_calculator(7.5e9, gpus=64, memory_gb=32)
    said = words(drawing)
    for total in ("120 GB", "31.4 GB", "16.6 GB", "1.88 GB"):
        assert total in said
    assert "adamw, mixed: 2 + 2 + 12 bytes per parameter" in said
    assert said.count("does not fit") == 1  # DDP
    assert said.count("fits, or not") == 3  # activations are not known


def test_bars_are_as_long_as_their_bytes():
    drawing = memory_calculator("gpt2", gpus=2, memory_gb=4)
    rows = plan(MODELS["gpt2"], 2, 4e9)[:4]
    bars = [
        (wide, e.get("fill")) for *_, wide, high, e in rects(drawing) if high == BAR
    ]
    longest = max(row.ledger.total for row in rows)
    scale = PLOT / max(1.12 * 4e9, 1.04 * longest)
    for kind in ("parameters", "gradients", "optimizer states"):
        drawn = [wide for wide, fill in bars if fill == KIND_LOOKS[kind].fill]
        want = [row.ledger[kind] * scale for row in rows]
        assert drawn == pytest.approx(want, abs=0.02)


def recorded(most=12, at=7.0):
    """The moments of a step and its events: a moment every 10 ms."""
    has = [ledger(4, 0, 8, k) for k in (0, most / 2, most)]
    has += [ledger(4, k, 8, most - most * k / 4, k % 2) for k in (1, 2, 3, 4)]
    has += [ledger(4, 4, 8, other=0.5), ledger(4, 0, 8)]
    moments = [(at + 0.01 * k, one, f"{k}") for k, one in enumerate(has)]
    ends = [at, at + 0.021, at + 0.061, at + 0.08]
    phases = ("forward", "backward", "step")
    events = [
        Event(0, op, *times)
        for op, times in zip(phases, itertools.pairwise(ends), strict=True)
    ]
    return moments, [*events, Event(0, "all_reduce", at, at + 0.05, 8)]


@dataclass
class Log:
    """A log that knows its moments."""

    moments: list


KEPT, SPANS = recorded()
LESS, _ = recorded(3, 9.0)
BOTH = {"kept": KEPT, "recomputed": Log(LESS)}
BOTH_SPANS = {"kept": SPANS, "recomputed": recorded(3, 9.0)[1]}


def areas(axes):
    """The highest value of each area, from the bottom to the top."""
    return [path.get_paths()[0].vertices[:, 1].max() for path in axes.collections]


def test_the_memory_of_a_step_is_stacked():
    (axes,) = plot_memory(KEPT, SPANS).axes
    # parameters, states, gradients, buffers, other, activations
    assert areas(axes) == pytest.approx([4, 12, 16, 16, 16.5, 24])
    hatches = [path.get_hatch() for path in axes.collections]
    assert hatches == [None, None, None, "////", None, ".."]
    (top,) = [line for line in axes.lines if line.get_drawstyle() == "steps-post"]
    assert list(top.get_ydata()) == [sum(m[1].values()) / MIB for m in KEPT]
    assert list(top.get_xdata()) == list(range(len(KEPT)))
    assert "MiB" in axes.get_ylabel()


def test_the_peak_and_the_phases_are_marked():
    (axes,) = plot_memory(KEPT, SPANS).axes
    assert "peak 24 MiB" in [text.get_text() for text in axes.texts]
    (mark,) = [line for line in axes.lines if line.get_marker() == "v"]
    assert list(zip(*mark.get_data(), strict=True)) == [(2, pytest.approx(24))]
    names = [text.get_text() for text in axes.texts if "peak" not in text.get_text()]
    assert names == ["forward", "backward", "step"]
    places = [text.xy[0] for text in axes.texts if text.get_text() in names]
    assert places == [1, 4.5, 7.5]


def test_two_logs_have_one_axis():
    left, right = plot_memory(BOTH, BOTH_SPANS).axes
    assert left.get_ylim() == right.get_ylim()
    assert [axes.get_title() for axes in (left, right)] == ["kept", "recomputed"]
    peaks = [t.get_text() for axes in (left, right) for t in axes.texts]
    assert {"peak 24 MiB", "peak 16.8 MiB"} <= set(peaks)


test_texts_do_not_overlap = apart(
    lambda: plot_memory(Log(KEPT)),
    lambda: plot_memory(BOTH, BOTH_SPANS),
)


def test_sliders_and_galleries():
    controls = {"units": (1, 8), "prefetch": (0, 3), "message": (0.2, 2.0)}
    controls |= {"reshard_after_forward": [True, False]}
    check_sliders(fsdp_step, [{"prefetch": 0}, {"prefetch": 1}], **controls)
    controls = {
        "model": ["1m", "gpt2-xl", ("7.5 B", 7.5e9)], "gpus": [1, 8, 64],
        "stage": [("all", None), 0, 1, 2, 3], "memory_gb": (8, 192),
        "recompute": ["none", "full"],
    }  # fmt: skip
    settings = [{"gpus": n} for n in (1, 4, 16, 64)]
    check_sliders(memory_calculator, settings, **controls)


test_what_cannot_be_drawn = refused(
    (
        lambda: memory_calculator("gpt5"),
        "model is 'gpt5'; it can be '1m', '8m'",
    ),
    (lambda: memory_calculator(0), "model is 0; it must be 1"),
    (lambda: memory_calculator(stage=4), "stage is 4"),
    (lambda: memory_calculator(gpus=0), "gpus is 0"),
    (lambda: memory_calculator(memory_gb=0), "memory is 0"),
    (lambda: memory_calculator(optimizer="x"), "optimizer is 'x'"),
    (lambda: memory_calculator(precision="x"), "precision is 'x'"),
    (lambda: plot_memory(BOTH, {"kept": SPANS}), r"events \['kept'\]"),
)

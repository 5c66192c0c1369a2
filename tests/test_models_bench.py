"""Small models under every strategy: equal, or refused; what is neither is found."""

import json
import re
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_course.bench import models
from ddp_course.bench.models import (
    EQUAL,
    FAILS,
    HARD,
    MODELS,
    OURS,
    STRATEGIES,
    WORDS,
    outcomes,
    shown,
)
from ddp_course.cli import main
from ddp_course.data_parallel import NaiveDistributedDataParallel
from ddp_course.mechanisms.buckets import bucket_plan

STORED = Path(__file__).with_name("models.json")  # ddp-course bench models --json


# ---- planted: strategies that are wrong ----------------------------------------------


def forgets(model, optim):
    """Average no parameter without dimensions."""
    replica = NaiveDistributedDataParallel(model)
    replica.trained = [p for p in replica.trained if p.dim()]
    return replica, optim(replica.parameters())


def sums(model, optim):
    """Forget to divide by the number of ranks: all ranks agree, and are wrong."""
    replica = NaiveDistributedDataParallel(model)
    replica.mean = lambda gradient: dist.all_reduce(gradient) or gradient
    return replica, optim(replica.parameters())


def raises(model, optim):
    """Let PyTorch complain."""
    torch.zeros(2).view(3)


def hangs(model, optim):
    """Wait on one rank for what nobody sends."""
    if dist.get_rank() == 1:
        time.sleep(1000)
    return model, optim(model.parameters())


def refuses_alone(model, optim):
    """Refuse with the course's own words, on one rank; the other one waits for it."""
    if dist.get_rank() == 0:
        bucket_plan((), bucket_cap_mb=-1)
    time.sleep(1000)


WRONG = {
    forgets: "FAILS: the ranks have different parameters",
    sums: "FAILS: the loss of step . is .*, not ",
    raises: r"FAILS: raises RuntimeError: shape '\[3\]' is invalid for input of size 2",
    refuses_alone: "FAILS: rank 0: refused: ValueError: bucket_cap_mb .* rank 1: hangs",
    hangs: "FAILS: rank 0: done; rank 1: hangs",
}


def test_hard_models_are_as_in_one_process_or_refused():
    cases = [(name, strategy) for name in HARD for strategy in OURS]
    found = outcomes(cases, 2)
    assert {case: kind for case, kind in found.items() if FAILS in kind} == {}
    # A bed that refuses everything would prove nothing.
    assert sum(kind.startswith(EQUAL) for kind in found.values()) > 100
    assert found["GPT, tied", "tp"] == found["GPT, tied", "pp"] == EQUAL
    assert WORDS["on"] in found["buffer that counts", "pp"]
    assert [WORDS["first"], WORDS["own"]] == [
        found["moving mean", strategy].removeprefix(f"{EQUAL}: ")
        for strategy in ("ddp", "zero3")
    ]


def test_what_is_wrong_is_called_by_its_name():
    strategies = {plant.__name__: plant for plant in WRONG}
    cases = [("0-dim parameter", name) for name in strategies]
    found = outcomes([*cases, ("GPT", "ddp")], 2, STRATEGIES | strategies, seconds=4)
    assert found.pop(("GPT", "ddp")) == EQUAL  # in a new launch
    for kind, words in zip(found.values(), WRONG.values(), strict=True):
        assert re.match(words, kind), kind


def test_the_stored_table_has_all_models_and_strategies_and_no_failure(monkeypatch):
    rows = json.loads(STORED.read_text())
    assert [row["case"] for row in rows] == list(MODELS)
    assert len(rows) == 50 and set(HARD) < set(MODELS)
    assert all([*row][4:] == [*STRATEGIES] and row["ranks"] == [2, 3] for row in rows)
    assert not [row["case"] for row in rows if FAILS in "".join(map(str, row.values()))]
    text = shown(rows)
    assert max(map(len, text)) <= 100
    assert text[-1].startswith("50 models under 13 strategies: ")
    assert text[-1].endswith(" 0 FAILS")
    monkeypatch.setattr(models, "bench", lambda quick: rows)
    assert main(["bench", "models"]) == 0
    rows[3]["DDP"] = "raises TypeError: told, but not judged"
    assert main(["bench", "models"]) == 0
    rows[3]["ddp"] = f"{FAILS}: hangs"
    assert main(["bench", "models"]) == 1
    text = shown(rows)
    assert text[-1].endswith(" 1 FAILS")
    assert [line for line in text if "!" in line][1].startswith(rows[3]["case"])

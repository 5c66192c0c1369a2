"""Predicted memory beside what four real ranks keep in a step."""

import gc
from dataclasses import replace

import pytest

from ddp_course.bench.emulated import kept_by
from ddp_course.bench.predict import CLUSTER, CONFIG, FLOAT32
from ddp_course.launch import spawn
from ddp_course.planning.step_time import Candidate, predict
from ddp_course.planning.workload import Workload

LAYOUTS = [Candidate(pp=4), Candidate(2, tp=2)]
SMALL = replace(CONFIG, block_size=128, n_layer=4)
GPT = Workload.of_gpt(SMALL, rows=8)


def kept():
    found = []
    for layout in LAYOUTS:
        gc.collect()  # frees the previous model
        found.append(kept_by(layout, SMALL, GPT.rows).total)
    return found


def test_memory_is_predicted_within_five_percent():
    ranks = spawn(kept, world_size=4, output="none")
    for layout, *its in zip(LAYOUTS, *ranks, strict=True):
        predicted = predict(GPT, CLUSTER, layout, FLOAT32).ledger.total
        assert max(its) == pytest.approx(predicted, rel=0.05), layout

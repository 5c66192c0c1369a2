"""Predicted memory beside what eight real ranks keep in a step."""

import pytest

from ddp_course.bench.predict import CLUSTER, FLOAT32, GPT, kept
from ddp_course.launch import spawn
from ddp_course.planning.step_time import Candidate, predict

LAYOUTS = [Candidate(pp=8), Candidate(4, tp=2)]


def test_memory_is_predicted_within_five_percent():
    ranks = spawn(kept, LAYOUTS, nnodes=2, nproc_per_node=4, output="none")
    for layout, *its in zip(LAYOUTS, *ranks, strict=True):
        predicted = predict(GPT, CLUSTER, layout, FLOAT32).ledger.total
        assert max(its) == pytest.approx(predicted, rel=0.05), layout

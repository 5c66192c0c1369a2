"""Nodes that leave and come back, and numbers of ranks that change."""

import os
from pathlib import Path

import pytest
import torch
from conftest import alive, none_left

from ddp_course.chapters.ch19_failures import nodes
from ddp_course.chapters.ch19_failures.batches import ROWS, grown
from ddp_course.chapters.ch19_failures.elastic_script import BATCH, STEPS, train
from ddp_course.chapters.ch19_failures.figures import loss_over_rows
from ddp_course.launch import spawn

ENDURANCE = bool(os.environ.get("DDP_COURSE_ENDURANCE"))


def furthest(a: dict, b: dict) -> float:
    return max(abs(x - y) for x, y in zip(a["losses"], b["losses"], strict=True))


@pytest.fixture(scope="module")
def alone() -> dict:
    return nodes.trained_in_parts((1, STEPS))


def test_four_ranks_then_two_then_four_are_one_process(alone):
    record = nodes.trained_in_parts((4, 4), (2, 8), (4, STEPS))
    assert record["ranks"] == [4] * 4 + [2] * 4 + [4] * 4
    assert record["rows"] == alone["rows"]
    assert sorted(record["rows"]) == list(range(STEPS * BATCH))  # each row once
    assert furthest(record, alone) < 1e-12


def test_a_forgotten_momentum_is_seen_in_the_losses(alone, tmp_path):
    spawn(train, tmp_path, 4, world_size=2)
    path = tmp_path / "checkpoint.pt"
    saved = torch.load(path)
    saved["optimizer"]["state"] = {}
    torch.save(saved, path)
    record = spawn(train, tmp_path, STEPS, world_size=2)[0]
    assert furthest(record, alone) > 1e-3


@pytest.mark.endurance
@pytest.mark.timeout(900)
def test_a_node_dies_and_comes_back_and_nothing_changes(alone, tmp_path):
    phases, record = nodes.leave_and_return(tmp_path)
    sizes = [[rank["WORLD_SIZE"] for rank in ranks] for ranks in phases]
    assert sizes == [["2", "2"], ["1"], ["2", "2"]]
    counts = [[r["TORCHELASTIC_RESTART_COUNT"] for r in ranks] for ranks in phases]
    assert counts == [["0", "0"], ["1"], ["1", "0"]]  # the nodes disagree
    assert record["ranks"] == [2] * 4 + [1] * 4 + [2] * 4
    assert record["rows"] == alone["rows"]
    assert furthest(record, alone) < 1e-12
    assert none_left(pids(tmp_path), 100)


@pytest.mark.skipif(not ENDURANCE, reason="torchrun gives up after a minute")
@pytest.mark.timeout(400)
def test_a_shared_store_does_not_let_a_node_come_later(monkeypatch, tmp_path):
    """Whoever sees this fail may drop the variable from chapter 19."""
    monkeypatch.setattr(nodes, "LATE_NODES", {})
    with pytest.raises(RuntimeError, match="an agent failed before 2 ranks"):
        nodes.leave_and_return(tmp_path, timeout=300)
    assert none_left(pids(tmp_path))


@pytest.mark.timeout(600)
def test_an_error_leaves_no_agent_and_no_rank_behind(tmp_path):
    with pytest.raises(ZeroDivisionError), nodes.nodes(tmp_path, timeout=400) as two:
        two.allow(0)
        two.start("a")
        two.next_ranks(1)
        agent = two.agents["a"].pid
        assert alive(agent)
        raise ZeroDivisionError
    assert none_left([agent, *pids(tmp_path)], 100)


def pids(folder: Path) -> list[int]:
    lines = (folder / "starts").read_text().splitlines()
    return [nodes.json.loads(line)["pid"] for line in lines]


def test_a_larger_batch_wants_a_larger_learning_rate():
    same, slow, scaled = grown(1, 1), grown(4, 1), grown(4, 4)
    half = ROWS // 2 // BATCH
    assert same[:half] == slow[:half] == scaled[:half]
    assert slow[-1][1] > 1.5 * same[-1][1]
    assert abs(scaled[-1][1] / same[-1][1] - 1) < 0.03
    curves = {"same": same, "slow": slow, "scaled": scaled}
    assert loss_over_rows(curves).axes[0].get_legend_handles_labels()[1] == [*curves]

"""The right and wrong answers of all chapters' `answers.py`."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_course.chapters import all_exercises

EXERCISES = all_exercises()
ON_RANKS = [  # exercises whose checks start ranks
    *("swap", "my_transpose", "sharded_step", "clip_shards", "agreed_step"),
    *("my_topk_mean", "my_average", "global_rank"),
    *("peer_on_next_node", "copy_to_ranks", "row_linear", "my_server", "node_group"),
    *("replicas_agree", "ring_reduce_scatter", "hierarchical_sum", "accumulate"),
    *("average_gradients_flat", "make_replicas", "my_stage_step", "ring_transfers"),
    *("sharded_linear", "vocab_loss", "my_broadcast", "mini_ddp", "repaired"),
    *("my_dispatch", "my_auxiliary_loss", "my_two_averages", "my_carry", "my_layout"),
]
ANSWERS = {
    name: answers
    for file in sorted(Path(__file__).parent.glob("ch*/answers.py"))
    for name, answers in runpy.run_path(str(file))["ANSWERS"].items()
}
ALL = [(name, answer) for name in ANSWERS for answer in ANSWERS[name]]
RIGHT = [(name, answer) for name, answer in ALL if not ANSWERS[name][answer]]
WRONG = [plant for plant in ALL if plant not in RIGHT]
# Their ranks wait for messages that never come: for many of them at once, that takes no
# longer than for one, and no more computing. Their hints say so, or their names.
HANGS = re.compile("still waits to|not returned after|still wanted to com|^silent_")
HANGING = [
    (name, wrong)
    for name, wrong in WRONG
    if HANGS.search(ANSWERS[name][wrong]) or HANGS.search(wrong.__name__)
]
OTHERS = [plant for plant in WRONG if plant not in HANGING]


def each(answer: str, plants: list[tuple[str, Callable]]) -> pytest.MarkDecorator:
    """Let a test look at each of the answers, by their names."""
    ids = [f"{name}-{getattr(one, '__name__', one)}" for name, one in plants]
    return pytest.mark.parametrize(("name", answer), plants, ids=ids)

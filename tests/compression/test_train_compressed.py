"""`train --compress` goes on bit for bit from a checkpoint, or says why it cannot."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
from refusals import answered, nothing_starts  # noqa: F401

from ddp_course.compression import Compressor
from ddp_course.launch import RankError, spawn
from ddp_course.model import GPTConfig
from ddp_course.spec import layout_for
from ddp_course.train import train

GPT = GPTConfig(block_size=16, n_layer=1, n_head=2, d_model=24)
ALL = ("fp16", "int8", "sign", "topk:0.05", "randomk:0.05", "powersgd:2")
WITH_MEMORY = ALL[2:]
run = partial(train, batch_size=4, preset=GPT, lr=1e-2)


def forgotten(words: str, folder: str) -> bool:
    """Whether it is seen if the error memory is saved, and not taken back."""
    run(2, compress=words, checkpoint=f"{folder}/planted-{words}")
    with mock.patch.object(Compressor, "load_state_dict", lambda self, state: None):
        again = run(3, compress=words, checkpoint=f"{folder}/planted-{words}")
    return again.checksum != run(3, compress=words).checksum


def job(folder: str) -> dict[str, tuple]:
    results = {"as it is": (run(4).checksum,)}
    for words in ALL:
        whole = run(4, compress=words)
        run(2, compress=words, checkpoint=f"{folder}/{words}")
        again = run(4, compress=words, checkpoint=f"{folder}/{words}")
        results[words] = whole.checksum, again.checksum, again.resumed_at, whole.losses
    results["seen"] = [
        forgotten(words, folder) for words in ("topk:0.05", "powersgd:2")
    ]
    with pytest.raises(Exception, match="compress 'sign', here 'int8'"):
        run(4, compress="int8", checkpoint=f"{folder}/sign")
    return results


def test_it_goes_on_bit_for_bit_with_what_was_not_yet_sent(tmp_path):
    how = {"world_size": 2, "output": "none", "timeout": 250}
    first, second = spawn(job, str(tmp_path), **how)
    assert first == second
    assert all(first.pop("seen"))
    (right,) = first.pop("as it is")
    for words, (whole, again, resumed_at, losses) in first.items():
        assert whole == again and resumed_at == 2, words
        assert whole != right, "nothing was compressed"
        assert losses[-1] < losses[0] or words in WITH_MEMORY


test_what_cannot_be_says_so_before_a_rank_starts = answered(
    "train --ranks 2 --compress",
    1,
    ("powersgd:0", "'powersgd:0'; its rank must be 1 or more"),
    ("powersgd:1.5", "it can be fp16, bf16, int8, sign, topk:0.01, randomk:0.01"),
    ("topk", "compress is 'topk'; it can be fp16"),
    ("topk:1.5", "'topk:1.5'; its density must be above 0 and at most 1"),
    ("int8:4", "compress is 'int8:4'; it can be"),
    ("int8 --zero 1", "compress is 'int8' and zero is 1; compressing is for data_"),
    ("sign --precision fp16", "scaled gradient would be added to a gradient"),
    ("powersgd:4 --precision bf16-pure", "16 bits have no room for the next gradient"),
    fixtures=["nothing_starts"],
)
test_nor_do_other_meshes = answered(
    "train --compress",
    1,
    ("int8 --tp 2 --dp 2", "compress is 'int8' and tp is 2; compressing is for"),
    ("int8 --ranks 1", "one rank sends nothing; use two ranks or more"),
    fixtures=["nothing_starts"],
)


def test_other_ranks_cannot_go_on_with_these_errors(tmp_path):
    job = partial(run, 1, compress="sign", checkpoint=str(tmp_path))
    spawn(job, world_size=2, output="none")
    with pytest.raises(RankError, match="ranks 2, here 4"):
        spawn(job, world_size=4, output="none")
    assert layout_for(2, compress="sign").compress == "sign"

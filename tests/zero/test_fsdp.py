"""FullyShardedDataParallel trains as one process does, and as fully_shard does."""

import functools

from fsdp_cases import FAKES, WRAPPERS, train
from trained import bits, far_apart

from ddp_course.launch import spawn

alone = functools.cache(functools.partial(train, None))  # one process, whole batch
SGD = {"optimizer": "sgd"}
ODD = {**SGD, "model": "odd"}
CLIP = {**SGD, "clip": 0.05}
EQUAL_ONLY = {"naive", "torch"}  # have no parameters of several types


def everything() -> dict[tuple[str, str], tuple]:
    """On every rank, by (who, what): the arguments of `train`, and what came of it."""
    cases = {(who, "adamw"): {} for who in ("ours", "torch")}
    cases |= {(who, "odd"): ODD for who in WRAPPERS if who not in EQUAL_ONLY}
    cases |= {(who, "gpt"): SGD for who in ("naive", "simple", "ours", "torch")}
    cases["ours", "odd, adamw"] = {"model": "odd"}
    cases["ours", "no_sync"] = {"micro": 2}
    cases["ours", "each averaged"] = {"micro": 2, "sync_all": True}
    cases |= {(who, "clip"): CLIP for who in ("ours", "torch")}
    cases |= {(who, "fake"): SGD for who in FAKES}
    cases["norm per shard", "fake"] = CLIP
    wraps = WRAPPERS | FAKES
    return {case: (how, train(wraps[case[0]], **how)) for case, how in cases.items()}


def test_the_same_training_as_one_process_and_as_pytorch():
    """On three ranks, among which sizes do not divide."""
    results = spawn(everything, world_size=3, output="none", timeout=240)
    assert max(alone(**CLIP).norms) > 0.05  # it is clipped
    for (who, what), (how, mine) in results[0].items():
        one = alone(**{k: v for k, v in how.items() if k not in ("micro", "sync_all")})
        ranks = {bits(rank[who, what][1]) for rank in results}
        wrong = far_apart(mine, one) or len(ranks) > 1
        assert bool(wrong) == (what == "fake"), (who, what)
        if ("torch", what) in results[0]:
            assert not far_apart(mine, results[0]["torch", what][1]), (who, what)

"""Training along the axis cp: the curve and parameters of one process.

Their states move between layouts in `tests/test_states_between_layouts.py`.
"""

import pytest
import torch
import torch.distributed as dist
from in_layouts import assert_same_run, trained_in
from on_ranks import error_of

from ddp_course.context_parallel.gpt import AverageLoss, context_parallel
from ddp_course.launch import spawn
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.spec import SpecError, layout_for
from ddp_course.train import train

SMALL = GPTConfig(block_size=16, n_layer=2, n_head=4, d_model=16)
CURVE = {"steps": 3, "batch_size": 8, "preset": SMALL, "clip": 1.0, "keep_state": True}
LAYOUTS = {  # the ranks, and how they share the training
    "three ranks: 16 positions are padded to 18": (3, {"cp": 3}),
    "gathered keys and values": (2, {"cp": 2, "attention": "gathered"}),
    "Ulysses": (2, {"cp": 2, "attention": "ulysses"}),
    "cp 2 x tp 2": (4, {"cp": 2, "tp": 2}),
    "dp 2 x cp 2 x ZeRO-1": (4, {"cp": 2, "zero": 1}),
    "dp 2 x cp 2 x ZeRO-3": (4, {"cp": 2, "zero": 3}),
    "cp 2 x pp 2": (4, {"cp": 2, "pp": 2, "microbatches": 2}),
    "NCCL's rules": (2, {"cp": 2, "backend": "strict"}),
}


@pytest.fixture(scope="module")
def runs():
    return trained_in(LAYOUTS, **CURVE)


@pytest.fixture(scope="module")
def one_process():
    return train(**CURVE)


@pytest.mark.parametrize("name", LAYOUTS)
def test_spawn_the_same_training(name, runs, one_process):
    assert_same_run(runs[name], one_process)


# ---- plants --------------------------------------------------------------------------


def positions_from_zero(model, patch):
    """Each rank counts its own positions from 0, as if it had a whole sequence."""
    right = model.embed.positions.forward
    model.embed.positions.forward = lambda own: right(torch.arange(len(own)))


def loss_of_own_tokens(model, patch):
    """The padding counts as positions: shares are those of the padded sequence."""
    loss = model.loss_fn.mean_loss
    model.loss_fn.mean_loss = lambda logits, y: loss(logits, y) / logits.shape[1]


def gradient_of_the_sum(model, patch):
    """Backward of the mean divides, too: every gradient is halved."""
    halved = staticmethod(lambda ctx, gradient: (gradient / 2, None))
    patch.setattr(AverageLoss, "backward", halved)


PLANTS = (positions_from_zero, loss_of_own_tokens, gradient_of_the_sum)


def errors_of_a_step():
    """On every rank: the largest error of loss and gradients; right, and planted."""
    x = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(0))
    y, found = x.roll(-1, 1), {}
    whole = build_gpt(SMALL)
    expected = whole(x, y)[1]
    expected.backward()
    for plant in (None, *PLANTS):
        model = context_parallel(build_gpt(SMALL))
        with pytest.MonkeyPatch.context() as patch:
            if plant:
                plant(model, patch)
            loss = model(x, y)[1]
            loss.backward()
        errors = [abs(float(loss - expected))]
        for mine, its in zip(model.parameters(), whole.parameters(), strict=True):
            dist.all_reduce(mine.grad)
            errors.append(float((mine.grad / 2 - its.grad).abs().max()))
        found[plant and plant.__name__] = max(errors)
    return found


def test_spawn_a_wrong_division_is_seen():
    ranks = spawn(errors_of_a_step, world_size=2, output="none")
    assert max(rank[None] for rank in ranks) < 1e-5
    for plant in PLANTS:
        assert max(rank[plant.__name__] for rank in ranks) > 1e-4, plant


# ---- use -----------------------------------------------------------------------------


def uses():
    """Return what a user sees of a divided model: logits, and refusals."""
    x = torch.randint(96, (2, 13), generator=torch.Generator().manual_seed(0))
    whole, model = build_gpt(SMALL), context_parallel(build_gpt(SMALL))
    with torch.no_grad():
        error = float((model(x)[0] - whole(x)[0]).abs().max())
    own, first = x + dist.get_rank() % 2, x[:, :1]
    me, ways = dist.get_rank(), ("ring", "gathered")
    return {
        "error of logits": error,
        "other rows": error_of(lambda: model(own.clamp(max=95), x)),
        "one position": float(model(first, first)[1] - whole(first, first)[1]),
        "attention": error_of(lambda: context_parallel(whole, attention="sparse")),
        "group": error_of(lambda: context_parallel(whole, "ring")),
        "twice": error_of(lambda: context_parallel(model)),
        "targets": error_of(lambda: model(x, x.new_zeros(2, 14))),  # both padded to 16
        "differ": error_of(lambda: context_parallel(whole, attention=ways[me])),
    }


def test_spawn_logits_are_gathered_and_other_rows_are_refused():
    for rank in spawn(uses, world_size=2, output="none"):
        assert rank["error of logits"] < 1e-5
        assert "the tokens differ between the ranks. rank 0: " in rank["other rows"]
        assert "context-parallel group need the same batch" in rank["other rows"]
        assert abs(rank["one position"]) < 1e-5
        assert "attention is 'sparse'; it can be ring, gathered" in rank["attention"]
        assert "group is 'ring'; it must be a process group" in rank["group"]
        assert "is context parallel already; divide it only once" in rank["twice"]
        assert "(2, 14); the logits are for T = 13" in rank["targets"]
        assert "attention is ring on rank 0, gathered on rank 1" in rank["differ"]


def test_layouts_that_cannot_be_are_refused_before_ranks_start():
    with pytest.raises(SpecError, match="attention is 'sparse'"):
        layout_for(2, cp=2, attention="sparse")
    config = build_gpt().config
    with pytest.raises(SpecError, match="n_head"):
        layout_for(5, cp=5, attention="ulysses").check(config=config)
    layout_for(5, cp=5).check(config=config)

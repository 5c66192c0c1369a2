"""Training on many ranks is the training of one process; and mistakes are noticed."""

import math
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from refusals import refused

from ddp_course import train as train_module
from ddp_course.data import load_corpus, shard
from ddp_course.launch import RankError, spawn
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.train import average_gradients, checksum, largest_difference, train

SMALL = GPTConfig(block_size=16, n_layer=1, n_head=6, d_model=24)
TIED = GPTConfig(block_size=16, n_layer=1, n_head=6, d_model=24, tied=True)
ROWS, STEPS, LR = 12, 3, 3e-4

# One process and many add up the same gradients in another order, and 32-bit floats
# round after every addition. As a part of a matrix's largest gradient: below 1e-6 here.
GRADIENT_TOLERANCE = 1e-5
# Adam moves every parameter by up to about LR per step, however small its gradient:
# where a gradient is nearly 0, rounding moves the parameter by a part of LR. Largest
# difference measured: 0.0003 LR here, 0.02 LR after 20 steps of the preset "1m"; with
# the mistakes below, 0.1 LR and more.
PARAMETER_TOLERANCE = 0.01 * LR
LOSS_TOLERANCE = 1e-5  # of about 4.6: 20 units in its last place


def run(**changes):
    how = {"keep_state": True, "data_parallel": "average"}
    return train(STEPS, ROWS, SMALL, LR, **how | changes)


# One process


def test_one_process_learns_and_repeats_itself():
    first, second, other = run(), run(), run(seed=1)
    assert len(first.losses) == STEPS
    assert first.losses[0] == pytest.approx(4.56, abs=0.1)  # log(96)
    assert first.losses[-1] < first.losses[0]
    assert first.world_size == 1
    assert first.seconds > 0
    assert first.losses == second.losses
    assert first.checksum == second.checksum == checksum(first.state)
    assert first.checksum != other.checksum
    assert first.state.keys() == build_gpt(SMALL).state_dict().keys()
    assert train(0, preset=SMALL).checksum == checksum(build_gpt(SMALL).state_dict())
    assert train(0, preset=SMALL).state is None


# Many ranks. Each of these planted mistakes stands in for `average_gradients`.


def averages_nothing(model):
    pass


def forgets_the_division(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)


def averages_the_parameters(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


def forgets_the_head(model):
    average_gradients(model.embed)
    average_gradients(model.blocks)


MISTAKES = [
    averages_nothing,
    forgets_the_division,
    averages_the_parameters,
    forgets_the_head,
]


def gradients(config, average):
    """The gradients of the first batch after `average`, and the parameters then."""
    rank, n = (
        (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    )
    model = build_gpt(config)
    model.head.norm.requires_grad_(False)  # a frozen parameter has no gradient
    x, y = (shard(t, rank, n) for t in load_corpus().batch(0, ROWS, 16))
    model(x, y)[1].backward()
    average(model)
    grads = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    return grads, checksum(model.state_dict())


def rows_per_step(share):
    """How many rows this rank's model sees in each step of `train`."""
    rows = []

    def build_and_watch(*args):
        model = build_gpt(*args)
        model.register_forward_pre_hook(lambda _model, args: rows.append(len(args[0])))
        return model

    train_module.build_gpt, train_module.shard = build_and_watch, share
    run()
    return rows


def everything_to_everyone(batch, rank, world_size):
    return batch


def on_every_rank():
    """What one launch brings home for all the checks below.

    It changes the module `train` for as long as this process lives: not for long.
    """
    averages = (average_gradients, *MISTAKES)
    averaged = {
        average.__name__: {
            config: gradients(config, average) for config in (SMALL, TIED)
        }
        for average in averages
    }
    trained = {}
    for average in averages:
        train_module.average_gradients = average
        trained[average.__name__] = run()
    train_module.average_gradients = forgets_the_division
    train_module.average = lambda tensor: tensor
    trained["reports its own loss"] = run()
    rows = [rows_per_step(share) for share in (shard, everything_to_everyone)]
    return trained, averaged, rows


@pytest.fixture(scope="module")
def one():
    return run(), {
        config: gradients(config, averages_nothing) for config in (SMALL, TIED)
    }


@pytest.fixture(scope="module")
def ranks():
    return spawn(on_every_rank, world_size=3, timeout=240)


def same_training(histories, one):
    """One loss curve and one model: the same bits on all ranks, near one process."""
    return (
        len({tuple(history.losses) for history in histories}) == 1
        and len({history.checksum for history in histories}) == 1
        and histories[0].losses == pytest.approx(one.losses, abs=LOSS_TOLERANCE)
        and largest_difference(histories[0].state, one.state) < PARAMETER_TOLERANCE
    )


def same_gradients(averaged, one):
    """Bit-equal among ranks, close to the full batch's; parameters not touched."""
    for config, (expected, untouched) in one.items():
        grads = [by_config[config][0] for by_config in averaged]
        if len({checksum(mine) for mine in grads}) > 1:
            return False
        if {by_config[config][1] for by_config in averaged} != {untouched}:
            return False
        for name, full in expected.items():
            error = (grads[0][name] - full).abs().max() / full.abs().max()
            if not error < GRADIENT_TOLERANCE:
                return False
    return True


def test_many_ranks_train_the_model_of_one_process(ranks, one):
    histories = [trained["average_gradients"] for trained, _, _ in ranks]
    assert same_training(histories, one[0])
    assert [history.world_size for history in histories] == [len(ranks)] * len(ranks)


def test_averaged_gradients_are_those_of_the_full_batch(ranks, one):
    assert same_gradients([by["average_gradients"] for _, by, _ in ranks], one[1])


def test_wrong_averages_are_caught(ranks, one):
    for name in (mistake.__name__ for mistake in MISTAKES):
        assert not same_gradients([by[name] for _, by, _ in ranks], one[1]), name
        assert not same_training([result[name] for result, _, _ in ranks], one[0]), name


def test_a_rank_that_reports_its_own_loss_is_caught(ranks, one):
    histories = [trained["reports its own loss"] for trained, _, _ in ranks]
    assert len({history.checksum for history in histories}) == 1
    assert histories[0].losses != pytest.approx(one[0].losses, abs=LOSS_TOLERANCE)
    assert not same_training(histories, one[0])


def test_every_rank_computes_its_share_of_the_rows_and_no_more(ranks):
    share = [ROWS // len(ranks)] * STEPS
    for _, _, (rows, rows_of_everything) in ranks:
        assert rows == share
        assert rows_of_everything != share  # its numbers are right, its work is N-fold


def test_a_batch_that_cannot_be_shared_is_refused():
    with pytest.raises(RankError, match="8 rows cannot be shared equally by 3 ranks"):
        spawn(train, 1, 8, SMALL, world_size=3, timeout=240)


def test_options_that_differ_between_the_ranks_are_refused():
    def train_longer():
        train(1 + dist.get_rank(), 8, SMALL)

    with pytest.raises(RankError, match="steps is 1 on rank 0, 2 on rank 1. Nothing w"):
        spawn(train_longer, world_size=2, timeout=240)


def test_one_of_several_processes_that_have_not_met_is_refused(monkeypatch):
    for name in ("SLURM_PROCID", "SLURM_LOCALID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(
        ValueError, match="as rank 1 of 2, but it did not say where the ranks meet"
    ):
        train(steps=0)


# Comparing


def test_checksum_sees_every_bit_name_type_and_shape():
    state = {
        "a": torch.tensor([[0.0, 1.0]]),
        "b": torch.tensor(2, dtype=torch.bfloat16),
    }
    same = {name: state[name].clone() for name in ("b", "a")}
    assert checksum(state) == checksum(same)
    assert re.fullmatch("[0-9a-f]{16}", checksum(state))
    changes = [
        {"a": torch.tensor([[-0.0, 1.0]])},
        {"a": torch.tensor([[0.0, 1.0 + 2**-23]])},
        {"a": torch.tensor([0.0, 1.0])},
        {"a": torch.tensor([[0.0, 1.0]]).view(torch.int32)},
        {"c": torch.tensor(0.0)},
    ]
    sums = {checksum(state | change) for change in changes}
    assert len(sums | {checksum(state)}) == 6
    transposed = torch.arange(6.0).view(2, 3).t()
    assert checksum({"a": transposed}) == checksum({"a": transposed.contiguous()})


def test_largest_difference_is_over_all_numbers():
    a = {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor([[3]])}
    assert largest_difference(a, a) == 0
    assert largest_difference(a, a | {"w": torch.tensor([1.5, 2.0])}) == 0.5
    assert largest_difference(a, a | {"n": torch.tensor([[-4]])}) == 7
    for place in (0, 1):  # a nan is never less than another difference
        w = torch.tensor([1.0, 2.0])
        w[place] = float("nan")
        assert math.isnan(largest_difference(a, a | {"w": w}))


ZEROS = {"w": torch.zeros(2), "n": torch.zeros(1)}
differs = partial(partial, largest_difference, ZEROS)
test_largest_difference_refuses_what_does_not_match = refused(
    (differs({"w": torch.zeros(2)}), "only one of the two states has n"),
    (differs(ZEROS | {"x": torch.zeros(1)}), "states has x"),
    (differs(ZEROS | {"w": torch.zeros(3)}), r"w has shape \(2,\) in the first"),
    (differs({}), "a state is empty"),
    (differs(None), "keep_state=True"),
)

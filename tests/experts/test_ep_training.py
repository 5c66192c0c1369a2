"""Training along the axis ep: the curve and parameters of one process.

Their states move between layouts in `tests/test_states_between_layouts.py`.
"""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from in_layouts import TOLERANCE, assert_same_run, trained_in
from on_ranks import error_of, launched

from ddp_course.experts import axis
from ddp_course.experts.axis import expert_parallel
from ddp_course.experts.gpt import AddAuxiliaryLoss, GradientScale, build_mixture_gpt
from ddp_course.gpt_config import GPTConfig, MixtureConfig
from ddp_course.launch import spawn
from ddp_course.mechanisms.engine import BucketReducer
from ddp_course.mechanisms.placements import Replicate
from ddp_course.mesh import make_groups
from ddp_course.model import build_gpt
from ddp_course.parallelize import optimizer_for, parallelize
from ddp_course.spec import SpecError, Training, layout_for
from ddp_course.train import train

SMALL = GPTConfig(block_size=20, n_layer=2, n_head=4, d_model=16)
CURVE = {"steps": 3, "batch_size": 8, "preset": SMALL, "clip": 1.0, "keep_state": True}
CURVE |= {"experts": 8}
CONFIG = Training(experts=8).with_experts(SMALL)
EXPERTS = 2 * 8 * (8 * 16 * 16 + 5 * 16)  # parameters of all experts
DROPS = {"capacity": 1.0, "experts_per_token": 1}
LAYOUTS = {  # the ranks, and how they share the training
    "ep 4 inside dp 4": (4, {"ep": 4}),
    "ep 4 inside dp 4, with drops": (4, {"ep": 4} | DROPS),
    "ep 2 x tp 2": (4, {"ep": 2, "tp": 2}),
    "ep 2 x tp 2, with drops": (4, {"ep": 2, "tp": 2} | DROPS),
    "ep 2 x pp 2": (4, {"ep": 2, "pp": 2, "microbatches": 2}),
    "ep 2 x pp 2, with drops": (
        4,
        {"ep": 2, "pp": 2, "schedule": "zero_bubble"} | DROPS,
    ),
    "ep 2 inside dp 4 x ZeRO-1": (4, {"ep": 2, "zero": 1} | DROPS),
    "ep 4 inside dp 4 x ZeRO-1": (4, {"ep": 4, "zero": 1}),
    "ep 2 inside dp 4 x ZeRO-2": (4, {"ep": 2, "zero": 2}),
    "ep 2 x cp 2": (4, {"ep": 2, "cp": 2, "balance": 0.0}),
    "pp 2 alone": (2, {"pp": 2}),
    "ZeRO-3 alone": (2, {"zero": 3} | DROPS),
    "NCCL's rules": (2, {"ep": 2, "backend": "strict"}),
}
OF_THE_MODEL = ("capacity", "experts_per_token", "balance")


@cache
def one_process(**options):
    """Return the training of one process with a model's options."""
    return train(**CURVE, **options)


def model_of(options):
    return {name: options[name] for name in OF_THE_MODEL if name in options}


@pytest.fixture(scope="module")
def runs():
    return trained_in(LAYOUTS, **CURVE)


@pytest.mark.parametrize("name", LAYOUTS)
def test_spawn_the_same_training(name, runs):
    expected = one_process(**model_of(LAYOUTS[name][1]))
    assert_same_run(runs[name], expected)


# ---- what a rank has, and plants -----------------------------------------------------


def one_step(plant=None, **options):
    """Return the largest errors of gradients and norm, and what the rank keeps."""
    whole = build_mixture_gpt(CONFIG)
    random = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randint(96, (2, 20), generator=random)
    all_x = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(all_x, x)
    rows = torch.cat(all_x)
    whole(rows, rows)[1].backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])
    layout = layout_for(dist.get_world_size(), **options)
    axes = make_groups(layout.mesh, *layout.together)
    with pytest.MonkeyPatch.context() as patch:
        if plant:
            plant(patch)
        model = parallelize(build_mixture_gpt(CONFIG), layout, axes)
        optimizer = optimizer_for(model, layout, axes, 1e-3)
        model(x, x)[1].backward()
    if layout.zero:
        found = optimizer.clip_grad_norm_(1e9)
        optimizer.step()
        kept = sum(s["exp_avg"].numel() for s in optimizer.state.values())
        return {"norm": float(found - norm), "numbers": kept}
    errors = {"norm": float(model.module.clip_grad_norm_(1e9) - norm)}
    own = dict(model.module.module.named_parameters())
    ep = axes.index("ep")
    for name, expected in whole.named_parameters():
        grad = expected.grad
        if "experts" in name:
            grad = grad.chunk(axes.size("ep"))[ep]
        errors[name] = float((own[name].grad - grad).abs().max() / grad.abs().max())
    return errors | {"numbers": sum(p.numel() for p in own.values())}


def divided_by_the_replicas(patch):
    """A mean over the replicas, though a gradient is the sum of R ranks' tokens."""
    pack = BucketReducer.pack

    def too_large(self, bucket, slot):
        scale, self.scale = self.scale, 1 / (bucket.plan.group or self.group).size()
        pack(self, bucket, slot)
        self.scale = scale

    patch.setattr(BucketReducer, "pack", too_large)


def averaged_over_all(patch):
    """Experts are averaged with other experts, as DDP does with any parameter."""
    none = property(lambda _: None, lambda *_: None)
    patch.setattr(torch.nn.Parameter, "replicas", none, raising=False)


def without_the_auxiliary_loss(patch):
    """The loss is added to nothing."""
    unscaled = staticmethod(lambda ctx, g: (g, None, None))
    patch.setattr(AddAuxiliaryLoss, "backward", unscaled)


PLANTS = (divided_by_the_replicas, averaged_over_all, without_the_auxiliary_loss)
EP = (2, 4)


def right_steps():
    """On every rank: a step of each of these layouts."""
    layouts = [(ep, zero) for ep in EP for zero in (0, 1, 2)]
    return {(ep, zero): one_step(ep=ep, zero=zero) for ep, zero in layouts}


def planted_steps():
    """On every rank: a step with each of the mistakes."""
    return {plant.__name__: one_step(plant, ep=2) for plant in PLANTS}


four_ranks = launched(4, right_steps, planted_steps)


@pytest.mark.parametrize("ep", EP)
def test_spawn_gradients_and_norm_are_those_of_one_process(four_ranks, ep):
    total = CONFIG.num_parameters
    assert total == sum(p.numel() for p in build_mixture_gpt(CONFIG).parameters())
    for rank in four_ranks["right_steps"]:
        errors = dict(rank[ep, 0])
        assert errors.pop("numbers") == total - EXPERTS + EXPERTS // ep
        assert max(map(abs, errors.values())) < 1e-5, errors


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("ep", EP)
def test_spawn_states_are_sharded_over_the_ranks_that_have_the_parameters(
    four_ranks, ep, zero
):
    rest = CONFIG.num_parameters - EXPERTS
    for rank in four_ranks["right_steps"]:
        assert abs(rank[ep, zero]["norm"]) < 1e-5
        wanted = pytest.approx(rest / 4 + EXPERTS / 4, abs=8)
        assert rank[ep, zero]["numbers"] == wanted


@pytest.mark.parametrize("plant", PLANTS)
def test_spawn_a_wrong_average_is_seen(four_ranks, plant):
    for rank in four_ranks["planted_steps"]:
        errors = {k: v for k, v in rank[plant.__name__].items() if k != "numbers"}
        assert max(map(abs, errors.values())) > 1e-3


def clipped():
    """Return how far the norm is off if no rank's experts count but the first's."""
    place, group, placements = axis.place, dist.group.WORLD, {}

    def noted(tensor, group, placement, **options):
        placements[tensor] = placement
        return place(tensor, group, placement, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(axis, "place", noted)
        model = expert_parallel(build_mixture_gpt(CONFIG), group, group)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    right = model.clip_grad_norm_(1e9)
    for p in model.parameters():
        if placements[p] != Replicate():
            place(p, group, Replicate(), like=p)
    return float(right), float(model.clip_grad_norm_(1e9))


def refused():
    """Return what is said to a model without experts, and to a divided one."""
    group = dist.group.WORLD
    model = expert_parallel(build_mixture_gpt(CONFIG), group, group)
    return [
        error_of(lambda: expert_parallel(build_gpt(), group, group)),
        error_of(lambda: expert_parallel(model, group, group)),
    ]


two_ranks = launched(2, clipped, refused)


def test_spawn_a_norm_of_one_ranks_experts_is_seen(two_ranks):
    for right, wrong in two_ranks["clipped"]:
        assert right == pytest.approx(CONFIG.num_parameters**0.5)
        assert wrong < 0.9 * right


def test_spawn_models_without_experts_are_refused(two_ranks):
    for plain, twice in two_ranks["refused"]:
        assert "the model is a GPT without experts; build_mixture_gpt" in plain
        assert "divided already" in twice


def test_a_pipeline_that_does_not_scale_the_auxiliary_loss_is_seen():
    def unscaled():
        GradientScale.before_compute = lambda *_: None
        return train(**CURVE, pp=2)

    found = spawn(unscaled, world_size=2, output="none")[0]
    with pytest.raises(AssertionError):
        assert_same_run(found, one_process(), 10 * TOLERANCE)


# ---- what cannot be ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "options", "words"),
    [
        (6, {"ep": 4, "dp": 6}, "ep must be a divisor of dp"),
        (4, {"ep": 2, "zero": 3}, "zero is 3 and ep is 2: .* use zero 1 or 2"),
        (4, {"ep": 2, "data_parallel": "flat"}, "'flat' and ep is 2"),
        (4, {"ep": 2, "compress": "fp16"}, "compress"),
        (4, {"ep": 2, "local_steps": 2}, "local_steps is 2"),
    ],
)
def test_layouts_that_cannot_be_are_refused_before_ranks_start(ranks, options, words):
    with pytest.raises(SpecError, match=words):
        layout_for(ranks, **options)


@pytest.mark.parametrize(
    ("ranks", "options", "config", "words"),
    [
        (2, {"ep": 2}, build_gpt().config, "ep is 2, and the model has no experts"),
        (3, {"ep": 3}, CONFIG, "experts is 8, which 3 ranks cannot share equally"),
        (2, {"cp": 2}, CONFIG, "cp is 2, .* use balance 0"),
        (1, {"precision": "fp16"}, CONFIG, "'fp16' .* use balance 0"),
        (1, {"threads": 2}, CONFIG, "threads is 2.* use balance 0"),
    ],
)
def test_models_that_cannot_be_divided_so_are_refused(ranks, options, config, words):
    with pytest.raises(SpecError, match=words):
        layout_for(ranks, **options).check(config=config)


@pytest.mark.parametrize(
    "wrong",
    [{"experts": 1}, {"experts_per_token": 9}, {"capacity": 0}, {"balance": -1}],
)
def test_mixtures_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="config is a GPTConfig; it must be a Mixture"):
        build_mixture_gpt(GPTConfig())
    with pytest.raises(ValueError, match=next(iter(wrong))):
        MixtureConfig(**wrong)

"""Training along the axis ep: the curve and parameters of one process.

Their states move between layouts in `tests/test_states_between_layouts.py`.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from on_ranks import error_of

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

STEPS, ROWS = 5, 8
SMALL = GPTConfig(n_layer=2, d_model=48)
CONFIG = Training(experts=8).with_experts(SMALL)
EXPERTS = 2 * 8 * (8 * 48 * 48 + 5 * 48)  # parameters of all experts
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
    "NCCL's rules": (2, {"ep": 2}),
}
OF_THE_MODEL = ("capacity", "experts_per_token", "balance")


def trained(ranks=1, steps=STEPS, backend=None, **options):
    options = {"clip": 1.0, "keep_state": True, "experts": 8} | options
    run = partial(train, steps, ROWS, SMALL, **options)
    how = {} if backend is None else {"backend": backend}
    return spawn(run, world_size=ranks, output="none", **how)[0]


@pytest.fixture(scope="module")
def one_process():
    """Return the training of one process with a model's options, each run once."""
    runs = {}

    def of(options):
        model = {n: options[n] for n in OF_THE_MODEL if n in options}
        key = repr(model)
        if key not in runs:
            runs[key] = trained(**model)
        return runs[key]

    return of


def assert_same_training(found, expected):
    assert found.losses == pytest.approx(expected.losses, abs=1e-5)
    for name, value in expected.state.items():
        torch.testing.assert_close(found.state[name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_spawn_the_same_training(name, one_process):
    ranks, options = LAYOUTS[name]
    backend = "strict" if name == "NCCL's rules" else None
    found = trained(ranks, backend=backend, **options)
    assert_same_training(found, one_process(options))


# ---- what a rank has, and plants -----------------------------------------------------


def one_step(plant, **options):
    """Return the largest errors of gradients and norm, and what the rank keeps."""
    whole = build_mixture_gpt(CONFIG)
    random = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randint(96, (2, 20), generator=random)
    all_x = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(all_x, x)
    rows = torch.cat(all_x)
    whole(rows, rows)[1].backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])
    plant()
    layout = layout_for(dist.get_world_size(), **options)
    axes = make_groups(layout.mesh, *layout.together)
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


def on_four_ranks(plant, **options):
    return spawn(partial(one_step, plant, **options), world_size=4, output="none")


def nothing():
    pass


def divided_by_the_replicas():
    """A mean over the replicas, though a gradient is the sum of R ranks' tokens."""
    pack = BucketReducer.pack

    def too_large(self, bucket, slot):
        scale, self.scale = self.scale, 1 / (bucket.plan.group or self.group).size()
        pack(self, bucket, slot)
        self.scale = scale

    BucketReducer.pack = too_large


def averaged_over_all():
    """Experts are averaged with other experts, as DDP does with any parameter."""
    torch.nn.Parameter.replicas = property(lambda _: None, lambda *_: None)


def without_the_auxiliary_loss():
    """The loss is added to nothing."""
    AddAuxiliaryLoss.backward = staticmethod(lambda ctx, g: (g, None, None))


PLANTS = [divided_by_the_replicas, averaged_over_all, without_the_auxiliary_loss]


@pytest.mark.parametrize("ep", [2, 4])
def test_spawn_gradients_and_norm_are_those_of_one_process(ep):
    total = CONFIG.num_parameters
    assert total == sum(p.numel() for p in build_mixture_gpt(CONFIG).parameters())
    for errors in on_four_ranks(nothing, ep=ep):
        assert errors.pop("numbers") == total - EXPERTS + EXPERTS // ep
        assert max(map(abs, errors.values())) < 1e-5, errors


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("ep", [2, 4])
def test_spawn_states_are_sharded_over_the_ranks_that_have_the_parameters(ep, zero):
    rest = CONFIG.num_parameters - EXPERTS
    ranks = on_four_ranks(nothing, ep=ep, zero=zero)
    for errors in ranks:
        assert abs(errors["norm"]) < 1e-5
        assert errors["numbers"] == pytest.approx(rest / 4 + EXPERTS / 4, abs=8)


@pytest.mark.parametrize("plant", PLANTS)
def test_spawn_a_wrong_average_is_seen(plant):
    for errors in on_four_ranks(plant, ep=2):
        del errors["numbers"]
        assert max(map(abs, errors.values())) > 1e-3


def clipped():
    """Return how far the norm is off if no rank's experts count but the first's."""
    place = axis.place

    def replicated(tensor, group, placement, **options):
        step = place(tensor, group, placement, **options)
        tensor.hidden = placement
        return step

    axis.place = replicated
    group = dist.group.WORLD
    model = expert_parallel(build_mixture_gpt(CONFIG), group, group)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    right = model.clip_grad_norm_(1e9)
    for p in model.parameters():
        if p.hidden != Replicate():
            axis.place(p, group, Replicate(), like=p)
    return float(right), float(model.clip_grad_norm_(1e9))


def test_spawn_a_norm_of_one_ranks_experts_is_seen():
    for right, wrong in spawn(clipped, world_size=2, output="none"):
        assert right == pytest.approx(CONFIG.num_parameters**0.5)
        assert wrong < 0.9 * right


def test_a_pipeline_that_does_not_scale_the_auxiliary_loss_is_seen(one_process):
    def unscaled():
        GradientScale.before_compute = lambda *_: None
        return train(STEPS, ROWS, SMALL, experts=8, pp=2, keep_state=True, clip=1.0)

    found = spawn(unscaled, world_size=2, output="none")[0]
    with pytest.raises(AssertionError):
        assert_same_training(found, one_process({}))


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


def refused():
    group = dist.group.WORLD
    model = expert_parallel(build_mixture_gpt(CONFIG), group, group)
    return [
        error_of(lambda: expert_parallel(build_gpt(), group, group)),
        error_of(lambda: expert_parallel(model, group, group)),
    ]


def test_spawn_models_without_experts_are_refused():
    for plain, twice in spawn(refused, world_size=2, output="none"):
        assert "the model is a GPT without experts; build_mixture_gpt" in plain
        assert "divided already" in twice


@pytest.mark.parametrize(
    "wrong",
    [{"experts": 1}, {"experts_per_token": 9}, {"capacity": 0}, {"balance": -1}],
)
def test_mixtures_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="config is a GPTConfig; it must be a Mixture"):
        build_mixture_gpt(GPTConfig())
    with pytest.raises(ValueError, match=next(iter(wrong))):
        MixtureConfig(**wrong)

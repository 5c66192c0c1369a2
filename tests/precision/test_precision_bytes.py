"""Bytes that are kept and sent in every precision: ledger and meter are the formula."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from ddp_course import spec
from ddp_course.collectives import ring_all_reduce
from ddp_course.data_parallel import DistributedDataParallel
from ddp_course.launch import spawn
from ddp_course.measure import ByteMeter, resident
from ddp_course.mesh import make_groups
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.parallelize import autocast, dtype_of, parallelize
from ddp_course.precision import MasterWeights
from ddp_course.spec import layout_for
from ddp_course.theory import model_states, step_volume
from ddp_course.theory.memory import PRECISIONS, precision_named
from ddp_course.theory.plan import Model, plan
from ddp_course.zero import metered
from ddp_course.zero.axis import OPTIMIZERS

GPT = GPTConfig(block_size=16, n_layer=2, n_head=2, d_model=24)  # no padding: all even
PSI, BF16 = GPT.num_parameters, torch.bfloat16
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")  # in the order of stages
WITH_COPIES = partial(MasterWeights, optimizer_class=AdamW)
# What is trained -> the names of the formulas that have its bytes with DDP.
OPTIONS = {
    "fp32": {"fp32", "bf16", "fp16", "fsdp-bf16"},
    "bf16": {"fp32", "bf16", "fp16", "fsdp-bf16"},
    "fp16": {"fp32", "bf16", "fp16", "fsdp-bf16"},
    "bf16-pure": {"bf16-pure"},
    "mixed": {"mixed"},
}


def one(strategy: str, name: str) -> tuple[dict, int]:
    """Return what this rank keeps after a step, counts of steps apart, and sends."""
    precision = "bf16-pure" if name == "mixed" else name
    stage = STRATEGIES.index(strategy)
    layout = layout_for(dist.get_world_size(), zero=stage, precision=precision)
    axes = make_groups(layout.mesh)
    model = build_gpt(GPT).to(dtype_of(layout))
    if strategy == "ddp":  # with messages that a meter sees
        model = DistributedDataParallel(model, all_reduce=ring_all_reduce)
    else:
        model = parallelize(model, layout, axes)
    make = WITH_COPIES if name == "mixed" else AdamW
    if shards := OPTIMIZERS.get(stage):
        group, seen = axes.group("dp"), metered.optimizer()
        optimizer = shards(model.parameters(), make, group, **seen)
    else:
        optimizer = make(model.parameters())
    x = torch.arange(64).view(4, 16)
    for _ in range(2):
        with ByteMeter() as meter:
            optimizer.zero_grad()
            with autocast(layout):
                _, loss = model(x, x)
            loss.backward()
            optimizer.step()
    gc.collect()  # the last case's
    kept = dict(resident(model, optimizer))
    states = getattr(optimizer, "optim", optimizer).state.values()
    kept["optimizer states"] -= 4 * sum("step" in state for state in states)
    return kept, meter.total_sent


def job() -> dict[tuple, tuple]:
    return {(s, name): one(s, name) for s in STRATEGIES for name in OPTIONS}


def formulas(stage: int) -> dict[str, tuple]:
    """Return what every formula says for two ranks."""
    return {
        name: (
            model_states(PSI, 2, stage, precision=name),
            step_volume(PSI, 2, stage, name).total,
        )
        for name in PRECISIONS
    }


def test_kept_and_sent_are_the_formula_to_the_byte():
    results = spawn(job, world_size=2, output="none", timeout=250)
    for rank in results:
        for (strategy, name), measured in rank.items():
            stage = STRATEGIES.index(strategy)
            found = {n for n, said in formulas(stage).items() if said == measured}
            # What stage 3 gathers and sums has types of its own.
            apart = {"fp32"} if name == "fp32" else {"bf16", "fp16"}
            expected = (OPTIONS[name] & apart if stage == 3 else 0) or OPTIONS[name]
            assert found == expected, (strategy, name, measured)
        for strategy in STRATEGIES:  # half, and of stage 3 in bf16 two thirds
            whole = rank[strategy, "fp32"][1]
            for name in ("bf16-pure", "mixed"):
                assert rank[strategy, name][1] * 2 == whole
            less = rank[strategy, "bf16"][1] * 3
            assert less == (2 if strategy == "zero3" else 3) * whole


@pytest.mark.parametrize("precision", [*spec.PRECISIONS])
def test_plan_says_so_too(precision):
    for row in plan(Model(PSI), 2, 1e9, precision=precision)[:4]:
        states, sent = formulas(row.stage)[precision]
        assert (row.ledger, row.bytes_sent) == (states, sent)
    assert precision_named(precision) == PRECISIONS[precision]


# ---- 16, 18 or 20 --------------------------------------------------------------------


def test_16_and_megatrons_18_and_20_are_measured():
    model, x = build_gpt(GPT).to(BF16), torch.arange(64).view(4, 16)
    optimizer, found = WITH_COPIES(model.parameters()), []

    def count(name: str) -> None:
        steps = 4 * len(optimizer.optim.state)
        total = resident(model, optimizer, optimizer.optim).total - steps
        assert total == model_states(PSI, 1, precision=name).total
        found.append(total / PSI)

    model(x, x)[1].backward()
    optimizer.step()
    count("mixed")
    model(x, x)[1].backward()
    optimizer.copy_gradients()  # of which the optimizer steps copies, as well
    count("mixed-both-gradients")
    optimizer.zero_grad()
    copies = [c for group in optimizer.optim.param_groups for c in group["params"]]
    for parameter, copy in zip(model.parameters(), copies, strict=True):

        def move(parameter: nn.Parameter, copy: torch.Tensor = copy) -> None:
            copy.grad = parameter.grad.float() + (0 if copy.grad is None else copy.grad)
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(move)
        copy.grad = None
    model(x, x)[1].backward()
    count("mixed-fp32-gradients")
    assert found == [16, 20, 18]

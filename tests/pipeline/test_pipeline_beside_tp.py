"""A pipeline of a tensor-parallel model: evaluation, states, zero bubble.

`test_composed_training.py` trains it, on 8 ranks.
"""

from __future__ import annotations

import functools
import gc
import weakref

import torch.distributed as dist
from on_ranks import launched
from pipeline_cases import CLOSE, adamw, batch, untied
from trained import same

from ddp_course.mechanisms.whole_state import (
    full_optimizer_state_dict,
)
from ddp_course.mesh import Axes, Mesh, make_groups
from ddp_course.model import GPT
from ddp_course.pipeline import PipelineParallel
from ddp_course.tensor_parallel import tensor_parallel


@functools.cache
def axes() -> Axes:
    return make_groups(Mesh({"pp": 2, "tp": 2}))


def beside_tp(gpt: GPT, schedule: str, m: int) -> PipelineParallel:
    gpt = tensor_parallel(gpt, axes().group("tp"))
    return PipelineParallel(gpt, schedule, m, axes().group("pp"))


def one_step() -> tuple:
    """Return what an evaluation gives, and the optimizer's whole state after a step."""
    pipeline = beside_tp(untied(), "1f1b", 3)
    optimizer = adamw(pipeline.parameters())
    logits, loss = pipeline(batch(9)[0])[0], pipeline.eval()(*batch(9))[1]
    pipeline.train()
    pipeline.step(*batch(0))
    optimizer.step()
    return logits, loss, full_optimizer_state_dict(pipeline, optimizer)


def weights_are_split() -> tuple[int, int, int]:
    """Return how many gradients of this rank's weights came with W, and of how many.

    And how many blocks there are when the model has been let go of.
    """
    gpt, came = tensor_parallel(untied(), axes().group("tp")), set()
    pipeline = PipelineParallel(gpt, "zero_bubble", 2, axes().group("pp"))
    blocks = [weakref.ref(block) for block in gpt.blocks]
    [store] = [part.store for part in pipeline.parts if hasattr(part, "store")]
    del gpt
    gc.collect()
    for name, parameter in pipeline.named_parameters():

        def note(_, name=name):
            if store.tasks is None:  # nobody collects: it is W, not I
                came.add(name)

        parameter.register_post_accumulate_grad_hook(note)
    pipeline.step(*batch(0))
    dist.barrier()
    layers = ("qkv.weight", "proj.weight", "up.weight", "down.weight", "out.weight")
    linear = {n for n, _ in pipeline.named_parameters() if n.endswith(layers)}
    return len(linear & came), len(linear), sum(ref() is not None for ref in blocks)


ranks = launched(4, one_step, weights_are_split, timeout=250)


def test_evaluation_and_the_optimizers_state_are_those_of_one_process(ranks):
    plain = untied()
    optimizer = adamw(plain.parameters())
    logits, loss = plain(*batch(9))
    plain(*batch(0))[1].backward()
    optimizer.step()
    for rank, (its_logits, its_loss, state) in enumerate(ranks["one_step"]):
        right = logits.detach() if rank > 1 else None  # where the last stage is
        assert same((its_logits, its_loss), (right, loss.detach()), **CLOSE)
        assert same(state, optimizer.state_dict(), **CLOSE)


def test_linear_layers_that_are_cut_are_split_by_zero_bubble(ranks):
    results = ranks["weights_are_split"]
    assert all(split == linear > 8 for split, linear, _ in results)
    assert [blocks for *_, blocks in results] == [3, 3, 3, 3]

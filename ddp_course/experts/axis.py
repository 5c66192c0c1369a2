"""The ep axis of a layout: ranks of dp share the experts of their mixtures.

All other parameters are on all ranks of dp. Ranks along ep have different experts;
ranks along edp (and cp) have the same. With W ranks along dp and cp, R of them along
ep, there are two kinds of gradients; both are divided by W:

    parameter    gradient on a rank                    all-reduced over
    expert       summed over the tokens of R ranks     the W/R ranks with this expert
    any other    from this rank's own tokens           all W ranks

An expert's gradient is a sum over R ranks already, because an expert computes tokens of
R ranks; dividing it by W/R instead would make it R times too large. Chapter 17.
"""

import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.experts.gpt import Mixture
from ddp_course.mechanisms.divided import DividedModule, PlainModel
from ddp_course.mechanisms.placements import Replicate, Shard, place, placed
from ddp_course.mesh import Axes
from ddp_course.spec import Layout
from ddp_course.strategy import Strategy


class ExpertParallel(DividedModule, nn.Module):
    """A model with some of the experts on each rank; call it like the plain model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.plain, self.groups, self.module = PlainModel.of(module), (), module

    def forward(
        self, idx: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the model's logits, and its loss if there are targets."""
        return self.module(idx, targets)


def expert_parallel(
    model: nn.Module, group: dist.ProcessGroup, replicas: dist.ProcessGroup
) -> nn.Module:
    """Keep this rank's share of the experts of each mixture; return the model.

    All ranks call it together, with equal models; other axes may have divided the
    models before. Afterwards `DistributedDataParallel`, or an optimizer of ZeRO stage 1
    or 2, averages the gradients over all ranks of data parallelism.

    Args:
        model: a model with `Mixture`s, such as `build_mixture_gpt` returns.
        group: the ranks that share the experts, each with an equal part.
        replicas: the ranks that have the same experts as this one.

    Raises ValueError if the experts cannot be divided.
    """
    mixtures = [each for each in model.modules() if isinstance(each, Mixture)]
    ranks = dist.get_world_size(group)
    for mixture in mixtures:
        if mixture.group is not None:
            raise ValueError("the experts are divided already; divide them only once")
        if text := mixture.config.indivisible(("experts",), ranks):
            raise ValueError(text)
    if not isinstance(model, DividedModule):
        if not mixtures:
            raise ValueError(
                f"the model is a {type(model).__name__} without experts; "
                "build_mixture_gpt returns one with experts; or leave ep out"
            )
        model = ExpertParallel(model)
    names = {p: name for name, p in model.named_parameters()}
    own = {p for mixture in mixtures for p in mixture.experts.parameters()}
    for parameter, name in names.items():
        placement = Shard(0) if parameter in own else Replicate()
        place(parameter, group, placement, name=name.removeprefix("module."))
        if parameter in own:
            part = placed(parameter).steps[-1].part(parameter.data)
            parameter.data, parameter.replicas = part.clone(), replicas
    for mixture in mixtures:
        mixture.group = group
    model.groups = (*model.groups, group)
    return model


def wrap(model: nn.Module, layout: Layout, axes: Axes) -> nn.Module:
    """Divide the experts of the model among the ranks along ep."""
    return expert_parallel(model, axes.group("ep"), axes.group(*layout.replicas))


def strategy(layout: Layout) -> Strategy:
    """Return the functions that set up expert parallelism for this layout."""
    return Strategy(wrap)

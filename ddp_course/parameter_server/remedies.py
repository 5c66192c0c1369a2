"""Remedies: functions that correct a stale gradient before a step with it.

A remedy is called as `remedy(gradient, staleness, now, then)`: `now` are the present
weights, `then` those that the gradient was computed with. It returns the corrected
gradient. `runs.replay` applies a remedy to a recorded run. Chapter 13.
"""

from dataclasses import dataclass

from torch import Tensor

from ddp_course.theory import implicit_momentum


def by_staleness(gradient: Tensor, staleness: int, now: Tensor, then: Tensor) -> Tensor:
    """Divide the gradient by its staleness, if that is above 1.

    With SGD this divides the learning rate (Zhang et al. 2015, arXiv:1511.05950); an
    optimizer such as Adam, which divides by the size of gradients, undoes much of it.
    """
    return gradient / max(1, staleness)


@dataclass(frozen=True)
class DelayCompensation:
    """DC-ASGD: an estimate of the gradient at the present weights.

    The gradient has changed by the Hessian times the change of the weights. As an
    estimate of the Hessian's diagonal DC-ASGD takes `strength` * gradient**2, and it
    ignores the rest. Source: Zheng et al. 2016, arXiv:1609.08326, equation 10.
    """

    strength: float = 0.04

    def __call__(
        self, gradient: Tensor, staleness: int, now: Tensor, then: Tensor
    ) -> Tensor:
        """Return the corrected gradient."""
        return gradient + self.strength * gradient * gradient * (now - then)


def corrected_momentum(momentum: float, workers: int) -> float:
    """Return the momentum for an asynchronous optimizer.

    Asynchrony acts like momentum, too; the result and this implicit momentum together
    are `momentum`. With many workers it can be negative. Source: Mitliagkas et al.
    2016, arXiv:1605.09774.
    """
    return momentum - implicit_momentum(workers)

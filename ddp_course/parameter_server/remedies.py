"""What can be done against stale gradients: a server takes something else instead.

A remedy is called as `remedy(gradient, staleness, now, then)`, with the weights now and
those that the gradient was computed with, and returns what is to be taken. Chapter 13.
"""

from dataclasses import dataclass

from torch import Tensor

from ddp_course.theory import implicit_momentum


def by_staleness(gradient: Tensor, staleness: int, now: Tensor, then: Tensor) -> Tensor:
    """Divide by the staleness, as if the learning rate were; if that is above 1.

    With SGD it is lr / staleness (Zhang et al. 2015, arXiv:1511.05950); an optimizer
    such as Adam, which divides by the size of gradients, undoes much of it.
    """
    return gradient / max(1, staleness)


@dataclass(frozen=True)
class DelayCompensation:
    """DC-ASGD: guess what the gradient would be at the weights now.

    A gradient changes by the Hessian times the way that was gone meanwhile; of the
    Hessian it takes only the diagonal, and of that the guess gradient**2, `strength`
    times. Source: Zheng et al. 2016, arXiv:1609.08326, equation 10.
    """

    strength: float = 0.04

    def __call__(
        self, gradient: Tensor, staleness: int, now: Tensor, then: Tensor
    ) -> Tensor:
        """Return the gradient, corrected."""
        return gradient + self.strength * gradient * gradient * (now - then)


def corrected_momentum(momentum: float, workers: int) -> float:
    """Return the momentum to give to an optimizer of which asynchrony has its part.

    So that both together are `momentum`; of many workers it can be negative. Source:
    Mitliagkas et al. 2016, arXiv:1605.09774.
    """
    return momentum - implicit_momentum(workers)

"""What DataParallel carries to and from replica 0, in bytes. Chapter 04."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map


@dataclass(frozen=True)
class Move:
    """A tensor of `nbytes` bytes that went from replica `src` to replica `dst`.

    `what` is "parameters", "buffers", "inputs" or "outputs"; in backward come the
    "gradients of parameters" and the like, in the opposite direction.
    """

    what: str
    src: int
    dst: int
    nbytes: int


class Moves(list[Move]):
    """All moves since the beginning or the last `clear()`, in their order.

    The batch is taken to lie with replica 0. Only one end of each move is another
    replica, so `moved` adds up what goes through replica 0.
    """

    def moved(self) -> dict[str, int]:
        """Return the bytes by what was moved: {"parameters": 1024, ...}."""
        total: Counter[str] = Counter()
        for move in self:
            total[move.what] += move.nbytes
        return dict(total)

    def note_forward(
        self,
        module: nn.Module,
        copies: Sequence[Mapping[Tensor, Tensor]],
        calls: Sequence[Any],
        outputs: Sequence[Any],
    ) -> list[Any]:
        """Note a forward; `copies[k]` are what replica k has in place of the module's.

        Returns the outputs, to be gathered in place of the given ones: their gradients
        are those that travel, without what a replica itself has made of its outputs.
        """
        outputs = tree_map(_alias, list(outputs))
        for k in range(1, len(calls)):
            self._note("parameters", 0, k, [copies[k][p] for p in module.parameters()])
            self._note("buffers", 0, k, [copies[k][b] for b in module.buffers()])
            self._note("inputs", 0, k, tree_leaves(calls[k]))
            self._note("outputs", k, 0, tree_leaves(outputs[k]))
        return outputs

    def _note(self, what: str, src: int, dst: int, leaves: Iterable[Any]) -> None:
        """Note the tensors among `leaves`, and in backward the gradients they get."""

        def note_gradient(gradient: Tensor) -> None:
            self.append(Move(f"gradients of {what}", dst, src, gradient.nbytes))

        for tensor in leaves:
            if isinstance(tensor, Tensor):
                self.append(Move(what, src, dst, tensor.nbytes))
                if tensor.requires_grad:
                    tensor.register_hook(note_gradient)


def _alias(leaf: Any) -> Any:
    return leaf.view_as(leaf) if isinstance(leaf, Tensor) else leaf

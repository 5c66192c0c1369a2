"""Record the tensors that DataParallel copies to and from replica 0. Chapter 04."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map


@dataclass(frozen=True)
class Move:
    """A tensor of `nbytes` bytes, copied from replica `src` to replica `dst`.

    `kind` is "parameters", "buffers", "inputs" or "outputs"; in backward, "gradients of
    parameters" and so on, in the opposite direction.
    """

    kind: str
    src: int
    dst: int
    nbytes: int


class Moves(list[Move]):
    """All moves since the beginning or the last `clear()`, in order.

    The batch is assumed to be on replica 0's device, so replica 0 is one end of every
    move, and `bytes_by_kind` adds up the bytes that pass through it.
    """

    def bytes_by_kind(self) -> dict[str, int]:
        """Return the bytes of each kind: {"parameters": 1024, ...}."""
        total: Counter[str] = Counter()
        for move in self:
            total[move.kind] += move.nbytes
        return dict(total)

    def note_forward(
        self,
        module: nn.Module,
        copies: Sequence[Mapping[Tensor, Tensor]],
        calls: Sequence[Any],
        outputs: Sequence[Any],
    ) -> list[Any]:
        """Record a forward; `copies[k]` has the tensors of replica k.

        Returns views of the outputs, and the caller must gather these views: only the
        gradient of a view travels back to the replica. The output itself may have
        further gradients, from uses inside the replica.
        """
        outputs = tree_map(_alias, list(outputs))
        for k in range(1, len(calls)):
            self._note("parameters", 0, k, [copies[k][p] for p in module.parameters()])
            self._note("buffers", 0, k, [copies[k][b] for b in module.buffers()])
            self._note("inputs", 0, k, tree_leaves(calls[k]))
            self._note("outputs", k, 0, tree_leaves(outputs[k]))
        return outputs

    def _note(self, kind: str, src: int, dst: int, leaves: Iterable[Any]) -> None:
        """Record the tensors among `leaves`, and their gradients in backward."""

        def note_gradient(gradient: Tensor) -> None:
            self.append(Move(f"gradients of {kind}", dst, src, gradient.nbytes))

        for tensor in leaves:
            if isinstance(tensor, Tensor):
                self.append(Move(kind, src, dst, tensor.nbytes))
                if tensor.requires_grad:
                    tensor.register_hook(note_gradient)


def _alias(leaf: Any) -> Any:
    return leaf.view_as(leaf) if isinstance(leaf, Tensor) else leaf

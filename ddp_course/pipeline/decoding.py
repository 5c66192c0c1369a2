"""Text from a pipeline: each rank caches the keys and values of its own layers.

A row's next token needs its last token, which leaves the last stage. So a microbatch
goes around a ring of stages, once for each token, and while it is elsewhere a stage
computes other microbatches. With as many microbatches as stages no stage waits, except
at the beginning and the end: no token waits for a flush, as a training step does.

Which rank computes what in which tick is plain data, `decoding_plan`. In each tick
every rank computes; then, in one batch, it sends to the next rank and receives from the
previous one. So no two ranks wait for each other, whatever the backend. Chapter 10.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.collectives.endpoint import Endpoint
from ddp_course.generation import KeyValueCache, check_length, most_likely
from ddp_course.pipeline.stages import add_layers, spine

Work = tuple[int, int] | None  # (number of the new token, microbatch); None: waiting


def decoding_plan(ranks: int, microbatches: int, tokens: int) -> list[list[Work]]:
    """Return, for each tick, what each rank computes. Pure.

    The work of rank r in a tick is the work of rank r + 1 in the next tick. Rank 0
    begins a microbatch's tokens `max(microbatches, ranks)` ticks apart.
    """
    period = max(microbatches, ranks)

    def work(tick: int, rank: int) -> Work:
        token, microbatch = divmod(tick - rank, period)
        works = 0 <= token < tokens and microbatch < microbatches
        return (token, microbatch) if works else None

    ticks = (tokens - 1) * period + microbatches + ranks - 1
    return [[work(tick, rank) for rank in range(ranks)] for tick in range(ticks)]


class PipelinedDecoder(nn.Module):
    """This rank's layers of `model`, which generate text for microbatches of rows.

    Args:
        model: the same on all ranks: a GPT, or one that `tensor_parallel` has cut.
        sizes: the number of layers on each rank of the group.
        num_microbatches: the number of parts of a batch.
        group: the ranks of the pipeline, in order; None means all.

    Raises ValueError if `sizes` does not fit the ranks and the model, and for a model
    that is cut with `sequence_parallel`.
    """

    def __init__(
        self,
        model: nn.Module,
        sizes: Sequence[int],
        num_microbatches: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.config, self.m, self.group = model.config, num_microbatches, group
        self.gather_logits: Callable[[Tensor], Tensor] = model.gather_logits
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        whole = spine(model)
        if len(sizes) != ranks or sum(sizes) != len(whole):
            raise ValueError(
                f"sizes is {list(sizes)}; it must be a number of layers for each rank, "
                f"{ranks} in all, together {len(whole)} layers"
            )
        if getattr(model, "sequence_parallel", False):
            raise ValueError(
                "the model is tensor parallel with sequence_parallel=True: its stages "
                "pass on parts of the sequence, not whole ones; leave the option out"
            )
        first = sum(sizes[:rank])
        layers = dict([*whole.items()][first : first + sizes[rank]])
        add_layers(self, layers)
        self.layers = list(layers.values())

    def forward(self, x: Tensor) -> Tensor:
        """Call this rank's layers."""
        for layer in self.layers:
            x = layer(x)
        return x

    @torch.no_grad()
    def generate(self, idx: Tensor, new_tokens: int) -> Tensor:
        """Return `idx` (B, T), the same on all ranks, continued: (B, T + new_tokens).

        The result is that of `generation.generate` for each microbatch by itself.
        Raises ValueError for too few rows, or too few positions in the model.
        """
        check_length(self, idx, new_tokens)
        if not 1 <= self.m <= len(idx):
            raise ValueError(
                f"num_microbatches is {self.m}; {len(idx)} rows can be cut into "
                f"1 to {len(idx)}"
            )
        endpoint, prompts = Endpoint(self.group), idx.tensor_split(self.m)
        caches = [KeyValueCache(self) for _ in prompts]
        texts = [[prompt] for prompt in prompts]  # new tokens arrive on rank 0 alone
        arrived = None
        for row in decoding_plan(endpoint.size, self.m, new_tokens):
            work, coming = row[endpoint.rank], row[endpoint.rank - 1]
            result = None
            if work is not None:  # compute
                _, k = work
                result = caches[k](texts[k][-1] if endpoint.rank == 0 else arrived)
                if endpoint.rank == endpoint.size - 1:
                    result = most_likely(self.gather_logits(result[:, -1:]))
            arrived = self.pass_on(endpoint, result, coming, prompts)
            if endpoint.rank == 0 and coming is not None:
                texts[coming[1]].append(arrived)
        whole = idx.new_empty(len(idx), idx.shape[1] + new_tokens)
        if endpoint.rank == 0:
            whole = torch.cat([torch.cat(text, 1) for text in texts])
        dist.broadcast(whole, endpoint.ranks[0], self.group)
        return whole

    def pass_on(
        self,
        endpoint: Endpoint,
        result: Tensor | None,
        coming: Work,
        prompts: Sequence[Tensor],
    ) -> Tensor | None:
        """Send `result` to the next rank; return the previous rank's result.

        `coming` is the work of the previous rank in this tick. Activations go from
        stage to stage, (B/m, T, C) for a prompt and (B/m, 1, C) after it; new tokens,
        (B/m, 1), go from the last rank to rank 0.
        """
        if endpoint.size == 1:
            return result
        after = (endpoint.rank + 1) % endpoint.size
        before = (endpoint.rank - 1) % endpoint.size
        sends = [] if result is None else [(result.contiguous(), after)]
        if coming is None:
            endpoint.exchange(sends, [])
            return None
        token, k = coming
        rows, positions = prompts[k].shape if token == 0 else (len(prompts[k]), 1)
        if endpoint.rank == 0:
            arriving = prompts[k].new_empty(rows, 1)
        else:
            like = next(self.parameters())
            arriving = like.new_empty(rows, positions, self.config.d_model)
        endpoint.exchange(sends, [(arriving, before)])
        return arriving

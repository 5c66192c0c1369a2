"""The exercises of chapter 10: a schedule, a cut, and the work of a stage."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.chapters.ch10_pipeline_parallel import solutions
from ddp_course.collectives import barrier
from ddp_course.lab import orders
from ddp_course.lab.answers import Answer, code, one_line
from ddp_course.lab.exercises import exercise, expect, judge_ranks, shown
from ddp_course.lab.judge import Case, Draw, same_as
from ddp_course.lab.messages import watched
from ddp_course.lab.values import fits

# ---- my_gpipe ------------------------------------------------------------------------

# (stages, microbatches)
PIPELINES = ((2, 3), (1, 2), (3, 1), (4, 4), (3, 7), (2, 12), (11, 2))


@exercise("my_gpipe", solution=solutions.my_gpipe)
def check_my_gpipe(answer: Answer) -> str:
    """`my_gpipe(num_stages, num_microbatches, rank)`: what a rank does, in order.

    How many forwards and backwards does a rank have, and does their order depend on
    its stage?

    Return an F of your own stage for each microbatch in order, then a B for each
    microbatch in order.
    """
    for p, m in PIPELINES:
        rows = [answer(p, m, rank) for rank in range(p)]
        for rank, row in enumerate(rows):
            orders.judge_row(answer.call(p, m, rank), row, rank, "FB")
            ops = "".join(action[len(str(rank))] for action in row)
            expect(
                "BF" not in ops,
                f"{answer.call(p, m, rank)} returned {code(' '.join(row))}, where a "
                "backward comes before a forward; in GPipe the forwards of all "
                "microbatches come first.",
            )
        where = f"With {p} stage{'s' * (p > 1)} and {m} microbatch{'es' * (m > 1)},"
        simulated = orders.judge_legal(where, rows, m)
        orders.judge_bubble(where, simulated, Fraction(p - 1, m + p - 1), "GPipe's")
    orders.judge_training([answer(3, 4, rank) for rank in range(3)])
    return (
        f"{len(PIPELINES)} pipelines: legal, all forwards first, and no more waiting "
        "than (p-1)/(m+p-1) of the time; on real ranks the gradients of one process"
    )


# ---- my_cut --------------------------------------------------------------------------

COSTS = (
    ([1, 1, 1, 1], 2),
    ([1, 8, 8, 8, 8, 6], 4),  # a GPT: the embedding costs nearly nothing
    ([1, 4, 4, 4, 4, 12], 3),  # a GPT with a large vocabulary
    ([5, 5, 2, 3, 5, 5, 2], 3),  # minimising differences or squares gives another cut
    ([7, 2, 5, 10, 8], 2),
    ([9, 1, 1, 1, 1, 1, 1], 3),
    ([1, 1, 1, 9], 4),
    ([2, 9, 5, 4], 3),
    ([2, 4, 4, 2, 8, 4], 3),
    ([3], 1),
    ([0.9, 0.9, 0.9, 2.0], 2),
    ([0, 0, 5, 0, 5], 3),  # layers without cost count as layers, too
    ([2, 3, 5, 7, 11, 13, 17, 19, 23], 4),
    ([0, 0, 0], 2),
    ([5e12, 2e12, 1e12, 1e12, 4e12], 3),  # in operations
    ([3e-7, 2e-7, 2e-7, 1e-7, 5e-7], 2),  # in seconds
    ([2**25 - 1, 1, 2**25], 2),  # float32 cannot tell the two cuts apart
    ([2**25, 1, 2**25 - 1], 2),
    ([5, 1, 4, 1, 3, 9, 2, 6, 5], 7),
)


@exercise("my_cut", solution=solutions.my_cut)
def check_my_cut(answer: Answer) -> str:
    """`my_cut(costs, num_stages)`: how many layers each stage has.

    Suppose that you know where the first stage ends. Which question remains?

    Try all ways to place the cuts between the layers (`itertools.combinations` yields
    them); the cost of a way's most expensive stage is a maximum of sums; return the way
    with the smallest maximum. A faster method finds the best cut of the layers from k
    on into s stages from the best cuts into s - 1 stages.
    """
    hints = {"fits": wrong_cut, "right": wrong_cut}
    same_as(answer, solutions.my_cut, _costs, cases=100, hints=hints)
    return "100 models; each one's dearest stage is as cheap as possible"


def _costs(d: Draw) -> tuple[list[float], int]:
    if d.case < len(COSTS):
        costs, stages = COSTS[d.case]
        return [*costs], stages
    layers, most = d.same.randint(1, 9), d.same.choice([3, 9, 30])
    costs = [d.own.randint(0, 4 * most) / d.own.choice([4, 1]) for _ in "1" * layers]
    return costs, d.same.randint(1, min(layers, 4))


def wrong_cut(case: Case) -> str:
    """Describe the mistake in a cut; cuts as good as the solution's are right."""
    (costs, stages), got = case.args.values(), case.got
    listed = isinstance(got, (list, tuple))
    if not listed or not all(fits(size, 1) and size == int(size) for size in got):
        expected = "expected a list with the number of layers of each stage."
        return f"returned {shown(got)}; {expected}"
    begin = f"returned {shown(got)}"
    if len(got) != stages:
        return f"{begin}, which has {len(got)} stages; expected {stages}."
    if not all(size > 0 for size in got):
        return f"{begin}: a stage without layers is a rank without work."
    if sum(got) != len(costs):
        return f"{begin}, together {sum(got)} layers; the model has {len(costs)}."
    dearest, least = _dearest(costs, got), _dearest(costs, case.wanted)
    if math.isclose(dearest, least, rel_tol=1e-9):
        return ""
    return (
        f"{begin}: the dearest stage costs {dearest:.10g}, and all others wait for it; "
        f"it can be {least:.10g}."
    )


def _dearest(costs: Sequence[float], sizes: Sequence[int]) -> float:
    ends = itertools.accumulate(sizes)
    stages = (costs[end - size : end] for size, end in zip(sizes, ends, strict=True))
    return max(map(sum, stages), default=0)


# ---- my_stage_step -------------------------------------------------------------------

SAMPLES, WIDE, WORDS = 2, 4, 8  # rows of a microbatch; channels; number of tokens
MICROBATCHES = {1: 2, 2: 11, 3: 4}  # {number of ranks: number of microbatches}
DROPOUT_SEED = 3  # every stage begins its step with this seed
FINE = 2**25 + 1  # which float32 cannot represent
# {step: (dtype of the tokens, dtype of the weights, whether all stages but the last
# are frozen and in evaluation mode)}
STEPS = {
    "the first step": (torch.int64, torch.float32, False),
    "the second step, tokens of 32 bits": (torch.int32, torch.float32, False),
    "weights of 64 bits, without gradients": (torch.int64, torch.float64, False),
    "all stages but the last frozen": (torch.int64, torch.float32, True),
}
STEP = {
    "each_once": "called `{way}_in` for the microbatches {order}; each of the {m} has "
    "one {way}.",
    "in_turn": "made the calls {events}; hand a result on before the next microbatch "
    "begins.",
    "flush": "made the calls {events}; in GPipe the forwards of all microbatches come "
    "before the first backward.",
    "same_order": "took the microbatches in the order {numbers}, and another rank in "
    "the order {others}. On NCCL messages have no names and are matched by their "
    "order: gradients would go back through the wrong microbatch.",
    "no_graph": "handed on an output with its graph: all that the graph has saved "
    "lives as long as the message travels. Hand on `y.detach()`.",
    "none": "handed back {handed} as the gradient of tokens. They are integers and "
    "have none: on the first rank it is None.",
    "own_messages": "sent {sent} messages and called {collectives} collectives; "
    "expected {wanted} messages, sent by the four functions in the arguments, and "
    "nothing else.",
    "mode": "has put the stage into training or into evaluation mode; leave that, and "
    "with it dropout, to the caller.",
    "frozen": "has changed a weight's `requires_grad`, or the gradient of a frozen "
    "weight; leave frozen weights frozen.",
    "weights": "has changed weights; the optimizer does that, after the step.",
    "reached": "has a weight without a gradient: backward did not reach it.",
    "added": "has lost what was in `grad` before the step: gradients add up, until the "
    "optimizer's owner calls `zero_grad`.",
    "full": "has a weight's gradient that was rounded to float32 on its way; keep the "
    "type of each tensor.",
    "gradients": "has {got} as a weight's gradient; one process has {right}. Does each "
    "microbatch go back through its own forward, and do all of them add up?",
    "freed": "keeps {left} that autograd has saved when the last backward is "
    "done. Which variable keeps a graph that is not needed any more?",
    "let_go": "still keeps inputs or outputs of the stage after the step, and their "
    "graphs with them. Keep them in a variable of your function.",
    "freed_in_turn": "keeps {alive} tensors that autograd has saved, after each "
    "backward: one backward should free what one forward has kept.",
}


@exercise("my_stage_step", solution=solutions.my_stage_step)
def check_my_stage_step(answer: Answer) -> str:
    """`my_stage_step(stage, num_microbatches, forward_in, ...)`: GPipe, one stage.

    The graph of a stage begins at its input and ends at its output. What gives the
    input a gradient, and how does backward start in the middle of a network?

    Forwards: take the input and let autograd record for it, unless it is tokens;
    compute; send the output on, detached; keep both. Then, in the same order, call
    backward on each kept output with its gradient from the next rank, and send the
    gradient of the input back. The output of a frozen first stage requires no gradient:
    receive one, and call no backward.
    """
    hint = "Look at the tensors that enter the stage and that must leave it."
    judge_ranks(STEP, _steps_on_rank, answer, hint=hint)
    return (
        "pipelines of 1 to 3 real ranks: the gradients of one process, one message for "
        "each microbatch and direction, and activations freed as backward goes"
    )


def _stages(p: int, frozen: bool, dtype: torch.dtype) -> list[nn.Module]:
    """Return the stages of a model of small integers: no sum is ever rounded.

    If `dtype` is float32, weights have gradients of an earlier step.
    """
    stages: list[nn.Module] = []
    for rank in range(p):
        layer = nn.Linear(WIDE, WIDE)
        first = nn.ReLU() if rank else nn.Embedding(WORDS, WIDE)
        stage = nn.Sequential(first, layer, nn.Dropout(0.5))  # which doubles or drops
        orders.whole_numbers(stage, seed=rank).to(dtype)
        stages.append(stage)
        layer.bias.requires_grad_(False)
        if frozen and rank < p - 1:
            stage.requires_grad_(False).eval()
        for parameter in stage.parameters():
            if parameter.requires_grad and dtype == torch.float32:
                parameter.grad = torch.ones_like(parameter)
    return stages


def _tokens(m: int) -> Tensor:
    dice = torch.Generator().manual_seed(1)
    return torch.randint(0, WORDS, (m, SAMPLES), generator=dice)


def _loss_gradient(y: Tensor, k: int) -> Tensor:
    """Return the gradient of the loss, sum of (k + 1) y² / 2, with respect to y.

    In float64 the loss is FINE times as large: float32 cannot hold its gradients.
    """
    return (k + 1) * y * (FINE if y.dtype == torch.float64 else 1)


def _strided(tensor: Tensor) -> Tensor:
    """Return a copy that, like an expanded gradient, is not contiguous."""
    return tensor.T.contiguous().T


def _trained(stage: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in stage.parameters() if weight.requires_grad]


def _gradients_alone(
    p: int, order: Sequence[int], frozen: bool, dtype: torch.dtype
) -> list[list[Tensor | None]]:
    """Return one process's gradients; `order` is that of the microbatches."""
    stages, tokens = _stages(p, frozen, dtype), _tokens(len(order))
    xs = [tokens[k] for k in order]
    for stage in stages:
        torch.manual_seed(DROPOUT_SEED)
        xs = [stage(x) for x in xs]
    for k, x in zip(order, xs, strict=True):
        x.backward(_loss_gradient(x.detach(), k))
    return [[weight.grad for weight in _trained(stage)] for stage in stages]


class _Saved:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Boundaries:
    """The four functions that a stage gets; they record their calls."""

    def __init__(self, m: int, tokens: torch.dtype, dtype: torch.dtype) -> None:
        self.dtype = dtype  # the type of all tensors at the boundaries
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        self.tokens, self.outputs, self.m = _tokens(m).to(tokens), {}, m
        self.events: list[tuple[str, int]] = []
        self.alive: list[int] = []  # number of saved tensors after each backward
        self.saved: weakref.WeakSet = weakref.WeakSet()
        self.used: list[weakref.ref] = []  # the stage's inputs and outputs
        self.works: list[tuple[Any, Tensor]] = []
        self.graph, self.handed = False, None

    def forward_in(self, k: int) -> Tensor:
        self._note("forward_in", k)
        if self.rank == 0:
            return self.tokens[k].clone()
        return self._receive(self.rank - 1)

    def forward_out(self, k: int, y: Tensor) -> None:
        self._note("forward_out", k)
        self.outputs[k] = self._checked(y, "forward_out").detach().clone()
        self.graph |= y.requires_grad
        if self.rank < self.last:
            self._send(self.outputs[k], self.rank + 1)

    def backward_in(self, k: int) -> Tensor:
        self._note("backward_in", k)
        if self.rank < self.last:
            return self._receive(self.rank + 1)
        if k not in self.outputs:
            raise ValueError(f"microbatch {k} has no output yet, and so no loss")
        return _strided(_loss_gradient(self.outputs[k], k))

    def backward_out(self, k: int, gradient: Tensor | None) -> None:
        self._note("backward_out", k)
        self.alive.append(len(self.saved))
        if self.rank == 0:
            self.handed = gradient if gradient is not None else self.handed
            return
        if gradient is None:
            raise TypeError(
                "backward_out got None: the input must require a gradient before the "
                "stage computes with it"
            )
        self._send(self._checked(gradient, "backward_out"), self.rank - 1)

    def _note(self, what: str, k: int) -> None:
        if type(k) is not int or not 0 <= k < self.m:
            raise ValueError(f"there is no microbatch {k!r}; the last is {self.m - 1}")
        self.events.append((what, k))

    def _checked(self, tensor: Any, what: str) -> Tensor:
        if not isinstance(tensor, Tensor) or tensor.shape != (SAMPLES, WIDE):
            raise TypeError(
                f"{what} got {one_line(tensor)}; the boundary's tensors have the shape "
                f"{(SAMPLES, WIDE)}"
            )
        if tensor.dtype != self.dtype:
            raise TypeError(
                f"{what} got a tensor of {tensor.dtype}; the stage has {self.dtype}"
            )
        return tensor

    def _send(self, tensor: Tensor, peer: int) -> None:
        sent = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.works.append((dist.isend(sent, peer), sent))

    def _receive(self, peer: int) -> Tensor:
        got = torch.empty(SAMPLES, WIDE, dtype=self.dtype)
        dist.irecv(got, peer).wait()
        return _strided(got)

    def use(self, stage: nn.Module, xs: tuple[Tensor, ...], y: Tensor) -> None:
        """Record the stage's input and output; a hook of its forward."""
        self.used += map(weakref.ref, (*xs, y))

    def pack(self, tensor: Tensor) -> _Saved:
        """Record a tensor for as long as autograd keeps it."""
        saved = _Saved(tensor)
        self.saved.add(saved)
        return saved


def _steps_on_rank(my_stage_step: Callable) -> Iterator[dict[str, Any]]:
    for case, kinds in STEPS.items():
        yield {"case": case} | _step_on_rank(my_stage_step, *kinds)


def _step_on_rank(
    my_stage_step: Callable, tokens: torch.dtype, dtype: torch.dtype, frozen: bool
) -> dict[str, Any]:
    """Run one step of this rank's stage, and return the facts to judge."""
    rank, n = dist.get_rank(), dist.get_world_size()
    m, stage = MICROBATCHES[n], _stages(n, frozen, dtype)[rank]
    ends, trained = _Boundaries(m, tokens, dtype), _trained(stage)
    before, modes = copy.deepcopy(stage), [stage.training]
    stage.register_forward_pre_hook(lambda *_: modes.append(stage[1].training))
    stage.register_forward_hook(ends.use)
    barrier()
    torch.manual_seed(DROPOUT_SEED)
    hooks = torch.autograd.graph.saved_tensors_hooks(ends.pack, lambda s: s.tensor)
    with watched() as record, hooks:
        functions = ends.forward_in, ends.forward_out, ends.backward_in
        my_stage_step(stage, m, *functions, ends.backward_out)
        for work, _ in ends.works:
            work.wait()
    numbers: list[Any] = [None] * n
    dist.all_gather_object(numbers, [k for _, k in ends.events])
    peers = [peer for peer in (rank + 1, rank - 1) if 0 <= peer < n]
    got = [weight.grad for weight in trained]
    order = [k for what, k in ends.events if what == "forward_in"]
    if sorted(order) != [*range(m)]:
        order = [*range(m)]
    right = _gradients_alone(n, order, frozen, dtype)[rank]
    reached = all(gradient is not None for gradient in got)
    pairs = list(zip(got, right, strict=True))
    same = [reached and torch.equal(a, b) for a, b in pairs]
    lost = reached and not all(same) and all(torch.equal(a + 1, b) for a, b in pairs)
    close = reached and dtype == torch.float64
    close = close and all(torch.allclose(a, b) for a, b in pairs)
    close = close and not all(torch.allclose(a, b, rtol=1e-12) for a, b in pairs)
    wrong = same.index(False) if False in same else -1
    others = [its for its in numbers if its != numbers[rank]]
    messages = sorted([(p, SAMPLES * WIDE) for p in peers] * m)
    alive, left = ends.alive, (ends.alive or [0])[-1]
    in_turn = alive == sorted(alive, reverse=True) and len(set(alive)) == m
    result = _orders_of(ends.events, m) | {"numbers": numbers[rank]}
    result |= {"same_order": not others, "others": (others or [None])[0]}
    result |= {"no_graph": not ends.graph, "none": ends.handed is None}
    result |= {"handed": shown(ends.handed), "wanted": m * len(peers)}
    result |= {key: len(record[key]) for key in ("sent", "collectives")}
    own = sorted(record["sent"]) == messages and not record["collectives"]
    result["own_messages"] = own
    modes += [module.training for module in stage.modules()]
    result["mode"] = len({*modes}) == 1
    untrained = [weight for weight in stage.parameters() if not weight.requires_grad]
    result["frozen"] = len(_trained(stage)) == len(trained)
    result["frozen"] &= all(weight.grad is None for weight in untrained)
    result["weights"] = all(map(torch.equal, stage.parameters(), before.parameters()))
    result |= {"reached": reached, "added": not lost, "gradients": all(same)}
    result["full"] = all(same) or not close
    result |= {"got": shown([None, *got][wrong + 1])}
    result |= {"right": shown([None, *right][wrong + 1])}
    gc.collect()
    result["let_go"] = not any(tensor() is not None for tensor in ends.used)
    result |= {
        "freed": left == 0,
        "left": f"{left} tensor{'s' * (left > 1)}",
        "alive": alive,
    }
    # `alive` has only zeros if the answer recomputes activations.
    return result | {"freed_in_turn": in_turn or not any(alive)}


def _orders_of(events: list[tuple[str, int]], m: int) -> dict[str, Any]:
    """Return facts about the order of a rank's calls: whether it is GPipe's."""
    facts: dict[str, Any] = {
        "m": m,
        "events": code(" ".join(f"{what}({k})" for what, k in events)),
        "each_once": True,
        "in_turn": True,
    }
    for way in ("backward", "forward"):
        found = [event for event in events if event[0].startswith(way)]
        order = [k for what, k in found if what == f"{way}_in"]
        if sorted(order) != list(range(m)):
            facts |= {"each_once": False, "way": way, "order": order}
        facts["in_turn"] &= found == [
            (f"{way}_{end}", k) for k in order for end in ("in", "out")
        ]
    ways = [what.partition("_")[0] for what, _ in events]
    return facts | {"flush": ways == sorted(ways, reverse=True)}

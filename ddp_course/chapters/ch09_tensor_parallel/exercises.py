"""The exercises of chapter 09: f, a row layer; the loss and a plan are in ch09_more."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ddp_course.chapters.ch09_tensor_parallel import solutions
from ddp_course.collectives import barrier
from ddp_course.lab.answers import Answer, code, judge_on_ranks, on_ranks, one_line
from ddp_course.lab.exercises import exercise, expect
from ddp_course.measure import ByteMeter, TorchCollectives

ROWS, INNER, OWN = 3, 6, 4  # of x; channels; columns of each rank's part


def integers(seed: int, *shape: int) -> Tensor:
    """Return small whole numbers: in any order, their sums are never rounded."""
    dice = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=dice).float()


# ---- copy_to_ranks -----------------------------------------------------------------


@exercise("copy_to_ranks", solution=solutions.copy_to_ranks)
def check_copy_to_ranks(answer: Answer) -> str:
    """`copy_to_ranks(x, all_reduce)`: x, whose gradients are summed in backward."""
    hint = "Write a torch.autograd.Function: what goes forward, and what goes back?"
    judge_on_ranks(_use_copy, answer, _judge_copy, hint)
    return (
        "1, 2 and 3 real ranks: nothing sent in forward, one all-reduce in backward, "
        "the gradient of one process, and no other gradient changed"
    )


class _Sums:
    """The all-reduce that the reader's function is given; it notes sizes."""

    def __init__(self) -> None:
        self.numels: list[int] = []

    def __call__(self, tensor: Tensor) -> None:
        self.numels.append(tensor.numel())
        dist.all_reduce(tensor.detach())


def _columns(n: int) -> Tensor:
    """Return W; rank 1's columns are zeros, and so are its gradients."""
    columns = integers(0, INNER, n * OWN)
    columns[:, OWN : 2 * OWN] = 0
    return columns


def _use_copy(copy: Callable) -> dict[str, Any] | str:
    """On every rank: multiply a copy by own columns, and add another one to y."""
    rank, n, sums = dist.get_rank(), dist.get_world_size(), _Sums()
    own = _columns(n).chunk(n, 1)[rank]  # of W
    x = integers(1, ROWS, INNER).requires_grad_()
    other, beside = (integers(s, ROWS, INNER).requires_grad_() for s in (2, 3))
    before = x.detach().clone()
    barrier()
    with TorchCollectives() as torchs:
        copied = copy(x, sums)
    if not isinstance(copied, Tensor):
        return f"your function returned {code(one_line(copied))}, no tensor."
    if not copied.requires_grad:
        return (
            "what your function returns has no way back to x (`requires_grad` is "
            "False): x would get no gradient at all."
        )
    forward = list(sums.numels) or [call.op for call in torchs.calls]
    same = copied.shape == x.shape and torch.equal(copied.detach(), before)
    if not same:
        return "what your function returns is not x: forward changes nothing."
    sums.numels.clear()
    with TorchCollectives() as torchs:
        (copied @ own).square().sum().backward()
    backward, ops = list(sums.numels), [call.op for call in torchs.calls]
    # One tensor is the gradient of both sides of a sum; `beside` needs it later.
    added = 1 * beside + copy(other, sums)
    (added * (1 + rank)).sum().backward()
    return {
        "forward": forward,
        "backward": backward,
        "others": len(ops) - len(backward),
        "gradient": x.grad,
        "beside": beside.grad,
        "untouched": torch.equal(x.detach(), before),
    }


def _judge_copy(where: str, told: dict[str, Any], n: int) -> None:
    rank = int(where.split("rank ")[-1].rstrip(","))
    expect(
        not told["forward"],
        f"{where} something was sent in forward; all ranks have x already.",
    )
    x, w = integers(1, ROWS, INNER).requires_grad_(), _columns(n)
    (x @ w).square().sum().backward()
    got, backward = told["gradient"], told["backward"]
    expect(
        backward or n == 1,
        f"{where} backward called `all_reduce` 0 times: the gradient of x is that of "
        "this rank's columns alone. All columns have used x.",
    )
    expect(
        backward in ([ROWS * INNER], []) and told["others"] <= 0,
        f"{where} backward sent {backward} numbers; one all-reduce of the "
        f"{ROWS * INNER} numbers of x's gradient is enough.",
    )
    mean = got is not None and n > 1 and torch.equal(got * n, x.grad)
    why = (
        "this is the mean; each rank's columns count fully, so it is the sum"
        if mean
        else "it is the sum of what the columns of all ranks give"
    )
    expect(
        got is not None and torch.allclose(got, x.grad),
        f"{where} the gradient of x is not that of one process: {why}.",
    )
    expect(
        torch.equal(told["beside"], torch.full((ROWS, INNER), 1.0 + rank)),
        f"{where} in `y = b + copy_to_ranks(x, all_reduce)` the gradient of b was "
        "changed, too: autograd hands the same tensor to both. Sum a copy of it.",
    )
    expect(told["untouched"], f"{where} your function changed x.")


# ---- row_linear --------------------------------------------------------------------

OUT = 5


@exercise("row_linear", solution=solutions.row_linear)
def check_row_linear(answer: Answer) -> str:
    """`row_linear(x, weight, bias, reduce_sum)`: X @ W.T + bias, from parts of both."""
    hint = "Each rank has a part of every sum. What has to be added how often?"
    judge_on_ranks(_use_row, answer, _judge_row, hint)
    return (
        "1, 2 and 3 real ranks: output and all gradients as in one process, the bias "
        "once and trained on every rank, one all-reduce"
    )


class _Reduce(torch.autograd.Function):
    """The chapter's g: all-reduce in forward, nothing in backward."""

    numels: list[int] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _Reduce.numels.append(x.numel())
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _row_parts(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the whole x, weight and bias."""
    wide = n * OWN
    x = integers(5, 2, ROWS, wide)  # texts of tokens, as in a GPT
    return x, integers(6, OUT, wide), 1 + integers(7, OUT).abs()


def _use_row(row_linear: Callable) -> dict[str, Any] | str:
    """On every rank: the layer, forward and backward."""
    rank, n = dist.get_rank(), dist.get_world_size()
    x, weight, bias = _row_parts(n)
    parts = [x.chunk(n, -1)[rank].clone(), weight.chunk(n, 1)[rank].clone(), bias]
    before = [part.clone() for part in parts]
    for part in parts:
        part.requires_grad_()
    _Reduce.numels.clear()
    barrier()
    with TorchCollectives() as torchs, ByteMeter() as ours:
        y = row_linear(*parts, _Reduce.apply)
        if not isinstance(y, Tensor):
            return f"your function returned {code(one_line(y))}, no tensor."
        if y.requires_grad:
            y.square().sum().backward()
    return {
        "y": y.detach(),
        "grads": [part.grad for part in parts],
        "numels": list(_Reduce.numels),
        "others": max(
            len(torchs.calls) - len(_Reduce.numels), int(ours.total_sent > 0)
        ),
        "untouched": all(map(torch.equal, before, [part.detach() for part in parts])),
    }


def _judge_row(where: str, told: dict[str, Any], n: int) -> None:
    rank = int(where.split("rank ")[-1].rstrip(","))
    whole = [part.requires_grad_() for part in _row_parts(n)]
    x, weight, bias = whole
    y = x @ weight.T + bias
    y.square().sum().backward()
    y = y.detach()
    got, numels = told["y"], told["numels"]
    shape = tuple(y.shape)
    expect(
        got.shape == y.shape,
        f"{where} the output has the shape {tuple(got.shape)}; expected {shape}.",
    )
    times = (got - y + bias.detach()) / bias.detach()  # how often the bias is in it
    often = times.unique().tolist()
    expect(
        len(often) != 1 or often == [1.0],
        f"{where} the bias is in the output {often[0]:g} times; it is added once.",
    )
    expect(
        torch.allclose(got, y),
        f"{where} the output is not X @ W.T + bias; this rank's columns of X and W "
        "give one summand of it.",
    )
    expect(
        not told["others"] and numels == [2 * ROWS * OUT],
        f"{where} `reduce_sum` was called for {numels or 'no'} numbers (and other "
        f"collectives: {told['others']}); one of {2 * ROWS * OUT} is enough.",
    )
    names = ("x", "weight", "bias")
    for name, part, all_of_it in zip(names, told["grads"], whole, strict=True):
        wanted = all_of_it.grad
        wanted = wanted.chunk(n, -1)[rank] if name != "bias" else wanted
        expect(
            part is not None,
            f"{where} {name} got no gradient. Each rank steps its own copy of it; "
            "one that is not trained drifts apart from the others.",
        )
        ratio = (part / wanted).nanmedian().item() if part.shape == wanted.shape else 0
        expect(
            part.shape == wanted.shape and torch.allclose(part, wanted),
            f"{where} the gradient of {name} is not that of one process (in the median "
            f"{ratio:.2g} times as large).",
        )
    expect(told["untouched"], f"{where} your function changed what it was given.")


# ---- vocab_loss --------------------------------------------------------------------

TOKENS, WORDS = 6, 8  # words: on each rank
OPS = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}


@exercise("vocab_loss", solution=solutions.vocab_loss)
def check_vocab_loss(answer: Answer) -> str:
    """`vocab_loss(logits, targets, all_reduce)`: the loss and its gradient."""
    hint = "Which numbers of the softmax depend on all words?"
    judge_on_ranks(_use_loss, answer, _judge_loss, hint)
    return (
        "1, 2 and 3 real ranks: loss and gradient of one process, also for large "
        "logits, and no more than four numbers per token in the messages"
    )


def _logits(n: int) -> tuple[Tensor, Tensor]:
    """Return the logits of all words, some of them large, and targets on all ranks."""
    dice = torch.Generator().manual_seed(n)
    logits = torch.randn(TOKENS, n * WORDS, generator=dice)
    logits[1] += 1000  # its exponential is infinite
    logits[2, :WORDS] -= 300
    targets = torch.arange(TOKENS) * n * WORDS // TOKENS  # the first word is one
    targets[-1] = n * WORDS - 1
    if n == 3:  # and rank 1 has none
        targets[targets // WORDS == 1] = 3
    return logits, targets


def _use_loss(vocab_loss: Callable) -> dict[str, Any] | str:
    rank, n = dist.get_rank(), dist.get_world_size()
    numels: list[int] = []

    def all_reduce(tensor: Tensor, op: str) -> None:
        if op not in OPS:
            raise ValueError(f"op is {op!r}; it can be 'max' or 'sum'")
        numels.append(tensor.numel())
        dist.all_reduce(tensor.detach(), OPS[op])

    logits, targets = _logits(n)
    own = logits.chunk(n, 1)[rank].clone()
    given = own.clone(), targets.clone()
    barrier()
    with TorchCollectives() as torchs, ByteMeter() as ours:
        told = vocab_loss(*given, all_reduce)
    if not (isinstance(told, tuple) and len(told) == 2 and torch.is_tensor(told[1])):
        return f"your function returned {code(one_line(told))}, not (loss, gradient)."
    loss, gradient = told
    return {
        "loss": float(loss),
        "gradient": gradient.detach().clone(),
        "sent": sum(numels),
        "others": max(len(torchs.calls) - len(numels), int(ours.total_sent > 0)),
        "untouched": torch.equal(given[0], own) and torch.equal(given[1], targets),
    }


def _judge_loss(where: str, told: dict[str, Any], n: int) -> None:
    rank = int(where.split("rank ")[-1].rstrip(","))
    logits, targets = _logits(n)
    logits = logits.double().requires_grad_()
    loss = F.cross_entropy(logits, targets)
    loss.backward()
    most = 4 * TOKENS
    expect(
        not told["others"] and told["sent"] <= most,
        f"{where} your all-reduces were of {told['sent']} numbers in all (and other "
        f"collectives: {told['others']}). For {TOKENS} tokens {most} are enough, "
        "however many words there are: a few numbers for each token.",
    )
    got, true = told["loss"], loss.item()
    expect(
        got == got and got != float("inf"),
        f"{where} the loss is {got}: exp of a large logit. Subtract the largest of "
        "all words first.",
    )
    expect(
        abs(got - true) < 1e-4 * true,
        f"{where} the loss is {got:.4f}; with all words in one place it is "
        f"{true:.4f}. Is it the mean over the tokens? Of each token, which rank has "
        "the target's logit, and at which place?",
    )
    wanted = logits.grad.chunk(n, 1)[rank].float()
    gradient = told["gradient"]
    expect(
        gradient.shape == wanted.shape,
        f"{where} the gradient has the shape {tuple(gradient.shape)}; expected that of "
        f"this rank's logits, {tuple(wanted.shape)}.",
    )
    expect(
        torch.allclose(gradient, wanted, rtol=1e-3, atol=1e-6),
        f"{where} the gradient is not (softmax - 1 at the target) / {TOKENS}, for this "
        "rank's words.",
    )
    expect(told["untouched"], f"{where} your function changed what it was given.")


# ---- plan_cuts ---------------------------------------------------------------------

CHANNELS = 12
MODELS = (
    ("linear", "elementwise", "linear"),
    ("linear",),
    ("elementwise", "linear", "mixing", "linear", "elementwise", "linear"),
    ("linear", "linear", "elementwise", "linear"),
    ("linear", "mixing", "linear", "mixing"),
    ("mixing", "linear", "elementwise", "linear", "linear", "mixing", "linear"),
    ("linear", "elementwise", "elementwise", "linear", "elementwise", "linear")
    + ("linear", "mixing", "linear", "linear", "linear"),
)


@exercise("plan_cuts", solution=solutions.plan_cuts)
def check_plan_cuts(answer: Answer) -> str:
    """`plan_cuts(layers)`: for each linear, "column" or "row": fewest messages."""
    plans = []
    for layers in MODELS:
        plan = answer(list(layers))
        linears = layers.count("linear")
        fine = isinstance(plan, list) and all(cut in ("column", "row") for cut in plan)
        expect(
            fine and len(plan) == linears,
            f"For {code(one_line(list(layers)))} your function returned "
            f"{code(one_line(plan))}; expected a list with 'column' or 'row' for each "
            f"of {linears} linears.",
        )
        plans.append(plan)
    real = on_ranks(_run_plans, plans, world_size=2)
    for rank, told in enumerate(real):
        for layers, plan, (same, sent) in zip(MODELS, plans, told, strict=True):
            every = itertools.product(("column", "row"), repeat=len(plan))
            least = min(messages(layers, cuts) for cuts in every)
            where = f"For {code(one_line(list(layers)))}, cut {code(one_line(plan))},"
            expect(same, f"{where} rank {rank} computed something else.")
            expect(
                sent == least,
                f"{where} forward took {sent} messages on two real ranks; the least is "
                f"{least}. What is cut by column can go through what treats each "
                "channel for itself, and then by row; what mixes channels needs all.",
            )
    return (
        f"{len(MODELS)} models on two real ranks, each with the fewest messages that "
        "any plan needs"
    )


def messages(layers: tuple[str, ...], plan: tuple[str, ...]) -> int:
    """Return how many collectives forward takes if the linears are cut so."""
    cuts, cut, sent = iter(plan), False, 0
    for layer in (*layers, "mixing"):  # the end needs all channels, too
        if layer == "linear" and next(cuts) == "row":
            cut, sent = False, sent + 1  # an all-reduce after it
        elif layer == "linear":
            cut, sent = True, sent + cut  # its input is gathered if it is cut
        elif layer == "mixing":
            cut, sent = False, sent + cut
    return sent


def _run_plans(plans: list[list[str]]) -> list[tuple[bool, int]]:
    """On every rank: compute each model as planned; is it right, and what was sent?"""
    told = []
    for layers, plan in zip(MODELS, plans, strict=True):
        with TorchCollectives() as torchs:
            y = _forward(layers, plan)
        told.append(
            (torch.allclose(y, _forward(layers, None), atol=1e-4), torchs.count())
        )
    return told


def _forward(layers: tuple[str, ...], plan: list[str] | None) -> Tensor:
    """Compute a model of random weights, alone or cut by a plan."""
    rank, n = dist.get_rank(), dist.get_world_size()
    dice = torch.Generator().manual_seed(0)
    x, cut, cuts = torch.randn(2, CHANNELS, generator=dice), False, iter(plan or ())
    for layer in (*layers, "end"):
        how = next(cuts) if layer == "linear" and plan else None
        if cut and (layer in ("mixing", "end") or how == "column"):
            parts = [torch.empty_like(x) for _ in range(n)]
            dist.all_gather(parts, x)
            x, cut = torch.cat(parts, dim=1), False
        if layer == "linear":
            weight = torch.randn(CHANNELS, CHANNELS, generator=dice)  # x @ weight
            weight = weight / CHANNELS**0.5  # so that numbers stay as large as they are
            if how == "column":
                x, cut = x @ weight.chunk(n, 1)[rank], True
            elif how == "row":
                x = x if cut else x.chunk(n, 1)[rank]  # nobody need send
                x, cut = x.contiguous() @ weight.chunk(n, 0)[rank], False
                dist.all_reduce(x)
            else:
                x = x @ weight
        elif layer == "elementwise":
            x = F.gelu(x)
        elif layer == "mixing":
            x = F.layer_norm(x, (CHANNELS,))
    return x

"""The exercises of chapter 09: f, a row layer, and the loss of a cut vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ddp_course.chapters.ch09_tensor_parallel import solutions
from ddp_course.lab.answers import Answer
from ddp_course.lab.exercises import equal, exercise, judge_ranks, shown
from ddp_course.measure import ByteMeter, TorchCollectives

OPS = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}


class _AllReduces:
    """The all-reduce that the reader's function gets; it records each call's size."""

    def __init__(self) -> None:
        self.numels: list[int] = []
        self.ops: set[str] = set()

    def __call__(self, tensor: Tensor, op: str = "sum") -> None:
        if op not in OPS:
            raise ValueError(f"op is {op!r}; it can be 'max' or 'sum'")
        self.numels.append(tensor.numel())
        self.ops.add(op)
        total = tensor.detach().contiguous()  # gloo and NCCL need that
        dist.all_reduce(total, OPS[op])
        tensor.detach().copy_(total)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record the block's all-reduces, and count other collectives as `others`."""
        self.numels.clear()
        with TorchCollectives() as torch_log, ByteMeter() as ours:
            yield
        others = len(torch_log.calls) - len(self.numels)
        self.others = max(others, int(ours.total_sent > 0))


def quarters(seed: int, *shape: int) -> Tensor:
    """Return random multiples of 1/4: their sums are exact in any order."""
    dice = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=dice) / 4


# ---- copy_to_ranks -------------------------------------------------------------------

COPY = {
    "is_tensor": "was returned {shown}, no tensor.",
    "silent": "sent something in forward; all ranks have x already.",
    "same": "was returned {shown}, which is not x: forward changes nothing.",
    "way_back": "was returned a tensor with no way back to x (`requires_grad` is "
    "False): x would get no gradient at all.",
    "asked": "called `all_reduce` 0 times in backward: the gradient of x then has only "
    "this rank's use of x. All ranks have used x.",
    "once": "sent {numels} numbers in backward, by `all_reduce` (and other "
    "collectives: {others}); one all-reduce of the {numel} numbers of x's gradient is "
    "enough, for each copy.",
    "own": "called the `all_reduce` of another call in backward, which may belong to "
    "another group. Keep each call's own: in `ctx`, or in a closure.",
    "sum": "has the mean as the gradient of x; each rank's use of x counts fully, so "
    "it is the sum.",
    "copy": "has summed the gradient of x wherever x is used, as in `x + "
    "copy_to_ranks(x, all_reduce)`; sum only the gradient that comes back through the "
    "copy. A hook on x itself sees both.",
    "right": "has {got} as the gradient of x; expected {wanted}: all ranks' gradients "
    "through the copy, summed, plus this rank's gradient from other uses of x.",
    "beside": "has a wrong gradient of b in `y = b + copy_to_ranks(x, all_reduce)`: "
    "autograd hands the same tensor to both. Sum a copy of it.",
    "again": "has a wrong gradient of x after a second backward through the same "
    "graph (`retain_graph=True`): sum the gradient in each backward.",
    "later": "has a second backward through the same graph that changes the gradient "
    "which the first one returned: sum a new copy in each.",
    "summed": "has no right gradient of x in `copy_to_ranks(x, all_reduce).sum()`, "
    "where all numbers of the incoming gradient share one place in memory: sum a copy.",
    "without": "got an error or another tensor where x requires no gradient: return x "
    "there, too.",
    "frozen": "got a tensor that requires a gradient where x requires none: its "
    "backward would send for nothing.",
    "no_grad": "got an error or another tensor under `torch.no_grad()`, as in an "
    "evaluation: return x there, too, even if x requires a gradient.",
    "untouched": "has a changed x: leave x as it is.",
}


@exercise("copy_to_ranks", solution=solutions.copy_to_ranks)
def check_copy_to_ranks(answer: Answer) -> str:
    """`copy_to_ranks(x, all_reduce)`: x, whose gradients are summed in backward.

    Forward changes nothing. Which uses of x does a rank's gradient know in backward,
    and which are missing?

    Write a `torch.autograd.Function`: forward returns a view of x; backward makes a
    copy of its incoming gradient, sums this copy over the ranks, and returns it.
    """
    hint = (
        "Write a torch.autograd.Function: what goes forward, and what goes back? In "
        "backward every rank calls `all_reduce`, even one whose gradient is zero."
    )
    judge_ranks(COPY, _copies, answer, hint=hint)
    return (
        "1, 2 and 3 real ranks, three types: nothing sent in forward, one all-reduce "
        "in backward, the gradient of one process, and no other gradient changed"
    )


def _copies(copy: Callable) -> Iterator[dict[str, Any]]:
    """Use a copy of x, to which b is added; check the gradients of both."""
    rank, n, sums = dist.get_rank(), dist.get_world_size(), _AllReduces()
    for case, source, times in (
        ("x of 3 x 4 numbers", quarters(1, 3, 4), 1),
        ("x of float64", quarters(2, 5).double(), 1),
        ("x of bfloat16", quarters(3, 2, 1, 3).bfloat16(), 1),
        ("a strided x", quarters(4, 4, 11).T, 1),
        ("an x without dimensions", quarters(6), 1),
        ("two copies of x", quarters(5, 7), 2),
    ):
        x = source.clone(memory_format=torch.preserve_format).requires_grad_()
        b = torch.zeros_like(x, requires_grad=True)
        # Factors with which each rank uses x; rank 1's gradient is all zero.
        fine = 1 + 2**-30 * (x.dtype == torch.float64)  # too fine for smaller types
        uses = [(quarters(r, *x.shape) * (r != 1)).to(x.dtype) * fine for r in range(n)]
        # A strided x has strided gradients.
        uses = [torch.empty_like(source).copy_(use) for use in uses]
        own = quarters(9, *x.shape).to(x.dtype)  # x itself is multiplied by these
        beside = 1 * b  # a sum passes the same gradient tensor to both its sides
        x_beside = x * own  # before the copies: autograd adds its gradient to theirs
        called: list[int] = []  # calls of the answer, by number, that all-reduced
        with sums.watched():
            copied, *more = [
                copy(x, partial(_sum_for, k, called, sums)) for k in range(times)
            ]
        facts = {"case": case, "numel": x.numel(), "shown": shown(copied)}
        facts["is_tensor"] = isinstance(copied, Tensor)
        facts["silent"] = not sums.numels and not sums.others
        facts["same"] = facts["is_tensor"] and equal(copied.detach(), source)
        facts["way_back"] = facts["same"] and copied.requires_grad
        if facts["way_back"]:
            total = torch.stack(uses).sum(0)
            right = total + own
            y = (beside + copied) * uses[rank] + x_beside
            if times == 2:  # the second copy is used with squared factors
                y, right = (
                    y + more[0] * uses[rank] ** 2,
                    right + sum(u**2 for u in uses),
                )
            with sums.watched():
                y.sum().backward(retain_graph=True)
            once = [x.numel()] * times, *([[]] if n == 1 else [])
            is_mean = x.grad is not None and equal((x.grad - own) * n, right - own)
            facts |= {"numels": sum(sums.numels), "others": sums.others}
            facts["asked"] = n == 1 or sums.numels or sums.others
            facts["once"] = not sums.others and sums.numels in once
            facts["own"] = sorted(called) == [*range(len(sums.numels))]
            facts["sum"] = n == 1 or not is_mean
            facts["copy"] = n == 1 or not equal(x.grad, right + (n - 1) * own)
            facts |= {"got": shown(x.grad), "wanted": shown(right)}
            facts |= {
                "right": equal(x.grad, right),
                "beside": equal(b.grad, uses[rank]),
            }
            [first] = torch.autograd.grad(
                *(copied, x, torch.ones_like(x)),
                retain_graph=True,
                materialize_grads=True,  # zeros if copied does not lead back to x
            )
            before = first.clone()
            x.grad = None
            y.sum().backward()
            facts["again"] = equal(x.grad, right)
            facts["later"] = equal(first, before)
            x.grad, once_more = None, partial(_sum_for, 0, [], sums)
            facts |= dict.fromkeys(("summed", "without", "frozen", "no_grad"), False)
            with suppress(RuntimeError):
                copy(x, once_more).sum().backward()  # an expanded gradient
                facts["summed"] = equal(x.grad, torch.full_like(x, n))
            with suppress(RuntimeError):
                still = copy(x.detach(), once_more)
                facts["without"] = equal(still.detach(), source)
                facts["frozen"] = not still.requires_grad
            with suppress(RuntimeError), torch.no_grad():
                facts["no_grad"] = equal(copy(x, once_more), source)
            facts["untouched"] = equal(x.detach(), source)
        yield facts


def _sum_for(call: int, called: list[int], sums: _AllReduces, tensor: Tensor) -> None:
    """Sum `tensor` by the all-reduce that one call of the answer got."""
    called.append(call)
    sums(tensor)


# ---- row_linear ----------------------------------------------------------------------

ROW = {
    "is_tensor": "was returned {shown}, no tensor.",
    "shape": "has an output of the shape {got}; expected {wanted}.",
    "bias_once": "has the bias in the output {times:g} times; it is added once.",
    "precise": "has an output that is X @ W.T + bias only roughly: numbers were "
    "rounded to a narrower type than that of x.",
    "output": "has an output that is not X @ W.T + bias; the rank's columns of X and W "
    "give one summand of it.",
    "one_sum": "called `reduce_sum` for {numels} numbers (and other collectives: "
    "{others}); one call for the {numel} numbers of the output is enough.",
    "trained": "has no gradient of {untrained}. The gradient of x goes on to earlier "
    "layers; weight and bias are trained on each rank, or copies drift apart.",
    "untouched": "has changed arguments: leave them as they are.",
    "gradients": "has a gradient of {wrong} that is not that of one process ({how}).",
}


@exercise("row_linear", solution=solutions.row_linear)
def check_row_linear(answer: Answer) -> str:
    """`row_linear(x, weight, bias, reduce_sum)`: X @ W.T + bias, from columns of both.

    Does your product contain some elements of the output, or one summand of each? How
    often may the sum contain the bias?

    Multiply your columns of x and of the weight, without a bias. Let g sum the products
    of all ranks. Only after the sum add the bias, once on every rank.
    """
    hint = "Each rank has one summand of every output. How often is the bias added?"
    judge_ranks(ROW, _rows, answer, hint=hint)
    return (
        "1, 2 and 3 real ranks, eight sizes, a bias of zeros: output and all gradients "
        "as in one process, the bias once and trained on every rank, one all-reduce"
    )


class _Reduce(torch.autograd.Function):
    """The chapter's g: all-reduce in forward, nothing in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sums: _AllReduces) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        sums(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


ROW_CASES = (  # name, shape without the channels, channels of the output, dtype
    ("texts of tokens", (2, 3), 5, torch.float32),
    ("other texts", (2, 3), 5, torch.float32),
    ("pages of texts", (2, 2, 3), 5, torch.float32),
    ("tokens in float64", (7,), 11, torch.float64),
    ("as many tokens as channels", (4,), 4, torch.float32),
    ("one channel", (1,), 1, torch.float32),
    ("one token", (), 3, torch.float32),
    ("a bias of zeros", (6,), 3, torch.float32),
    ("no tokens", (0,), 3, torch.float32),
)


def roughly_equal(got: Tensor, wanted: Tensor) -> bool:
    """Return whether two tensors differ by no more than rounding to bfloat16."""
    return (got - wanted).abs().max().item() < 0.01 * wanted.abs().max().item()


def _rows(row_linear: Callable) -> Iterator[dict[str, Any]]:
    """Run the layer on this rank's parts, forward and backward."""
    rank, n, sums = dist.get_rank(), dist.get_world_size(), _AllReduces()
    for seed, (case, shape, out, kind) in enumerate(ROW_CASES):
        x, weight = quarters(5 + seed, *shape, 4 * n), quarters(6 + seed, out, 4 * n)
        x = x.to(kind)
        double = kind == torch.float64  # thirds, which smaller types round
        x, near = (x / 3, 1e-9) if double else (x, 1e-5)
        whole = [x, weight.to(kind), (1 + quarters(7 + seed, out).abs()).to(kind)]
        whole[2] *= "zeros" not in case
        inputs = [whole[0].chunk(n, -1)[rank], whole[1].chunk(n, 1)[rank], whole[2]]
        copies = [one.clone() for one in whole]  # their parts are not contiguous
        if shape == (2, 3):  # the tokens lie in another order in memory
            copies[0] = x.transpose(0, 1).contiguous().transpose(0, 1)
        copies = [copies[0].chunk(n, -1)[rank], copies[1].chunk(n, 1)[rank], copies[2]]
        parts = [part.requires_grad_() for part in copies]
        with sums.watched():
            y = row_linear(*parts, lambda summand: _Reduce.apply(summand, sums))
            if isinstance(y, Tensor) and y.requires_grad:
                y.square().sum().backward()
        [part.requires_grad_() for part in whole]
        right = whole[0] @ whole[1].T + whole[2]
        right.square().sum().backward()
        grads = [whole[0].grad.chunk(n, -1)[rank], whole[1].grad.chunk(n, 1)[rank]]
        facts = {"case": case, "shown": shown(y), "is_tensor": isinstance(y, Tensor)}
        facts |= {"got": tuple(getattr(y, "shape", ())), "wanted": tuple(right.shape)}
        facts["shape"] = getattr(y, "shape", None) == right.shape
        facts |= {"numel": right.numel(), "numels": sums.numels[:] or "no"}
        facts["one_sum"] = not sums.others and sums.numels == [right.numel()]
        facts["others"] = sums.others
        if facts["shape"]:
            times = ((y - right + whole[2]) / whole[2]).detach()
            times = times.nan_to_num(1.0, 1.0, 1.0).unique()  # a bias may be 0
            times = times.tolist() or [1.0]  # no tokens, no bias
            found = [part.grad for part in parts]
            both = zip(found, [*grads, whole[2].grad], strict=True)
            pairs = dict(zip(("x", "weight", "bias"), both, strict=True))
            untrained = [name for name, (got, _) in pairs.items() if got is None]
            wrong = [
                name
                for name, (got, wanted) in pairs.items()
                if name not in untrained and not torch.allclose(got, wanted, rtol=near)
            ]
            got, wanted = pairs[wrong[0]] if wrong else (torch.ones(1), torch.ones(1))
            facts["bias_once"] = len(times) > 1 or times[0] == 1
            facts["output"] = torch.allclose(y, right, rtol=near)
            facts["precise"] = facts["output"] or not roughly_equal(y, right)
            facts |= {"times": times[0], "untrained": " and ".join(untrained)}
            facts |= {"trained": not untrained, "wrong": " and ".join(wrong)}
            ratio = (got / wanted).nanmedian().item()
            facts |= {"gradients": not wrong, "how": "rounded to a narrower type"}
            if not roughly_equal(got, wanted):
                facts["how"] = f"in the median {ratio:.2g} times as large"
            facts["untouched"] = all(map(equal, [p.detach() for p in parts], inputs))
        yield facts


# ---- vocab_loss ----------------------------------------------------------------------

WORDS = 8  # words of each rank, in most cases
LOSS = {
    "is_pair": "was returned {shown}, not (loss, gradient).",
    "few": "sent {sent} numbers in all by `all_reduce` (and other collectives: "
    "{others}). For {tokens} tokens {most} are enough, however many words there are: a "
    "few numbers for each token.",
    "finite": "has the loss {loss}: exp of a large logit, or log of 0. Subtract the "
    "largest of all words first.",
    "common": "never called `all_reduce` with 'max', and has the loss {loss:.4f} in "
    "place of {right:.4f}. Exponentials that are added must all be relative to the "
    "same number, and each rank knows the largest logit of its own words only.",
    "loss_right": "has the loss {loss:.9g}; with all words in one place it is "
    "{right:.9g}. Is it the mean over the tokens? For each token, which rank has the "
    "target's logit, and at which place?",
    "shape": "has a gradient of the shape {got}; expected the shape of its logits, "
    "{wanted}.",
    "gradient_right": "has a gradient that is not (softmax - 1 at the target) / "
    "{tokens}, for its own words.",
    "untouched": "has changed arguments: leave them as they are.",
    "later": "changed the gradient that an earlier call returned: return a new tensor "
    "each time.",
}


@exercise("vocab_loss", solution=solutions.vocab_loss)
def check_vocab_loss(answer: Answer) -> str:
    """`vocab_loss(logits, targets, all_reduce)`: the loss and its gradient.

    Three numbers for each token depend on words that other ranks have. Which?

    All-reduce each token's highest logit. Subtract it and take exponentials. All-reduce
    two numbers: the sum of the exponentials, and the target's logit, to which all ranks
    but one contribute 0. A token's loss is the logarithm of that sum minus that logit.
    Its gradient is the softmax, minus 1 at the target if it is among your words,
    divided by the number of tokens.
    """
    hint = (
        "Which numbers of the softmax depend on all words? Every rank calls the same "
        "all-reduces, even one that has none of the targets."
    )
    judge_ranks(LOSS, _losses, answer, hint=hint)
    judge_ranks(LOSS, _losses, answer, worlds=[2], nodes=2, hint=hint)
    return (
        "1, 2 and 3 real ranks, also on two nodes: loss and gradient of one process, "
        "also for large logits, and no more than four numbers per token in the messages"
    )


def _texts(n: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield logits of all words, and the targets of all tokens."""
    dice = torch.Generator().manual_seed(n)
    first = torch.arange(n) * WORDS
    targets = torch.cat([first, first + 3, first + WORDS - 1])  # the ends of all parts
    logits = torch.randn(len(targets), n * WORDS, generator=dice)
    yield "small logits", logits, targets
    logits = logits.clone()
    logits[1] += 1000  # exponentials of these logits are infinite
    logits[2, :WORDS] -= 300  # rank 0's exponentials vanish beside the other ranks'
    yield "large logits", logits, targets
    yield "all targets on the last rank", logits, targets[-1].repeat(len(targets))
    logits = torch.zeros(1, n * WORDS)
    logits[0, 0] = -(2**34)  # lower than any mask, such as -1e9
    yield "one token", logits, torch.tensor([0])
    many = n * 70_001
    logits = torch.randn(2, many, generator=dice)
    yield "a large vocabulary", logits, torch.tensor([many - 1, many - 999])
    more = n * (WORDS + 3)
    strided = torch.randn(more, 29, generator=dice, dtype=torch.float64).T
    yield "strided logits of float64", strided, torch.arange(29) % more
    if n > 1:
        logits = torch.randn(5, n, generator=dice)
        yield "one word for each rank", logits, torch.arange(5) % n


def _losses(vocab_loss: Callable) -> Iterator[dict[str, Any]]:
    rank, n, sums = dist.get_rank(), dist.get_world_size(), _AllReduces()
    returned: list[tuple[Tensor, Tensor]] = []  # gradients, and copies of them
    for case, logits, targets in _texts(n):
        own = logits.chunk(n, 1)[rank]
        args = own.clone(memory_format=torch.preserve_format), targets.clone()
        with sums.watched():
            answer = vocab_loss(*args, sums)
        whole = logits.double().requires_grad_()
        right = F.cross_entropy(whole, targets)
        right.backward()
        wanted = whole.grad.chunk(n, 1)[rank].to(logits.dtype)
        pair = isinstance(answer, (tuple, list)) and len(answer) == 2
        pair = pair and isinstance(answer[1], Tensor)
        loss, gradient = answer if pair else (math.nan, torch.zeros(0))
        loss = float(loss)
        double = logits.dtype == torch.float64
        near = math.isclose(loss, right.item(), rel_tol=1e-9 if double else 1e-4)
        close = (1e-9, 1e-12) if double else (1e-3, 1e-6)
        same = gradient.shape == wanted.shape
        sent, most = sum(sums.numels), 4 * len(targets)
        facts = {"case": case, "shown": shown(answer), "is_pair": pair}
        facts |= {"few": not sums.others and sent <= most, "sent": sent, "most": most}
        facts |= {"others": sums.others, "tokens": len(targets)}
        facts |= {"loss": loss, "right": right.item(), "finite": math.isfinite(loss)}
        facts |= {"common": near or n == 1 or "max" in sums.ops, "loss_right": near}
        facts |= {"got": tuple(gradient.shape), "wanted": tuple(wanted.shape)}
        alike = same and torch.allclose(gradient.to(wanted.dtype), wanted, *close)
        facts |= {"shape": same, "gradient_right": alike}
        untouched = equal(args[0], own) and equal(args[1], targets)
        untouched = untouched and not args[0].requires_grad
        later = all(equal(now, then) for now, then in returned)
        returned.append((gradient, gradient.clone()))
        yield facts | {"untouched": untouched, "later": later}

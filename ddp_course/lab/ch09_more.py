"""Exercises of chapter 09: a loss over a cut vocabulary; which linear is cut how."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ddp_course.collectives import barrier
from ddp_course.lab.answers import Answer, code, judge_on_ranks, on_ranks, one_line
from ddp_course.lab.exercises import exercise, expect
from ddp_course.lab.solutions import ch09 as solutions
from ddp_course.measure import ByteMeter, TorchCollectives

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
    return logits, torch.arange(TOKENS) * n * WORDS // TOKENS + 1


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

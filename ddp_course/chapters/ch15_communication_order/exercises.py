"""The exercises of chapter 15: a queue, a bound, a late step, and weights to carry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ddp_course.chapters.ch15_communication_order import solutions
from ddp_course.lab.answers import Answer, Hint, code, one_line
from ddp_course.lab.exercises import (
    exercise,
    expect,
    judge_ranks,
    shown,
    where_they_differ,
)
from ddp_course.lab.judge import Case, Draw, same_as
from ddp_course.lab.values import equal_values
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.zero import FullyShardedDataParallel, full_state_dict


def because(reasons: Sequence[tuple], otherwise: str) -> Callable[[Case], str]:
    """Return a hint function that says what was returned and expected, and why.

    `reasons` are tuples (*arguments, reason); `otherwise` is the reason for other
    arguments.
    """

    def why(case: Case) -> str:
        args = tuple(case.args.values())
        known = (reason for *case_args, reason in reasons if tuple(case_args) == args)
        texts = (one_line(value, 10**6) for value in (case.got, case.wanted))
        mine, right = (code(text) for text in where_they_differ(*texts))
        return f"returned {mine}; expected {right}, because {next(known, otherwise)}."

    return why


# ---- my_priority ---------------------------------------------------------------------

LINKS = (
    ([0], [2], 2, "the gradient is ready at 0, and fits into one piece"),
    ([3], [5], 2, "nothing is ready before 3, and the last piece is shorter"),
    ([4, 0], [2, 4], 2, "only layer 1 is ready before 4"),
    ([3, 0], [2, 6], 2, "layer 0 is next from 3 on, after the piece on the link"),
    ([1, 0], [1, 9], 10, "a whole layer is a piece, too, and layer 0 comes after it"),
    ([4, 2, 0], [3, 3, 3], 1, "a free link sends a piece of the first ready layer"),
    ([9, 1, 0], [2, 2, 2], 5, "the link waits until 9 for layer 0"),
    ([5, 5, 5], [2, 2, 2], 1, "all are ready at once, and forward needs layer 0 first"),
    ([2, 1, 0], [4, 0, 2], 3, "layer 1 has nothing to send"),
    ([0, 2, 5], [3, 3, 3], 2, "layers can be ready in any order"),
    ([7, 0], [40, 1200], 1, "layer 0 is next from 7 on, then layer 1 to its end"),
    ([3_000_000_001, 0], [2, 3_000_000_005], 10**9, "large times are exact, too"),
)


@exercise("my_priority", solution=solutions.my_priority)
def check_my_priority(answer: Answer) -> str:
    """`my_priority(ready, send, piece)`: pieces on the link, as (layer, start, end).

    At which moments does the link choose, and among which layers?

    Repeat until all is sent: if no ready layer has anything left, go to the moment when
    the next layer is ready. Otherwise send a piece of the first ready layer that has
    something left, and go to the end of this piece.
    """
    why = because(LINKS, "the first ready layer is sent, piece by piece")
    hints = {"fits": why, "right": why}
    same_as(answer, solutions.my_priority, _link, cases=120, hints=hints)
    return "120 links of up to 300 layers, ready in any order, and no byte sent twice"


def _link(d: Draw) -> tuple[list[int], list[int], int]:
    if d.case < len(LINKS):
        ready, send, piece, _ = LINKS[d.case]
        back = -1 if d.number != d.case else 1  # again, with the layers reversed
        return [*ready[::back]], [*send[::back]], piece
    # Three neighbouring cases have the same `ready`, and two of them the same `send`.
    order, sizes = Draw(d.case // 3).same, Draw(999 + (d.case + 1) // 3).same
    layers = 300 if d.case == 50 else order.randint(1, 13)
    ready = [order.randint(0, 30) for _ in range(layers)]
    if d.case % 9 > 2:  # ascending or descending; otherwise unsorted
        ready.sort(reverse=d.case % 9 < 6)
    send = [sizes.choice([0, 1, 2, 5, 9]) for _ in range(layers)]
    return ready, send, [1, 2, 3, 100][d.case % 4]


# ---- my_least_time -------------------------------------------------------------------

STEPS = (
    ([1], [2], [3], "one layer goes backward, is sent, and goes forward"),
    ([1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3], "here all four paths are equally long"),
    ([1, 1], [2, 2], [9, 1], "layer 0 is sent after all of backward, before any of "
     "forward: its path is the longest"),
    ([1, 1], [2, 2], [1, 9], "layer 1's path is the longest: its backward, both sends, "
     "its forward"),
    ([2, 1, 1], [4, 4, 1], [1, 7, 2], "layer 1's path is the longest: backward to it, "
     "sends 0 and 1, forward from it on"),
    ([2, 3], [4, 5], [0, 0], "without anything to send, only computing takes time"),
    ([5, 5], [9, 9], [1, 1], "layer 1's send is hidden, and layer 0's is not"),
    ([20_000_000_001, 9], [2, 2], [3, 3], "large times are exact, too"),
)  # fmt: skip


@exercise("my_least_time", solution=solutions.my_least_time)
def check_my_least_time(answer: Answer) -> str:
    """`my_least_time(forward, backward, send)`: a time that no order of sends beats.

    In any order, what must end before layer c's forward, and what comes after it?

    For each layer c add up backward from the last layer to c, then the sends of layers
    0 to c, none of which can begin before that, then forward from c to the last layer.
    Return the largest of these sums.
    """
    why = because(STEPS, "the longest of all layers' paths counts")
    hints = {"fits": why, "right": why}
    same_as(answer, solutions.my_least_time, _step, cases=120, hints=hints)
    return "120 models of up to 300 layers"


def _step(d: Draw) -> tuple[list[int], ...]:
    if d.case < len(STEPS):
        back = -1 if d.number != d.case else 1  # again, with the layers reversed
        return tuple([*times[::back]] for times in STEPS[d.case][:3])
    # Every second model differs from the one before only in its forward times.
    shared, scale = Draw(d.case // 2).same, 1 if d.case % 4 < 2 else 1009
    layers = 300 if d.case == 60 else shared.randint(1, 12)
    forward, backward, send = (
        [scale * source.randint(0, most) for _ in range(layers)]
        for source, most in ((d.same, 5), (shared, 6), (shared, 9))
    )
    if d.case == 60:  # the longest path is that of a layer in the middle
        forward.sort()
        backward.sort()
        send.sort(reverse=True)
    return forward, backward, send


# ---- my_late_steps -------------------------------------------------------------------

SIZES = (3, 2, 2, 3, 2)  # widths: inputs and outputs of neighbouring layers
FROZEN = "2.inner.bias"
# Parameters without gradients in two steps: a frozen bias, and some that are unused.
# In the second step the frozen bias still has a gradient.
WITHOUT = (FROZEN, "1.scale", "3."), ("1.inner.weight",)
STRIDED, ZERO = "0.inner.weight", "0.scale"  # gradients: not contiguous, and 0
OPTIMIZERS = {  # optimizers with a step that depends on more than the gradient
    "SGD with momentum": lambda ps: torch.optim.SGD(ps, lr=0.25, momentum=0.5),
    "AdamW": lambda ps: torch.optim.AdamW(_in_two_groups(ps), lr=0.125),
}


def _in_two_groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Return two groups of parameters; weight decay is for matrices only."""
    every = list(parameters)
    matrices = [p for p in every if p.dim() > 1]
    others = [p for p in every if p.dim() <= 1]
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]


def _do_nothing(layer: nn.Module, args: Any) -> None:
    """Return nothing: this is a hook of the model itself, which must stay."""


class _Watched(nn.Module):
    """A layer with a parameter, and a module inside; each forward is logged."""

    def __init__(self, number: int, log: list[Any]) -> None:
        super().__init__()
        self.number, self.log = number, log
        shape = [SIZES[number + 1]] if number else []
        self.scale = nn.Parameter(torch.ones(shape))
        self.inner = nn.Linear(SIZES[number], SIZES[number + 1])
        self.register_forward_pre_hook(_do_nothing)

    def forward(self, x: Tensor) -> Tensor:
        """Record the call in the log, and return the layer's output."""
        self.log.append(f"layer {self.number}")
        return self.scale * self.inner(x)


def _numbers(name: str, like: Tensor, rank: int) -> Tensor:
    """Return values for a parameter or gradient, different for each name and rank."""
    case = sum(map(ord, name))
    return Draw(0, case, case + rank + 1).tensor(like.shape, like.dtype) / 512


def _trained(optimizer: Callable[[Any], Any], rank: int = 0) -> SimpleNamespace:
    """Return layers as after backward, their optimizers, and a log."""
    log: list[Any] = []
    layers = [_Watched(number, log) for number in range(len(SIZES) - 1)]
    named = {
        f"{layer.number}.{name}": parameter
        for layer in layers
        for name, parameter in layer.named_parameters()
    }
    for name, parameter in named.items():
        parameter.data = _numbers(name, parameter, 0)
    optimizers = [optimizer(layer.parameters()) for layer in layers]
    trained = SimpleNamespace(layers=layers, optimizers=optimizers, named=named)
    trained.log = log
    _go_backward(trained, 0, rank)
    return trained


def _go_backward(trained: SimpleNamespace, step: int, rank: int) -> None:
    """Set the gradients of a step, but for the parameters in WITHOUT."""
    for name, parameter in trained.named.items():
        parameter.requires_grad_(name != FROZEN)
        parameter.grad = None
        if not name.startswith(WITHOUT[step]):
            parameter.grad = _gradient(name, parameter, step, rank)


def _gradient(name: str, like: Tensor, step: int, rank: int) -> Tensor:
    gradient = _numbers(f"gradient {name} {step}", like, rank)
    if name == ZERO:
        gradient.zero_()
    return gradient.T.contiguous().T if name == STRIDED else gradient


def _present(trained: SimpleNamespace) -> dict[str, Tensor]:
    """Return the gradients that exist, by the names of their parameters."""
    return {n: p.grad for n, p in trained.named.items() if p.grad is not None}


def _take_step(trained: SimpleNamespace, means: dict[str, Tensor]) -> dict[str, Tensor]:
    """Step each layer with the mean gradients; return the parameters."""
    for name, parameter in trained.named.items():
        parameter.grad = means[name].clone() if name in means else None
    for optimizer in trained.optimizers:
        optimizer.step()
    return {name: p.detach().clone() for name, p in trained.named.items()}


class _Handle:
    """A handle that `send` returns: until `wait`, the gradient is nan."""

    def __init__(self, tensor: Tensor, name: str, mean: Tensor, log: list[Any]) -> None:
        self.tensor, self.name, self.mean, self.log = tensor, name, mean, log
        tensor.fill_(torch.nan)

    def wait(self) -> None:
        """Write the mean into the gradient."""
        self.log.append(f"wait {self.name}")
        self.tensor.copy_(self.mean)


@exercise("my_late_steps", solution=solutions.my_late_steps)
def check_my_late_steps(answer: Answer) -> str:
    """`my_late_steps(layers, optimizers, send)`: send all; let layers wait and step.

    How can PyTorch call you just before a layer runs, and only once?

    Send the gradients of a layer that are not None; keep their handles, and
    register a forward pre-hook that removes itself, waits for these handles, and lets
    this layer's optimizer step. If the loop calls a function for each layer, that
    function's variables keep the layers' handles apart.
    """
    for first, second in (OPTIMIZERS, reversed(OPTIMIZERS)):
        trained, twin = (_trained(OPTIMIZERS[first]) for _ in range(2))
        _judge_alone(answer, trained, twin, first, 0)
        for one in (trained, twin):  # new optimizers and gradients for the second call
            nn.Sequential(*one.layers).double().eval()
            one.optimizers = [OPTIMIZERS[second](x.parameters()) for x in one.layers]
            _go_backward(one, 1, 0)
        _judge_alone(answer, trained, twin, second, 1)
        _judge_hooks(trained.layers)
    judge_ranks(REAL, _use, answer, worlds=(2, 3))
    return (
        "gradients are sent once, the first layer's first; each layer waits only for "
        "its own, and steps once, by SGD or AdamW; the same on two and three real ranks"
    )


def _judge_alone(
    answer: Answer,
    trained: SimpleNamespace,
    twin: SimpleNamespace,
    kind: str,
    step: int,
) -> None:
    """Run the answer and then each layer in this process; judge calls and values."""
    trained.log.clear()
    before = {name: p.detach().clone() for name, p in trained.named.items()}
    gradients = _present(trained)
    names = {gradient.data_ptr(): name for name, gradient in gradients.items()}
    means = {n: _numbers(f"mean {n} {step}", g, 0) for n, g in gradients.items()}
    after = _take_step(twin, means)
    call = ", in the second call" * step

    def send(tensor: Tensor) -> _Handle:
        if tensor is None:
            raise TypeError(
                "send got None: a parameter that is frozen, or was not used, has no "
                "gradient to send"
            )
        name = names.get(tensor.data_ptr(), "something else")
        trained.log.append(f"send {name}")
        return _Handle(tensor, name, means.get(name, tensor), trained.log)

    def judge_values(last: int, when: str) -> None:
        stepped = [name for name in after if int(name[0]) <= last]
        right = before | {name: after[name] for name in stepped}
        _judge_values(trained, right, stepped, f"With {kind}{call}, when {when}")

    answer(trained.layers, trained.optimizers, send)
    _judge_sent(trained.log, sorted(gradients))
    judge_values(-1, "your function returned")
    dtype = trained.named[ZERO].dtype
    x = first = torch.ones(1, SIZES[0], dtype=dtype, requires_grad=True)
    for number, layer in enumerate(trained.layers):
        begin = len(trained.log)
        x = Answer(answer.name, layer)(x)
        _judge_waits(trained.log[begin:], number, gradients)
        judge_values(number, f"layer {number} ran")
    _judge_kept(trained, means)
    slope = torch.autograd.grad(x.sum(), first, allow_unused=True)[0]
    expect(slope is not None, "After your hooks, backward does not reach the input.")
    trained.layers[0](first)
    judge_values(len(SIZES), "layer 0 ran a second time")


def _judge_kept(trained: SimpleNamespace, means: dict[str, Tensor]) -> None:
    """Expect mean gradients after all layers have run."""
    changed = [
        name
        for name, mean in means.items()
        if not equal_values(trained.named[name].grad, mean)
    ]
    expect(
        not changed,
        f"After a forward, the gradients of {', '.join(changed)} are not the means any "
        "more. Leave them: only the parameters change.",
    )


def _judge_hooks(layers: Sequence[_Watched]) -> None:
    """Expect that the layers have the hook that they had before, and no other."""
    hooks = [
        [*x._forward_pre_hooks.values(), *x._forward_hooks.values()] for x in layers
    ]
    lost = [x.number for x, its in zip(layers, hooks, strict=True) if not its]
    expect(
        not lost,
        f"After a forward, layers {lost} have lost a hook that was there before your "
        "call. Remove only your own: registering it has returned a handle.",
    )
    left = [
        x.number for x, its in zip(layers, hooks, strict=True) if its != [_do_nothing]
    ]
    expect(
        not left,
        f"After a forward, layers {left} still have your hook: each call would add "
        "one more. A hook that has done its work removes itself.",
    )


def _judge_sent(log: Sequence[str], wanted: Sequence[str]) -> None:
    """Expect that all gradients were sent, layer by layer, without any wait."""
    waited = [one for one in log if one.startswith("wait")]
    expect(
        not waited,
        f"Your function waited before it returned: {', '.join(waited)}. Each layer "
        "shall wait for its own gradients, just before it runs.",
    )
    sent = [one.removeprefix("send ") for one in log]
    expect(
        sorted(sent) == wanted,
        f"Sent: {', '.join(sent) or 'nothing'}. Expected each existing gradient "
        f"once: {', '.join(wanted)}.",
    )
    expect(
        [name[0] for name in sent] == sorted(name[0] for name in sent),
        f"Sent in this order: {', '.join(sent)}. The layer that runs first needs its "
        "gradients first.",
    )


def _judge_waits(log: Sequence[str], number: int, names: Sequence[str]) -> None:
    """Expect waits for only this layer's gradients, before the layer ran."""
    mine = sorted(name for name in names if name.startswith(f"{number}."))
    before = log[: log.index(f"layer {number}")]
    waited = sorted({one.removeprefix("wait ") for one in before})
    expect(
        waited == mine,
        f"Before layer {number} ran, your hooks had waited for "
        f"{', '.join(waited) or 'nothing'}; expected {', '.join(mine) or 'nothing'}.",
    )


def _judge_values(
    trained: SimpleNamespace,
    right: dict[str, Tensor],
    stepped: Sequence[str],
    when: str,
) -> None:
    """Expect the values `right`; the hint says which parameters should have stepped."""
    for name, parameter in trained.named.items():
        got, wanted = parameter.detach(), right[name]
        why = "after a step of its layer's optimizer, with the mean gradients"
        if name not in stepped:
            why = "as its layer has not run yet"
        expect(
            equal_values(got, wanted),
            f"{when}, {name} was {shown(got)}; expected {shown(wanted)}, {why}.",
        )


REAL = {"right": "{why}"}


def _use(my_late_steps: Callable) -> dict[str, Any]:
    """Run the answer with this rank's own gradients and real all-reduces."""
    rank, n = dist.get_rank(), dist.get_world_size()
    trained, twin = (_trained(OPTIMIZERS["SGD with momentum"], rank) for _ in range(2))

    def send(tensor: Tensor) -> Any:
        tensor /= n
        return dist.all_reduce(tensor, async_op=True)

    for step in range(2):
        _go_backward(trained, step, rank)
        means = {
            name: sum(_gradient(name, p, step, r) for r in range(n)) / n
            for name, p in trained.named.items()
            if p.grad is not None
        }
        right = _take_step(twin, means)
        my_late_steps(trained.layers, trained.optimizers, send)
        nn.Sequential(*trained.layers)(torch.ones(1, SIZES[0]))
        try:
            when = "after a forward" if not step else "after a second step"
            _judge_values(trained, right, list(right), when)
        except Hint as wrong:
            return {"right": False, "why": str(wrong)}
    return {"right": True, "why": ""}


# ---- my_carry ------------------------------------------------------------------------

CARRIED = {
    "files": "left nothing in the folder that a plain GPT can load by `dcp.load`: "
    "{problem}.",
    "saved": "saved weights that are not ours: after `dcp.load`, {wrong} of {all} "
    "tensors of a plain GPT differ.",
    "sharded": "left whole tensors where PyTorch had shards (`DTensor`).",
    "right": "loaded wrong weights: {off} of {all} tensors of PyTorch's model differ "
    "from ours.",
    "read": "read nothing from the folder: load the saved weights by `dcp.load`.",
    "kept": "changed our model.",
    "alike": "changed more than weights: a model's `training`, `requires_grad` or "
    "`grad`.",
    "small": "left {nbytes:,} bytes in the folder; the weights have {least:,}.",
}


@exercise("my_carry", solution=solutions.my_carry)
def check_my_carry(answer: Answer) -> str:
    """`my_carry(ours, theirs, folder)`: copy weights of our FSDP into PyTorch's.

    Which names do the tensors of a plain GPT have, and which function of
    `ddp_course.zero` returns those of our FSDP whole?

    `dcp.save` also takes a dictionary of whole tensors that all ranks have. To load,
    `dcp.load` needs a dictionary of tensors to fill: get_model_state_dict returns
    PyTorch's shards by their plain names.
    """
    for ranks in (2, 3):
        with TemporaryDirectory() as folder:
            judge_ranks(CARRIED, _both_carried, answer, folder, worlds=(ranks,))
    return "copied through files on two and on three ranks, equal to the last bit"


def _both_carried(my_carry: Callable, folder: str) -> Iterator[dict[str, Any]]:
    """Run the answer with three GPTs; the second one uses the first one's folder.

    The third has more layers than the course's GPT, and one weight under two names.
    """
    for seed, layers, case in (
        (1, 1, "a GPT of one layer"),
        (2, 1, "another GPT in the same folder"),
        (3, 5, "a GPT of five layers, with a tied head"),
    ):
        Path(folder, str(layers)).mkdir(exist_ok=True)
        config = GPTConfig(20, 8, layers, n_head=2, d_model=48, tied=layers == 5)
        yield {"case": case} | _carried(my_carry, config, f"{folder}/{layers}", seed)


def _carried(
    my_carry: Callable, config: GPTConfig, folder: str, seed: int
) -> dict[str, Any]:
    """Run the answer with a small GPT on this rank, and compare the weights."""
    random = torch.Generator().manual_seed(seed)
    net = build_gpt(config, seed)
    for parameter in net.parameters():  # norms and biases begin equal in all GPTs
        parameter.data += torch.rand(parameter.shape, generator=random)
    ours = FullyShardedDataParallel(net)
    theirs = build_gpt(config, 7).eval()
    for module in (*theirs.blocks, theirs):
        fully_shard(module)
    before = {name: t.clone() for name, t in full_state_dict(ours).items()}
    modes = _modes(ours), _modes(theirs)
    reads, read_data = [], dcp.FileSystemReader.read_data

    def recorded(reader: dcp.FileSystemReader, *args: Any) -> Any:
        reads.append(reader)
        return read_data(reader, *args)

    with patch.object(dcp.FileSystemReader, "read_data", recorded):
        my_carry(ours, theirs, folder)
    readers = torch.tensor(len(reads))
    dist.all_reduce(readers)  # one rank may read for all
    loaded, problem = build_gpt(config, 8).state_dict(), ""
    try:
        dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    except (CheckpointException, ValueError, RuntimeError) as error:
        problem = shown(one_line(error))
    after = dict(theirs.named_parameters(remove_duplicate=False))
    sharded = all(isinstance(tensor, DTensor) for tensor in after.values())
    whole = {n: t.full_tensor() if sharded else t for n, t in after.items()}
    nbytes = sum(file.stat().st_size for file in Path(folder).rglob("*.distcp"))
    least = sum(tensor.nbytes for tensor in before.values())
    now = full_state_dict(ours)
    wrong, off, changed = (
        sum(not torch.equal(tensor, found[name]) for name, tensor in before.items())
        for found in (loaded, whole, now)
    )
    return {
        "files": not problem,
        "problem": problem,
        "saved": not wrong,
        "wrong": wrong,
        "sharded": sharded,
        "right": not off,
        "off": off,
        "all": len(before),
        "read": readers.item() > 0,
        "kept": not changed,
        "alike": (_modes(ours), _modes(theirs)) == modes,
        "small": nbytes < 1.5 * least,
        "nbytes": nbytes,
        "least": least,
    }


def _modes(model: nn.Module) -> list[Any]:
    """Return which modules train, and which parameters are frozen or have gradients."""
    training = [module.training for module in model.modules()]
    return training + [(p.requires_grad, p.grad is None) for p in model.parameters()]

"""The exercises of chapter 04: replicas, averaged gradients, a check of replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.chapters.ch04_dp_vs_ddp import solutions
from ddp_course.collectives import barrier
from ddp_course.lab.answers import Answer, code, one_line
from ddp_course.lab.exercises import exercise, judge_ranks, shown, written_by
from ddp_course.lab.judge import Draw
from ddp_course.lab.messages import WAITED, pending, waiting
from ddp_course.lab.values import difference, equal_values
from ddp_course.measure import ByteMeter, EventLog, TorchCollectives

# ---- the collectives that an answer calls ------------------------------------------


class Odd(nn.Module):
    """A model with tied, frozen and empty parameters and buffers of 3 types."""

    def __init__(self, seed: int, third: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.second = nn.Linear(5, 5, bias=False)
        self.tied = nn.Linear(5, 5)
        self.tied.weight = self.second.weight
        self.deep = nn.Sequential(nn.Sequential(nn.Linear(1, 2)))
        self.scale = nn.Parameter(torch.tensor(1.0 + seed))
        self.empty = nn.Parameter(torch.zeros(0))
        rows = self.first.weight.data.t().contiguous().t()
        self.first.weight = nn.Parameter(rows)  # not contiguous
        hidden = torch.full((3,), 1.0 + seed)
        self.tied.register_buffer("hidden", hidden, persistent=False)
        fine = torch.full((2, 2), 1.0 + seed, dtype=torch.float64) / 3
        fine = torch.tensor(seed == 0) if third == torch.bool else fine.to(third)
        self.frozen.register_buffer("fine", fine)
        self.norm.running_mean.fill_(seed)
        self.norm.num_batches_tracked.fill_(2**60 + 1 + seed)  # exact in no float

    def tensors(self) -> dict[str, Tensor]:
        """Return all parameters and buffers by name, tied ones once."""
        return dict([*self.named_parameters(), *self.named_buffers()])

    def states(self) -> dict[str, Tensor]:
        """Return copies of all parameters and buffers by name."""
        return {name: t.detach().clone() for name, t in self.tensors().items()}


def _watch(function: Callable, model: nn.Module) -> dict[str, Any]:
    """Call the function; return facts about PyTorch's and our collectives in it."""
    barrier()
    with (
        pending() as ignored,
        TorchCollectives() as torch_log,
        EventLog() as log,
        ByteMeter() as meter,
    ):
        function(model)
    ops = [call.op for call in torch_log.calls]
    ops += [e.op.rpartition(".")[2] for e in log.events if e.lane == "communication"]
    facts = {"ops": ops, "torch_bytes": torch_log.nbytes, "sent": meter.total_sent}
    return facts | waiting(ignored)


def _sending(
    facts: dict[str, Any], fine: bool, op: str, most: int, nbytes: int
) -> None:
    """Judge the number and bytes of the calls of `op`, if all ranks are `fine`.

    For PyTorch's collectives the tensors' sizes are known; for ours, the bytes that all
    ranks send: (n - 1) S in a broadcast, 2 (n - 1) S in an all-reduce, or n (n - 1) S
    in a small one by shared memory.
    """
    n, ops = dist.get_world_size(), facts["ops"]
    everyones: list[Any] = [None] * n
    dist.all_gather_object(everyones, (facts["sent"], fine))
    sent = sum(s for s, _ in everyones)
    skip = n == 1 or not all(f for _, f in everyones)
    times = {"broadcast": [n - 1], "all_reduce": [2 * (n - 1), n * (n - 1)]}[op]
    carried = [facts["torch_bytes"] + sent // max(1, k) for k in times]
    counts = [f"{ops.count(one)} x {one}" for one in dict.fromkeys(ops)]
    facts |= {"calls": ", ".join(counts) or "no collective", "most": f"{most} x {op}"}
    facts |= {"few": skip or set(ops) == {op} and len(ops) <= most}
    facts |= {"enough": skip or nbytes in carried, "nbytes": nbytes, "carried": carried}


def _size(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


SENDS = {
    "few": "called {calls}; expected {most}. Numbers of one type fit into one tensor.",
    "enough": "sends {carried[0]:,} bytes in its collectives; the numbers that the "
    "ranks must share are {nbytes:,} bytes. Is a number sent twice, left out, or sent "
    "in vain?",
}


# ---- make_replicas -----------------------------------------------------------------

THIRD = {2: torch.float64, 3: torch.bool}  # by number of ranks
REPLICAS = {
    **WAITED,
    "right": "has {many} wrong: for example, {first} {how}. All ranks must get rank "
    "0's parameters, trained or not, and buffers.",
    "names": "has a parameter or buffer more than before: {more}. Change only the "
    "numbers of the model's own tensors.",
    "in_place": "has a new tensor as {moved}: an optimizer that was created earlier "
    "would train the old one. Write into the old tensor.",
    "learns": "has a model that can no longer be trained as before: has "
    "`requires_grad` changed, a gradient, or the model's mode?",
    **SENDS,
}


@exercise("make_replicas", solution=solutions.make_replicas)
def check_make_replicas(answer: Answer) -> str:
    """`make_replicas(model)`: rank 0's parameters and buffers, on every rank.

    A broadcast sends one tensor. How can you join many tensors of one type to one, and
    how do you split it again?

    For each dtype, flatten its parameters and buffers and join them; broadcast the
    result from rank 0; split it by their lengths; and write each part, in its shape,
    into its tensor. Do it without recording gradients.
    """
    judge_ranks(REPLICAS, _replicate, answer, worlds=(2, 3))
    return (
        "2 and 3 ranks have rank 0's parameters and buffers, bit for bit, in their "
        "old tensors; one broadcast for each type sent every number once"
    )


def _replicate(function: Callable) -> dict[str, Any]:
    """Call the reader's function on a model, then twice on another; judge the last."""
    rank, third = dist.get_rank(), THIRD[dist.get_world_size()]
    function(Odd(rank + 9, torch.bfloat16))
    model, wanted = Odd(rank + 7, third), _own(0, third).states()
    model.norm.eval()
    modes = _modes(model)
    function(model)
    learns = _modes(model) == modes
    with torch.no_grad():  # other numbers in the same tensors
        own = _own(rank, third).tensors()
        for name, tensor in model.tensors().items():
            if name in own:
                tensor.copy_(own[name])
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    before = model.tensors()
    places = {name: tensor.data_ptr() for name, tensor in before.items()}
    trainable = _trainable(model)
    facts = _watch(function, model)
    facts["learns"] = learns and _trainable(model) == trainable
    now = model.tensors()
    more = [name for name in {**before, **now} if name not in wanted]
    wrong = [name for name in wanted if not same_bits(now[name], wanted[name])]
    moved = [
        name
        for name in before
        if now.get(name) is not before[name] or now[name].data_ptr() != places[name]
    ]
    how = "is not rank 0's" if dist.get_rank() else "has changed"
    facts |= {"right": not wrong, "first": (wrong or [""])[0], "how": how}
    facts |= {"many": f"{len(wrong)} of {len(wanted)} tensors"}
    facts |= {"names": not more, "more": (more or [""])[0]}
    facts |= {"in_place": not moved, "moved": (moved or [""])[0]}
    types, fine = {t.dtype for t in wanted.values()}, not wrong and not moved
    _sending(facts, fine, "broadcast", len(types), _size(wanted))
    return facts


def _own(rank: int, third: torch.dtype) -> Odd:
    """Return a rank's model; on rank 0 a buffer has numbers of a failed training."""
    model = Odd(rank, third)
    if rank == 0:
        model.tied.hidden.copy_(torch.tensor([torch.nan, -torch.inf, -0.0]))
    return model


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bits: nan equals nan, 0 is not -0."""
    return torch.equal(_bits(one), _bits(other))


def _trainable(model: nn.Module) -> list[Any]:
    """Return what the next training step needs besides the model's numbers."""
    gradients = [
        None if p.grad is None else p.grad.tolist() for p in model.parameters()
    ]
    return [gradients, *_modes(model)]


def _modes(model: nn.Module) -> list[Any]:
    """Return which parameters require a gradient, and which modules are in training."""
    flags = [p.requires_grad for p in model.parameters()]
    return [flags, [module.training for module in model.modules()]]


# ---- average_gradients_flat --------------------------------------------------------

MEANS = {
    **WAITED,
    "there": "has no gradient for {name}: all ranks must get its mean, to which a rank "
    "without a gradient contributes zeros.",
    "means": "has {got} as the gradient of {name}; the mean over the ranks is "
    "{wanted}{more}",
    "frozen": "has a gradient for frozen.weight or frozen.bias, which do not require "
    "one.",
    "same_weights": "has changed parameters: average only gradients, and leave the "
    "step to the optimizer.",
    "modes": "has a model that trains differently than before: has `requires_grad`, or "
    "the mode of a module, changed?",
    "own_memory": "has changed the gradients of the first model, too: give each "
    "gradient memory of its own.",
    **SENDS,
}


@exercise("average_gradients_flat", solution=solutions.average_gradients_flat)
def check_average_gradients_flat(answer: Answer) -> str:
    """`average_gradients_flat(model)`: the mean of all gradients, in one all-reduce.

    All ranks must contribute equally many numbers. What does a rank contribute for a
    gradient that it does not have?

    Where `grad` is None, put zeros. Flatten and join the gradients of all parameters
    that require one, add up over the ranks once, divide, split by lengths, and write
    each part into its `grad`.
    """
    hint = "Do all ranks contribute equally many numbers, in the same order?"
    judge_ranks(MEANS, _average, answer, worlds=(2, 3, 1), hint=hint)
    return (
        "1 to 3 ranks have the means, with two dtypes; a parameter without a gradient "
        "counts as zero, and one all-reduce sent every gradient once"
    )


# {number of ranks: parameter without a gradient on one rank}
LACKING = {1: "scale", 2: "first.weight", 3: "tied.bias"}


def _model(n: int, only: bool = False) -> Odd:
    """Return a model, of float64 on three ranks; `only`: most of it is frozen."""
    model = Odd(seed=0).double() if n == 3 else Odd(seed=0)
    for name, parameter in model.named_parameters():
        if only and name != LACKING[n]:
            parameter.requires_grad_(False)
    return model


def _gradients(
    rank: int, n: int, call: int, only: bool = False
) -> dict[str, Tensor | None]:
    """Return random gradients with their parameters' strides; one rank lacks one."""
    draw = Draw(call, rank, n)
    model = _model(n, only)
    gradients: dict[str, Tensor | None] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            like = torch.zeros_like(parameter)
            gradients[name] = like.copy_(draw.tensor(like.shape, like.dtype) * 4)
    if call:
        gradients["first.bias"][2] = torch.nan if rank == n - 1 else 2
        gradients["first.bias"][1] = torch.inf if rank == n - 1 else 2
    if rank == 0 and not only:
        gradients["deep.0.0.bias"].zero_()
    if rank == min(1 - call, n - 1):
        gradients[LACKING[n]] = None
    return gradients


def _average(function: Callable) -> Iterator[dict[str, Any]]:
    """Call the reader's function twice on a model, with different gradients."""
    n = dist.get_world_size()
    model = _model(n)
    yield _average_once(function, model, 0)
    model.norm.eval()
    yield {"case": "in a second call"} | _average_once(function, model, 1)
    kept = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    facts = _average_once(function, _model(n), 0)
    now = [p.grad for p in model.parameters() if p.grad is not None]
    facts["own_memory"] = all(map(same_bits, now, kept))
    yield {"case": "on a second model"} | facts
    facts = _average_once(function, _model(n, only=True), 0, only=True)
    yield {"case": "where one parameter requires a gradient"} | facts


def _average_once(
    function: Callable, model: Odd, call: int, only: bool = False
) -> dict[str, Any]:
    """Set this rank's gradients, call `function`, and return facts about the call."""
    rank, n = dist.get_rank(), dist.get_world_size()
    before, parameters = model.states(), dict(model.named_parameters())
    everyones = [_gradients(k, n, call, only) for k in range(n)]
    for name, gradient in everyones[rank].items():
        parameters[name].grad = None if gradient is None else gradient.clone()
    modes = _modes(model)
    facts = _watch(function, model)
    facts |= {"modes": _modes(model) == modes, "own_memory": True}
    facts |= {"there": True, "means": True, "name": "", "got": 0, "wanted": 0}
    zeros = {name: torch.zeros_like(parameters[name]) for name in everyones[0]}
    wrong = []
    for name, zero in zeros.items():
        present = [one[name] for one in everyones if one[name] is not None]
        total, got = sum(present, zero.detach()), parameters[name].grad
        if got is None:
            facts |= {"there": False, "name": name}
        elif not equal_values(got, total / n):
            wrong.append((name, got, total))
    for name, got, total in wrong[:1]:
        facts |= {"means": False, "name": name, "got": shown(got)}
        facts |= {"wanted": shown(total / n), "more": difference(got, total / n) + "."}
        own = everyones[rank][name]
        if len(wrong) == 1 and name == LACKING[n]:
            facts["more"] += " One rank had no such gradient, which counts as zero."
        elif equal_values(got, total):
            facts["more"] = ". That is the sum."
        elif n > 1 and own is not None and equal_values(got, own / n):
            facts["more"] = ": the other ranks' gradients are missing. Do you wait for "
            facts["more"] += "the all-reduce, and do all ranks use the same order?"
    now = model.states()
    facts["frozen"] = all(p.grad is None for p in model.frozen.parameters())
    facts["same_weights"] = all(torch.equal(now[name], before[name]) for name in before)
    fine = all(facts[what] for what in ("there", "means", "frozen", "same_weights"))
    _sending(facts, fine, "all_reduce", 1, _size(zeros))
    return facts


# ---- replicas_agree ----------------------------------------------------------------

WIDE = 256  # the model of this exercise has WIDE x WIDE numbers and a few more
ENOUGH = 20_000  # bytes that a rank may write
AGREE = {
    "is_bool": "returned {got}; expected True or False.",
    "right": "returned {got}; expected {agree} on every rank.",
    "untouched": "has a changed model (numbers, gradients, modes); only read it.",
    "short": "wrote {written} bytes, by the operating system's count, and the model "
    "has more than 260,000: send something short that changes with every bit.",
}


@exercise("replicas_agree", solution=solutions.replicas_agree)
def check_replicas_agree(answer: Answer) -> str:
    """`replicas_agree(model)`: the same True or False on all ranks, for few bytes.

    What is short, and differs as soon as a single bit of the model does?

    Each rank computes the checksum of its `state_dict()`. Gather the checksums of all
    ranks: the replicas agree if all checksums are equal.
    """
    judge_ranks(AGREE, _agree, answer, worlds=(2, 4, 1))
    return (
        "1, 2 and 4 ranks returned the same right answer in all of "
        f"{len(CASES)} cases, down to a single bit, and sent hardly any bytes"
    )


# name -> (whether the ranks agree, description)
CASES = {
    "same": (True, "all have the same model"),
    "a bit": (False, "one weight of the last rank differs in its last bit"),
    "rank 0": (False, "rank 0 alone has another weight"),
    "half": (False, "one half of the ranks has another weight than the other half"),
    "swapped": (False, "on the last rank two weights have changed places"),
    "buffer": (False, "a buffer of the last rank differs"),
    "middle": (False, "a rank in the middle has another weight"),
    "rank 1": (False, "rank 1 alone has another weight"),
    "each": (False, "every rank has another weight"),
    "part": (True, "a weight of the last rank is a part of a larger tensor"),
    "sign": (False, "a zero of the last rank has another sign"),
    "double": (False, "a number of float64 of the last rank differs in its last bit"),
    "counter": (False, "a whole number in a buffer of the last rank differs"),
    "nan": (True, "all have the same model, with a nan in the same place"),
    "frozen": (False, "a frozen weight of the last rank differs"),
    "end": (False, "the last weight of the last rank differs"),
    "exchanged": (False, "on the last rank two buffers have been exchanged"),
    "bits of nan": (False, "a nan of the last rank has other bits"),
    "bfloat16": (False, "a bfloat16 of the last rank differs in its last bit"),
    "repaired": (True, "in a second call, a weight that differed is the same again"),
    "later": (False, "in a second call, the last rank has changed a weight since"),
    "not saved": (True, "a buffer that is not in `state_dict()` differs"),
}
# case -> what the last rank adds to a weight before the second call
CHANGES = {"repaired": -1.0, "later": 1.0}


def _agree(function: Callable) -> Iterator[dict[str, Any]]:
    """Call the reader's function in each case; yield facts about its answer."""
    for case, (agree, what) in CASES.items():
        model = _model_for(case)
        for p in model.parameters():
            p.grad = torch.ones_like(p) if case == "same" else None
        before = {name: _bits(t) for name, t in model.state_dict().items()}
        trainable = _trainable(model)
        barrier()
        got, written = written_by(function, model)
        if case in CHANGES:  # call again on all ranks, whatever each rank has returned
            if dist.get_rank() == dist.get_world_size() - 1:
                model[0].bias.data[1] += CHANGES[case]
            before = {name: _bits(t) for name, t in model.state_dict().items()}
            got = function(model)
        after = {name: _bits(t) for name, t in model.state_dict().items()}
        agree = agree or dist.get_world_size() == 1
        one = {"case": what, "got": code(one_line(got)), "agree": agree}
        one |= {"is_bool": isinstance(got, bool), "right": got == agree}
        one["untouched"] = all(torch.equal(after[k], before[k]) for k in before)
        one["untouched"] &= _trainable(model) == trainable
        one |= {"short": written is None or written <= ENOUGH, "written": written}
        yield one


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten().view(torch.uint8).clone()


@torch.no_grad()
def _model_for(case: str) -> nn.Module:
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.BatchNorm1d(WIDE))
    model.register_buffer("exact", torch.tensor([[0.1]], dtype=torch.float64))
    weight = model[0].weight
    model[1].weight.requires_grad_(False)
    if case == "frozen" and rank == n - 1:
        model[1].weight[3] = 2.0
    elif case == "a bit" and rank == n - 1:
        weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(1.0))
    elif case == "rank 0" and rank == 0 or case == "half" and rank < n / 2:
        weight[0, 0] = 1.0
    elif case == "swapped" and rank == n - 1:
        weight[0, :2] = weight[0, :2].flip(0)
    elif case == "middle" and rank == n // 2:
        weight[1, 1] = 1.0
    elif case == "rank 1" and rank == 1:
        weight[0, 1] = 1.0
    elif case == "each":
        weight[0, 2] = rank
    elif case == "part" and rank == n - 1:
        weight.data = torch.cat([weight, weight]).T.contiguous().T[:WIDE]
    elif case == "sign":
        weight[2, 2] = -0.0 if rank == n - 1 else 0.0
    elif case == "counter":  # float64 rounds both counts to one number
        model[1].num_batches_tracked += 2**60 + (rank == n - 1)
    elif case == "buffer" and rank == n - 1:
        model[1].running_mean[0] = 1.0
    elif case == "end" and rank == n - 1:
        weight[-1, -1] += 1
    elif case == "exchanged":
        first, second = model[1].running_mean, model[1].running_var
        (first if rank < n - 1 else second).fill_(3)
        (second if rank < n - 1 else first).fill_(4)
    elif case == "bits of nan":
        weight.view(torch.int32)[2, 2] = 0x7FC00000 + (rank == n - 1)
    elif case == "bfloat16":
        half = torch.tensor([1.0, 1.0 + 2**-7 * (rank == n - 1)])
        model.register_buffer("narrow", half.bfloat16())
    elif case == "repaired":
        model[0].bias.zero_()
        model[0].bias[1] += rank == n - 1
    elif case == "not saved":
        model.register_buffer("own", torch.tensor([1.0 + rank]), persistent=False)
    elif case == "double" and rank == n - 1:
        model.exact += 2**-50
    elif case == "nan":
        weight[2, 2] = torch.nan
    return model

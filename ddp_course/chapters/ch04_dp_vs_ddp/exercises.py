"""The exercises of chapter 04."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.chapters.ch04_dp_vs_ddp import solutions
from ddp_course.collectives import barrier
from ddp_course.data_parallel import DataParallel
from ddp_course.lab.answers import Answer, code, on_ranks, one_line
from ddp_course.lab.exercises import exercise, expect, expect_call
from ddp_course.measure import ByteMeter, EventLog, SystemBytes, TorchCollectives

# ---- through_replica_0 -------------------------------------------------------------


@exercise("through_replica_0", solution=solutions.through_replica_0)
def check_through_replica_0(answer: Answer) -> str:
    """`through_replica_0(...)`: what DP moves through replica 0 in one iteration."""
    for width, rows, replicas in (
        (8, 8, 4), (8, 8, 2), (8, 8, 1), (32, 8, 3), (8, 5, 4), (8, 2, 4), (16, 9, 4),
    ):  # fmt: skip
        layer = nn.Linear(width, 6)
        parallel = DataParallel(layer, ["cpu"] * replicas, record=True)
        parallel(torch.ones(rows, width)).sum().backward()
        moved = parallel.moves.moved()
        told = ", ".join(f"{n:,} of {what}" for what, n in moved.items()) or "nothing"
        parameters = sum(p.numel() for p in layer.parameters())
        expect_call(
            answer, parameters, rows, 4 * width, 4 * 6, replicas,
            returns=sum(moved.values()),
            because=f"the meter of a real iteration shows {told}",
        )  # fmt: skip
    return (
        "seven real iterations on 1 to 4 replicas moved as many bytes, with rows that "
        "divide, rows that do not, and too few rows for all"
    )


# ---- what a function sends ---------------------------------------------------------


class Odd(nn.Module):
    """Tied and frozen parameters, and buffers of two types; numbers from `seed`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.second = nn.Linear(5, 5, bias=False)
        self.tied = nn.Linear(5, 5)
        self.tied.weight = self.second.weight
        self.scale = nn.Parameter(torch.tensor(1.0 + seed))
        rows = self.first.weight.data.t().contiguous().t()
        self.first.weight = nn.Parameter(rows)  # not one number after the other
        hidden = torch.full((3,), 1.0 + seed)
        self.tied.register_buffer("hidden", hidden, persistent=False)
        self.norm.running_mean.fill_(seed)
        self.norm.num_batches_tracked.fill_(seed)

    def forward(self, x: Tensor) -> Tensor:
        """Use all of them."""
        h = self.frozen(self.norm(self.first(x)))
        return self.tied(self.second(h)) * self.scale

    def states(self) -> dict[str, Tensor]:
        """Return copies of all parameters and buffers: tied ones once."""
        named = [*self.named_parameters(), *self.named_buffers()]
        return {name: tensor.detach().clone() for name, tensor in named}


@contextmanager
def _watched() -> Iterator[dict[str, Any]]:
    """Note the collectives of PyTorch and ours that this rank calls, and their bytes.

    "sent" are the bytes of ours that this rank sends, "tensors" those of the tensors
    that PyTorch's collectives were given.
    """
    told: dict[str, Any] = {}
    barrier()
    with TorchCollectives() as torchs, EventLog() as log, ByteMeter() as meter:
        yield told
    ours = [e.op.rpartition(".")[2] for e in log.events if e.lane == "communication"]
    told["ops"] = [call.op for call in torchs.calls] + ours
    told["tensors"] = torchs.nbytes
    told["sent"] = meter.total_sent


def _times(ops: list[str]) -> str:
    """Write which collectives were called: "5 x broadcast, 1 x all_reduce"."""
    counts = {op: ops.count(op) for op in dict.fromkeys(ops)}
    return ", ".join(f"{n} x {op}" for op, n in counts.items()) or "no collective"


def _judge_calls(
    where: str, real: list[dict[str, Any]], op: str, most: int, nbytes: int, why: str
) -> None:
    """Expect 1 to `most` calls of `op`, and tensors of `nbytes` bytes in all of them.

    Of ours it is known what all ranks send together: (n - 1) S in a broadcast, and
    2 (n - 1) S in an all-reduce, or n (n - 1) S for a small one in shared memory.
    """
    n = len(real)
    for rank, told in enumerate(real):
        ops = told["ops"]
        expect(
            set(ops) == {op} and len(ops) <= most,
            f"{where} rank {rank} called {_times(ops)}; expected {most} x {op}. {why}",
        )
    sent, pairs = sum(told["sent"] for told in real), n * (n - 1)
    sends = {"broadcast": [n - 1], "all_reduce": [2 * (n - 1), pairs]}[op]
    carried = [real[0]["tensors"] + sent // times for times in sends]
    expect(
        nbytes in carried,
        f"{where} the {op} carries {carried[0]:,} bytes; the numbers that the ranks "
        f"must share are {nbytes:,} bytes. Is something sent twice, left out, or sent "
        "in vain?",
    )


def _differing(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    return [name for name in wanted if not torch.equal(got[name], wanted[name])]


# ---- make_replicas -----------------------------------------------------------------


@exercise("make_replicas", solution=solutions.make_replicas)
def check_make_replicas(answer: Answer) -> str:
    """`make_replicas(model)`: rank 0's parameters and buffers, on every rank."""
    hint = (
        "Does every rank call the same broadcasts, with as many numbers? A parameter "
        "may be written in place inside of `torch.no_grad()`."
    )
    for n in (2, 4, 3):
        where = f"With {n} ranks,"
        real = on_ranks(_replicate, answer, world_size=n, hint=hint)
        wanted = real[0]["before"]
        for rank, told in enumerate(real):
            wrong = _differing(told["after"], wanted)
            what = f"{wrong[0]}, for one," if wrong else ""
            said = (
                "has changed on rank 0"
                if rank == 0
                else f"on rank {rank} is not rank 0's"
            )
            expect(
                not wrong,
                f"{where} {len(wrong)} of {len(wanted)} tensors are wrong: {what} "
                f"{said}. Rank 0 has what all shall have: parameters, trained or not, "
                "and buffers.",
            )
            expect(
                not told["moved"],
                f"{where} {''.join(told['moved'][:1])} of rank {rank} is another "
                "tensor than before: an optimizer that was made earlier would train "
                "the old one. Write into the tensor that is there.",
            )
            expect(
                told["learns"],
                f"{where} rank {rank}'s model can no longer be trained as before: has "
                "`requires_grad` changed?",
            )
        types = len({t.dtype for t in wanted.values()})
        why = (
            f"The numbers are of {types} types; those of one type fit into one message."
        )
        nbytes = sum(t.nbytes for t in wanted.values())
        _judge_calls(where, real, "broadcast", types, nbytes, why)
    return (
        "2, 3 and 4 ranks have rank 0's parameters and buffers, bit for bit, in the "
        "tensors that they had; one broadcast for each type carried every number once"
    )


def _replicate(function: Callable) -> dict[str, Any]:
    """On every rank: call the reader's function on a model from a seed of its own."""
    model = Odd(seed=dist.get_rank())
    before = model.states()
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    places = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    flags = [p.requires_grad for p in model.parameters()]
    with _watched() as told:
        function(model)
    now = dict([*model.named_parameters(), *model.named_buffers()])
    told["moved"] = [
        name
        for name in tensors
        if now.get(name) is not tensors[name] or now[name].data_ptr() != places[name]
    ]
    told |= {"before": before, "after": model.states()}
    told["learns"] = flags == [p.requires_grad for p in model.parameters()]
    return told


# ---- average_gradients_flat --------------------------------------------------------


@exercise("average_gradients_flat", solution=solutions.average_gradients_flat)
def check_average_gradients_flat(answer: Answer) -> str:
    """`average_gradients_flat(model)`: the mean of all gradients, in one all-reduce."""
    hint = "Do all ranks bring as many numbers, in the same order?"
    for n in (2, 4, 3, 1):
        where = f"With {n} ranks,"
        real = on_ranks(_average, answer, world_size=n, hint=hint)
        _judge_means(where, real)
        wanted = real[0]["before"]
        why = "Put all gradients into one tensor first."
        nbytes = sum(t.nbytes for t in wanted.values())
        if n > 1:
            _judge_calls(where, real, "all_reduce", 1, nbytes, why)
    return (
        "1 to 4 ranks have the means, bit for bit the same, a parameter without a "
        "gradient counts as zero, and one all-reduce carried every gradient once"
    )


def _average(function: Callable) -> dict[str, Any]:
    """On every rank: call the reader's function on a model with made-up gradients."""
    rank, model = dist.get_rank(), Odd(seed=0)
    before = model.states()
    gradients = {}
    for k, (name, p) in enumerate(model.named_parameters()):
        if p.requires_grad:
            numbers = 12 * (torch.arange(p.numel()) + 10 * k + 100 * rank + 1)
            gradients[name] = numbers.view(p.shape).float()
            if name == "second.weight" and rank == 1:
                gradients[name] = torch.zeros(p.shape)  # and p.grad stays None
            else:
                p.grad = gradients[name].clone()
    with _watched() as told:
        function(model)
    after = {name: p.grad for name, p in model.named_parameters()}
    told |= {"before": gradients, "after": after}
    told["frozen"] = [name for name in after if name not in gradients]
    told["same weights"] = not _differing(model.states(), before)
    return told


def _judge_means(where: str, real: list[dict[str, Any]]) -> None:
    n = len(real)
    everyones = [told["before"] for told in real]
    sums = {name: sum(one[name] for one in everyones) for name in everyones[0]}
    for rank, told in enumerate(real):
        for name, total in sums.items():
            got = told["after"][name]
            expect(
                got is not None,
                f"{where} {name} has no gradient on rank {rank}, though other ranks "
                "have one for it: its mean is for all.",
            )
            more = ""
            if n > 1 and name == "second.weight":
                more = " Rank 1 had none for it, which counts as zero."
            elif n > 1 and torch.equal(got, total):
                more = " That is the sum."
            expect(
                torch.equal(got, total / n),
                f"{where} the gradient of {name} on rank {rank} begins with "
                f"{got.flatten()[0]:g}; the mean over the ranks is "
                f"{total.flatten()[0] / n:g}.{more}",
            )
        frozen = [name for name in told["frozen"] if told["after"][name] is not None]
        expect(
            not frozen,
            f"{where} {''.join(frozen[:1])} does not require a gradient, and has one "
            f"on rank {rank}.",
        )
        expect(
            told["same weights"],
            f"{where} rank {rank}'s parameters have changed: only gradients are to be "
            "averaged; the step is the optimizer's.",
        )


# ---- replicas_agree ----------------------------------------------------------------

WIDE = 256  # the model of this exercise has WIDE x WIDE numbers and a few more
ENOUGH = 20_000  # bytes that a rank may write for all that


@exercise("replicas_agree", solution=solutions.replicas_agree)
def check_replicas_agree(answer: Answer) -> str:
    """`replicas_agree(model)`: on all ranks the same True or False, for few bytes."""
    hint = "Does every rank call the same collectives, whatever it finds?"
    for n in (4, 2, 3):
        where = f"With {n} ranks,"
        real = on_ranks(_agree, answer, world_size=n, hint=hint)
        for case, (agree, what) in CASES.items():
            told = [rank[case][0] for rank in real]
            expect(
                all(isinstance(one, bool) for one in told),
                f"{where} it returned {code(one_line(told))}, rank by rank; expected "
                "True or False.",
            )
            expect(
                set(told) == {agree},
                f"{where} {what}, and the ranks returned {told}; expected {agree} on "
                "every rank.",
            )
            for rank, one in enumerate(real):
                written, untouched = one[case][1:]
                expect(
                    untouched,
                    f"{where} rank {rank}'s model was changed; it was only to be "
                    "looked at.",
                )
                expect(
                    written is None or written <= ENOUGH,
                    f"{where} rank {rank} wrote {written or 0:,} bytes, by the "
                    f"operating system's count, and the model has {4 * WIDE**2:,}: "
                    "send something short that changes with every bit.",
                )
    return (
        "2, 3 and 4 ranks gave the same right answer in all of "
        f"{len(CASES)} cases, down to a single bit, and sent next to nothing"
    )


# name -> do they agree?, and what it is
CASES = {
    "same": (True, "all have the same model"),
    "a bit": (False, "one weight of the last rank differs in its last bit"),
    "rank 0": (False, "rank 0 alone has another weight"),
    "half": (False, "one half of the ranks has another weight than the other half"),
    "swapped": (False, "on the last rank two weights have changed places"),
    "buffer": (False, "a buffer of the last rank differs"),
    "counter": (False, "a whole number in a buffer of the last rank differs"),
    "middle": (False, "a rank in the middle has another weight"),
    "sign": (False, "a zero of the last rank has another sign"),
    "nan": (True, "all have the same model, with a nan in the same place"),
}


def _agree(function: Callable) -> dict[str, tuple[Any, int | None, bool]]:
    """On every rank: the answer, the bytes written, and whether nothing was changed."""
    told = {}
    for case in CASES:
        model = _model_for(case)
        before = {name: t.clone() for name, t in model.state_dict().items()}
        barrier()
        system = SystemBytes()
        try:
            with system:
                got = function(model)
            written = system.written
        except RuntimeError as error:
            if "SystemBytes" not in str(error):
                raise
            got, written = function(model), None  # a system that does not count
        after = model.state_dict()
        same = all(
            torch.equal(_bits(after[name]), _bits(before[name])) for name in before
        )
        told[case] = got, written, same
    return told


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten().view(torch.uint8)


@torch.no_grad()
def _model_for(case: str) -> nn.Module:
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.BatchNorm1d(WIDE))
    weight = model[0].weight
    if case == "a bit" and rank == n - 1:
        weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(1.0))
    elif case == "rank 0" and rank == 0 or case == "half" and rank < n / 2:
        weight[0, 0] = 1.0
    elif case == "swapped" and rank == n - 1:
        weight[0, :2] = weight[0, :2].flip(0)
    elif case == "middle" and rank == n // 2:
        weight[1, 1] = 1.0
    elif case == "sign":
        weight[2, 2] = -0.0 if rank == n - 1 else 0.0
    elif case == "counter" and rank == n - 1:
        model[1].num_batches_tracked += 1
    elif case == "buffer" and rank == n - 1:
        model[1].running_mean[0] = 1.0
    elif case == "nan":
        weight[2, 2] = torch.nan
    return model

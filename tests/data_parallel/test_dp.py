"""DataParallel is one plain call on the whole batch, for outputs and gradients."""

import re
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ddp_course.data_parallel import DataParallel, Move, dp, part_sizes
from ddp_course.data_parallel.scatter_gather import gather, scatter
from ddp_course.model import GPTConfig, build_gpt

CPU = torch.device("cpu")
SMALL = GPTConfig(block_size=8, n_layer=1, n_head=2, d_model=8)
Point = namedtuple("Point", "x y")


class Net(nn.Module):
    """Tied and frozen parameters, none at all, and a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.norm = nn.LayerNorm(4)
        self.again = nn.Linear(4, 4)
        self.again.weight = self.first.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.own = nn.Parameter(torch.randn(4))
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x)) + self.frozen(x)
        return self.again(self.norm(h)) * self.own * self.scale


class Lists(nn.Module):
    """Modules that keep their parameters in an unusual way."""

    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(2)])
        self.dict = nn.ParameterDict({"a": nn.Parameter(torch.randn(4))})
        self.rnn = nn.LSTM(4, 4, batch_first=True)
        self.weird = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.absent = None

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.rnn(x[:, None] * self.list[0] + self.list[1])
        return self.weird(h[:, 0]) * self.dict["a"]


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: p.grad for n, p in model.named_parameters()}


def assert_same_training(cls: type, build: Callable, rows: int, n: int) -> None:
    """Compare outputs, gradients and two steps of SGD with one plain call."""
    plain, wrapped = seeded(build), seeded(build)
    replicas = cls(wrapped, [CPU] * n)
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1, 0.9)
        for m in (plain, wrapped)
    ]
    for step in range(2):
        torch.manual_seed(step)
        x, y = torch.randn(rows, 4), torch.randn(rows, 4)
        xs = x.clone().requires_grad_(), x.clone().requires_grad_()
        outputs = plain(xs[0]), replicas(xs[1])
        torch.testing.assert_close(outputs[1], outputs[0])
        for output, optimizer in zip(outputs, optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(output, y).backward()
        torch.testing.assert_close(gradients(wrapped), gradients(plain))
        torch.testing.assert_close(xs[1].grad, xs[0].grad)
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(wrapped.state_dict(), plain.state_dict())


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("build", [Net, Lists])
def test_the_same_training(build, n):
    for rows in (12, 7, 2):
        assert_same_training(DataParallel, build, rows, n)


# ---- planted mistakes ----------------------------------------------------------------


class Averages(DataParallel):
    """Divides gradients by the number of replicas, as DDP does."""

    def forward(self, *inputs, **kwargs):
        output = super().forward(*inputs, **kwargs)
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient / len(self.devices))
        return output


class ForgetsRows(DataParallel):
    """Gives every replica the same number of rows and drops the rest."""

    def forward(self, x):
        rows = len(x) // len(self.devices) * len(self.devices)
        return super().forward(x[: rows or None])


def planted(name: str, wrong: Callable) -> type:
    """Return a DataParallel with `wrong(right, *args)` in place of a function of dp."""

    class Fake(DataParallel):
        def forward(self, *inputs, **kwargs):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(dp, name, partial(wrong, getattr(dp, name)))
                return super().forward(*inputs, **kwargs)

    return Fake


def detached(right, module, devices):
    """Copies so that only replica 0 gets gradients."""
    first, *others = right(module, devices)
    return [first] + [{t: c.detach() for t, c in o.items()} for o in others]


def shared_buffers(right, module, devices):
    """All replicas write into the same buffers."""
    buffers = {b: b for b in module.buffers()}
    return [copies | buffers for copies in right(module, devices)]


def lost_buffers(right, module, devices):
    """Replica 0, too, has copies, and what it learns is lost."""
    first, *others = right(module, devices)
    return [first | {b: b.clone() for b in module.buffers()}, *others]


def turned(right, outputs, *args):
    """Gathers in the order in which threads may end."""
    return right(outputs[::-1], *args)


DETACHES, WRONG_ORDER = planted("copy_states", detached), planted("gather", turned)


@pytest.mark.parametrize("fake", [Averages, DETACHES, ForgetsRows, WRONG_ORDER])
def test_planted_data_parallels_fail(fake):
    with pytest.raises(AssertionError):
        assert_same_training(fake, Net, 7, 3)


# ---- buffers -------------------------------------------------------------------------


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(x)


def keeps_the_buffers_of_replica_0(cls: type) -> None:
    """BatchNorm's statistics are those of the first part, and of nobody else."""
    model, first = seeded(Statistics), seeded(Statistics)
    replicas = cls(model, [CPU] * 3)
    for step in range(3):
        x = torch.randn(8, 4) + torch.arange(8)[:, None] * 10 + step
        output = replicas(x)
        first(x[:3])
        parts = [nn.functional.batch_norm(p, None, None, training=True) for p in _3(x)]
        torch.testing.assert_close(output, torch.cat(parts))
        assert_equal(model.state_dict(), first.state_dict())
        assert model.calls == step + 1


def _3(x: Tensor) -> tuple[Tensor, ...]:
    return x.split(part_sizes(len(x), 3))


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_buffers():
    keeps_the_buffers_of_replica_0(DataParallel)
    for wrong in (shared_buffers, lost_buffers):
        with pytest.raises(AssertionError):
            keeps_the_buffers_of_replica_0(planted("copy_states", wrong))


class Grows(nn.Module):
    """Changes its own parameter in place, as spectral norm does with its vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        self.weight += 1
        return x * self.weight


def test_what_replica_0_changes_in_place_is_kept_once():
    model = Grows()
    output = DataParallel(model, [CPU] * 3)(torch.ones(3, 2))
    assert output.tolist() == [[2, 2]] * 3
    assert model.weight.tolist() == [2, 2]


# ---- inputs and outputs --------------------------------------------------------------


class Nested(nn.Module):
    """Takes and returns all sorts of things."""

    def forward(self, pair, table, *, point=None, factor=1.0, name="", **more):
        first, (second, third) = pair
        total = first + second + third + table["deep"][0]
        if point is not None:
            total = total + point.x - point.y
        return {
            "sum": total * factor,
            "both": [first, (second,)],
            "point": Point(first, None),
            "name": name,
            "ordered": OrderedDict(total=total.sum(1)),
            "seen": sorted(more),
        }


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [5, 8, 1])
def test_nested_inputs_and_outputs(rows, n):
    x = torch.randn(6, rows, 3)
    inputs = [x[0], (x[1], x[2])], {"deep": [x[3]], "other": None}
    options = {"point": Point(x[4], x[5]), "factor": 0.5, "name": "it", "last": 1}
    expected = Nested()(*inputs, **options)
    found = DataParallel(Nested(), [CPU] * n)(*inputs, **options)
    assert type(found["point"]) is Point
    assert type(found["ordered"]) is OrderedDict
    assert found.pop("name") == expected.pop("name") == "it"
    assert found.pop("seen") == expected.pop("seen") == ["last"]
    assert found["point"].y is None
    found["point"] = found["point"].x
    expected["point"] = expected["point"].x
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Says(nn.Module):
    """Returns the number of rows that it sees, and who it is."""

    def forward(self, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
        rows = 0 if x is None else len(x)
        return torch.tensor(float(rows)), torch.full((1,), threading.get_ident())


@given(st.integers(0, 40), st.integers(1, 9))
def test_parts_are_those_of_torch_chunk(rows, replicas):
    sizes = part_sizes(rows, replicas)
    assert sum(sizes) == rows
    assert len(sizes) <= replicas
    if rows:
        chunks = torch.empty(rows, 2).chunk(replicas)
        assert sizes == [len(chunk) for chunk in chunks]


@pytest.mark.parametrize(("rows", "n"), [(8, 4), (5, 4), (2, 4), (1, 3), (0, 2)])
def test_a_thread_for_each_replica_that_has_rows(rows, n):
    seen, threads = DataParallel(Says(), [CPU] * n)(torch.empty(rows, 3))
    assert seen.tolist() == part_sizes(rows, n)
    assert threading.get_ident() not in threads.tolist()


class Meet(nn.Module):
    """Waits until all replicas are inside of forward at the same time."""

    def __init__(self, n: int, seconds: float) -> None:
        super().__init__()
        self.barrier, self.seconds = threading.Barrier(n), seconds

    def forward(self, x: Tensor) -> Tensor:
        self.barrier.wait(self.seconds)
        return x


def one_after_the_other(replicas: list, calls: list, devices: list) -> list:
    """Planted: the right outputs, but no threads."""
    return [m(*args, **kw) for m, (args, kw) in zip(replicas, calls, strict=True)]


def test_replicas_run_at_the_same_time(monkeypatch):
    x = torch.randn(6, 2)
    assert torch.equal(DataParallel(Meet(3, 120), [CPU] * 3)(x), x)
    monkeypatch.setattr(dp, "parallel_apply", one_after_the_other)
    with pytest.raises(threading.BrokenBarrierError):
        DataParallel(Meet(3, 0.1), [CPU] * 3)(x)


def test_without_a_tensor_there_is_one_replica():
    seen, _ = DataParallel(Says(), [CPU] * 3)()
    assert seen.tolist() == [0.0]
    assert scatter(((3, "a"), {"b": None}), [CPU] * 3) == [((3, "a"), {"b": None})]


def test_losses_become_a_vector_whose_mean_may_be_wrong():
    model = build_gpt(SMALL)
    idx = torch.arange(40).view(5, 8)
    scores = model(idx)[0].detach()
    # The last row, alone on its replica, has a small loss, and the others large ones.
    targets = torch.cat([scores[:4].argmin(-1), scores[4:].argmax(-1)])
    logits, loss = model(idx, targets)
    found, losses = DataParallel(model, [CPU] * 4)(idx, targets)
    torch.testing.assert_close(found, logits)
    assert losses.shape == (3,)
    rows = torch.tensor(part_sizes(5, 4))
    torch.testing.assert_close((losses * rows).sum() / 5, loss)
    assert abs(losses.mean() - loss) > 1e-4  # planted: the mean of means


# ---- modes, module, errors -----------------------------------------------------------


class Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.found = nn.Linear(4, 4), []

    def forward(self, x: Tensor) -> Tensor:
        self.found.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return self.layer(x)


def test_threads_have_the_modes_of_the_caller():
    model = Modes()
    replicas = DataParallel(model, [CPU] * 2)
    x = torch.randn(4, 4)
    assert replicas(x).requires_grad
    with torch.no_grad():
        assert not replicas(x).requires_grad
    with torch.inference_mode():
        assert replicas(x).is_inference()
    with torch.autocast("cpu", torch.bfloat16):
        assert replicas(x).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.float16):
        assert replicas(x).dtype == torch.float16
    assert replicas(x).dtype == torch.float32
    on, off, fast = (True, False), (False, False), (False, True)
    assert model.found == [on] * 2 + [off] * 2 + [fast] * 2 + [on] * 6
    replicas.eval()
    assert not model.training


def test_module():
    model = seeded(Net)
    replicas = DataParallel(model, [CPU] * 2)
    assert replicas.module is model
    assert list(replicas.state_dict()) == [f"module.{k}" for k in model.state_dict()]
    assert list(replicas.parameters()) == list(model.parameters())
    theirs = nn.DataParallel(seeded(Net))
    assert list(replicas.state_dict()) == list(theirs.state_dict())
    replicas.load_state_dict(theirs.state_dict())


def test_two_forwards_before_backward_and_gradients_of_gradients():
    plain, wrapped = seeded(Net).double(), seeded(Net).double()
    replicas = DataParallel(wrapped, [CPU] * 3)
    x = torch.randn(2, 7, 4, dtype=torch.float64, requires_grad=True)
    for model, run in ((plain, plain), (wrapped, replicas)):
        loss = run(x[0]).pow(2).sum() + run(x[1]).pow(3).sum()
        (gradient,) = torch.autograd.grad(loss, model.own, create_graph=True)
        gradient.pow(2).sum().backward()
    torch.testing.assert_close(gradients(wrapped), gradients(plain))


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if (x == 7).any():
            raise KeyError("seven")
        return x


def test_an_error_in_a_thread_is_raised_here():
    replicas = DataParallel(Fails(), [CPU] * 4)
    message = "replica 2 of 4, on cpu, raised KeyError: 'seven'"
    before = set(threading.enumerate())
    for ones in ([0, 0, 0, 0, 7, 0, 0, 0], [0, 0, 0, 0, 0, 7, 7, 0]):
        with pytest.raises(RuntimeError, match=message) as caught:
            replicas(torch.tensor(ones))
        assert isinstance(caught.value.__cause__, KeyError)
        assert caught.traceback[-1].name == "parallel_apply"
    assert set(threading.enumerate()) <= before
    assert len(replicas(torch.zeros(5))) == 5  # it can be used again


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([], "devices is []; it must be a list of one or more"),
        ("cpu", "devices is 'cpu'; it must be a list of one or more"),
        (["cpu", "moon"], "'moon' is not a device"),
        (["meta"], "device 'meta' does not exist: this machine has a CPU and"),
        ([10_000], "device 10000 does not exist: this machine has a CPU and"),
        ([None], "None is not a device"),
    ],
)
def test_bad_devices(devices, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        DataParallel(Net(), devices)


def test_bad_modules():
    with pytest.raises(TypeError, match="module is a function; it must be a torch.nn"):
        DataParallel(seeded, [CPU])
    lazy = DataParallel(nn.LazyLinear(3), [CPU] * 2)
    with pytest.raises(ValueError, match="weight has no shape yet"):
        lazy(torch.ones(2, 2))
    away = DataParallel(nn.Linear(2, 2, device="meta"), [CPU] * 2)
    with pytest.raises(ValueError, match="weight is on meta; parameters .* on devices"):
        away(torch.ones(2, 2))


@pytest.mark.parametrize("shapes", [[[8, 2], [2, 2]], [[8, 2], []], [[]]])
def test_inputs_that_cannot_be_cut(shapes):
    results = f"the inputs have the shapes {', '.join(map(str, shapes))}; all must"
    with pytest.raises(ValueError, match=re.escape(results)):
        scatter([torch.ones(shape) for shape in shapes], [CPU] * 4)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([torch.ones(2), [torch.ones(2)]], "replica 1 and replica 0 return outputs"),
        ([torch.ones(2, 3), torch.ones(2, 4)], "tensors of the shapes [2, 3], [2, 4]"),
        ([torch.ones(2), torch.ones(())], "tensors of the shapes [2], []"),
        ([3, 4], "the replicas return 3, 4; each output must be a tensor"),
        ([torch.ones(1), None], "must be a tensor on all replicas"),
    ],
)
def test_outputs_that_cannot_be_joined(outputs, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        gather(outputs, CPU)


# ---- what passes replica 0 -----------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [8, 5])
def test_bytes(rows, n):
    model = seeded(Net)
    replicas = DataParallel(model, [CPU] * n, record=True)
    x = torch.randn(rows, 4, requires_grad=True)
    sizes = part_sizes(rows, n)
    others = len(sizes) - 1  # 5 rows on 4 replicas leave one idle
    away = 4 * 4 * (rows - sizes[0])  # bytes of the rows that are not replica 0's
    every = sum(p.nbytes for p in model.parameters())
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    forward = {
        "parameters": others * every,
        "buffers": others * 4,
        "inputs": away,
        "outputs": away,
    }
    backward = {
        "gradients of parameters": others * trained,
        "gradients of inputs": away,
        "gradients of outputs": away,
    }
    out = replicas(x)
    assert replicas.moves.bytes_by_kind() == (forward if others else {})
    out.sum().backward()
    assert replicas.moves.bytes_by_kind() == (forward | backward if others else {})
    assert {(m.src, m.dst) for m in replicas.moves if m.kind == "outputs"} == {
        (k, 0) for k in range(1, others + 1)
    }
    assert {(m.src, m.dst) for m in replicas.moves} == {
        pair for k in range(1, others + 1) for pair in ((0, k), (k, 0))
    }
    replicas.moves.clear()
    with torch.no_grad():
        replicas(x)
    assert replicas.moves.bytes_by_kind() == (forward if others else {})
    assert DataParallel(model, [CPU] * n).moves is None  # unless asked
    if others:
        assert replicas.moves[0] == Move("parameters", 0, 1, 16)
        sent = [move for move in replicas.moves if move.kind == "parameters"]
        assert len(sent) == others * 7  # the tied weight once


class WithLoss(nn.Linear):
    """Computes its loss inside, of outputs that it returns, too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = super().forward(x)
        return out, out.square().mean()


def test_gradients_that_a_replica_uses_itself_do_not_travel():
    replicas = DataParallel(WithLoss(4, 3), [CPU] * 2, record=True)
    out, losses = replicas(torch.ones(8, 4))
    losses.mean().backward()
    moved = replicas.moves.bytes_by_kind()
    assert moved["outputs"] == 4 * 3 * 4 + 4  # four rows, and a loss
    # Nobody has used the gathered outputs: only the gradient of the loss came back.
    assert moved["gradients of outputs"] == 4
    replicas.moves.clear()
    out, losses = replicas(torch.ones(8, 4))
    (out.sum() + losses.mean()).backward()
    assert replicas.moves.bytes_by_kind()["gradients of outputs"] == 4 * 3 * 4 + 4

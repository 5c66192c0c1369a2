"""The ledger: every byte once, by kind."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from collections.abc import Callable

import cloudpickle
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ddp_course.launch import spawn
from ddp_course.measure import KINDS, Ledger, MemoryLog, label, resident
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.theory import model_states

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(autouse=True)
def no_collector():
    """Nothing that earlier tests have left is freed in the middle of a test.

    Labelled memory counts as long as it lives, also in a circle of references that only
    the garbage collector finds.
    """
    gc.disable()
    yield
    gc.enable()


class Odd(nn.Module):
    """Tied, shared, viewed, frozen parameters; a window into a large buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)  # 35 + 7
        self.second = nn.Linear(5, 7, bias=False)
        self.second.weight = self.first.weight
        self.third = nn.Linear(5, 7, bias=False)  # the same memory, another parameter
        self.third.weight = nn.Parameter(self.first.weight.detach())
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.low = nn.Parameter(torch.zeros(11, dtype=torch.bfloat16))
        # A view keeps all 100 numbers; an expanded one is but one number.
        self.register_buffer("window", torch.zeros(100)[40:42])
        self.register_buffer("wide", torch.zeros(1).expand(1000))
        self.register_buffer("bits", self.low.detach().view(torch.int16))
        self.register_buffer("meta", torch.zeros(50, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) + self.second(x) + self.third(x)
        return h * self.low.sum() + self.window.sum() + self.frozen.sum()


PARAMETERS = 4 * (35 + 7 + 3) + 2 * 11
OTHER = 4 * 100 + 4


def trained(optimizer: Callable = torch.optim.AdamW) -> tuple[nn.Module, object]:
    model = Odd()
    stepper = optimizer([p for p in model.parameters() if p.requires_grad])
    model(torch.ones(2, 5)).sum().backward()
    stepper.step()
    return model, stepper


def test_every_byte_counts_once():
    model, stepper = trained()
    # Two parameters over one memory have a gradient each, and states each.
    gradients = 4 * (35 + 7 + 35) + 2 * 11
    states = 2 * gradients + 4 * 4  # and four counts of steps
    assert resident(model, stepper) == {
        "parameters": PARAMETERS,
        "gradients": gradients,
        "optimizer states": states,
        "activations": 0,
        "communication buffers": 0,
        "other": OTHER,
    }
    assert resident(model, model, stepper, stepper) == resident(model, stepper)
    assert resident(model)["optimizer states"] == 0
    assert resident(model, stepper).total == PARAMETERS + gradients + states + OTHER
    stepper.zero_grad()
    assert resident(model, stepper)["gradients"] == 0
    model.first.weight.untyped_storage().resize_(0)  # freed, as stage 3 does
    assert resident(model)["parameters"] == PARAMETERS - 4 * 35


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("sgd", torch.optim.SGD),
        ("sgd-momentum", lambda ps: torch.optim.SGD(ps, momentum=0.9)),
        ("adamw", torch.optim.AdamW),
    ],
)
def test_one_process_keeps_what_the_formula_says(name, optimizer):
    model = build_gpt(GPTConfig(n_layer=1))
    stepper = optimizer(model.parameters())
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    model(tokens, tokens)[1].backward()
    stepper.step()
    counts = len(list(model.parameters())) if name == "adamw" else 0
    assert resident(model, stepper) == model_states(
        model.config.num_parameters, 1, 0, name, "fp32", step_counts=counts
    )


def test_a_master_copy_belongs_to_the_optimizer():
    model = nn.Linear(10, 10, bias=False).half()
    master = nn.Parameter(model.weight.detach().float())
    stepper = torch.optim.AdamW([master])
    master.grad = torch.zeros_like(master)
    stepper.step()
    ledger = resident(model, stepper)
    assert ledger["parameters"] == 2 * 100 and ledger["gradients"] == 4 * 100
    assert ledger["optimizer states"] == 3 * 4 * 100 + 4  # 12 bytes per parameter
    assert resident(stepper)["parameters"] == 4 * 100  # it knows of no other


# ---- labels ------------------------------------------------------------------------


def test_a_label_wins_and_goes_with_the_storage():
    before = resident()
    assert resident(nn.Linear(3, 4)).total == before.total + 64
    model, flat = nn.Linear(3, 4), torch.zeros(100)
    assert label(flat[:2], "communication buffers").shape == (2,)
    view = flat[50:]
    del flat
    assert resident()["communication buffers"] == 400  # the view keeps all of it
    label(model.weight, "other")
    assert resident(model) == {
        **dict.fromkeys(KINDS, 0),
        "parameters": 16,
        "communication buffers": 400,
        "other": 48,
    }
    label(view, "gradients")
    assert resident()["gradients"] == 400
    assert resident()["communication buffers"] == 0
    view.untyped_storage().resize_(0)
    assert resident()["gradients"] == 0
    view.untyped_storage().resize_(800)
    assert resident()["gradients"] == 800  # its label has stayed
    del view, model
    assert resident() == before
    label(torch.zeros(1000), "activations")  # nor does a label keep anything alive
    assert resident() == before


def test_tensors_made_of_others_count_as_what_they_are_made_of():
    table = nn.Embedding(100, 5, sparse=True)
    table(torch.tensor([0, 2])).sum().backward()
    sparse = label(table.weight.grad, "communication buffers")
    assert sparse.is_sparse
    assert resident()["communication buffers"] == 2 * 8 + 2 * 5 * 4
    assert label(torch.zeros(5, device="meta"), "other").is_meta
    del sparse, table
    assert resident()["communication buffers"] == 0


def test_bad_input_is_named():
    for wrong, words in {
        lambda: label(torch.zeros(1), "weights"): "kind is 'weights'; it can be 'para",
        lambda: Ledger({"weights": 1}): "kind is 'weights'",
        lambda: Ledger({"other": -1}): "other: -1 bytes",
        lambda: resident(nn.Linear(1, 1), 3): "^an object of type int is neither a mod",
        lambda: resident(nn.Linear(1, 1).state_dict()): "type OrderedDict is neither",
        lambda: resident(nn.Linear(1, 1).parameters()): "pass the model itself",
        lambda: MemoryLog(torch.zeros(3)): "neither a module nor an optimizer",
        lambda: MemoryLog().peak_of("all"): "kind is 'all'",
    }.items():
        with pytest.raises((ValueError, TypeError), match=words):
            wrong()


def test_a_ledger_is_a_mapping_that_prints_as_a_table():
    ledger = Ledger({"gradients": 1_234_567})
    assert tuple(ledger) == KINDS and len(ledger) == 6
    assert "weights" not in ledger and dict(ledger) == ledger
    lines = repr(ledger).splitlines()
    assert lines[1] == "gradients              1,234,567"
    assert lines[0].endswith("        -") and lines[6].startswith("total  ")
    assert len({len(line) for line in lines}) == 1
    assert pickle.loads(pickle.dumps(ledger)) == ledger == copy.copy(ledger)


# ---- against a model of memory -----------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(("make", "view", "tie", "free", "label", "empty")),
        st.integers(0, 20),
        st.integers(1, 30),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
@example([(what, 0, 1) for what in ("make", "view", "free", "label", "free")])
def test_any_makings_views_ties_and_ends(steps):
    """Follow random makings and ends with a model: storage number -> bytes and kind."""
    module = nn.Module()
    base = resident()
    owner: dict[str, int] = {}  # name of a parameter -> number of its storage
    sizes: dict[int, int] = {}
    labels: dict[int, str] = {}
    for number, (what, which, size) in enumerate(steps):
        names = list(owner)
        name = names[which % len(names)] if names else None
        if what == "make":
            setattr(module, f"p{number}", nn.Parameter(torch.zeros(size)))
            owner[f"p{number}"], sizes[number] = number, 4 * size
        elif name is None:
            continue
        elif what == "view":
            tensor = getattr(module, name).detach()
            cut = nn.Parameter(tensor[which % 3 :: 1 + size % 3].view(-1, 1))
            setattr(module, f"p{number}", cut)
            del tensor, cut  # else this function would keep a storage alive
            owner[f"p{number}"] = owner[name]
        elif what == "tie":
            setattr(module, f"p{number}", getattr(module, name))
            owner[f"p{number}"] = owner[name]
        elif what == "free":
            delattr(module, name)
            del owner[name]
        elif what == "label":
            labels[owner[name]] = KINDS[size % len(KINDS)]
            label(getattr(module, name), labels[owner[name]])
        else:  # nothing may look into it any more
            getattr(module, name).untyped_storage().resize_(0)
            sizes[owner[name]] = 0
            for other in [n for n in owner if owner[n] == owner[name]]:
                delattr(module, other)
                del owner[other]
        expected = dict(base)
        for storage in set(owner.values()):
            kind = labels.get(storage, "parameters")
            expected[kind] += sizes[storage]
        assert resident(module) == expected


# ---- memory that processes share, and PyTorch's own ledgers ------------------------


def shares_memory() -> list[tuple[int, int]]:
    """Return what was measured, and what is expected."""
    import torch.distributed as dist

    from ddp_course.collectives import shared_memory

    found = []
    flat = shared_memory.empty(1000)
    ends = resident()
    label(flat, "gradients")
    found.append((resident()["gradients"] - ends["gradients"], 4000))
    label(flat[:300], "communication buffers")
    now = resident()
    found.append((now["communication buffers"] - ends["communication buffers"], 1200))
    found.append((now["gradients"] - ends["gradients"], 2800))
    model = nn.Linear(10, 10, bias=False)
    model.weight.data = shared_memory.empty(200)[50:150].view(10, 10)
    found.append((resident(model)["parameters"], 400))
    model.register_buffer("part", model.weight.detach()[2:4])
    found.append((resident(model)["parameters"], 400))
    label(flat[10:500:7], "other")  # with gaps: from the first to the last of 70
    found.append((resident()["other"] - ends["other"], 4 * (69 * 7 + 1)))
    found.append(
        (flat.untyped_storage().nbytes() >= 4000 * dist.get_world_size(), True)
    )
    del now, flat
    return found


def census_of_fully_shard() -> tuple[dict, dict]:
    from torch.distributed.fsdp import fully_shard

    model = build_gpt(GPTConfig(n_layer=2, n_head=3, d_model=30))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    stepper = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    model(tokens, tokens)[1].backward()
    stepper.step()
    locals_ = [p.to_local() for p in model.parameters()]
    states = [v for s in stepper.state.values() for v in s.values()]
    states = [s.to_local() if hasattr(s, "to_local") else s for s in states]
    grads = [p.grad.to_local() for p in model.parameters()]
    by_hand = {"parameters": locals_, "gradients": grads, "optimizer states": states}
    return dict(resident(model, stepper)), {
        kind: sum(s.nbytes() for s in {t.untyped_storage() for t in ts})
        for kind, ts in by_hand.items()
    }


def test_spawn_shared_memory_and_dtensors_count_as_their_parts():
    for (ledger, by_hand), shared in spawn(
        lambda: (census_of_fully_shard(), shares_memory()), world_size=3
    ):
        assert [a for a, _ in shared] == [b for _, b in shared]
        whole = 4 * GPTConfig(n_layer=2, n_head=3, d_model=30).num_parameters
        assert {kind: ledger[kind] for kind in by_hand} == by_hand
        assert 0.3 * whole < ledger["parameters"] < 0.4 * whole


def test_as_memtracker_counts():
    """The same bytes of parameters, gradients, states and buffers."""
    from torch.distributed._tools.mem_tracker import MemTracker

    model = build_gpt(GPTConfig(n_layer=2, n_head=3, d_model=30))
    model.register_buffer("extra", torch.zeros(77))
    stepper = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    tracker = MemTracker()
    tracker.track_external(model, stepper)
    with tracker:
        model(tokens, tokens)[1].backward()
        stepper.step()
        found = [tracker.get_tracker_snapshot()]
    found.append(tracker.get_tracker_snapshot("peak"))
    counted, peak = (
        {str(kind.value): n for kind, n in list(of[torch.device("cpu")].items())[:-1]}
        for of in found
    )
    ledger = resident(model, stepper)
    assert counted["Parameter"] == ledger["parameters"]
    assert counted["Gradient"] == ledger["gradients"]
    assert counted["Optstate"] == ledger["optimizer states"]
    assert counted["Buffer"] == ledger["other"] == 4 * 77
    # Not everything is to be believed: at the peak it takes what a step of AdamW
    # computes with for states, and it takes the tokens for activations.
    assert peak["Optstate"] > counted["Optstate"]
    assert counted["Activation"] == tokens.nbytes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="counts a GPU's memory")
def test_as_the_gpus_allocator_counts():
    """The allocator deals in multiples of 512 bytes: so does this model."""
    gc.collect()
    elsewhere, before = resident().total, torch.cuda.memory_allocated()
    model = nn.Linear(128, 256, bias=False, device="cuda")
    stepper = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 128, device="cuda")).sum().backward()
    stepper.step()
    # cuBLAS keeps a workspace of its own from its first use on.
    torch._C._cuda_clearCublasWorkspaces()
    counted = torch.cuda.memory_allocated() - before
    kept = resident(model, stepper).total - elsewhere
    assert kept == counted == 3 * 4 * 128 * 256

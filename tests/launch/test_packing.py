"""What travels between processes, and the name of what cannot."""

from __future__ import annotations

import dataclasses
import functools
import io
import linecache
import pickle
import sys
import threading
import types
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_course.launch import CannotSendError, Topology, packing
from ddp_course.launch.packing import pack_call, pack_value, unpack_call, unpack_value


@dataclasses.dataclass
class Point:
    x: int
    y: torch.Tensor


class Owner:
    """Something with attributes."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def step(self):
        return vars(self)


def sent(fn, *args):
    """What a rank calls: `fn` and its arguments, after the journey."""
    there, its_args, _ = unpack_call(pack_call(fn, args))
    return there(*its_args)


def sent_back(value):
    return unpack_value(pack_value(value))


def of_main(source: str, name: str):
    """The function `name` of a script or notebook whose text is `source`."""
    main = types.ModuleType("__main__")
    before, sys.modules["__main__"] = sys.modules["__main__"], main
    try:
        exec(source, vars(main))
    finally:
        sys.modules["__main__"] = before
    return getattr(main, name)


@pytest.fixture
def bare_main(monkeypatch):
    """A `__main__` with nothing in it, as a rank has."""
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))


# ---- functions ---------------------------------------------------------------------


def test_lambdas_and_closures_take_their_surroundings_along():
    offset, table = 100, {"a": [1, 2]}

    def outer(k):
        return lambda x: x * k + offset + table["a"][1]

    assert sent(outer(10), 3) == 132


def test_what_travels_is_a_copy():
    table = {"a": 1}

    def change():
        table["a"] = 2
        return table

    assert sent(change) == {"a": 2}
    assert table == {"a": 1}


SCRIPT = """
import dataclasses, math
FACTOR = 3
@dataclasses.dataclass
class Mine:
    x: float
def helper(x):
    return Mine(math.floor(x) * FACTOR)
def recursive(n):
    return 1 if n == 0 else n * recursive(n - 1)
def main(x):
    return helper(x).x + recursive(3)
"""


def test_functions_of_main_go_with_all_they_refer_to(bare_main):
    assert sent(of_main(SCRIPT, "main"), 2.5) == 12


def test_plain_pickle_would_not_do(bare_main):
    """A planted mistake: the standard library's pickle instead of cloudpickle."""
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.loads(pickle.dumps(of_main(SCRIPT, "main")))


def test_functions_of_modules_go_by_name_and_are_never_stale():
    data = pack_call(torch.nn.functional.gelu, ())
    assert unpack_call(data)[0] is torch.nn.functional.gelu
    data = pack_call(Topology.place, ())
    assert b"ddp_course.launch.topology" in data
    assert len(data) < 500, "the function went by value"


def test_methods_and_partial_functions():
    assert sent(Owner(x=3).step) == {"x": 3}
    assert sent(functools.partial(max, 5), 3) == 5


def test_arguments_that_are_the_same_thing_stay_the_same_thing():
    shared = torch.zeros(2)
    assert sent(lambda a, b: a is b, shared, shared)


# ---- the notebook's cells ----------------------------------------------------------

CELL = "/tmp/ipykernel_4242/987654321.py"


@pytest.fixture
def notebook(monkeypatch):
    """A notebook in which one cell has run: In[7]."""
    source = "def f():\n    return 1 / 0\n"

    def called(file):
        return ("Cell", "In[7]") if file == CELL else None

    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=called))
    ipython = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    lines = source.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, CELL, (len(source), 1.0, lines, CELL))
    names = {}
    exec(compile(source, CELL, "exec"), names)
    return names["f"]


def test_cells_travel_with_their_source_and_their_name(notebook):
    data = pack_call(notebook, ())
    del linecache.cache[CELL]
    _, _, labels = unpack_call(data)
    assert labels == {CELL: "Cell In[7]"}
    assert linecache.getline(CELL, 2) == "    return 1 / 0\n"
    linecache.checkcache()  # tracebacks do this before they look
    assert linecache.getline(CELL, 2) == "    return 1 / 0\n"


def test_without_a_notebook_no_source_travels(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", None)
    assert unpack_call(pack_call(print, ()))[2] == {}


# ---- results -----------------------------------------------------------------------

dtypes = st.sampled_from(
    [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]
)
shapes = st.lists(st.integers(0, 4), max_size=3)
tensors = st.builds(
    lambda shape, dtype: (torch.rand(shape) * 9).to(dtype), shapes, dtypes
)
plain = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.binary()
values = st.recursive(
    plain | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=6,
)


def same(a, b) -> bool:
    """Equal, tensors to the bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@given(values)
def test_values_come_back_as_they_were(value):
    assert same(value, sent_back(value))


def test_modules_come_back_with_their_weights():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
    back = sent_back(module)
    x = torch.randn(4, 3)
    assert torch.equal(back(x), module(x))
    assert [p.requires_grad for p in back.parameters()] == [True, True]


def test_dataclasses_come_back():
    back = sent_back([Point(1, torch.ones(2))])[0]
    assert isinstance(back, Point)
    assert (back.x, back.y.tolist()) == (1, [1.0, 1.0])


def test_tensors_with_a_graph_come_back_without_it():
    leaf = torch.ones(2, requires_grad=True)
    assert sent_back(leaf * 3).tolist() == [3.0, 3.0]


def test_views_of_a_tensor_come_back_right_and_still_share_it():
    big = torch.arange(12.0).reshape(3, 4)
    views = {"column": big[:, 1], "turned": big.T, "row": big[2], "every": big[::2]}
    back = sent_back(views)
    assert same(views, back)
    back["row"][1] = -1.0
    assert back["column"][2] == -1.0, "memory that was shared no longer is"


def test_a_small_view_of_a_big_tensor_is_sent_right():
    big = torch.zeros(1_000_000)
    big[500] = 7.0
    assert sent_back(big[500:501]).tolist() == [7.0]


def test_functions_and_classes_of_main_can_be_returned(bare_main):
    assert sent_back(of_main(SCRIPT, "main"))(2.5) == 12
    assert sent_back(of_main(SCRIPT, "Mine")(4)).x == 4


class TwoArguments(Exception):
    """The classic: it can be pickled, but not unpickled."""

    def __init__(self, a, b):
        super().__init__(a)


def test_a_value_that_cannot_be_read_back_says_so():
    data = pack_value(TwoArguments(1, 2))
    with pytest.raises(CannotSendError, match="cannot be read back"):
        unpack_value(data)


# ---- what cannot be sent -----------------------------------------------------------


class Slotted:
    """No __dict__ to look into."""

    __slots__ = ("lock",)

    def __init__(self, lock):
        self.lock = lock


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.layer.guard = threading.Lock()


def some_generator():
    yield 1


LOCK = threading.Lock()
CULPRITS = [
    # a value, and how what is wrong with it is called; {} is the value's own name
    (LOCK, "{} is a _thread.lock"),
    ([1, LOCK], "{}[1] is a _thread.lock"),
    ({"a": 1, "b": LOCK}, "{}['b'] is a _thread.lock"),
    ({"a": [{"deep": (1, LOCK)}]}, "{}['a'][0]['deep'][1] is a _thread.lock"),
    ({2: {None: LOCK}}, "{}[2][None] is a _thread.lock"),
    (Owner(x=1, guard=LOCK), "{}.guard is a _thread.lock"),
    (Owner(inner=Owner(items=[LOCK])), "{}.inner.items[0] is a _thread.lock"),
    (Point(1, LOCK), "{}.y is a _thread.lock"),
    (Slotted(LOCK), "{} is a test_packing.Slotted"),
    (SimpleNamespace(at=SimpleNamespace(guard=LOCK)), "{}.at.guard is a _thread.lock"),
    (Net(), "{}._modules['layer'].guard is a _thread.lock"),
    ([some_generator()], "{}[0] is a generator"),
    ({"ready": threading.Event()}, "{}['ready']._cond._lock is a _thread.lock"),
]
ids = [name for _, name in CULPRITS]


@pytest.mark.parametrize(("value", "name"), CULPRITS, ids=ids)
def test_a_result_that_cannot_be_sent_is_named_by_its_path(value, name):
    with pytest.raises(CannotSendError) as caught:
        pack_value(value)
    assert str(caught.value) == (
        f"the function returned something that cannot be sent back: "
        f"{name.format('the value')}"
    )


@pytest.mark.parametrize(("value", "name"), CULPRITS, ids=ids)
def test_an_argument_that_cannot_be_sent_is_named_by_its_path(value, name):
    with pytest.raises(CannotSendError) as caught:
        pack_call(print, (1, value))
    assert str(caught.value) == f"cannot be sent to the ranks: {name.format('args[1]')}"


def test_a_variable_of_a_closure_that_cannot_be_sent_is_named():
    guard = threading.Lock()

    def train():
        return guard

    with pytest.raises(CannotSendError, match="train uses guard, which is a _thread"):
        pack_call(train, ())


def test_a_global_of_a_cell_that_cannot_be_sent_is_named():
    source = "import threading\nguard = threading.Lock()\ndef f(): return guard\n"
    with pytest.raises(CannotSendError, match="f uses guard, which is a _thread.lock"):
        pack_call(of_main(source, "f"), ())


def test_the_part_of_a_variable_that_cannot_be_sent_is_named():
    table = {"fine": 1, "guard": threading.Lock()}
    with pytest.raises(CannotSendError) as caught:
        pack_call(lambda: table, ())
    assert "uses table['guard'], which is a _thread.lock" in str(caught.value)


def test_what_a_helper_function_uses_is_named():
    source = (
        "import threading\nguard = threading.Lock()\n"
        "def helper(): return guard\ndef f(): return helper()\n"
    )
    with pytest.raises(CannotSendError, match="helper uses guard"):
        pack_call(of_main(source, "f"), ())


def test_what_a_method_belongs_to_is_looked_into():
    with pytest.raises(CannotSendError, match="guard is a _thread.lock"):
        pack_call(Owner(x=1, guard=threading.Lock()).step, ())


def test_the_arguments_of_a_partial_function_are_looked_into():
    with pytest.raises(CannotSendError, match=r"\['guard'\] is a _thread.lock"):
        pack_call(functools.partial(print, {"guard": threading.Lock()}), ())


def test_an_error_is_about_the_first_thing_at_fault_only():
    with pytest.raises(CannotSendError) as caught:
        pack_value([threading.Lock(), some_generator()])
    assert "generator" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_was_wrong_underneath_is_not_shown_in_between():
    with pytest.raises(CannotSendError) as caught:
        pack_value(threading.Lock())
    assert caught.value.__suppress_context__


# ---- things that refer to themselves -----------------------------------------------


def test_a_list_that_holds_itself_can_be_sent():
    loop = [1]
    loop.append(loop)
    back = sent_back(loop)
    assert back[1] is back


@pytest.mark.timeout(10)
def test_in_a_list_that_holds_itself_the_culprit_is_found():
    loop = [1]
    loop += [loop, threading.Lock()]
    with pytest.raises(CannotSendError, match=r"the value\[2\] is a _thread.lock"):
        pack_value(loop)


@pytest.mark.timeout(10)
def test_in_things_that_hold_each_other_the_culprit_is_found():
    """A trainer and its model that know each other: the model is not at fault."""
    trainer, model = Owner(), Owner()
    trainer.model, model.trainer = model, trainer
    trainer.guard = threading.Lock()
    with pytest.raises(CannotSendError, match="the value.guard is a _thread.lock"):
        pack_value(trainer)


@pytest.mark.timeout(10)
def test_in_many_things_that_all_know_each_other_the_culprit_is_found():
    """Every way from one to the other must not be walked: there are 20!."""
    crowd = [Owner() for _ in range(20)]
    for one in crowd:
        one.friends = crowd
    crowd[-1].guard = threading.Lock()
    with pytest.raises(CannotSendError, match="guard is a _thread.lock"):
        pack_value(crowd[0])


@pytest.mark.timeout(10)
def test_what_is_too_deep_to_be_sent_says_so():
    deep = []
    for _ in range(20_000):
        deep = [deep]
    with pytest.raises(CannotSendError) as caught:
        pack_value(deep)
    assert len(str(caught.value)) < 1000


def test_tensors_arrive_on_the_cpu(monkeypatch):
    asked = {}
    load = torch.load

    def spy(file, **how):
        asked.update(how)
        return load(file, **how)

    monkeypatch.setattr(packing.torch, "load", spy)
    sent_back(torch.ones(1))
    assert asked["map_location"] == "cpu"


def test_the_bytes_of_a_result_are_what_torch_save_writes():
    read = torch.load(io.BytesIO(pack_value({"a": torch.ones(2)})), weights_only=True)
    assert read["a"].tolist() == [1.0, 1.0]

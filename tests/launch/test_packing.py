"""What travels between processes, and the name of what cannot."""

import dataclasses
import functools
import io
import linecache
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
    unpacked, its_args, _ = unpack_call(pack_call(fn, args))
    return unpacked(*its_args)


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


def test_code_keeps_the_file_that_tracebacks_name(bare_main):
    cell = compile("def outer():\n    return lambda: 0", "the cell", "exec")
    outer, _, _ = unpack_call(pack_call(of_main(cell, "outer"), ()))
    assert [f.__code__.co_filename for f in (outer, outer())] == ["the cell"] * 2


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


def test_modules_come_back_with_their_weights_and_as_torch_save_writes_them():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
    back = sent_back(module)
    x = torch.randn(4, 3)
    assert torch.equal(back(x), module(x))
    assert [p.requires_grad for p in back.parameters()] == [True, True]
    read = torch.load(io.BytesIO(pack_value({"a": torch.ones(2)})), weights_only=True)
    assert read["a"].tolist() == [1.0, 1.0]


def test_tensors_arrive_on_the_cpu(monkeypatch):
    asked, load = {}, torch.load
    spy = lambda file, **how: asked.update(how) or load(file, **how)  # noqa: E731
    monkeypatch.setattr(packing.torch, "load", spy)
    sent_back(torch.ones(1))
    assert asked["map_location"] == "cpu"


def test_views_of_a_tensor_come_back_right_and_still_share_it():
    big = torch.arange(12.0).reshape(3, 4)
    views = {"column": big[:, 1], "turned": big.T, "row": big[2], "every": big[::2]}
    back = sent_back(views)
    assert same(views, back)
    back["row"][1] = -1.0
    assert back["column"][2] == -1.0, "memory that was shared no longer is"


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


@pytest.mark.parametrize(("value", "name"), CULPRITS, ids=[n for _, n in CULPRITS])
def test_what_cannot_be_sent_is_named_by_its_path(value, name):
    with pytest.raises(CannotSendError) as caught:
        pack_value(value)
    start, end = str(caught.value).split(" that cannot be sent back: ")
    assert start.startswith("the function returned an object of type ")
    assert start.endswith(type(value).__name__)
    remedy = "Return tensors, numbers or a state_dict()"
    assert end == f"{name.format('the value')}. {remedy}"
    assert caught.value.__suppress_context__
    with pytest.raises(CannotSendError) as caught:
        pack_call(print, (1, value))
    assert str(caught.value) == f"cannot be sent to the ranks: {name.format('args[1]')}"


def a_closure(guard):
    return lambda: guard


CELL_WITH_A_LOCK = (
    "import threading\nguard = threading.Lock()\n"
    "def helper(): return guard\ndef f(): return helper()\n"
)


@pytest.mark.parametrize(
    ("fn", "what"),
    [
        (a_closure(LOCK), "uses guard, which is a _thread.lock"),
        (a_closure({"ok": 1, "a": LOCK}), "uses guard['a'], which is a _thread.lock"),
        (of_main(CELL_WITH_A_LOCK, "helper"), "helper uses guard, which is a _thread"),
        (of_main(CELL_WITH_A_LOCK, "f"), "helper uses guard"),
        (Owner(x=1, guard=LOCK).step, "guard is a _thread.lock"),
        (functools.partial(print, {"guard": LOCK}), "['guard'] is a _thread.lock"),
        (functools.partial(a_closure(LOCK), 1), "uses guard, which is a _thread.lock"),
    ],
)
def test_what_a_function_uses_and_cannot_be_sent_is_named(fn, what):
    with pytest.raises(CannotSendError) as caught:
        pack_call(fn, ())
    assert what in str(caught.value) and "\n" not in str(caught.value)


# ---- things that refer to themselves -----------------------------------------------


def crowd(size: int) -> list[Owner]:
    """Return trainers and models that all know each other; only the last is at fault.

    Every way from one to the other must not be walked: of 20 there are 20!.
    """
    friends = [Owner() for _ in range(size)]
    for one in friends:
        one.friends = friends
    friends[-1].guard = threading.Lock()
    return friends


def test_in_things_that_hold_each_other_the_culprit_is_found():
    loop = [1]
    loop.append(loop)
    back = sent_back(loop)
    assert back[1] is back
    loop.append(threading.Lock())
    for value in (
        loop,
        crowd(2)[1],
        crowd(20)[0],
        [threading.Lock(), some_generator()],
    ):
        with pytest.raises(CannotSendError, match=r"is a _thread\.lock\. Return"):
            pack_value(value)


def test_what_is_too_deep_to_be_sent_says_so():
    deep = []
    for _ in range(20_000):
        deep = [deep]
    with pytest.raises(CannotSendError) as caught:
        pack_value(deep)
    assert len(str(caught.value)) < 1000


TWICE = """
import functools, torch
from torch.autograd.function import once_differentiable

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return 2 * gradient

@torch.no_grad()
def without_graph(x, *, more=1):
    "Adds."
    return x + more

def gradient():
    x = torch.ones(2, requires_grad=True)
    Twice.apply(x).sum().backward()
    summed = without_graph(x, more=2)
    return x.grad.tolist(), summed.requires_grad, without_graph.__doc__
"""


def test_what_a_librarys_decorator_made_travels_without_the_library(monkeypatch):
    fn = of_main(TWICE, "gradient")
    assert sent(fn) == ([2.0, 2.0], False, "Adds.")
    assert len(pack_call(fn, ())) < 10_000
    monkeypatch.setattr(packing, "_Pickler", packing.cloudpickle.Pickler)  # the plant
    with pytest.raises((AttributeError, TypeError)):
        sent(fn)


NESTED = """
from torch.autograd.function import once_differentiable
def inside():
    class Twice:
        @once_differentiable
        def backward(ctx, gradient):
            return 2 * gradient
    return Twice.backward.__name__
"""


def test_what_the_body_of_a_class_inside_a_function_names_goes_along(monkeypatch):
    assert sent(of_main(NESTED, "inside")) == "backward"
    plain = packing.cloudpickle.cloudpickle
    monkeypatch.setattr(plain, "GLOBAL_OPS", plain.GLOBAL_OPS[:-1])  # the plant
    plain._extract_code_globals_cache.clear()
    with pytest.raises(NameError):
        sent(of_main(NESTED, "inside"))
    plain._extract_code_globals_cache.clear()

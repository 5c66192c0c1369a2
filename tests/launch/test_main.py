"""`python -m ddp_course.launch`, as torchrun calls it: what it is told to call."""

import sys
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ddp_course.launch import __main__ as main_module
from ddp_course.launch import here
from ddp_course.launch.__main__ import (
    find_function,
    parse_arguments,
    print_in_rank_order,
)
from ddp_course.launch.torchrun import check_variables, join, report_cause_first

main = main_module.main.__wrapped__  # without what torchrun records of its end


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    """Let `find_function` change the search path, and undo it."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """A working folder with a few modules in it."""
    (tmp_path / "readers_script.py").write_text(
        "def train(steps=1, name='x'):\n    return steps, name\nNUMBER = 3\n"
    )
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_missing\n")
    (tmp_path / "is_broken.py").write_text("raise RuntimeError('while importing')\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("readers_script", "needs_more", "is_broken"):
        sys.modules.pop(name, None)


# ---- the function ------------------------------------------------------------------


def test_a_function_of_the_course_or_of_the_working_folder_is_found(scripts):
    assert find_function("ddp_course.launch.topology:here") is here
    assert find_function("readers_script:train")(2) == (2, "x")
    with pytest.raises(RuntimeError, match="while importing"):  # its own error
        find_function("is_broken:train")


FORM = "is not of the form MODULE:FUNCTION"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", FORM),
        ("readers_script", FORM),
        ("readers_script:", FORM),
        (":train", FORM),
        (".relative:train", FORM),
        ("there_is_no_such_module:train", "no module 'there_is_no_such_module'"),
        ("ddp_course.nowhere:train", "no module 'ddp_course.nowhere'"),
        ("nowhere.at_all:train", "no module 'nowhere'"),
        ("needs_more:train", "no module 'a_package_that_is_missing'"),
        ("readers_script:nope", "module 'readers_script' has no function 'nope'"),
        ("readers_script:NUMBER", "has no function 'NUMBER'"),
        ("readers_script:train:twice", "has no function 'train:twice'"),
    ],
)
def test_what_is_no_function_is_named(name, problem, scripts):
    with pytest.raises(ValueError) as caught:
        find_function(name)
    assert problem in str(caught.value)
    assert "has no function" in problem or repr(name) in str(caught.value)


# ---- its arguments -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "args", "kwargs"),
    [
        ([], [], {}),
        (["12"], [12], {}),
        (["-3"], [-3], {}),
        (["0.5", "1e-3"], [0.5, 1e-3], {}),
        (["tiny"], ["tiny"], {}),
        (['"12"'], ["12"], {}),
        (["None", "True"], [None, True], {}),
        (["[1, 2]"], [[1, 2]], {}),
        (["steps=5"], [], {"steps": 5}),
        (["8", "steps=5", "name=tiny"], [8], {"steps": 5, "name": "tiny"}),
        (["text=a=b"], [], {"text": "a=b"}),
        (["text="], [], {"text": ""}),
        (["path=/tmp/x.pt"], [], {"path": "/tmp/x.pt"}),
        (["1=2"], ["1=2"], {}),
        (["--x=2"], ["--x=2"], {}),
        *(
            ([word], [word], {})  # no Python values
            for word in ("{[]: 1}", "{{}}", "[" * 300, "(" * 5000, "-" * 20_000 + "1")
        ),
        (["a\0b", "é", "1 +"], ["a\0b", "é", "1 +"], {}),
    ],
    ids=lambda x: ascii(x)[:20],
)
def test_arguments_are_python_values_or_words(words, args, kwargs):
    assert parse_arguments(words) == (args, kwargs)


literals = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=5,
)


def finite(value) -> bool:
    return "inf" not in repr(value)


@given(literals.filter(finite), literals.filter(finite))
def test_every_value_that_python_can_write_can_be_given(one, two):
    assert parse_arguments([repr(one), f"name={two!r}"]) == ([one], {"name": two})


@given(st.lists(st.text()))
def test_any_words_are_understood_or_refused_in_clear(words):
    try:
        args, kwargs = parse_arguments(words)
    except ValueError as error:
        assert "comes after an argument of the form name=value" in str(error)
    else:
        assert len(args) + len(kwargs) <= len(words)
        assert all(name.isidentifier() for name in kwargs)


def test_rank_0_prints_what_each_returned_in_rank_order_and_shortened(
    monkeypatch, capsys
):
    values = [1.5, "two", {"a": 3}, None, "", 0, ["x" * 10_000] * 1000]
    store = dist.HashStore()
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(len(values)))
    for rank in reversed(range(len(values))):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert capsys.readouterr().out == "", "it is for rank 0 to print"
        print_in_rank_order(values[rank], store)
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines == [
        "[rank 0] returned 1.5",
        "[rank 1] returned 'two'",
        "[rank 2] returned {'a': 3}",
        "[rank 4] returned ''",
        "[rank 5] returned 0",
    ]
    assert len(last) < 2000


# ---- all of it ---------------------------------------------------------------------


@pytest.fixture
def not_under_torchrun(monkeypatch):
    for name in ("RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nope"], "'nope' is not of the form MODULE:FUNCTION"),
        (["a.py"], "MODULE:FUNCTION; a program that creates its process group runs by"),
        (["there_is_no_such_module:f"], "no module 'there_is_no_such_module'"),
        (["math:pi"], "module 'math' has no function 'pi'"),
        (
            ["math:sqrt", "x=1", "2"],
            "'2' comes after an argument of the form name=value",
        ),
        (["math:sqrt", "4"], "start it with torchrun"),
    ],
)
def test_errors_are_one_clear_line_and_an_exit_code(
    words, message, not_under_torchrun, capsys
):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_a_rank_that_lacks_a_variable_is_refused_before_it_waits(monkeypatch, missing):
    """Without RANK a process was rank 0, and waited for the others for ten minutes."""
    values = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    check_variables()
    monkeypatch.delenv(missing)
    with pytest.raises(ValueError, match=rf"^{missing}: not set. Start this program"):
        join()
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    if missing == "RANK":  # SLURM has set it under its own name
        check_variables()


@pytest.mark.parametrize(
    ("rank", "size"), [("x", "2"), ("2", "2"), ("0", "0"), ("0", "")]
)
def test_a_rank_outside_of_the_world_is_refused_before_it_waits(
    monkeypatch, rank, size
):
    """Rank 2 of 2 waited for ten minutes, and "x" ended in a message of `int`."""
    values = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "MASTER_ADDR": "::1",
        "MASTER_PORT": "1",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    words = rf"^RANK is '{rank}' and WORLD_SIZE '{size}'; they must be whole"
    with pytest.raises(ValueError, match=words):
        check_variables()  # `join` begins with it


def test_help_shows_an_example(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "MODULE:FUNCTION" in (output := capsys.readouterr().out)
    assert "torchrun --nproc-per-node 4 -m ddp_course.launch ddp_course." in output


@pytest.fixture
def rank_of_torchrun(monkeypatch):
    """A world of one, whose store is here; without a process group."""
    for name, value in here({}).environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(main_module, "join", dist.HashStore)
    return monkeypatch


def test_the_function_is_called_between_joining_and_leaving(rank_of_torchrun, capsys):
    left = []
    rank_of_torchrun.setattr("torch.distributed.is_initialized", lambda: True)
    rank_of_torchrun.setattr("torch.distributed.get_rank", lambda: 0)
    rank_of_torchrun.setattr("torch.distributed.get_world_size", lambda: 1)
    rank_of_torchrun.setattr("torch.distributed.barrier", lambda: left.append("met"))
    rank_of_torchrun.setattr(
        "torch.distributed.destroy_process_group", lambda: left.append("left")
    )
    main(["math:pow", "2", "10"])
    assert capsys.readouterr().out == "[rank 0] returned 1024.0\n"
    assert left == ["met", "left"]


def test_a_function_that_destroys_the_process_group_itself_is_fine(
    rank_of_torchrun, capsys
):
    """Every script for torchrun ends with destroy_process_group()."""
    assert not dist.is_initialized()
    main(["math:sqrt", "4"])
    assert capsys.readouterr().out == "[rank 0] returned 2.0\n"


@pytest.mark.parametrize(
    "kind", [RuntimeError, dist.DistNetworkError, dist.DistBackendError]
)
def test_a_rank_that_lost_a_peer_fails_late_and_others_at_once(kind, monkeypatch):
    slept: list[float] = []
    clock = SimpleNamespace(sleep=slept.append)
    monkeypatch.setattr("ddp_course.launch.torchrun.time", clock)
    with pytest.raises(kind), report_cause_first(patience=7.0):
        raise kind("Connection reset by peer")
    assert slept == [7.0]
    with pytest.raises(ValueError), report_cause_first(patience=7.0):
        raise ValueError("Connection reset by peer")  # the program's own
    assert slept == [7.0]


def test_a_strict_program_imports_what_lies_beside_it(tmp_path, monkeypatch, capsys):
    """As under `python program.py`, wherever it is started."""
    (tmp_path / "beside_the_program.py").write_text("NUMBER = 3\n")
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom beside_the_program import NUMBER\n"
        "print(NUMBER, *sys.argv[1:])\n"
    )
    for name in ("init_process_group", "new_group", "batch_isend_irecv"):
        for module in (dist, dist.distributed_c10d):  # `run_program` replaces them
            monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(sys, "argv", sys.argv)
    main(["--strict", str(program), "7"])
    assert capsys.readouterr().out == "3 7\n"
    del sys.modules["beside_the_program"]

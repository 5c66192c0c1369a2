"""A style check that helps a writer of the package; reading it aloud is still needed.

Names say what they hold, docstrings begin with what is done (functions) or with what a
thing is (classes), comments are whole thoughts, and a class name has one meaning.
"""

import ast
import io
import json
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_architecture import FLOORS, PACKAGE

BANNED = {"told", "made", "given", "there", "whose", "meanwhile", "held", "played"}

# A docstring of a function begins with one of these verbs. Add a verb of the field here
# when you need one. Not: tell, say, make, take, give, go, put, look, do, hand, bring.
_VERBS = """
    accept accumulate acknowledge add adjust advance agree all-gather all-reduce
    allocate allow announce append apply ask assemble assert assign attend average await
    barrier begin benchmark bind block broadcast build cache call cancel cast check
    choose clear clip close collect combine compare complete compress compute
    concatenate configure connect construct continue convert copy count create cut deal
    decide decode decompress decorate delay delete deliver derive describe destroy
    detach detect disable discard display divide download draw drop embed enable enclose
    encode end ensure enter enumerate estimate evaluate exchange execute exit expect
    explain export expose extract fail fetch fill find finish fit flatten flush fold
    follow forbid force format forward free gather generate get group grow guard halve
    hash hatch ignore import increment initialise initialize insert inspect install
    interrupt invert iterate join judge keep kill label launch let limit list listen
    load locate lock log lower map mark mask match measure merge move multiply name
    negate normalise normalize notify offload open order overwrite pack pad parse
    partition pass patch pause perform permute pick pickle place plan play plot poll pop
    post predict prefetch prepare preserve prevent print process profile project protect
    prove publish pull push quantize query queue raise read receive record recover
    reduce reduce-scatter refuse register reject release reload remember remove rename
    render reorder repeat replace replay report request require rescale reserve reset
    reshape resolve respond restart restore resume retry return reuse rotate round run
    sample save scale scatter schedule search select send serialize serve set shard
    share shorten show shrink shuffle shut sign signal simulate skip sleep slice sort
    split stack start step stop store subtract sum suspend swap switch synchronize test
    time toggle trace train transfer transpose traverse treat trim truncate try turn
    undo unflatten unpack unpickle unregister unscale update use validate verify visit
    wait walk warn watch weigh wrap write yield zero
"""

# A class is a thing: its docstring does not begin with one of these, nor with a verb.
_NO_NOUN = """
    what who whose whom which where when why how whether that of as if let lets not only
    within told made given gives give tells tell says say makes make takes take puts put
    goes go brings stands looks raised cut
"""
VERBS, NO_NOUN = set(_VERBS.split()), set(_NO_NOUN.split())
BEHIND_A_NOUN = {"of", "that", "which", "with", "in", "on", "for", "from", "and", "or"}

Found = list[tuple[int, str]]


def room(path: Path) -> str:
    """Return the folder below the package, or the file that lies directly in it."""
    where = path.relative_to(PACKAGE)
    return where.name if len(where.parts) == 1 else where.parent.as_posix()


FILES = {path: room(path) for path in sorted(PACKAGE.rglob("*.py"))}


def names_of(node: ast.AST) -> Iterator[str]:
    """Yield the names that this node defines: variables, arguments, fields, imports."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr
    elif isinstance(node, ast.alias) and node.asname:
        yield node.asname


def bad_names(source: str) -> Found:
    return [
        (node.lineno, f"the name {name!r} says nothing: what does it hold?")
        for node in ast.walk(ast.parse(source))
        for name in names_of(node)
        if name.strip("_").lower() in BANNED
    ]


def words(text: str) -> list[str]:
    """Return the first two words, in lower case, without what stands around them."""
    return [word.strip("`'\"*(.,:;!?)").lower() for word in (*text.split()[:2], "", "")]


def decorators(node: ast.FunctionDef) -> str:
    return " ".join(ast.unparse(one) for one in node.decorator_list)


def is_a_verb(first: str, second: str) -> bool:
    """Return whether a class is described by what it does: "Sends", but "Calls of"."""
    verb = first in VERBS or any(
        first.removesuffix(end) in VERBS
        for end in ("s", "es", "ing")
        if first != "pass"
    )
    return verb and second not in BEHIND_A_NOUN


def bad_docstrings(source: str) -> Found:
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if not (text := ast.get_docstring(node)):
            continue
        first, second, *_ = words(text)
        line = f"{node.name}: {text.splitlines()[0]!r} does not begin with"
        if isinstance(node, ast.ClassDef):
            if first in NO_NOUN or is_a_verb(first, second):
                found.append((node.lineno, f"{line} a noun"))
        elif "property" in decorators(node):
            if first != "whether" and first in NO_NOUN:
                found.append((node.lineno, f"{line} a noun or a verb"))
        elif "exercise(" in decorators(node):
            continue  # the text of a question
        elif first not in VERBS:
            listed = "a verb of VERBS in tests/test_plain_words.py, as Return or Count"
            found.append((node.lineno, f"{line} {listed}"))
    return found


def bad_comments(source: str) -> Found:
    """Return comments that begin with no noun and no verb; not their further lines."""
    found, before = [], -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, own = token.start[0], token.line.lstrip().startswith("#")
        first, *_ = words(token.string.lstrip("#: "))
        if first in {"of", "whose", "what"} and before != line - 1:
            message = f"{token.string!r} begins with no noun and no verb"
            found.append((line, message))
        before = line if own else -1
    return found


RULES = (bad_names, bad_docstrings, bad_comments)


def classes(source: str) -> list[str]:
    """Return the public classes of a module, but not those within functions."""
    return [
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


def double_meanings(sources: dict[str, str]) -> dict[str, list[str]]:
    """Return the public class names that several files define, and these files."""
    where: dict[str, list[str]] = {}
    for path, source in sources.items():
        for name in classes(source):
            where.setdefault(name, []).append(path)
    return {name: paths for name, paths in where.items() if len(paths) > 1}


@pytest.mark.parametrize("name", sorted(set(FILES.values())))
def test_a_room_is_written_in_plain_words(name):
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {message}"
        for path, where in FILES.items()
        if where == name
        for rule in RULES
        for line, message in rule(path.read_text())
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def code_elsewhere() -> Iterator[tuple[str, str]]:
    """Yield (place, source) of tests, the authors' tools and notebooks' cells."""
    root = PACKAGE.parent
    for folder in ("tests", "tools", "docs"):
        for path in sorted((root / folder).rglob("*.py")):
            yield str(path.relative_to(root)), path.read_text()
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        for number, cell in enumerate(json.loads(path.read_text())["cells"]):
            if cell["cell_type"] == "code":
                yield f"{path.name}, cell {number}", "".join(cell["source"])


def test_names_in_tests_tools_and_notebooks_are_plain():
    sources = list(code_elsewhere())
    assert len(sources) > 1000, "nothing was read"
    wrong = [
        f"{place}, line {line}: {message}"
        for place, source in sources
        for line, message in bad_names(source)
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_a_class_name_has_one_meaning():
    """On floors 0 to 3; benches and commands may have classes of the same names."""
    low = {name for floor in FLOORS[:4] for name in floor}
    sources = {
        str(path.relative_to(PACKAGE)): path.read_text()
        for path, where in FILES.items()
        if where.removesuffix(".py").split("/")[0] in low
    }
    twice = double_meanings(sources)
    assert twice == {}, f"two classes of one name; rename one: {twice}"


@pytest.mark.parametrize(
    "source",
    [
        "told = {}",
        "def f(given): ...",
        "def f(*, held=1): ...",
        "def made(): ...",
        "class Played: ...",
        "class A:\n    there: int",
        "self._meanwhile = 1",
        "for whose in x: ...",
        "f = lambda told: 0",
        "if (made := f()): ...",
        "import a as there",
    ],
)
def test_a_planted_name_is_seen(source):
    assert len(bad_names(source)) == 1


def test_good_names_pass():
    assert bad_names("results = f(args, told_ranks)\nself.owner = held.x") == []


@pytest.mark.parametrize(
    "source",
    [
        'def f():\n    """The bytes of a rank."""',
        'def f():\n    """Returns the bytes of a rank."""',
        'def f():\n    """Whether the ranks agree."""',
        'def f():\n    """Tell the ranks."""',
        'async def f():\n    """On a GPU, an event."""',
        'class A:\n    @property\n    def f(self):\n        """What it needs."""',
        'class A:\n    """What a rank sends."""',
        'class A:\n    """Who waits."""',
        'class A:\n    """Sends buckets."""',
        'class A:\n    """Send buckets."""',
        'class A:\n    """Watching the ranks."""',
        'class A:\n    """Cut along one dimension."""',
        'class A:\n    """Calls a module."""',
    ],
)
def test_a_planted_docstring_is_seen(source):
    assert len(bad_docstrings(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        'def f():\n    """Return the bytes of a rank."""',
        'def f():\n    """Return, per rank, the bytes."""',
        'def f():\n    """All-reduce the bucket."""',
        'class A:\n    @property\n    def f(self):\n        """The unit\'s bytes."""',
        '@exercise("mine")\ndef f():\n    """`mine(x)`: return what the rank sends."""',
        'class A:\n    """A bucket of gradients."""',
        'class A:\n    """Calls of one rank, in order."""',
        'class A:\n    """Parameters that no forward used."""',
    ],
)
def test_good_docstrings_pass(source):
    assert bad_docstrings(source) == []


@pytest.mark.parametrize(
    "comment",
    ["# of the last one", "x = 1  # whose", "#: What is told", "x  # a\n# of"],
)
def test_a_planted_comment_is_seen(comment):
    assert len(bad_comments(comment)) == 1


@pytest.mark.parametrize(
    "source", ["x = '# of'  # offset of the shard\n# launch", "# The sum\n# of all."]
)
def test_good_comments_pass(source):
    assert bad_comments(source) == []


def test_a_planted_second_meaning_is_seen():
    planted = "class Ring: ...\nclass _Own: ...\ndef f():\n    class Row: ..."
    sources = {"a.py": planted, "b.py": planted.replace("f()", "g()"), "c.py": ""}
    assert double_meanings(sources) == {"Ring": ["a.py", "b.py"]}

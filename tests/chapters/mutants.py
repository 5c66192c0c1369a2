"""Mutants of a solution: its source with one small change each.

A judge that accepts a mutant which is not equivalent to the solution would accept that
mistake from a reader, too. Operators, constants, names, conditions, loops, calls and
results are changed, and statements are left out.
"""

import ast
import copy
import inspect
import sys
from collections.abc import Callable, Iterator

OPERATORS: dict[type, tuple[type, ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div, ast.Add),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.Add,),
    ast.Pow: (ast.Mult,),
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq, ast.GtE),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
CALLS = {"sum": "max", "max": "min", "min": "max", "any": "all", "all": "any"}
PARTS = ("[:1]", "[1:]", "[:-1]", "[::-1]", "[:2]")  # of what a loop goes through
CASTS = ("half", "float", "double", "flatten")


def mutants(solution: Callable) -> Iterator[tuple[str, Callable]]:
    """Yield (what was changed, the changed solution), one change each.

    Functions of the solution's own file that it calls, and whose names begin with an
    underscore, are changed, too.
    """
    module = sys.modules[solution.__module__]
    tree = ast.parse(inspect.getsource(module))
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    todo, chosen = [solution.__name__], []
    while todo:
        name = todo.pop()
        chosen.append(name)
        names = {n.id for n in ast.walk(functions[name]) if isinstance(n, ast.Name)}
        todo += [n for n in names if n[0] == "_" and n in functions.keys() - chosen]
    for name in chosen:
        for words, changed in changes_of(functions[name]):
            text = ast.unparse(ast.fix_missing_locations(changed))
            scope = dict(vars(module))
            try:
                exec(compile(text, f"<mutant of {name}>", "exec"), scope)
            except (SyntaxError, TypeError):  # a nonlocal name; what decorates it
                continue
            if name != solution.__name__:  # the solution must call the changed one
                rest = ast.unparse(functions[solution.__name__])
                exec(compile(rest, f"<{solution.__name__}>", "exec"), scope)
            yield words, scope[solution.__name__]


def changes_of(function: ast.FunctionDef) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield (words, a copy of the function with this change)."""
    arguments = [arg.arg for arg in function.args.args]
    returns_tensor = ast.unparse(function.returns or function) == "Tensor"
    function = Unannotated().visit(copy.deepcopy(function))
    function.returns = None
    for number, node in enumerate(ast.walk(function)):
        if isinstance(node, (ast.arguments, ast.arg)) or is_docstring(node):
            continue
        for field, new in replacements(node, arguments, returns_tensor):
            changed = copy.deepcopy(function)
            twin = list(ast.walk(changed))[number]
            new = copy.deepcopy(new)
            if field is None:
                replace(changed, twin, new)
            else:
                setattr(twin, field, new)
            before = " ".join(ast.unparse(node).split())
            after = " ".join(ast.unparse(new if field is None else twin).split())
            if before != after:
                line = function.lineno
                where = getattr(node, "lineno", line) - line
                yield f"{before[:70]} -> {after[:70]} (line {where})", changed


class Unannotated(ast.NodeTransformer):
    """Removes annotations, which change nothing."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        """Leave the name alone."""
        return ast.copy_location(ast.arg(node.arg), node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.Assign:
        """Leave a plain assignment."""
        return ast.copy_location(ast.Assign([node.target], node.value), node)


def is_one(value: ast.AST | None) -> bool:
    """Tell whether a function returns one thing, and no tuple."""
    return value is not None and not isinstance(value, ast.Tuple)


def is_docstring(node: ast.AST) -> bool:
    """Tell whether a node is a text that stands alone."""
    value = getattr(node, "value", node)
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def replacements(
    node: ast.AST, arguments: list[str], returns_tensor: bool
) -> Iterator[tuple[str | None, ast.AST]]:
    """Yield (field of the node or None for itself, what comes in its place)."""
    if isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)):
        yield from (("op", new()) for new in OPERATORS.get(type(node.op), ()))
    if isinstance(node, ast.BinOp):
        yield from ((None, part) for part in (node.left, node.right))
        if not isinstance(node.op, (ast.Add, ast.Mult)):  # they commute
            yield None, ast.BinOp(node.right, node.op, node.left)
    elif isinstance(node, ast.BoolOp):
        yield from ((None, part) for part in node.values)
    elif isinstance(node, ast.UnaryOp):
        yield None, node.operand
    elif isinstance(node, ast.Compare):
        new_ops = OPERATORS.get(type(node.ops[0]), ())
        yield from (("ops", [new(), *node.ops[1:]]) for new in new_ops)
        yield from ((None, ast.Constant(value)) for value in (True, False))
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield from ((None, ast.Constant(node.value + by)) for by in (1, -1))
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        if node.id in arguments:
            others = [name for name in arguments if name != node.id]
            yield from ((None, ast.Name(name, ast.Load())) for name in others)
    elif isinstance(node, ast.Call):
        yield from replaced_calls(node)
    elif isinstance(node, (ast.For, ast.comprehension)):
        for part in PARTS:
            text = f"list({ast.unparse(node.iter)}){part}"
            yield "iter", ast.parse(text, mode="eval").body
    elif isinstance(node, (ast.If, ast.IfExp)):
        yield from (("test", ast.Constant(value)) for value in (True, False))
    elif isinstance(node, ast.Return) and returns_tensor and is_one(node.value):
        for cast in CASTS:
            text = f"(lambda x: x.{cast}() if hasattr(x, '{cast}') else x)"
            call = f"{text}({ast.unparse(node.value)})"
            yield "value", ast.parse(call, mode="eval").body
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr, ast.Continue)):
        yield None, ast.Pass()


def replaced_calls(node: ast.Call) -> Iterator[tuple[None, ast.AST]]:
    """Yield what can stand in the place of a call."""
    if isinstance(node.func, ast.Attribute):
        yield None, node.func.value  # x for x.clone()
    name = getattr(node.func, "id", getattr(node.func, "attr", ""))
    if name in CALLS and isinstance(node.func, ast.Name):
        other = ast.Name(CALLS[name], ast.Load())
        yield None, ast.Call(other, node.args, node.keywords)
    if name == "len" or name.startswith("get_"):  # of a size, or of ranks
        yield from ((None, ast.Constant(value)) for value in (1, 2, 3))
    if node.args:
        yield None, node.args[0]
    if len(node.args) > 1:
        yield None, ast.Call(node.func, node.args[::-1], node.keywords)
    for keyword in node.keywords:
        if keyword.arg == "strict":  # it only tells a mistake of the caller's
            continue
        rest = [one for one in node.keywords if one is not keyword]
        yield None, ast.Call(node.func, node.args, rest)


def replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    """Put `new` where `old` is in the tree."""
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, field, new)
            elif isinstance(value, list) and any(one is old for one in value):
                setattr(parent, field, [new if one is old else one for one in value])

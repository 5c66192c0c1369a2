"""Explain a call that fails because an argument is of the wrong kind.

`all_reduce_ring("4", 1024)` ends somewhere inside with Python's "'>' not supported
between instances of 'str' and 'int'". A room calls `explain_calls(globals())` at its
end; then that call raises "world_size is '4'; it must be an integer". The annotations
of a function say what it takes, but they are read only after it has failed: a call that
works is never refused, whatever its arguments are, and an error that this package
raises itself stays as it is. If no kind is wrong, the sentence names an empty list, or
the shapes and types of all tensors.

Two things never are right, so they are refused where they would work, too: a string for
a number or for True; and in formulas, which would calculate with them, negative numbers
and all else of a wrong kind.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

PYTHON_SAYS = re.compile(
    r"object is not|has no len|has no attribute|not supported between|unsupported oper"
)
METHODS = ("__init__", "__call__")
Argument = tuple[str, Any, Any]  # name, value, annotation
VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
SCALARS = (int, float, bool, Real, types.NoneType)
COMMON = {
    kind.__name__: kind for kind in (Callable, Collection, Iterable, Mapping, Sequence)
} | {"Any": Any}  # names that some modules import for type checkers only
LISTS = (list, tuple, Sequence, Iterable, Collection)
WORDS = {  # an annotation's name -> how it is called in a sentence
    "int": "an integer",
    "float": "a number",
    "Real": "a number",
    "str": "a string",
    "bool": "True or False",
    "Tensor": "a tensor",
    "Module": "an nn.Module",
    "Parameter": "a parameter",
    "Optimizer": "an optimizer",
    "dtype": "a dtype such as torch.float32",
    "ProcessGroup": "a process group",
    "NoneType": "None",
}


def explain_calls(namespace: dict[str, Any], *, formulas: bool = False) -> None:
    """Explain the calls of a module's public functions, and of its classes' methods.

    In a room's `__init__`, these are the names that it exports. Naive rungs, too, are
    explained there, and their sources stay plain. With `formulas` the arguments are
    read after each call.
    """
    room = namespace["__name__"]
    for name, thing in list(namespace.items()):
        if name.startswith("_"):
            continue
        if not (getattr(thing, "__module__", None) or "").startswith(room):
            continue
        if inspect.isfunction(thing):
            namespace[name] = explained(thing, formulas)
            namespace[name].__module__ = room  # where pickle finds it
        elif inspect.isclass(thing):
            for owner in thing.__mro__:
                if owner.__module__.startswith(__package__):
                    _explain_methods(owner, formulas)


def _explain_methods(owner: type, formulas: bool) -> None:
    for name, function in list(vars(owner).items()):
        public = not name.startswith("_") or name in METHODS
        if public and inspect.isfunction(function):
            setattr(owner, name, explained(function, formulas and name == "__call__"))


def explained(function: Callable, formula: bool = False) -> Callable:
    """Return the function, with a sentence in place of errors about its arguments."""
    if hasattr(function, "explains") or not inspect.signature(function).parameters:
        return function

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            result = function(*args, **options)
        except Exception as error:
            if _is_bare(error):
                _explain(error, _arguments(function, args, options), formula)
                if type(error) is TypeError and (
                    more := options.keys() - _kinds(function)
                ):
                    texts = (f"{name}={shown(options[name])}" for name in more)
                    raise TypeError(
                        f"{error}; the options are {', '.join(texts)}"
                    ) from error
            raise
        strings = any(isinstance(value, str) for value in (*args, *options.values()))
        if formula or strings:
            for name, value, kind in _arguments(function, args, options):
                if formula or isinstance(value, str) and _is_scalar(kind):
                    _check(name, value, kind, formula)
        return result

    call.explains = True
    return call


def _explain(error: Exception, arguments: list[Argument], formula: bool) -> None:
    """Raise an error that names the argument that is to blame, if one can be named."""
    for name, value, kind in arguments:
        _check(name, value, kind, formula, error)
    if isinstance(error, (ValueError, LookupError, ZeroDivisionError)):
        for name, value, _ in arguments:
            if isinstance(value, (list, tuple)) and not value:
                raise ValueError(f"{name} is empty; it needs an element") from error
    if formula and isinstance(error, ZeroDivisionError):
        zeros = [f"{name} is 0" for name, value, _ in arguments if _is_zero(value)]
        if zeros:
            which = "it" if len(zeros) == 1 else "one of them"
            text = f"{' and '.join(zeros)}; {which} must be above 0"
            raise ValueError(text) from error
    if type(error) in (RuntimeError, IndexError):
        tensors = [
            f"{name} is {shown(value)}"
            for name, value, _ in arguments
            if type(value).__name__ in ("Tensor", "Parameter")
        ]
        if tensors:
            raise type(error)(f"{error}; {', '.join(tensors)}") from error


def _check(
    name: str, value: Any, kind: Any, formula: bool, cause: Exception | None = None
) -> None:
    if not fits(value, kind):
        words = in_words(kind)
        if value is kind:
            words = f"an object of it, as {value.__name__}(...)"
        text = f"{name} is {shown(value)}; it must be {words}"
        if _by_agreement(cause):
            raise type(cause)(f"{text}. Nothing was sent.") from cause
        raise ValueError(text) from cause
    if formula and isinstance(value, Real) and not value >= 0:
        raise ValueError(f"{name} is {value!r}; it must be 0 or more") from cause


def _by_agreement(error: Exception | None) -> bool:
    """Return whether this is the error that all ranks raise, before they send."""
    ours = type(error).__module__.startswith(__package__)
    return ours and str(error).endswith("Nothing was sent.")


def _is_bare(error: Exception) -> bool:
    """Return whether the error comes from Python or PyTorch, below the call.

    What a `raise` of this package or of the user says stays as it is, except that
    `agreed` raises on all ranks what one of them has said, which may be Python's text.
    """
    end = error.__traceback__.tb_next
    if end is None:
        return False  # Python explains a missing or unexpected argument
    while end.tb_next:
        end = end.tb_next
    code = end.tb_frame.f_code
    raised = code.co_code[end.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    ours = code.co_filename.startswith(str(Path(__file__).parent))
    library = code.co_filename.startswith((sys.prefix, sys.base_prefix)) and not ours
    agreed = code.co_filename.endswith("agreement.py")
    return not raised or library or agreed and bool(PYTHON_SAYS.search(str(error)))


def _arguments(function: Callable, args: tuple, options: dict) -> list[Argument]:
    """Return name, value and annotation of a call's arguments, without **options."""
    bound, kinds = (
        _signature(function).bind(*args, **options).arguments,
        _kinds(function),
    )
    return [
        (name, value, kinds[name]) for name, value in bound.items() if name in kinds
    ]


@functools.cache
def _signature(function: Callable) -> inspect.Signature:
    return inspect.signature(function)


@functools.cache
def _kinds(function: Callable) -> dict[str, Any]:
    """Return what the annotation of each parameter means."""
    return {
        name: _resolved(parameter.annotation, inspect.unwrap(function).__globals__)
        for name, parameter in _signature(function).parameters.items()
        if parameter.kind not in VARIABLE
    }


def _resolved(hint: Any, names: dict[str, Any]) -> Any:
    """Return what an annotation means; Any for a name that only type checkers have."""
    names = COMMON | names
    if torch := sys.modules.get("torch"):
        names |= {"Tensor": torch.Tensor, "nn": torch.nn, "dist": torch.distributed}
        names |= {"torch": torch, "Optimizer": torch.optim.Optimizer}
    try:
        while isinstance(hint, str):
            hint = eval(hint, names)
    except (NameError, AttributeError, TypeError):
        return Any
    return Any if hint is inspect.Parameter.empty else hint


def _is_zero(value: Any) -> bool:
    return isinstance(value, Real) and value == 0


def _is_scalar(kind: Any) -> bool:
    union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    each = typing.get_args(kind) if union else (kind,)
    return all(one in SCALARS or typing.get_origin(one) is Callable for one in each)


def fits(value: Any, kind: Any) -> bool:
    """Return whether a value is of the kind that an annotation names."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is None or kind is types.NoneType:
        return value is None
    if kind is Any:
        return True
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, each) for each in inner)
    if kind is bool:
        return not isinstance(value, str)
    if kind is int:
        return hasattr(type(value), "__index__") or _is_whole(value)
    if kind in (float, Real):
        return hasattr(type(value), "__float__")
    if origin in LISTS or kind in LISTS:
        if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
            return False
        items = value if isinstance(value, (list, tuple)) else ()
        each = inner[0] if inner else Any
        if origin is tuple and len(inner) > 1 and inner[1] is not Ellipsis:
            return len(items) == len(inner) and all(map(fits, items, inner))
        return all(fits(item, each) for item in items)
    if origin is Mapping or origin is dict:
        return isinstance(value, Mapping)
    if origin is not None and inspect.isclass(origin) and issubclass(origin, Callable):
        return callable(value)
    plain = inspect.isclass(kind) and not getattr(kind, "_is_protocol", False)
    if not plain or kind is object:
        return True
    if kind.__name__ == "Optimizer":
        return not inspect.isclass(value) and hasattr(value, "param_groups")
    return isinstance(value, kind) or type(value).__name__ == kind.__name__


def _is_whole(value: Any) -> bool:
    return isinstance(value, Real) and value == value // 1


def in_words(kind: Any) -> str:
    """Return an annotation in words: "a list of integers, or None"."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(in_words(each) for each in inner)
    if origin in LISTS or kind in LISTS:
        one = in_words(inner[0]) if inner and inner[0] is not Any else ""
        article, _, noun = one.partition(" ")
        regular = article in ("a", "an") and " " not in noun and noun
        return f"a list of {noun}s" if regular else "a list"
    if origin is Mapping or origin is dict:
        return "a dictionary"
    if origin is not None and inspect.isclass(origin) and issubclass(origin, Callable):
        return "a function or a class"
    name = "None" if kind is None else getattr(kind, "__name__", str(kind))
    return WORDS.get(name, f"{'an' if name[0] in 'AEIO' else 'a'} {name}")


def shown(value: Any) -> str:
    """Return a value for a sentence: short values as they are, others by their kind."""
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    if inspect.isfunction(value) or inspect.ismethod(value):
        return f"the function {value.__name__}"
    if hasattr(value, "requires_grad"):
        return f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
    items = value if isinstance(value, (list, tuple)) else [value]
    plain = all(isinstance(item, (str, int, float, type(None))) for item in items)
    if plain and len(text := repr(value)) <= 60:
        return text
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"

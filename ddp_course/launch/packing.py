"""Send functions and values between processes, and name what cannot be sent.

cloudpickle packs functions: a function of a notebook cell by value, with everything
that it refers to; a function of a module by name, and the rank imports that module from
disk. `torch.save` packs results.
"""

import dis
import functools
import importlib
import inspect
import io
import linecache
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

import cloudpickle
import torch

from ddp_course.launch.reports import CannotSendError

MOST = 100  # objects inspected in search of one that cannot be pickled
# Without this, cloudpickle misses globals that a class body inside a function uses.
cloudpickle.cloudpickle.GLOBAL_OPS += (dis.opmap["LOAD_NAME"],)


class _Pickler(cloudpickle.Pickler):
    """A pickler that keeps the file names of code, and the modules of wrappers.

    From release 3.1.3 on, cloudpickle replaces a file name by "<dynamic-code>", so that
    the ranks' tracebacks would show no source lines. And `functools.wraps` gives a
    library's wrapper of a notebook's function, such as PyTorch's
    `once_differentiable`, the module `__main__`: cloudpickle would send the wrapper by
    value, with all globals of PyTorch that it uses.
    """

    def reducer_override(self, obj: Any) -> Any:
        """Return how to rebuild `obj` in the rank, as `__reduce__` does."""
        if isinstance(obj, types.CodeType):
            _, arguments = self.dispatch_table[types.CodeType](obj)
            return _rebuild_code, (obj.co_filename, *arguments)
        if isinstance(obj, types.FunctionType) and obj.__module__ == "__main__":
            home = obj.__globals__.get("__name__", "__main__")
            module = sys.modules.get(home)
            if home != "__main__" and vars(module or self) is obj.__globals__:
                cells = [cell.cell_contents for cell in obj.__closure__ or ()]
                state = cells, obj.__defaults__, obj.__kwdefaults__, vars(obj)
                names = {n: getattr(obj, n) for n in ("__qualname__", "__doc__")}
                arguments = home, obj.__code__, obj.__name__
                return (
                    _rebuild_function,
                    arguments,
                    (*state, names),
                    None,
                    None,
                    _fill_in,
                )
        return super().reducer_override(obj)


def _rebuild_code(file: str, *arguments: Any) -> types.CodeType:
    return types.CodeType(*arguments).replace(co_filename=file)


def _rebuild_function(home: str, code: types.CodeType, name: str) -> types.FunctionType:
    cells = tuple(types.CellType() for _ in code.co_freevars)
    module = importlib.import_module(home)
    return types.FunctionType(code, vars(module), name, None, cells)


def _fill_in(fn: types.FunctionType, state: tuple) -> None:
    """Set closure cells, defaults and attributes: they may refer to `fn` itself."""
    cells, fn.__defaults__, fn.__kwdefaults__, attributes, names = state
    for cell, content in zip(fn.__closure__ or (), cells, strict=True):
        cell.cell_contents = content
    vars(fn).update(attributes)
    for name, value in {**names, "__module__": "__main__"}.items():
        setattr(fn, name, value)


def pack_call(fn: Any, args: tuple) -> bytes:
    """Return `fn` and `args` as bytes, with the source of the notebook's cells.

    Raises CannotSendError, which names the object that cannot be sent.
    """
    try:
        buffer = io.BytesIO()
        _Pickler(buffer).dump((fn, args))
    except Exception as error:
        name = getattr(fn, "__name__", "the function")
        parts = {name: fn} | {f"args[{i}]": arg for i, arg in enumerate(args)}
        culprit = _culprit(parts) or f"{name}: {error}"
        raise CannotSendError(f"cannot be sent to the ranks: {culprit}") from None
    return pickle.dumps((buffer.getvalue(), _cells()))


def unpack_call(data: bytes) -> tuple[Any, tuple, dict[str, str]]:
    """Return the function, its arguments, and {file name: label} of notebook cells.

    Adds the cells' sources to `linecache`, where tracebacks look for them.
    """
    call, cells = pickle.loads(data)
    for file, (_, lines) in cells.items():
        linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
    fn, args = cloudpickle.loads(call)
    return fn, args, {file: label for file, (label, _) in cells.items()}


def pack_value(value: Any) -> bytes:
    """Return a rank's result as bytes.

    Raises CannotSendError, which names the object that cannot be sent.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer, pickle_module=cloudpickle)
    except Exception as error:
        culprit = _culprit({"the value": value}) or f"the value: {error}"
        raise CannotSendError(
            f"the function returned an object of type {_type_name(value)} that cannot "
            f"be sent back: {culprit}. Return tensors, numbers or a state_dict()"
        ) from None
    return buffer.getvalue()


def unpack_value(data: bytes) -> Any:
    """Return a rank's result, with all tensors on the CPU."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    except Exception as error:
        raise CannotSendError(
            "the function returned something that cannot be read back: "
            f"{type(error).__name__}: {error}"
        ) from None


def cell_labels() -> dict[str, str]:
    """Return the notebook's name for each of its cells ("Cell In[5]"), by file name."""
    return {file: label for file, (label, _) in _cells().items()}


def _cells() -> dict[str, tuple[str, list[str]]]:
    """Return the notebook cells that have run: file name -> (label, source lines)."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    label = getattr(getattr(shell, "compile", None), "format_code_name", None)
    cells = {}
    for file, entry in list(linecache.cache.items()) if label else ():
        if (name := label(file)) and len(entry) == 4:
            cells[file] = (" ".join(name), entry[2])
    return cells


def _captured(fn: Any) -> dict[str, Any]:
    """Return the globals and closure variables that a function uses."""
    try:
        outside = inspect.getclosurevars(inspect.unwrap(fn))
    except (TypeError, ValueError):
        return {}
    return {**outside.globals, **outside.nonlocals}


def _culprit(parts: dict[str, Any], seen: set[int] | None = None) -> str | None:
    """Find the smallest part that cannot be pickled: "value['lock'] is a lock".

    Inspects each object once. An object is only blamed if all its parts can be pickled:
    otherwise it belongs to a circle of references.
    """
    seen = set() if seen is None else seen
    for path, part in parts.items():
        if id(part) in seen or _can_be_pickled(part):
            continue
        seen.add(id(part))
        inner = dict(_parts_of(path, part)) if len(seen) < MOST else {}
        if found := _culprit(inner, seen):
            return found
        if all(_can_be_pickled(each) for each in inner.values()):
            which = ", which" if " uses " in path else ""
            return f"{path}{which} is a {_type_name(part)}"
    return None


def _parts_of(path: str, whole: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(whole, dict):
        yield from ((f"{path}[{key!r}]", part) for key, part in whole.items())
    elif isinstance(whole, (list, tuple, set, frozenset)):
        yield from ((f"{path}[{i}]", part) for i, part in enumerate(whole))
    elif isinstance(whole, types.FunctionType):
        name = whole.__name__
        yield from ((f"{name} uses {key}", v) for key, v in _captured(whole).items())
    elif isinstance(whole, types.MethodType):
        yield f"{path}.__self__", whole.__self__
    elif isinstance(whole, functools.partial):
        yield f"{path}.func", whole.func
        yield from ((f"{path}.args[{i}]", part) for i, part in enumerate(whole.args))
        yield from _parts_of(f"{path}.keywords", whole.keywords)
    elif not isinstance(whole, type):
        attributes = getattr(whole, "__dict__", {})
        yield from ((f"{path}.{name}", part) for name, part in attributes.items())


def _can_be_pickled(part: Any) -> bool:
    try:
        torch.save(part, io.BytesIO(), pickle_module=cloudpickle)
    except Exception:
        return False
    return True


def _type_name(part: Any) -> str:
    room, name = type(part).__module__, type(part).__qualname__
    return name if room == "builtins" else f"{room}.{name}"

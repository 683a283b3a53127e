"""Unsupported Python: errors for syntax and functions that the kernel language lacks, with alternatives."""

from __future__ import annotations

import ast
import types

from tessera.core.errors import UnsupportedSyntaxError
from tessera.frontend.kernel.python_ast.scope import KernelFrame

_ALTERNATIVES: dict[type, tuple[str, str | None]] = {
    ast.Try: ("try", "a kernel has no exceptions: check with `if`, or mask the access"),
    ast.With: ("with", "call the function directly; ts.memory.prefetch is the one that kernels have"),
    ast.ClassDef: ("class", "define it outside the kernel"),
    ast.AsyncFunctionDef: ("async", "use tile.cp_async to overlap copies"),
    ast.AsyncFor: ("async for", "use for"),
    ast.AsyncWith: ("async with", "call the function directly"),
    ast.Await: ("await", "use tile.cp_wait_group"),
    ast.Yield: ("yield", "store into an array instead"),
    ast.YieldFrom: ("yield from", "store into an array instead"),
    ast.Import: ("import", "import at the top of the file"),
    ast.ImportFrom: ("import", "import at the top of the file"),
    ast.Delete: ("del", "names end with the kernel"),
    ast.Global: ("global", "pass the value as an argument and return or store the result"),
    ast.Nonlocal: ("nonlocal", "return the value instead"),
    ast.Raise: ("raise", "a kernel has no exceptions: use assert on values known while compiling"),
    ast.Set: ("a set", "use a tuple"),
    ast.SetComp: ("a set comprehension", "use a list comprehension"),
    ast.DictComp: ("a dict comprehension", "build the dict outside the kernel"),
    ast.Starred: ("a starred expression", "write the elements one by one"),
    ast.NamedExpr: (":=", "assign on a line of its own"),
    ast.Match: ("match", "use if and elif"),
    ast.Break: ("break", None),
    ast.Continue: ("continue", None),
}


if hasattr(ast, "TryStar"):  # Python 3.11
    _ALTERNATIVES[ast.TryStar] = ("try … except*", _ALTERNATIVES[ast.Try][1])
if hasattr(ast, "TypeAlias"):  # Python 3.12
    _ALTERNATIVES[ast.TypeAlias] = ("type", "define it outside the kernel")
ATTRIBUTE_ALTERNATIVE = "keep it in a variable of its own, or store it into memory: A[i] = value"

# Functions of the host that a kernel, which is read once and runs many times, cannot mean.
_HOST_FUNCTIONS = {
    **dict.fromkeys((open, input), "a kernel has no files: pass what they hold as an argument"),
    **dict.fromkeys((eval, exec, compile, __import__), "write the code out, or call a function defined in a file"),
    **dict.fromkeys((globals, locals, vars, setattr, delattr), "use names and attributes directly"),
}
_IMPURE_MODULES = {
    "random": "tile.random(seed, offsets) draws numbers while the kernel runs",
    "time": "measure around the launch",
    "datetime": "measure around the launch",
    "secrets": "tile.random(seed, offsets) draws numbers while the kernel runs",
    "os": "read it outside and pass it as an argument",
}
_HOST_PACKAGE = "tessera.runtime.storage"  # copies between memories of the host


def refuse_function(function: object) -> None:
    """Refuse a function whose result, found once while compiling, would stand for every launch.

    Raises:
        UnsupportedSyntaxError: it is such a function of Python or NumPy, or one that moves memory of the host.
    """
    owner = type(getattr(function, "__self__", None))
    module = getattr(function, "__module__", None) or owner.__module__
    drawn = module.startswith("numpy.random") or owner.__module__.startswith("numpy.random")
    name = getattr(function, "__name__", repr(function))
    if module.startswith(_HOST_PACKAGE):
        raise UnsupportedSyntaxError(
            f"{name} is a function of the host",
            suggestion="tile.cp_async begins a copy in a kernel, tile.cp_wait_group waits for it",
        )
    builtin = isinstance(function, types.BuiltinFunctionType) and function in _HOST_FUNCTIONS
    instead = (
        _HOST_FUNCTIONS[function]  # type: ignore[index]
        if builtin
        else _IMPURE_MODULES["random"]
        if drawn
        else _IMPURE_MODULES.get(module.partition(".")[0])
    )  # type: ignore[index]
    if instead is not None and module.partition(".")[0] != "tessera":
        raise UnsupportedSyntaxError(f"{name} would run once, while compiling", suggestion=instead)


def unsupported_error(
    frame: KernelFrame, node: ast.AST, what: str | None = None, suggestion: str | None = None
) -> UnsupportedSyntaxError:
    """The error for an unsupported piece of syntax, with its source location."""
    name, instead = _ALTERNATIVES.get(type(node), (type(node).__name__, None))
    return UnsupportedSyntaxError(
        f"{what or name} is not part of the kernel language",
        location=frame.place(node),
        suggestion=suggestion or instead,
    )

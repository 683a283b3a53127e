"""The names of a function being interpreted, and where a name is looked up."""

from __future__ import annotations

import ast
import builtins
import difflib
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from tessera.errors import Location, TesseraError, UnknownNameError
from tessera.kernel.place import Place
from tessera.kernel.source import Source
from tessera.kernel.trace import Trace, known
from tessera.op import REGISTRY
from tessera.tensor import Tensor
from tessera.types import BY_NAME

_MISSING = object()


class Unset:
    """A name that may have no value here; reading it gives this error."""

    def __init__(self, error: TesseraError) -> None:
        self.error = error


class Frame:
    """One call of an interpreted function: its names, its source, and the scope around it."""

    def __init__(self, trace: Trace, source: Source, names: dict[str, Any], outer: Callable[[str], Any]) -> None:
        self.trace = trace
        self.source = source
        self.names = names
        self.outer = outer
        self.result: Any = None
        self.lost: frozenset[str] = frozenset()  # names whose values a stepped program no longer has
        self.returned: Location | None = None  # where the result was given

    def find(self, name: str) -> Any:
        """The value of a name.

        Raises:
            UnknownNameError: nothing defines it, or not on every way here.
        """
        found = self.lookup(name)
        if found is _MISSING:
            raise self.unknown(name)
        if isinstance(found, Unset):
            raise found.error
        return found

    def lookup(self, name: str) -> Any:
        """The value of a name, or a marker where it has none."""
        found = self.names.get(name, _MISSING)
        return self.outer(name) if found is _MISSING else found

    def unknown(self, name: str) -> UnknownNameError:
        """The error for a name that nothing defines."""
        known = [*self.names, *_outer_names(self.outer), *dir(builtins)]
        near = difflib.get_close_matches(name, known, 1)
        return UnknownNameError(
            f"`{name}` is not defined",
            expected="a parameter, a variable, a dim of an annotation, or a name of the file",
            suggestion=f"did you mean `{near[0]}`?" if near else _qualified(name),
        )

    def child(self, names: dict[str, Any], source: Source | None = None) -> Frame:
        """The frame of an inner function, which sees the names of this one."""
        return Frame(self.trace, source or self.source, names, self.lookup)

    def place(self, node: ast.AST) -> Location:
        """Where a piece of syntax stands in its file."""
        return self.source.location(node)


def _qualified(name: str) -> str | None:
    """An op of about this name, as a kernel calls it."""
    ops = {full.partition(".")[2]: full for full in REGISTRY}
    near = difflib.get_close_matches(name, ops, 1)
    return f"did you mean `{ops[near[0]]}`?" if near else None


def _outer_names(outer: Any) -> list[str]:
    return list(outer.names()) if isinstance(outer, Outer) else list(outer.__self__.names)


class Outer:
    """The names a Python function sees outside itself: its closure, its module, the builtins.

    Each value read is noted in the trace, since the compiled kernel depends on it.
    """

    def __init__(self, function: FunctionType, trace: Trace | None = None) -> None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self.cells: Mapping[str, Any] = dict(cells)
        self.globals = function.__globals__
        self.trace = trace

    def names(self) -> list[str]:
        """Every name there is."""
        return [*self.cells, *self.globals]

    def peek(self, name: str) -> Any:
        """What a name holds now, or a marker."""
        if name in self.cells:
            return self.cells[name].cell_contents
        return self.globals.get(name, getattr(builtins, name, _MISSING))

    def __call__(self, name: str) -> Any:
        found = self.peek(name)
        if self.trace is not None and found is not _MISSING:
            self.trace.guards.append((self, name, found))
        return known(found)


def unchanged(guards: list[tuple[Any, str, Any]]) -> bool:
    """Whether the outer names a kernel was compiled with still hold what they held."""
    return all(_same(scope.peek(name), held) for scope, name, held in guards)


def _same(now: Any, held: Any) -> bool:
    plain = isinstance(now, (bool, int, float, str, tuple, np.generic)) and type(now) is type(held)
    return now is held or (plain and bool(now == held))


class ModuleScope:
    """The names of a module, as something a trace can depend on."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def peek(self, name: str) -> Any:
        """What a name holds now."""
        return getattr(self.module, name, _MISSING)


def attribute(frame: Frame, base: Any, name: str) -> Any:
    """`base.name`, noted in the trace where `base` is a module.

    Raises:
        UnknownNameError: there is no such attribute.
    """
    try:
        found = getattr(base, name)
    except AttributeError:
        near = difflib.get_close_matches(name, dir(Tensor if isinstance(base, Place) else base), 1)
        kind = getattr(base, "__name__", type(base).__name__).rpartition(".")[2]
        raise UnknownNameError(
            f"{'a tensor' if isinstance(base, (Place, Tensor)) else f'`{kind}`'} has no `{name}`",
            suggestion=f"did you mean `{near[0]}`?" if near else _spelling(name),
        ) from None
    if isinstance(base, ModuleType):
        frame.trace.guards.append((ModuleScope(base), name, found))
    return known(found)


def _spelling(name: str) -> str | None:
    near = difflib.get_close_matches(name, BY_NAME, 1)
    return f"did you mean the type `ts.{near[0]}`?" if near else None

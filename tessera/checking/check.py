"""`check`: all shape and dtype errors of a function, from its annotations alone."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import numpy as np

from tessera.checking.checker import Checker, user_function
from tessera.checking.findings import Findings
from tessera.checking.report import Finding, Report
from tessera.checking.signatures import Signature, broken
from tessera.checking.unknown import UNKNOWN
from tessera.errors import ArgumentError, Location, ShapeError, here
from tessera.ir.builder import Builder
from tessera.ir.core import Value
from tessera.pytree import flatten
from tessera.shapes import Dim, Size, bind_all
from tessera.tensor import Tensor
from tessera.types import TensorType, as_dtype


def check(function: Callable[..., Any], *types: Any, **named: Any) -> Report:
    """All shape and dtype errors of a function, with nothing executed.

    The function is traced over tensors of its annotations, with symbolic sizes, or of the `types` given: tensor
    types, containers of them, arrays (only their type counts), and anything else by value. After an error the result
    is unknown and takes no further part. Functions it calls are checked too. A parameter without a type is unknown.
    `"..."` is checked as one axis, and `"?"` only where no size at all would fit.

    Raises:
        ArgumentError: `function` is no Python function, or does not take these arguments.

    >>> def scale(x: Tensor["B", "D"], w: Tensor["E"]):
    ...     return x * w
    >>> check(scale).ok
    False
    """
    target, first = user_function(function)
    if target is None:
        raise ArgumentError(f"{function!r} is not a Python function to check", location=here())
    return _Check(target).run((*first, *types), named)


class _Check:
    """One check: its builder, its findings, and the arguments it makes of types."""

    def __init__(self, function: FunctionType) -> None:
        self.function = function
        self.signature = Signature.of(function)
        self.builder = Builder()
        self.findings = Findings()
        self.checker = Checker(self.builder, self.findings)

    def run(self, types: tuple, named: dict[str, Any]) -> Report:
        """Trace the function and report."""
        arguments = self._arguments(types, named)
        sizes = self._sizes(arguments.arguments)
        with self.builder.active():
            try:
                self.checker.enter(self.function, arguments.args, arguments.kwargs, sizes)
            except Exception as error:
                self._crash(error)
        return Report(self.signature.name, (*self.extra, *self.findings.all), self.findings.notes)

    def _arguments(self, types: tuple, named: dict[str, Any]) -> Any:
        try:
            bound = self.signature.python.bind_partial(*types, **named)
        except TypeError as error:
            raise ArgumentError(f"{self.signature.name}: {error}", location=here()) from None
        given = dict(bound.arguments)
        bound.apply_defaults()
        for name, parameter in self.signature.python.parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if name not in given and (name in self.signature.tensors or parameter.default is parameter.empty):
                bound.arguments[name] = self._from_annotation(name)
            else:
                bound.arguments[name] = self._from_value(name, bound.arguments[name])
        order = [n for n in self.signature.python.parameters if n in bound.arguments]
        bound.arguments = {n: bound.arguments[n] for n in order}  # type: ignore[assignment]
        return bound

    def _from_annotation(self, name: str) -> Any:
        want = self.signature.tensors.get(name)
        if want is None:
            self.findings.note(f"{self.signature.name}: {name} has no type: what follows from it is not checked")
            return UNKNOWN
        holes = {n: Dim.of(f"?{name}{n[1:]}") for n in _anonymous(want)}
        return self._parameter(name, want.evaluate(holes))  # type: ignore[arg-type]

    def _from_value(self, name: str, value: Any) -> Any:
        leaves, tree = flatten(value, name)
        return tree.build(iter([self._leaf(path, leaf) for path, leaf in leaves]))

    def _leaf(self, path: str, value: Any) -> Any:
        if isinstance(value, (Tensor, np.ndarray)):
            value = value.type if isinstance(value, Tensor) else TensorType(value.shape, as_dtype(value.dtype))
        return self._parameter(path, value) if isinstance(value, TensorType) else value

    def _parameter(self, name: str, type: TensorType) -> Tensor:
        value = Value(type, name)
        self.findings.origins[value] = (name, self._place(name))
        return Tensor(value)

    def _place(self, name: str) -> Location:
        return self.checker.places(self.function).get(name.partition(".")[0], _definition(self.function))

    def _sizes(self, arguments: Mapping[str, Any]) -> dict[str, Size]:
        """The sizes of the names in the annotations; what the types given break is kept as an error."""
        sizes: dict[str, Size] = {}
        self.extra: tuple[Finding, ...] = ()
        wanted = [
            (n, v.type, w) for n, w in self.signature.tensors.items() if isinstance(v := arguments.get(n), Tensor)
        ]
        misfit = bind_all([(w.shape, t.shape) for _, t, w in wanted], sizes)
        error = broken(self.signature.required, sizes)
        if misfit:
            name, type, want = wanted[misfit.number]
            error = ShapeError(f"argument {name}: {misfit.problem}", expected=str(want), received=str(type))
        if error:
            place = _definition(self.function)
            parts = (error.message, error.expected, error.received)
            self.extra = (Finding("Shape mismatch", self.signature.name, place, *parts),)
        return sizes

    def _crash(self, error: Exception) -> None:
        """Keep an error of Python itself, which ends the check."""
        file = self.function.__code__.co_filename
        steps = [s for s in traceback.extract_tb(error.__traceback__) if s.filename == file]
        last = steps[-1] if steps else None
        place = Location(file, last.lineno or 0) if last else _definition(self.function)
        title = type(error).__name__
        name = last.name if last else self.signature.name
        self.extra += (Finding(title, name, place, str(error) or title),)


def _anonymous(type: TensorType) -> list[str]:
    return [str(s) for s in type.shape if str(s).startswith("?")]


def _definition(function: FunctionType) -> Location:
    return Location(function.__code__.co_filename, function.__code__.co_firstlineno)

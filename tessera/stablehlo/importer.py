"""Import: evaluates the functions of a StableHLO module on tensors, under the trace that is open, by the op table."""

from __future__ import annotations

import inspect
import keyword
import linecache
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from tessera.core.errors import Location, ParseError, TesseraError, UnknownNameError, UnsupportedOpError
from tessera.core.io import hash_text
from tessera.core.types import TensorType
from tessera.frontend.jit.tracing import Jit
from tessera.ir.builder import CURRENT_BUILDER
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor.basic import full
from tessera.stablehlo import contractions, control_flow, elementwise, indexing, random_bits, reductions
from tessera.stablehlo.parser import parse
from tessera.stablehlo.table import ROWS, Row, Scope, Site, as_list
from tessera.stablehlo.text import HloFunction, HloModule, HloRegion, Operation, RefusedType
from tessera.transforms.recording import set_location

_TABLES = (contractions, control_flow, elementwise, indexing, random_bits, reductions)  # each adds its rows to ROWS
_RETURNS = ("return", "func.return", "stablehlo.return")
_MAX_CALLS = 50  # of functions inside one another


class ModuleEvaluator:
    """Evaluates the functions of a module on tensors."""

    def __init__(self, module: HloModule, custom_calls: Mapping[str, Callable[..., Any]]) -> None:
        self.module, self.custom_calls = module, custom_calls
        self.depth = 0
        self.failed: BaseException | None = None  # the error that has the location of its operation

    def custom_call(self, target: str) -> Row | None:
        """The meaning that the user gave a custom call."""
        return self.custom_calls.get(target)

    def function(self, name: str) -> HloFunction:
        """The function of a name.

        Raises:
            UnknownNameError: there is none.
        """
        if name not in self.module.functions:
            raise UnknownNameError(
                f"there is no function @{name}", expected=", ".join(f"@{n}" for n in self.module.functions)
            )
        return self.module.functions[name]

    def call(self, name: str, operands: Sequence[Any], numbers: Sequence[Any] = ()) -> list[Any]:
        """The results of a function; `numbers` are those of operands that are constants."""
        region, scope = self.function(name).region, Scope()
        scope.numbers = {p: n for p, n in zip(region.params, numbers, strict=False) if n is not None}
        self.depth += 1
        if self.depth > _MAX_CALLS:
            raise UnsupportedOpError(f"@{name} calls itself", suggestion="a program has no recursion in StableHLO")
        try:
            return self._run(region, operands, scope)
        finally:
            self.depth -= 1

    def run_region(self, region: HloRegion, operands: Sequence[Any], scope: Scope) -> list[Any]:
        """What a region returns on operands; it sees the names around it."""
        return self._run(region, operands, Scope(scope))

    def _run(self, region: HloRegion, operands: Sequence[Any], scope: Scope) -> list[Any]:
        if len(operands) != len(region.params):
            raise ParseError(
                "a region or function takes another number of values", expected=str(len(region.params)),
                received=str(len(operands)),
            )  # fmt: skip
        scope.values.update(zip(region.params, operands, strict=True))
        for operation in region.operations:
            if operation.name in _RETURNS:
                return self._find_operands(operation, scope)
            found = self._execute(operation, scope)
            start = 0
            for name, count in operation.results:
                scope.values[name] = found[start]
                for i in range(count):
                    scope.values[f"{name}#{i}"] = found[start + i]
                start += count
        return []

    def _find_operands(self, operation: Operation, scope: Scope) -> list[Any]:
        try:
            return [scope.values[name] for name in operation.operands]
        except KeyError as error:
            raise ParseError(f"nothing defines {error.args[0]}", location=operation.location) from None

    def _execute(self, operation: Operation, scope: Scope) -> list[Any]:
        builder = CURRENT_BUILDER.get()
        try:
            with set_location(operation.location) if builder is not None else nullcontext():
                return self._apply_row(operation, scope)
        except TesseraError as error:
            if error is not self.failed:
                self.failed = error
                error.location = operation.location
            raise

    def _apply_row(self, operation: Operation, scope: Scope) -> list[Any]:
        for type in operation.types:
            if isinstance(type, RefusedType):
                raise UnsupportedOpError(
                    f"{operation.name} has a type that is not supported: {type.reason}", received=type.text
                )
        if operation.name in ("stablehlo.constant", "mhlo.constant"):
            return [_make_constant(operation, scope)]
        rule = ROWS.get(operation.name)
        if rule is None:
            raise UnsupportedOpError(f"{operation.name} is not supported")
        operands = self._find_operands(operation, scope)
        try:
            found = as_list(rule(Site(operation, scope, self), *operands))
            _check_types(operation, found)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, TesseraError):
                raise
            raise ParseError(
                f"{operation.name} has operands or attributes that do not fit it",
                received=f"{error.__class__.__name__}: {error}",
            ) from error
        return found


def _check_types(operation: Operation, found: Sequence[Any]) -> None:
    """Compare the types of results with those that the text says."""
    for made, type in zip(found, operation.types, strict=True):
        known = not (isinstance(type, TensorType) and isinstance(made, Tensor))
        if not (known or (made.shape == type.shape and made.dtype == type.dtype)):
            raise UnsupportedOpError(
                f"{operation.name}: the result has another type than the text says", expected=str(type),
                received=str(made.type),
            )  # fmt: skip


def _make_constant(operation: Operation, scope: Scope) -> Tensor:
    value, (type,) = operation.attrs["value"], operation.types
    flat = value.reshape(-1)
    if not flat.size or not (flat.view(f"V{flat.itemsize}") == flat.view(f"V{flat.itemsize}")[0]).all():
        return Tensor(np.ascontiguousarray(value))
    number = flat[0].item() if flat.dtype.kind in "iufb" else float(flat[0])
    if not type.shape:
        for name, _ in operation.results:
            scope.numbers[name] = number
    return full(shape=type.shape, value=number, dtype=type.dtype)


# Functions for users.


def load(
    text: str,
    *,
    entry: str = "main",
    name: str | None = None,
    custom_calls: Mapping[str, Callable[..., Any]] | None = None,
) -> Any:
    """A function of tensors from StableHLO text, as `jax.jit(f).lower(...).as_text()` or `jax.export` give it.

    The function is that of `@ts.jit`: call it with arrays, or use it in other functions, under `ts.grad` and `ts.vmap`
    and with `ts.build`. It returns one tensor or a tuple. With `as_text(debug_info=True)` errors and `tessera inspect`
    name the lines of the Python program; else those of the text, a file called `name`. `entry` is the function to
    import; `custom_calls` gives custom calls a meaning: functions of tensors by the name of the target.

    >>> double = load('''
    ... func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
    ...   %0 = stablehlo.add %x, %x : tensor<2xf32>
    ...   return %0 : tensor<2xf32>
    ... }''')
    >>> double(np.float32([1, 2]))
    Tensor([2., 4.], f32)

    Raises:
        ParseError: the text is not StableHLO.
        UnknownNameError: there is no function `entry`.
        UnsupportedOpError: on a call, at an operation that is not supported (complex numbers, dynamic shapes, LAPACK).
    """
    name = name or f"<stablehlo {hash_text(text)[:12]}>"
    _keep_text(name, text)
    module = parse(text, name)
    evaluation = ModuleEvaluator(module, custom_calls or {})
    function = evaluation.function(entry)
    _check_parameters(function)
    names = _name_parameters(function)

    def run(*operands: Any) -> Any:
        found = ModuleEvaluator(module, custom_calls or {}).call(entry, [as_tensor(x) for x in operands])
        return found[0] if len(found) == 1 else tuple(found)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    run.__name__ = run.__qualname__ = module.name if entry == "main" and module.name.isidentifier() else entry
    run.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])  # type: ignore[attr-defined]
    run.__annotations__ = dict(zip(names, function.region.types, strict=True))
    run.__doc__ = f"The function @{entry} of {name}."
    found = Jit(run)
    if function.region.operations:
        found.location = function.region.operations[0].location
    return found


def _keep_text(name: str, text: str) -> None:
    """Let errors show the lines of the text."""
    if name.startswith("<"):
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


def _check_parameters(function: HloFunction) -> None:
    for type in function.region.types:
        if isinstance(type, RefusedType):
            raise UnsupportedOpError(
                f"@{function.name} has a parameter that is not supported: {type.reason}", received=type.text,
                location=function.region.operations[0].location if function.region.operations else Location(),
            )  # fmt: skip


def _name_parameters(function: HloFunction) -> list[str]:
    """Python names: those of the program that the text came from where they are distinct identifiers."""
    hints = [*function.hints, *([""] * len(function.region.params))][: len(function.region.params)]
    found: list[str] = []
    for i, (hint, name) in enumerate(zip(hints, function.region.params, strict=True)):
        plain = re.sub(r"\W", "_", hint or name.lstrip("%"))
        usable = plain.isidentifier() and not keyword.iskeyword(plain) and plain not in found
        found.append(plain if usable else f"argument{i}")
    return found

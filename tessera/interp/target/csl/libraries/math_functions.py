"""The library `<math>`: elementary functions and constants of f16 and f32."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.values import ComptimeValue, NativeFunction
from tessera.interp.target.csl.text.diagnostics import CslError


def _raise_to_power(x: Any, y: Any) -> Any:
    """C's power: NumPy takes the square root for one half, which is another function at -0 and -inf."""
    root = np.equal(y, 0.5) & (np.equal(x, 0.0) | np.isinf(x))
    return np.where(root, np.abs(x), np.power(x, y))


# Functions, each computed in f64 and rounded once, with the cycles of one call.
UNARY_FUNCTIONS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "abs": (np.abs, 2),
    "sign": (np.sign, 3),
    "sqrt": (np.sqrt, 30),
    "inv": (np.reciprocal, 20),
    "invsqrt": (lambda x: 1.0 / np.sqrt(x), 30),
    "sin": (np.sin, 60),
    "cos": (np.cos, 60),
    "tan": (np.tan, 80),
    "tanh": (np.tanh, 60),
    "sinh": (np.sinh, 80),
    "cosh": (np.cosh, 80),
    "asin": (np.arcsin, 80),
    "acos": (np.arccos, 80),
    "atan": (np.arctan, 80),
    "exp": (np.exp, 60),
    "exp2": (np.exp2, 60),
    "log": (np.log, 60),
    "log2": (np.log2, 60),
    "log10": (np.log10, 60),
    "ceil": (np.ceil, 10),
    "floor": (np.floor, 10),
    "trunc": (np.trunc, 10),
    "round": (np.rint, 10),
    "isNaN": (np.isnan, 3),
    "isInf": (np.isinf, 3),
    "isFinite": (np.isfinite, 3),
    "isSignaling": (lambda x: False, 3),
    "signbit": (np.signbit, 3),
    "sig": (lambda x: 1.0 / (1.0 + np.exp(-x)), 80),
}
BINARY_FUNCTIONS: dict[str, tuple[Callable[[Any, Any], Any], int]] = {
    "pow": (_raise_to_power, 120),
    "min": (np.fmin, 3),
    "max": (np.fmax, 3),
    "fmod": (np.fmod, 40),
    "copysign": (np.copysign, 3),
    "atan2": (np.arctan2, 100),
}
_PREDICATES = ("isNaN", "isInf", "isFinite", "isSignaling", "signbit")
_INTEGER_FUNCTIONS = ("abs", "sign", "min", "max")
CONSTANTS = {
    "PI": math.pi,
    "E": math.e,
    "LN2": math.log(2),
    "SQRT_2": math.sqrt(2),
    "POSITIVE_INF": math.inf,
    "NEGATIVE_INF": -math.inf,
    "NaN": math.nan,
}


def _make_typed(name: str, type_: t.CslFloat, function: Callable[..., Any], count: int, cycles: int) -> ComptimeValue:
    result = t.BOOL if name in _PREDICATES else type_
    back = bool if name in _PREDICATES else type_.dtype.type

    def run(pe: Any, *args: Any) -> Any:
        return back(function(*(np.float64(a) for a in args)))

    on_arrays = None if name in _PREDICATES else _vectorise(function)
    native = NativeFunction(f"{name}_{type_}", run, cycles=cycles, whole=on_arrays)
    return ComptimeValue(t.CslFunctionType("", (type_,) * count, result), native)


def _vectorise(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of floats on arrays: computed in f64 and rounded once, as for one number.

    >>> _vectorise(np.sqrt)(np.array([2, 4], np.float32)).tolist()
    [1.4142135381698608, 2.0]
    """

    def run(*args: Any) -> Any:
        dtype = next(a.dtype for a in args if isinstance(a, (np.ndarray, np.generic)))
        if dtype.kind in "iu":
            return function(*args)
        return function(*(np.asarray(a).astype(np.float64) for a in args)).astype(dtype)

    return run


def _make_generic(name: str, function: Callable[..., Any], count: int, cycles: int) -> ComptimeValue:
    """A function whose type is that of its arguments."""

    def result(*types: t.CslType) -> t.CslType:
        first = next((x for x in types if x not in (t.COMPTIME_FLOAT, t.COMPTIME_INT)), types[0])
        on_arrays = name in _INTEGER_FUNCTIONS and isinstance(first, t.CslInt)
        if not (on_arrays or isinstance(first, t.CslFloat) or first is t.COMPTIME_FLOAT):
            raise CslError(f"function '{name}' is not defined for type '{first}'")
        if any(x != first and x not in (t.COMPTIME_FLOAT, t.COMPTIME_INT) for x in types):
            raise CslError(f"expected type '{first}', got: '{next(x for x in types if x != first)}'")
        return t.BOOL if name in _PREDICATES else t.F32 if first is t.COMPTIME_FLOAT else first

    def run(pe: Any, *args: Any) -> Any:
        kind = next((type(a) for a in args if isinstance(a, np.floating)), None)
        if kind is None:
            found = function(*args)
            return bool(found) if name in _PREDICATES else int(found)
        found = function(*(np.float64(a) for a in args))
        return bool(found) if name in _PREDICATES else kind(found)

    on_arrays = None if name in _PREDICATES else _vectorise(function)
    native = NativeFunction(name, run, cycles=cycles, result=result, whole=on_arrays)
    return ComptimeValue(t.CslFunctionType("", (None,) * count, t.ANYTYPE), native)


def _make_constant(name: str, number: float) -> ComptimeValue:
    """`NaN(f32)` and the like: a constant of a type."""

    def run(unit: Any, type_: ComptimeValue) -> ComptimeValue:
        if not isinstance(type_.data, t.CslFloat):
            raise CslError(f"function '{name}' is not defined for type '{type_.data}'")
        return ComptimeValue(type_.data, type_.data.dtype.type(number))

    return ComptimeValue(t.CslFunctionType("", (t.TYPE,), t.ANYTYPE), NativeFunction(name, run, comptime=True))


def _make_fscale(title: str, type_: t.CslType | None) -> ComptimeValue:
    """`fscale`: a float times a power of two."""
    run = NativeFunction(
        title, lambda pe, x, power: type(x)(np.ldexp(np.float64(x), int(power))), cycles=4,
        result=None if type_ else lambda x, power: x,
    )  # fmt: skip
    return ComptimeValue(t.CslFunctionType("", (type_, t.I16), type_ or t.ANYTYPE), run)


def make_math(unit: Any, params: dict[str, ComptimeValue]) -> dict[str, ComptimeValue]:
    """The members of `<math>`: `sqrt_f32`, `sqrt_f16` (for the format of `@fp16()`), the generic `sqrt`, and so on."""
    return dict(_make_members(unit.options.fp16_format))


@cache
def _make_members(fp16_format: str) -> dict[str, ComptimeValue]:
    members: dict[str, ComptimeValue] = {"fscale": _make_fscale("fscale", None)}
    half = t.NAMED[fp16_format]
    kinds: tuple[tuple[str, t.CslFloat], ...] = (("f16", half), ("f32", t.F32))  # type: ignore[assignment]
    for suffix, type_ in kinds:
        members[f"fscale_{suffix}"] = _make_fscale(f"fscale_{suffix}", type_)
        for name, number in CONSTANTS.items():
            members[f"{name}_{suffix}"] = ComptimeValue(type_, type_.dtype.type(number))
    for count, table in ((1, UNARY_FUNCTIONS), (2, BINARY_FUNCTIONS)):
        for name, (function, cycles) in table.items():  # type: ignore[attr-defined]
            members[name] = _make_generic(name, function, count, cycles)
            for suffix, type_ in kinds:
                members[f"{name}_{suffix}"] = _make_typed(name, type_, function, count, cycles)
    members |= {name: _make_constant(name, CONSTANTS[name]) for name in ("POSITIVE_INF", "NEGATIVE_INF", "NaN")}
    members["PI"], members["E"] = ComptimeValue(t.COMPTIME_FLOAT, math.pi), ComptimeValue(t.COMPTIME_FLOAT, math.e)
    return members

"""Ops of one element type: `ts.f32.add`, `ts.int8.saturating_add`. Operands of another type are an error.

| name | types | meaning |
|---|---|---|
| add sub mul maximum minimum neg abs sum matmul | all | as `ts.add` … |
| div exp log sqrt tanh sigmoid relu softmax mean | floats | as `ts.div` … |
| saturating_add saturating_sub saturating_mul | integers | the precise result, cut off at the ends of the type |
| wrapping_add wrapping_sub wrapping_mul | integers | the precise result modulo 2^bits |
| checked_add checked_sub checked_mul | integers | the result, and whether it fits |
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tessera.core.errors import DTypeError, user_location
from tessera.core.types import DType, int16, int32, int64
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor import contractions, nn, reduce
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import scalar_functions as functions
from tessera.ops.tensor.basic import cast

COMMON: dict[str, Callable[..., Any]] = {
    "add": e.add, "sub": e.sub, "mul": e.mul, "maximum": e.maximum, "minimum": e.minimum, "neg": e.neg, "abs": e.abs,
    "sum": reduce.sum, "matmul": contractions.matmul,
}  # fmt: skip
FLOATS: dict[str, Callable[..., Any]] = {
    "div": e.div, "exp": e.exp, "log": e.log, "sqrt": e.sqrt, "tanh": e.tanh, "sigmoid": functions.sigmoid,
    "relu": nn.relu, "softmax": nn.softmax, "mean": reduce.mean,
}  # fmt: skip
_ARITHMETIC = {"add": e.add, "sub": e.sub, "mul": e.mul}
_WIDER = {4: int16, 8: int32, 16: int64, 32: int64}  # which holds every sum and product


def _limits(dtype: DType) -> tuple[int, int]:
    if dtype.kind == "uint":
        return 0, (1 << dtype.bits) - 1
    return -(1 << (dtype.bits - 1)), (1 << (dtype.bits - 1)) - 1


def _compute_wide(dtype: DType, name: str, x: Tensor, y: Tensor) -> Tensor:
    """The precise result; for 64 bits, modulo 2^64."""
    wide = _WIDER.get(dtype.bits, dtype)
    return _ARITHMETIC[name](cast(x, dtype=wide), cast(y, dtype=wide))  # type: ignore[no-any-return]


def _saturate(dtype: DType, name: str, x: Tensor, y: Tensor) -> Tensor:
    low, high = _limits(dtype)
    wide = _compute_wide(dtype, name, x, y)
    return cast(e.minimum(e.maximum(wide, low), high), dtype=dtype)


def _wrap(dtype: DType, name: str, x: Tensor, y: Tensor) -> Tensor:
    low, high = _limits(dtype)
    wide = _compute_wide(dtype, name, x, y)
    if wide.dtype == dtype:
        return wide
    return cast(e.remainder(wide - low, high - low + 1) + low, dtype=dtype)


def _check(dtype: DType, name: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    low, high = _limits(dtype)
    wide = _compute_wide(dtype, name, x, y)
    return _wrap(dtype, name, x, y), e.bitwise_and(wide >= low, wide <= high)


_MODES = {"saturating": _saturate, "wrapping": _wrap, "checked": _check}
EXACT_BITS = 32  # of the widest integers whose results fit a wider type


def list_typed_ops(dtype: DType) -> dict[str, Callable[..., Any]]:
    """The ops of an element type, by name."""
    found = dict(COMMON)
    if dtype.is_float:
        found.update(FLOATS)
    elif dtype.is_integer and dtype.bits <= EXACT_BITS and (dtype.kind, dtype.bits) != ("uint", 32):
        found.update(_make_integer_ops(dtype))
    elif dtype.is_integer:
        found.update({k: v for k, v in _make_integer_ops(dtype).items() if k.startswith("wrapping")})
    return found


def _make_integer_ops(dtype: DType) -> dict[str, Callable[..., Any]]:
    return {
        f"{mode}_{name}": functools.partial(run, dtype, name) for mode, run in _MODES.items() for name in _ARITHMETIC
    }


def find_typed_op(dtype: DType, name: str) -> Callable[..., Any] | None:
    """An op of an element type, which refuses operands of another; None where the type has none of this name."""
    op = list_typed_ops(dtype).get(name)
    if op is None:
        return None

    def typed(*operands: Any, **attrs: Any) -> Any:
        tensors = [as_tensor(x) if isinstance(x, Tensor) else _convert(x, dtype) for x in operands]
        wrong = next((t for t in tensors if t.dtype != dtype), None)
        if wrong is not None:
            raise DTypeError(
                f"ts.{dtype}.{name} has an operand of another element type", location=user_location(),
                expected=str(dtype), received=str(wrong.type), suggestion=f"cast it: x.to(ts.{dtype})",
            )  # fmt: skip
        return op(*tensors, **attrs)

    typed.__name__, typed.__doc__ = name, f"`ts.{name.rpartition('_')[2]}` of {dtype} alone."
    return typed


def _convert(value: Any, dtype: DType) -> Tensor:
    """A Python number takes the type; an array keeps its own."""
    if isinstance(value, (bool, int, float)):
        return Tensor(value, dtype=dtype)
    return as_tensor(value)

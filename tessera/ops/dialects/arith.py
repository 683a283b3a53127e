"""Arithmetic dialect: the primitives that decompositions of scalar functions need besides ts ops (MLIR, arith and
math).

They occur in decompositions alone (tessera/lower/scalar_functions), which code generators read. No program and no
module has them, so they have neither a text form nor rules for errors, derivatives or batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.core.errors import DTypeError
from tessera.core.types import DType, TensorType, bool_
from tessera.ir.rules import STORAGE, Op
from tessera.ops.tensor.basic import coerce_plain
from tessera.ops.tensor.coercion import coerce_pointwise
from tessera.ops.tensor.elementwise import infer_comparison, infer_same

BITCAST_BITS = (32, 64)


def define_primitive(
    infer: Callable[..., TensorType], coerce: Any = coerce_pointwise, dialect: str = "arith"
) -> Callable[..., Op]:
    """An op of decompositions alone."""

    def define(ref: Callable[..., Any]) -> Op:
        parameters = inspect.signature(ref).parameters
        attrs = {k: p for k, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
        operands = tuple(k for k in parameters if k not in attrs)
        return Op(f"{dialect}.{ref.__name__}", ref, infer, STORAGE, True, coerce, None, frozenset(), operands, attrs)

    return define


def _infer_bitcast(x: TensorType, *, dtype: DType) -> TensorType:
    if x.dtype.bits != dtype.bits or dtype.bits not in BITCAST_BITS or bool_ in (x.dtype, dtype):
        raise DTypeError(
            "bitcast keeps the width of elements", expected="two element types of 32 bits, or two of 64",
            received=f"{x.dtype} to {dtype}",
        )  # fmt: skip
    return TensorType(x.shape, dtype)


@define_primitive(_infer_bitcast, coerce_plain)
def bitcast(x: Any, *, dtype: DType) -> Any:
    """The bits of each element, read as another element type of the same width."""
    return np.ascontiguousarray(x).view(dtype.numpy).reshape(np.shape(x))


@define_primitive(infer_same)
def fma(x, y, z):
    """`x` times `y` plus `z`, rounded once where the target has such an instruction, else twice."""
    if np.asarray(x).dtype == np.float32:
        return (np.multiply(x, y, dtype=np.float64) + z).astype(np.float32)
    (a, b), (c, d) = _split_in_halves(x), _split_in_halves(y)
    total, lost = _add_exactly(a * c, np.asarray(z, np.longdouble))
    total, lost_too = _add_exactly(total, a * d + b * c)
    plain = np.multiply(x, y, dtype=np.longdouble) + z
    return np.where(np.isfinite(plain), total + (lost + lost_too + b * d), plain).astype(np.float64)


def _split_in_halves(x):
    """Numbers of f64 as sums of two of at most 27 bits, whose products a long double holds."""
    x = np.asarray(x, np.float64)
    high = (x.view(np.int64) & ~((1 << 26) - 1)).view(np.float64)
    return high.astype(np.longdouble), (x - high).astype(np.longdouble)


def _add_exactly(x, y):
    """The rounded sum, and what rounding lost (Knuth 1969)."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


@define_primitive(infer_same)
def divide(x, y):
    """`x` divided by `y`, rounded to nearest; `ts.div` may be off by 2.5 ulp."""
    return np.divide(x, y)


@define_primitive(infer_same)
def fmod(x, y):
    """What is left of `x` after whole multiples of `y`, with the sign of `x`: exact, as C's fmod."""
    return np.fmod(x, y)


@define_primitive(infer_same)
def copysign(x, y):
    """The magnitude of `x` with the sign bit of `y`; NaN has one, too."""
    return np.copysign(x, y)


@define_primitive(infer_same)
def trunc(x):
    """The whole part of `x`."""
    return np.trunc(x)


@define_primitive(infer_same)
def extract_bit(x, n):
    """Bit `n` of an unsigned integer, as 0 or 1."""
    return (x >> n) & 1


@define_primitive(infer_same)
def multiply_high(x, y):
    """The upper 64 bits of the product of two unsigned integers of 64 bits."""
    x, y = np.asarray(x), np.asarray(y)
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    low, cross = (x & mask) * (y & mask), (x >> half) * (y & mask)
    middle = (x & mask) * (y >> half) + (low >> half) + (cross & mask)
    return (x >> half) * (y >> half) + (cross >> half) + (middle >> half)


@define_primitive(infer_comparison)
def is_nan(x):
    """Whether `x` is NaN."""
    return np.isnan(x)

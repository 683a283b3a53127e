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
    wide = np.float64 if np.asarray(x).dtype == np.float32 else np.longdouble
    return (np.multiply(x, y, dtype=wide) + z).astype(np.asarray(x).dtype)


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


@define_primitive(infer_comparison)
def is_nan(x):
    """Whether `x` is NaN."""
    return np.isnan(x)

"""Contractions: the primitive `dot`, and matmul in all its forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tessera.errors import DTypeError, ShapeError, TesseraError, here
from tessera.numerics import sums
from tessera.op import ACCUMULATE, Op, error, op
from tessera.ops.arguments import typed
from tessera.ops.basic import broadcast_to, cast, check_count
from tessera.ops.coerce import promote
from tessera.ops.shape import count, expand_dims, reshape, squeeze
from tessera.shapes import broadcast
from tessera.tensor import Tensor, as_tensor, bind
from tessera.types import DType, TensorType, as_dtype, bool_, f32, fp8_e4m3, fp8_e5m2, int8, int32, uint8


def _dot_attrs(a: TensorType, b: TensorType, *, dtype: Any) -> dict[str, Any]:
    return {"dtype": as_dtype(dtype) if dtype is not None else product_dtype(a, b)}


def product_dtype(a: TensorType, b: TensorType) -> DType:
    """What a product of such elements is stored as: int8, and two types, give their accumulator."""
    whole = a.dtype.is_integer and a.dtype.bits <= int8.bits
    return int32 if whole else a.dtype if a.dtype == b.dtype else f32


# Types whose numbers matrix units multiply with each other's, each exactly.
MIXED = (frozenset((fp8_e4m3, fp8_e5m2)), frozenset((int8, uint8)))


def mixes(a: DType, b: DType) -> bool:
    """Whether a product may have sides of two types."""
    return any({a, b} <= family for family in MIXED)


def _dot_type(a: TensorType, b: TensorType, *, dtype: DType) -> TensorType:
    if a.dtype != b.dtype and not mixes(a.dtype, b.dtype):
        raise DTypeError(
            f"cannot multiply {a.dtype} by {b.dtype}", received=f"{a} and {b}",
            expected="one element type, or two of " + " or of ".join(", ".join(sorted(map(str, f))) for f in MIXED),
            suggestion="cast one side to the other's type before",
        )  # fmt: skip
    if a.dtype == bool_:
        raise DTypeError("a matrix product of bools", received=f"{a} and {b}", suggestion="cast to ts.int32 before")
    if a.rank != b.rank or a.rank < 2 or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        raise ShapeError(
            "the shapes do not fit a matrix product",
            expected=f"({a.shape[-1] if a.rank else '?'}, N) on the right",
            received=f"{a} and {b}",
        )
    return a.with_shape((*a.shape[:-1], b.shape[-1])).with_dtype(dtype)


def products(op: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """As `plain`; two vectors are a row and a column."""
    check_count(op, operands)
    a, b = (as_tensor(x) for x in operands)
    if a.ndim == 1 == b.ndim:
        return reshape(bind(op, [expand_dims(a, 0), expand_dims(b, 1)], attrs), shape=())
    return bind(op, [a, b], attrs)


@op(infer=_dot_type, coerce=products, canonical=_dot_attrs, numerics=ACCUMULATE)
def dot(a, b, *, dtype: Any = None):
    """The matrix product of the last two axes, equal leading axes being a batch; of two vectors, their dot product.

    Products are summed in the accumulation type and rounded once to `dtype` (default: the storage type, int32 for
    int8 and uint8). The sides have one type, or are both fp8 (the default is f32 where they differ), or int8 and uint8.
    """
    return np.matmul(a, b)


error(dot)(sums.product)


@typed
def matmul(a: Any, b: Any, *, dtype: Any = None) -> Tensor:
    """The matrix product, with NumPy's rules for vectors and broadcast batch axes.

    Shapes: [..., M, K] by [..., K, N] gives [..., M, N].

    >>> matmul([[1.0, 2.0]], [[3.0], [4.0]])
    Tensor([[11.]], f32)
    """
    a, b = as_tensor(a), as_tensor(b)
    try:
        if a.dtype is not b.dtype and not (a.dtype.is_float and mixes(a.dtype, b.dtype)):
            common = promote([a.type, b.type])
            a, b = (t if t.dtype == common else cast(t, dtype=common) for t in (a, b))
        return _matmul(a, b, dtype)
    except TesseraError as error:
        raise error.at(here()) from None


def _matmul(a: Tensor, b: Tensor, dtype: Any) -> Tensor:
    if not a.ndim or not b.ndim:
        raise ShapeError("matmul needs at least one axis on each side", received=f"{a.type} and {b.type}")
    if a.ndim == 1:
        return squeeze(_matmul(expand_dims(a, 0), b, dtype), -1 if b.ndim == 1 else -2)
    if b.ndim == 1:
        return squeeze(_matmul(a, expand_dims(b, -1), dtype), -1)
    if a.shape[-1] != b.shape[-2]:
        raise ShapeError(
            f"cannot multiply: the left has {a.shape[-1]} columns, the right {b.shape[-2]} rows",
            expected=f"({a.shape[-1]}, N) on the right",
            received=f"{a.type} and {b.type}",
        )
    if b.ndim == 2 and a.ndim > 2:  # one big product rather than many small ones
        rows = reshape(a, shape=(count(a.shape[:-1]), a.shape[-1]))
        return reshape(dot(rows, b, dtype=dtype), shape=(*a.shape[:-1], b.shape[-1]))
    if a.ndim == 2 == b.ndim:
        return dot(a, b, dtype=dtype)
    batch = broadcast(a.shape[:-2], b.shape[:-2])
    sides = [t if t.shape[:-2] == batch else broadcast_to(t, shape=(*batch, *t.shape[-2:])) for t in (a, b)]
    return dot(*sides, dtype=dtype)


@typed
def linear(x: Any, weight: Any, bias: Any = None) -> Tensor:
    """`x` [..., D] times `weight` [D, N], plus `bias` [N] if given."""
    out = matmul(x, weight)
    return out if bias is None else out + bias

"""Bits of elements: the primitive `bitcast`, counts of bits, and rounding to fewer bits of exponent and mantissa."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, DTypeError, user_location
from tessera.core.types import BY_NAME, DType, TensorType, as_dtype, bf16, f32, f64, int32, int64, tf32, uint16, uint32
from tessera.ir.numerics.error_model import ErrorSite
from tessera.ir.numerics.interval_arithmetic import IntervalArray, make_interval
from tessera.ir.rules import STORAGE, error, jvp, op
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor.argument_checks import check_arguments
from tessera.ops.tensor.basic import cast, coerce_plain, splat, zero_jvp
from tessera.ops.tensor.elementwise import (
    abs,
    bitwise_and,
    equal,
    greater,
    greater_equal,
    less,
    not_equal,
    shift_left,
    shift_right,
    where,
)


def _infer_bitcast(x: TensorType, *, dtype: DType) -> TensorType:
    if x.dtype.bits != dtype.bits or tf32 in (x.dtype, dtype) or dtype.bits not in (32, 64):
        raise DTypeError(
            "bitcast keeps the width of elements", expected="two types of 16, 32 or 64 bits, or two integer types",
            received=f"{x.dtype} to {dtype}",
        )  # fmt: skip
    return TensorType(x.shape, dtype)


@op(
    infer=_infer_bitcast,
    coerce=coerce_plain,
    canonical=lambda x, *, dtype: {"dtype": as_dtype(dtype)},
    numerics=STORAGE,
    pointwise=True,
    name="bitcast",
)
def bitcast_elements(x: Any, *, dtype: DType) -> Any:
    """The bits of each element, read as another element type of the same width."""
    return np.ascontiguousarray(x).view(dtype.numpy).reshape(np.shape(x))


@error(bitcast_elements)
def _(site: ErrorSite, x: IntervalArray, *, dtype: DType) -> IntervalArray:
    stored = np.asarray(x.value).astype(site.types[0].dtype.numpy)
    value = np.ascontiguousarray(stored).view(dtype.numpy).reshape(x.shape)
    uncertain = (x.radius > 0) | (stored != x.value)
    value = value.astype(np.float64) if dtype.is_float else value
    # Nothing is known of the bits of an uncertain value, nor of a NaN: its sign and payload are the engine's.
    return make_interval(value, np.where(uncertain, np.inf, 0.0))


jvp(bitcast_elements)(zero_jvp)


@check_arguments
def bitcast(x: Any, dtype: DType) -> Tensor:
    """The bits of each element of `x`, read as another element type of the same width. It has no derivative.

    >>> bitcast(Tensor([1.0]), "int32")
    Tensor([1065353216], int32)

    Raises:
        DTypeError: the types have different widths.
    """
    x, to = as_tensor(x), as_dtype(dtype)
    if x.dtype == to:
        return x
    if x.dtype.is_integer and to.is_integer and x.dtype.bits == to.bits:
        return cast(x, dtype=to)
    if x.dtype.bits == to.bits == 16:
        return _decode(_encode(x), to)
    return bitcast_elements(x, dtype=to)


def _encode(x: Tensor) -> Tensor:
    """The bits of 16-bit elements, in uint32."""
    if x.dtype.is_integer:
        return cast(cast(x, dtype=uint16), dtype=uint32)
    bits = bitcast_elements(cast(x, dtype=f32), dtype=uint32)
    if x.dtype == bf16:
        return shift_right(bits, 16)
    sign, size = shift_left(shift_right(bits, 31), 15), bitwise_and(bits, 0x7FFFFFFF)
    small = cast(abs(cast(x, dtype=f32)) * 2.0**24, dtype=uint32)  # a subnormal number: a multiple of 2^-24
    short = shift_right(size, 13)
    usual = where(greater_equal(size, 0x7F800000), bitwise_and(short, 0x3FF) | 0x7C00, short - (112 << 10))
    return sign | where(less(size, 113 << 23), small, usual)


def _decode(bits: Tensor, to: DType) -> Tensor:
    """16-bit elements of these bits."""
    if to.is_integer:
        return cast(bits, dtype=to)
    if to == bf16:  # the high half of an f32
        return cast(bitcast_elements(shift_left(bits, 16), dtype=f32), dtype=bf16)
    sign, size = shift_left(shift_right(bits, 15), 31), bitwise_and(bits, 0x7FFF)
    special = greater_equal(size, 0x7C00)
    wide = shift_left(size, 13) + where(special, splat((255 - 31) << 23, bits.type), splat(112 << 23, bits.type))
    small = bitcast_elements(cast(size, dtype=f32) * 2.0**-24, dtype=uint32)
    return cast(bitcast_elements(sign | where(less(size, 0x400), small, wide), dtype=f32), dtype=to)


def _view_unsigned(x: Tensor) -> Tensor:
    """The bits of integers as whole numbers of 0 or more; those of int4, which has no unsigned type, in uint8."""
    if not x.dtype.is_integer:
        raise DTypeError("the elements are not integers", location=user_location(), received=str(x.type))
    if x.dtype.kind != "int":
        return x
    bits = cast(x, dtype=BY_NAME[f"uint{max(x.dtype.bits, 8)}"])
    return bits if x.dtype.bits >= 8 else bitwise_and(bits, 2**x.dtype.bits - 1)


@check_arguments
def population_count(x: Any) -> Tensor:
    """The number of bits of each integer that are set, of the type of `x`.

    >>> population_count([0, 7, -1])
    Tensor([ 0,  3, 64], int64)
    """
    x = as_tensor(x)
    bits, width = _view_unsigned(x), x.dtype.bits
    ones = 2**width - 1
    # Sums of neighbouring fields of 1, 2, 4, ... bits, each within twice the width (Warren, Hacker's Delight).
    field = 1
    while field < width:
        mask = splat(ones // (2**field + 1), bits.type)
        bits = bitwise_and(bits, mask) + bitwise_and(shift_right(bits, field), mask)
        field *= 2
    return cast(bits, dtype=x.dtype)


@check_arguments
def count_leading_zeros(x: Any) -> Tensor:
    """The number of zero bits before the highest set bit of each integer; the width for 0.

    >>> count_leading_zeros(Tensor([0, 1, -1]).to("int8"))
    Tensor([8, 7, 0], int8)
    """
    x = as_tensor(x)
    bits, width = _view_unsigned(x), x.dtype.bits
    step = 1
    while step < width:  # set all bits below the highest one
        bits = bits | shift_right(bits, step)
        step *= 2
    return cast(splat(width, bits.type) - population_count(bits), dtype=x.dtype)


@check_arguments
def reduce_precision(x: Any, exponent_bits: int, mantissa_bits: int) -> Tensor:
    """`x` rounded to nearest-even in a float format of these widths, in its own type.

    What is too large becomes infinite; what is too small for a normal number of the format becomes zero. A format
    without mantissa has no NaN: it becomes infinite.

    >>> reduce_precision([1.01, 1e30], 5, 2)
    Tensor([ 1., inf], f32)

    Raises:
        DTypeError: the elements are not floats.
        ArgumentError: there is no such format.
    """
    x = as_tensor(x)
    if not x.dtype.is_float:
        raise DTypeError("the elements are not floats", location=user_location(), received=str(x.type))
    if exponent_bits < 1 or mantissa_bits < 0:
        raise ArgumentError("no float format", location=user_location(), received=f"e{exponent_bits}m{mantissa_bits}")
    info = np.finfo(x.dtype.numpy) if x.dtype in (f32, f64) else None
    wide = x if info is not None else cast(x, dtype=f32)
    found = _round_bits(wide, exponent_bits, mantissa_bits)
    if not mantissa_bits:
        found = where(not_equal(wide, wide), splat(math.inf, wide.type), found)
    return cast(found, dtype=x.dtype)


def _round_bits(x: Tensor, exponent_bits: int, mantissa_bits: int) -> Tensor:
    word, own = (int64, 52) if x.dtype == f64 else (int32, 23)
    bits, dropped = bitcast_elements(x, dtype=word), own - mantissa_bits
    if dropped > 0:
        odd = bitwise_and(shift_right(bits, dropped), 1)
        bits = bitwise_and(bits + (odd + (2 ** (dropped - 1) - 1)), -(2**dropped))
    near = bitcast_elements(bits, dtype=x.dtype)
    bias = 2 ** (exponent_bits - 1) - 1
    if bias >= (1023 if x.dtype == f64 else 127):
        return where(not_equal(x, x), x, near)
    largest = (2.0 - 2.0 ** -min(mantissa_bits, own)) * 2.0**bias
    signed_zero = where(less(x, 0.0), splat(-0.0, x.type), splat(0.0, x.type))
    near = where(
        greater(abs(near), largest), where(less(x, 0.0), splat(-math.inf, x.type), splat(math.inf, x.type)), near
    )
    near = where(greater_equal(abs(near), 2.0 ** (1 - bias)) | equal(x, 0.0), near, signed_zero)
    return where(not_equal(x, x), x, near)

"""Powers of integers by integers, which stay integers: by repeated squares."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.errors import DTypeError, here
from tessera.op import STORAGE, lower, op
from tessera.ops.basic import splat
from tessera.ops.coerce import WHOLE_POWER, pointwise
from tessera.ops.elementwise import abs, bitwise_and, equal, greater_equal, less, shift_right, where
from tessera.tensor import Tensor
from tessera.types import TensorType


def _integers(x: TensorType, exponent: TensorType) -> TensorType:
    if not x.dtype.is_integer:
        raise DTypeError("integer_power of other elements than integers", received=str(x), suggestion="use ts.pow")
    return x


@op(infer=_integers, coerce=pointwise, numerics=STORAGE)
def integer_power(x, exponent):
    """`x` to the power `exponent`, both integers; what overflows wraps. Below 0 it is 1 / x toward zero (0 for 0)."""
    odd = np.where(exponent & 1, x, 1)
    below = np.where(np.abs(x) == 1, odd, 0)
    return np.where(exponent < 0, below, np.power(x.astype(np.int64), np.maximum(exponent, 0))).astype(x.dtype)


@lower(integer_power)
def _(x, exponent):
    odd = where(equal(bitwise_and(exponent, 1), 1), x, 1)
    result, square = odd, x
    for bit in range(1, min(6, exponent.dtype.bits - 1)):
        square = square * square
        result = result * where(equal(bitwise_and(shift_right(exponent, bit), 1), 1), square, 1)
    if exponent.dtype.bits > 7:  # from 64 on only powers of 0, 1 and -1 do not overflow
        result = result * where(greater_equal(exponent, 64), square * square, 1)
    if exponent.dtype.kind == "uint":
        return result
    return where(less(exponent, 0), where(equal(abs(x), 1), odd, 0), result)


def whole_power(x: Any, exponent: Any) -> Tensor:
    """The power of integers; for an exponent that is a Python number, a product of squares.

    Raises:
        DTypeError: the exponent is a number below 0: the result would be no integer.
    """
    if not isinstance(exponent, int):
        return integer_power(x, exponent)
    if exponent < 0:
        raise DTypeError(
            "an integer to a negative power is no integer", location=here(), received=f"exponent {exponent}",
            expected="an exponent from 0 on, or a float base", suggestion=f"x.to(ts.f32) ** {exponent}",
        )  # fmt: skip
    result = None
    for bit in bin(exponent)[2:]:
        result = None if result is None else result * result
        if bit == "1":
            result = x if result is None else result * x
    return splat(1, x.type) if result is None else result


WHOLE_POWER.append(whole_power)

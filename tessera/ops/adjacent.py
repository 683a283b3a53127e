"""The numbers of a format next to another.

The steps are by Rump, Zimmermann, Boldo and Melquiond, "Computing predecessor and successor in rounding to nearest"
(2009): no bits are looked at, so that every target has them.
"""

from __future__ import annotations

import math

import numpy as np

from tessera.errors import DTypeError
from tessera.op import STORAGE, lower, op
from tessera.ops.arithmetic import copysign
from tessera.ops.basic import cast, full
from tessera.ops.coerce import floating
from tessera.ops.elementwise import abs, equal, greater, less, not_equal, where
from tessera.ops.info import FloatInfo, finfo
from tessera.tensor import Tensor
from tessera.types import TensorType, f32, tf32


def _neighbour_type(x: TensorType, y: TensorType) -> TensorType:
    if x.dtype == tf32:
        raise DTypeError("nextafter of tf32, which lies in memory as f32", received=str(x), suggestion="cast to ts.f32")
    return x


@op(infer=_neighbour_type, coerce=floating, numerics=STORAGE)
def nextafter(x, y):
    """The number of the type next to `x` on the way to `y`; `y` where they are equal, NaN where either is.

    Beyond the largest number is what the type overflows to.

    >>> import tessera as ts
    >>> ts.nextafter(1.0, [0.0, 2.0]) - 1.0
    Tensor([-5.9604645e-08,  1.1920929e-07], f32)
    """
    return np.where(x == y, y, np.nextafter(x, y))  # of f16 NumPy gives x, which may be the other zero


@lower(nextafter)
def _(x, y):
    info = finfo(x.dtype)
    wide, target = (x, y) if x.dtype.bits >= f32.bits else (cast(x, dtype=f32), cast(y, dtype=f32))
    size, out = abs(wide), greater(target, wide)
    moved = _moved(wide, size, out, info)
    moved = where(equal(moved, 0.0), copysign(moved, wide), moved)  # from the least number to a zero of its sign
    moved = where(equal(size, math.inf), copysign(info.max, wide), moved)
    least = full(shape=(), value=info.smallest_subnormal, dtype=wide.dtype)
    moved = where(equal(wide, 0.0), where(out, least, -least), moved)
    found = where(equal(wide, target), target, moved)
    found = where(not_equal(wide, wide) | not_equal(target, target), math.nan, found)
    return cast(found, dtype=x.dtype)


def _moved(x: Tensor, size: Tensor, out: Tensor, info: FloatInfo) -> Tensor:
    """A finite number and what rounds to its neighbour: half to one and a half of the distance, added or taken away.

    Among the least numbers that distance is known; a little above them the product is formed of larger numbers, so
    that it is not itself rounded to a multiple of the least one.
    """
    unit, one = info.eps / 2, full(shape=(), value=1, dtype=x.dtype)
    up = 2 / unit
    scale = where(less(size, info.smallest_normal * up), up, one)
    step = size * scale * (unit * (1 + 2 * unit))
    small = less(size, info.smallest_normal * 2)
    step, scale = where(small, info.smallest_subnormal, step), where(small, 1.0, scale)
    return where(out, x * scale + step, x * scale - step) / scale

"""The compensated sum: what the clause `ts.compensated` of a policy makes of `sum` and `mean`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tessera.numerics.compensated import compensated
from tessera.op import ACCUMULATE, lower, op
from tessera.ops.basic import plain
from tessera.ops.elementwise import equal, where
from tessera.ops.reduce import Axes, _axes, _sum_type, reduced, sum
from tessera.ops.shape import count, pad, permute, reshape, slice_
from tessera.shapes import Size
from tessera.tensor import Tensor


def _whole(size: int) -> int:
    """The least power of two from `size` on."""
    return 1 << (size - 1).bit_length() if size > 1 else 1


@op(infer=_sum_type, coerce=plain, canonical=_axes, numerics=ACCUMULATE)
def compensated_sum(x, *, axis: Any = None, keepdims: bool = False):
    """The sum of the elements along `axis` with its rounding errors added at the end: about 2 ulps, however many.

    >>> import tessera as ts
    >>> row = ts.Tensor([1e8, 1.0, -1e8, 1.0])
    >>> ts.compensated_sum(row)
    Tensor(2., f32)
    """
    if x.dtype.kind != "f":
        return np.sum(x, axis=axis, keepdims=keepdims, dtype=np.int64)
    kept = [a for a in range(-x.ndim, 0) if a not in axis]
    size = math.prod(x.shape[a] for a in axis)
    rows = np.transpose(x, (*kept, *axis)).reshape(math.prod(x.shape[a] for a in kept), size)
    rows = np.pad(rows, ((0, 0), (0, _whole(size) - size)))
    total, lost = compensated(rows, rows.shape[1], lambda r, begin, end: r[:, begin:end])
    out = total if lost is None else np.where(lost == lost, total + lost, total)
    shape = [(1 if keepdims else None) if i - x.ndim in axis else s for i, s in enumerate(x.shape)]
    return out.reshape([s for s in shape if s is not None])


@lower(compensated_sum)
def _(x: Tensor, *, axis: Axes, keepdims: bool):
    if not x.dtype.is_float:
        return sum(x, axis=axis, keepdims=keepdims)
    shape: tuple[Size, ...] = reduced(x.type, axis, keepdims)
    kept = [a for a in range(-x.ndim, 0) if a not in axis]
    size = int(count([x.shape[a] for a in axis]))
    rows = reshape(permute(x, axes=(*kept, *axis)), shape=(count([x.shape[a] for a in kept]), size))
    rows = pad(rows, low=(0, 0), high=(0, _whole(size) - size)) if size != _whole(size) else rows
    total, lost = compensated(rows, int(rows.shape[1]), _part)
    return reshape(total if lost is None else where(equal(lost, lost), total + lost, total), shape=shape)


def _part(rows: Tensor, begin: int, end: int) -> Tensor:
    return slice_(rows, start=(0, begin), stop=(rows.shape[0], end))

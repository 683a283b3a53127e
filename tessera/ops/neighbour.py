"""What neighbours hold: whole tensors moved by a place or more, for stencils."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.op import STORAGE, lower, op
from tessera.ops.basic import plain
from tessera.ops.shape import pad, slice_
from tessera.shapes import normalize_axis
from tessera.types import TensorType


def _attrs(x: TensorType, *, axis: Any, shift: int) -> dict[str, Any]:
    return {"axis": normalize_axis(axis, x.rank), "shift": int(shift)}


@op(coerce=plain, canonical=_attrs, numerics=STORAGE)
def mesh_shift(x, *, axis: int = 0, shift: int = 1):
    """What lies `shift` places before each element along `axis`, 0 where nothing does; on a mesh, a neighbour tells.

    Shapes: that of `x`. Raises ShapeError for an axis there is not.

    >>> import tessera as ts
    >>> ts.mesh_shift([1.0, 2.0, 3.0], axis=0, shift=1)
    Tensor([0., 1., 2.], f32)
    """
    out = np.zeros_like(x)
    count, places = x.shape[axis], [slice(None)] * x.ndim
    here, there = list(places), list(places)
    here[axis], there[axis] = slice(max(shift, 0), count + min(shift, 0)), slice(max(-shift, 0), count - max(shift, 0))
    if abs(shift) < count:
        out[tuple(here)] = x[tuple(there)]
    return out


@lower(mesh_shift)
def _(x, *, axis, shift):
    low = tuple(max(shift, 0) if a - x.ndim == axis else 0 for a in range(x.ndim))
    high = tuple(max(-shift, 0) if a - x.ndim == axis else 0 for a in range(x.ndim))
    start = tuple(high)
    stop = tuple(h + n for h, n in zip(high, x.shape, strict=True))
    return slice_(pad(x, low=low, high=high), start=start, stop=stop, step=(1,) * x.ndim)

"""Running sums and products of whole tensors, by doubling: log2(n) steps over the axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.op import ACCUMULATE, lower, op
from tessera.ops.arrange import narrow
from tessera.ops.basic import cast, plain
from tessera.ops.elementwise import add, mul
from tessera.ops.reduce import _total
from tessera.ops.shape import pad
from tessera.shapes import normalize_axis
from tessera.tensor import Tensor
from tessera.types import TensorType


def _running_type(x: TensorType, *, axis: int) -> TensorType:
    return x.with_dtype(_total(x.dtype))


def _axis(x: TensorType, *, axis: int) -> dict[str, Any]:
    return {"axis": normalize_axis(axis, x.rank)}


@op(infer=_running_type, coerce=plain, canonical=_axis, numerics=ACCUMULATE)
def cumsum(x, *, axis: int = -1):
    """The sums of the elements up to each along `axis`; narrower integers and bools give int64.

    >>> import tessera as ts
    >>> ts.cumsum([1, 2, 3])
    Tensor([1, 3, 6], int64)
    """
    return np.cumsum(x, axis=axis, dtype=np.int64 if x.dtype.kind in "iub" else x.dtype)


@op(infer=_running_type, coerce=plain, canonical=_axis, numerics=ACCUMULATE)
def cumprod(x, *, axis: int = -1):
    """The products of the elements up to each along `axis`; narrower integers and bools give int64."""
    return np.cumprod(x, axis=axis, dtype=np.int64 if x.dtype.kind in "iub" else x.dtype)


def _doubled(x: Tensor, axis: int, join: Callable[..., Any], neutral: int) -> Tensor:
    x = cast(x, dtype=_total(x.dtype))
    size, reach = int(x.shape[axis]), 1
    none, sides = [0] * x.ndim, [0] * x.ndim
    while reach < size:
        sides[axis] = reach
        earlier = pad(narrow(x, axis, 0, size - reach), low=tuple(sides), high=tuple(none), value=neutral)
        x, reach = join(x, earlier), 2 * reach
    return x


@lower(cumsum)
def _(x, *, axis):
    return _doubled(x, axis, add, 0)


@lower(cumprod)
def _(x, *, axis):
    return _doubled(x, axis, mul, 1)

"""Running extremes: cummax and cummin, with their rules."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.core.shapes import normalize_axis
from tessera.core.types import TensorType
from tessera.ir.numerics import reference_kernels
from tessera.ir.rules import STORAGE, batch, lower, op
from tessera.ir.tensor import Tensor, bind_op
from tessera.ops.tensor.basic import coerce_plain
from tessera.ops.tensor.elementwise import maximum, minimum
from tessera.ops.tensor.rearrange import narrow
from tessera.ops.tensor.shape import concatenate


def _canonicalise(x: TensorType, *, axis: int) -> dict[str, Any]:
    return {"axis": normalize_axis(axis, x.rank)}


@op(infer=lambda x, *, axis: x, coerce=coerce_plain, canonical=_canonicalise, numerics=STORAGE)
def cummax(x, *, axis: int = -1):
    """The largest of the elements up to each along `axis`; NaN from the first one on.

    >>> import tessera as ts
    >>> ts.cummax([1, 3, 2])
    Tensor([1, 3, 3], int64)
    """
    return reference_kernels.accumulate_extreme(np.maximum, x, axis)


@op(infer=lambda x, *, axis: x, coerce=coerce_plain, canonical=_canonicalise, numerics=STORAGE)
def cummin(x, *, axis: int = -1):
    """The smallest of the elements up to each along `axis`; NaN from the first one on."""
    return reference_kernels.accumulate_extreme(np.minimum, x, axis)


def _scan_by_doubling(x: Tensor, axis: int, join: Any) -> Tensor:
    """Recursive doubling: log2(n) steps (Hillis and Steele 1986)."""
    size, reach = int(x.shape[axis]), 1
    while reach < size:
        later = join(narrow(x, axis, reach, size), narrow(x, axis, 0, size - reach))
        x, reach = concatenate([narrow(x, axis, 0, reach), later], axis=axis), 2 * reach
    return x


@lower(cummax)
def _(x, *, axis):
    return _scan_by_doubling(x, axis, maximum)


@lower(cummin)
def _(x, *, axis):
    return _scan_by_doubling(x, axis, minimum)


@batch(cummax, cummin)
def _(lanes, **attrs):
    # Axes count from the end, so the attributes hold with a leading axis too.
    return bind_op(lanes.op, lanes.tensors, attrs)

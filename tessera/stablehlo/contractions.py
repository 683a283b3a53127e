"""Rows of contractions: dot_general, convolution, normalisation over batches and linear systems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tessera.core.types import DType, int8, int32
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import reduce as r
from tessera.ops.tensor import shape as s
from tessera.ops.tensor.basic import cast, full
from tessera.ops.tensor.contractions import dot
from tessera.ops.tensor.convolution import conv1d, conv2d, conv3d
from tessera.ops.tensor.decompositions import cholesky
from tessera.ops.tensor.matrices import matrix_transpose
from tessera.ops.tensor.rearrange import flip, tril, triu
from tessera.stablehlo.padding import pad_with
from tessera.stablehlo.table import Site, row
from tessera.transforms.flow import scan

# Products.


def _multiply(a: Tensor, b: Tensor, dtype: DType) -> Tensor:
    """The product of [..., M, K] and [..., K, N], with sums of the type of the result or a wider one."""
    if 0 in (*a.shape, *b.shape):
        return full(shape=(*a.shape[:-1], b.shape[-1]), value=0, dtype=dtype)
    if dtype.kind == "bool":
        return e.not_equal(dot(cast(a, dtype=int32), cast(b, dtype=int32), dtype=int32), 0)
    exact = a.dtype == b.dtype and (dtype == int32 if a.dtype == int8 else a.dtype == dtype or _widens(a.dtype, dtype))
    if not exact:
        a, b = (x if x.dtype == dtype else cast(x, dtype=dtype) for x in (a, b))
    if dtype.is_integer and dtype.bits < int32.bits:
        wide = dot(cast(a, dtype=int32), cast(b, dtype=int32), dtype=int32)
        return cast(wide, dtype=dtype)
    return dot(a, b, dtype=dtype)


def _widens(narrow: DType, wide: DType) -> bool:
    return narrow.is_float and narrow.bits <= 16 and wide.is_float and wide.bits == 32


@row("stablehlo.dot_general")
def _(site: Site, x: Tensor, y: Tensor) -> Tensor:
    batch, contracted = _dot_axes(site)
    free = [[a for a in range(t.ndim) if a not in (*batch[i], *contracted[i])] for i, t in enumerate((x, y))]
    left = _group(x, batch[0], free[0], contracted[0])
    right = _group(y, batch[1], contracted[1], free[1])
    found = _multiply(left, right, site.dtype)
    return s.reshape(found, shape=site.shape)


def _dot_axes(site: Site) -> tuple[Any, Any]:
    """The batching and the contracting axes, of each side, in either form."""
    given = site.get("dot_dimension_numbers")
    if given is not None:
        kinds = ("batching", "contracting")
        return tuple([given.get(f"{side}_{k}_dimensions", []) for side in ("lhs", "rhs")] for k in kinds)  # type: ignore[return-value]
    return site.get("batching_dims", [[], []]), site.get("contracting_dims", [[], []])


def _group(x: Tensor, *groups: Sequence[int]) -> Tensor:
    """`x` with each group of axes merged into one."""
    order = tuple(a for group in groups for a in group)
    moved = x if order == tuple(range(x.ndim)) else s.permute(x, axes=order)
    return s.reshape(moved, shape=tuple(math.prod(x.shape[a] for a in group) for group in groups))


@row("stablehlo.dot")
def _(site: Site, x: Tensor, y: Tensor) -> Tensor:
    a = s.reshape(x, shape=(1, -1)) if x.ndim == 1 else x
    b = s.reshape(y, shape=(-1, 1)) if y.ndim == 1 else y
    return s.reshape(_multiply(a, b, site.dtype), shape=site.shape)


# Convolution.

_CONVOLUTIONS = {1: conv1d, 2: conv2d, 3: conv3d}


def _locate(labels: Sequence[str], first: str, second: str) -> tuple[int, ...]:
    """The order of axes [first, second, spatial] of a layout such as `[b, 0, 1, f]`."""
    spatial = [labels.index(str(i)) for i in range(len(labels) - 2)]
    return (labels.index(first), labels.index(second), *spatial)


def _read_window(site: Site, rank: int) -> dict[str, Any]:
    """Strides, padding, dilations and reversal, in either form."""
    window = site.get("window", {})
    names = {
        "stride": "window_strides", "pad": "padding", "lhs_dilate": "lhs_dilation", "rhs_dilate": "rhs_dilation",
        "reverse": "window_reversal",
    }  # fmt: skip
    default = {"stride": [1] * rank, "pad": [[0, 0]] * rank, "reverse": [False] * rank}
    found: dict[str, Any] = {}
    for short, long in names.items():
        given = window.get(short, site.get(long))
        found[short] = default.get(short, [1] * rank) if given is None else given
    return found


@row("stablehlo.convolution")
def _(site: Site, x: Tensor, kernel: Tensor) -> Tensor:
    layouts = site.get("dim_numbers") or site.get("dimension_numbers")
    rank = x.ndim - 2
    if 0 in site.shape or 0 in x.shape or 0 in kernel.shape:
        return full(shape=site.shape, value=0, dtype=site.dtype)
    window = _read_window(site, rank)
    x = s.permute(_as_product(x, site.dtype), axes=_locate(layouts[0], "b", "f"))
    w = s.permute(_as_product(kernel, site.dtype), axes=_locate(layouts[1], "o", "i"))
    turned = tuple(i + 2 for i, flag in enumerate(window["reverse"]) if flag)
    w = flip(w, turned) if turned else w
    zero = full(shape=(), value=0, dtype=x.dtype)
    sides = [
        (int(low), int(high), int(d) - 1) for (low, high), d in zip(window["pad"], window["lhs_dilate"], strict=True)
    ]
    x = pad_with(x, zero, 0, [(0, 0, 0), (0, 0, 0), *sides])
    found = _convolve(site, x, w, [int(n) for n in window["stride"]], [int(n) for n in window["rhs_dilate"]])
    order = _locate(layouts[2], "b", "f")
    back = tuple(order.index(a) for a in range(len(order)))
    found = s.permute(found, axes=back)
    return found if found.dtype == site.dtype else cast(found, dtype=site.dtype)


def _as_product(x: Tensor, dtype: DType) -> Tensor:
    """An operand in the type in which products are summed."""
    if dtype.is_integer and dtype.bits < int32.bits:
        return cast(x, dtype=int32)
    return x if x.dtype == dtype else cast(x, dtype=dtype)


def _convolve(site: Site, x: Tensor, w: Tensor, stride: list[int], dilation: list[int]) -> Tensor:
    groups, batches = int(site.get("feature_group_count", 1)), int(site.get("batch_group_count", 1))
    if batches > 1:  # groups of the batch are groups of features
        split = s.reshape(x, shape=(batches, x.shape[0] // batches, *x.shape[1:]))
        moved = s.permute(split, axes=(1, 0, *range(2, split.ndim)))
        x, groups = s.reshape(moved, shape=(moved.shape[0], batches * x.shape[1], *x.shape[2:])), batches
    rank = x.ndim - 2
    if not rank:
        (x, w), stride, dilation = (s.expand_dims(t, -1) for t in (x, w)), [1], [1]
    if rank > 3:
        raise site.refuse(f"a convolution of {rank} spatial axes", "reshape to at most 3 of them")
    found = _CONVOLUTIONS[rank or 1](x, w, stride=stride, dilation=dilation, groups=groups)
    return found if rank else s.squeeze(found, -1)


# Normalisation over batches.


def _along(x: Tensor, axis: int, rank: int) -> Tensor:
    return s.reshape(x, shape=tuple(-1 if i == axis else 1 for i in range(rank)))


def _moments(x: Tensor, axis: int) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    others = tuple(a for a in range(x.ndim) if a != axis)
    return r.mean(x, axis=others), r.var(x, axis=others), others


@row("stablehlo.batch_norm_inference")
def _(site: Site, x: Tensor, scale: Tensor, offset: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return _normalise(x, scale, offset, mean, variance, site.get("feature_index"), float(site.get("epsilon")))


def _normalise(
    x: Tensor, scale: Tensor, offset: Tensor, mean: Tensor, variance: Tensor, axis: int, eps: float
) -> Tensor:
    m, v, a, b = (_along(t, axis, x.ndim) for t in (mean, variance, scale, offset))
    return (x - m) / e.sqrt(v + eps) * a + b


@row("stablehlo.batch_norm_training")
def _(site: Site, x: Tensor, scale: Tensor, offset: Tensor) -> list[Tensor]:
    axis = site.get("feature_index")
    mean, variance, _ = _moments(x, axis)
    return [_normalise(x, scale, offset, mean, variance, axis, float(site.get("epsilon"))), mean, variance]


@row("stablehlo.batch_norm_grad")
def _(site: Site, x: Tensor, scale: Tensor, mean: Tensor, variance: Tensor, g: Tensor) -> list[Tensor]:
    axis, eps = site.get("feature_index"), float(site.get("epsilon"))
    others = tuple(a for a in range(x.ndim) if a != axis)
    m, v, a = (_along(t, axis, x.ndim) for t in (mean, variance, scale))
    deviation = e.sqrt(v + eps)
    centred = (x - m) / deviation
    by_scale, by_offset = r.sum(g * centred, axis=others), r.sum(g, axis=others)
    count = float(math.prod(x.shape[i] for i in others))
    rest = (_along(by_offset, axis, x.ndim) + centred * _along(by_scale, axis, x.ndim)) / count
    return [a / deviation * (g - rest), by_scale, by_offset]


# Linear systems.


@row("stablehlo.cholesky")
def _(site: Site, x: Tensor) -> Tensor:
    lower = bool(site.get("lower", False))
    found = cholesky(tril(x) + matrix_transpose(tril(x, -1)) if lower else triu(x) + matrix_transpose(triu(x, 1)))
    return found if lower else matrix_transpose(found)


@row("stablehlo.triangular_solve")
def _(site: Site, a: Tensor, b: Tensor) -> Tensor:
    kind = str(site.get("transpose_a", "NO_TRANSPOSE"))
    if kind not in ("NO_TRANSPOSE", "TRANSPOSE", "ADJOINT"):
        raise site.refuse(f"transpose_a = {kind}")
    lower, left = bool(site.get("lower")), bool(site.get("left_side"))
    if (kind == "NO_TRANSPOSE") != left:  # x·a = b is aᵀ·xᵀ = bᵀ
        a, lower = matrix_transpose(a), not lower
    if left:
        return _substitute(a, b, lower, bool(site.get("unit_diagonal")))
    return matrix_transpose(_substitute(a, matrix_transpose(b), lower, bool(site.get("unit_diagonal"))))


def _substitute(a: Tensor, b: Tensor, lower: bool, unit: bool) -> Tensor:
    """x with a·x = b, for a triangular `a`: forward or back substitution, one row a step."""
    size = a.shape[-1]
    if 0 in b.shape:
        return b
    numbers = s.iota(shape=(size,))

    def step(x: Tensor, i: Tensor) -> tuple[Tensor, None]:
        here = s.reshape(i, shape=(1,))
        row, right = s.gather(a, here, axis=-2), s.gather(b, here, axis=-2)
        used = e.less(numbers, i) if lower else e.greater(numbers, i)
        known = dot(e.where(used, row, 0.0), x, dtype=x.dtype)
        found = right - known
        if not unit:
            found = found / s.gather(row, here, axis=-1)
        return e.where(s.reshape(e.equal(numbers, i), shape=(size, 1)), found, x), None

    order = numbers if lower else (size - 1) - numbers
    return scan(step, full(shape=b.shape, value=0, dtype=b.dtype), order)[0]

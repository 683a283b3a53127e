"""Indexing rows: gathers, scatters, masks, embeddings and searches, with their derivatives (ATen's index ops)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tessera.core.shapes import broadcast
from tessera.core.types import bool_, f32, int32, int64
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import reduce as r
from tessera.ops.tensor.basic import broadcast_to, cast, splat
from tessera.ops.tensor.rearrange import take_along_axis, tril, triu
from tessera.ops.tensor.scatter import scatter, scatter_add
from tessera.ops.tensor.shape import check_index, count_elements, expand_dims, gather, iota, reshape
from tessera.ops.tensor.sorting import searchsorted
from tessera.stdlib.bags import add_bags
from tessera.torch.rows.elementwise import convert_element_type
from tessera.torch.table import ATEN, aten, convert, narrow_to, unify, wide, zeros


def _as_scalar(value: Any, like: Tensor) -> Tensor:
    """A number, or a tensor, in the element type of another."""
    return value if isinstance(value, Tensor) else splat(convert(value, like.dtype), like.type.with_shape(()))


# Gathers.


@aten("index.Tensor", "_unsafe_index.Tensor")
def _(x, indices):
    return x[tuple(slice(None) if i is None else i for i in indices)]


@aten("_unsafe_masked_index.default")
def _(x, mask, indices, fill):
    found = x[tuple(slice(None) if i is None else _clamp_index(i, n) for i, n in zip(indices, x.shape, strict=False))]
    return e.where(mask, found, convert(fill, x.dtype))


def _clamp_index(index: Tensor, size: int) -> Tensor:
    return e.minimum(e.maximum(index, 0), size - 1)


@aten("_unsafe_masked_index_put_accumulate.default")
def _(x, mask, indices, values):
    at = tuple(slice(None) if i is None else _clamp_index(i, n) for i, n in zip(indices, x.shape, strict=False))
    return x.at[at].add(e.where(mask, values, convert(0, x.dtype)))


@aten("index_select.default")
def _(x, dim, index):
    if not x.ndim:
        return x
    return gather(x, reshape(index, shape=(-1,)), axis=dim)


@aten("gather.default")
def _(x, dim, index, sparse_grad=False):
    if not x.ndim or not index.ndim:
        spread = e.add(zeros(index.shape, int64), 0)
        return gather(reshape(x, shape=(-1,)), e.add(spread, index) if x.ndim else spread, axis=0)
    return take_along_axis(x, index, dim)


@aten("take.default")
def _(x, index):
    return gather(reshape(x, shape=(-1,)), index, axis=0)


@aten("embedding.default")
def _(weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    return gather(weight, indices, axis=0)


@aten("embedding_dense_backward.default")
def _(g, indices, num_weights, padding_idx, scale_grad_by_freq):
    at, gw = reshape(indices, shape=(-1,)), wide(g)
    rows = reshape(gw, shape=(at.size, g.shape[-1]))
    kept = e.not_equal(at, padding_idx)
    rows = e.where(expand_dims(kept, -1), rows, 0.0)
    if scale_grad_by_freq:
        counts = scatter_add(zeros((num_weights,), f32), at, splat(1.0, rows.type.with_shape(at.shape)), axis=0)
        rows = rows / expand_dims(gather(counts, at, axis=0), -1)
    return narrow_to(scatter_add(zeros((num_weights, g.shape[-1]), gw.dtype), at, rows, axis=0), g.dtype)


@aten("_embedding_bag.default", "_embedding_bag_forward_only.default")
def _(
    weight, indices, offsets, scale_grad_by_freq=False, mode=0, sparse=False, per_sample_weights=None,
    include_last_offset=False, padding_idx=-1,
):  # fmt: skip
    bags, count = offsets.shape[0] - int(include_last_offset), indices.shape[0]
    # The bag of each index: how many bags start at or before it, less one.
    starts = cast(offsets, dtype=int64)[:bags]
    marks = scatter_add(zeros((count + 1,), int64), starts, splat(1, starts.type), axis=0)
    bag, kept = r.cumsum(marks[:count]) - 1, e.not_equal(indices, padding_idx)
    sizes = scatter_add(zeros((bags,), int64), bag, cast(kept, dtype=int64), axis=0)
    rows = wide(gather(weight, indices, axis=0))
    if mode == 2:
        out = _take_largest(rows, bag, kept, sizes)
    else:
        rows = rows if per_sample_weights is None else rows * expand_dims(wide(per_sample_weights), 1)
        rows = e.where(expand_dims(kept, 1), rows, 0.0)
        out = scatter_add(zeros((bags, weight.shape[1]), rows.dtype), bag, rows, axis=0)
        out = out / expand_dims(e.maximum(cast(sizes, dtype=out.dtype), 1.0), 1) if mode == 1 else out
    return narrow_to(out, weight.dtype), None, None, None  # the others serve PyTorch's own backward pass


ATEN["tessera_bags.add.default"] = add_bags


def _take_largest(rows: Tensor, bag: Tensor, kept: Tensor, sizes: Tensor) -> Tensor:
    member = e.bitwise_and(e.equal(expand_dims(bag, 0), iota(shape=(sizes.size, 1), axis=0)), expand_dims(kept, 0))
    spread = e.where(expand_dims(member, 2), expand_dims(rows, 0), -float("inf"))
    return e.where(expand_dims(e.equal(sizes, 0), 1), 0.0, r.max(spread, axis=1))


# Scatters. Those along an axis name an element each; they become one scatter into the flattened tensor.


def _flat_places(x: Tensor, dim: int, index: Tensor) -> Tensor:
    axis, places = dim % x.ndim, splat(0, index.type.with_dtype(int64))
    for each in range(x.ndim):
        own = each == axis
        along = check_index(index, size=x.shape[axis], along=axis) if own else iota(shape=index.shape, axis=each)
        places = places + along * count_elements(x.shape[each + 1 :])
    return reshape(places, shape=(-1,))


def scatter_elements(x: Tensor, dim: int, index: Tensor, source: Any, mode: str = "set") -> Tensor:
    """`x` with elements replaced by those of `source`, or combined by "add", "multiply", "min" or "max"."""
    if not x.ndim or not index.ndim:
        x1, index1 = reshape(x, shape=(-1,)), reshape(index, shape=(-1,))
        source = reshape(source, shape=(-1,)) if isinstance(source, Tensor) else source
        return reshape(scatter_elements(x1, 0, index1, source, mode), shape=x.shape)
    if not index.size:
        return x
    part = _as_scalar(source, x)
    if part.ndim:
        part = part[tuple(slice(n) for n in index.shape)]
    part = reshape(broadcast_to(convert(part, x.dtype), shape=index.shape), shape=(-1,))
    flat, places = reshape(x, shape=(-1,)), _flat_places(x, dim, index)
    out = scatter_add(flat, places, part) if mode == "add" else scatter(flat, places, part, mode=mode)
    return reshape(out, shape=x.shape)


@aten("scatter.value", "scatter.src")
def _(x, dim, index, source):
    return scatter_elements(x, dim, index, source)


REDUCTIONS = {"add": "add", "sum": "add", "multiply": "multiply", "prod": "multiply", "amax": "max", "amin": "min"}


@aten("scatter.reduce", "scatter.value_reduce")
def _(x, dim, index, source, reduce):
    return _scatter_wide(x, dim, index, source, REDUCTIONS[reduce])


def _scatter_wide(x: Tensor, dim: int, index: Tensor, source: Any, mode: str) -> Tensor:
    if x.dtype.kind == "bool":
        return _scatter_truth(x, dim, index, source, mode)
    part = wide(source) if isinstance(source, Tensor) else source
    return narrow_to(scatter_elements(wide(x), dim, index, part, mode), x.dtype)


def _scatter_truth(x: Tensor, dim: int, index: Tensor, source: Any, mode: str) -> Tensor:
    part = cast(source, dtype=int32) if isinstance(source, Tensor) else int(source)
    join = {"add": "max", "multiply": "min"}.get(mode, mode)
    return e.not_equal(scatter_elements(cast(x, dtype=int32), dim, index, part, join), 0)


@aten("scatter_add.default")
def _(x, dim, index, source):
    return _scatter_wide(x, dim, index, source, "add")


@aten("scatter_reduce.two")
def _(x, dim, index, source, reduce, include_self=True):
    if not x.ndim or not index.ndim:
        x1, index1, source1 = (reshape(v, shape=(-1,)) for v in (x, index, source))
        return reshape(_scatter_reduce(x1, 0, index1, source1, reduce, include_self), shape=x.shape)
    return _scatter_reduce(x, dim, index, source, reduce, include_self)


def _scatter_reduce(x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, include_self: bool) -> Tensor:
    if not index.size:
        return x
    start = wide(x)
    touched = scatter_elements(zeros(x.shape, bool_), dim, index, True)
    if not include_self:
        start = e.where(touched, _neutral(start, reduce), start)
    if reduce != "mean":
        return narrow_to(_scatter_wide(start, dim, index, wide(source), REDUCTIONS[reduce]), x.dtype)
    total = _scatter_wide(start, dim, index, wide(source), "add")
    first = splat(int(include_self), start.type.with_dtype(int64))
    count = e.maximum(scatter_elements(first, dim, index, 1, "add"), 1)
    if start.dtype.is_float:
        return narrow_to(total / cast(count, dtype=total.dtype), x.dtype)
    return e.floor_divide(total, cast(count, dtype=total.dtype))


def _neutral(x: Tensor, reduce: str) -> Any:
    if reduce in ("sum", "mean"):
        return convert(0, x.dtype)
    if reduce == "prod":
        return convert(1, x.dtype)
    if x.dtype.is_float:
        return -float("inf") if reduce == "amax" else float("inf")
    if x.dtype.kind == "bool":
        return reduce == "amin"
    low = -(1 << (x.dtype.bits - 1)) if x.dtype.kind == "int" else 0
    high = (1 << (x.dtype.bits - (x.dtype.kind == "int"))) - 1
    return low if reduce == "amax" else high


@aten("index_put.default", "_unsafe_index_put.default")
def _(x, indices, values, accumulate=False):
    values = convert_element_type(values, x.dtype)
    if any(i is not None and i.dtype.kind == "bool" for i in indices):
        return _put_masked(x, indices, values, accumulate)
    at = x.at[tuple(slice(None) if i is None else i for i in indices)]
    if not accumulate:
        return at.set(values)
    if x.dtype.kind == "bool":
        return e.bitwise_or(x, zeros(x.shape, bool_).at[at.index if hasattr(at, "index") else ...].set(values))
    return at.add(values)


def _put_masked(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool) -> Tensor:
    """A put with one mask, of leading axes, and one value, or one for the other axes."""
    mask = next(i for i in indices if i is not None)
    before = next(n for n, i in enumerate(indices) if i is not None)
    rest = x.ndim - before - mask.ndim
    hit = broadcast_to(reshape(mask, shape=(*mask.shape, *(1,) * rest)), shape=x.shape)
    values = values if values.ndim <= rest else reshape(values, shape=values.shape[1:])
    new = broadcast_to(values, shape=x.shape)
    return e.where(hit, x + new if accumulate else new, x)


def _lift(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A row of (x, dim, index, source, ...) that takes scalars as vectors of one element."""

    def row(x: Tensor, dim: int, index: Tensor, source: Any, *rest: Any, **named: Any) -> Tensor:
        index = reshape(index, shape=(-1,))
        if x.ndim:
            return function(x, dim, index, source, *rest, **named)
        source = reshape(source, shape=(-1,)) if isinstance(source, Tensor) else source
        return reshape(function(reshape(x, shape=(1,)), 0, index, source, *rest, **named), shape=())

    return row


@aten("index_add.default")
@_lift
def _(x, dim, index, source, alpha=1):
    if not alpha:
        return x
    if x.dtype.kind == "bool":
        hits = scatter_add(zeros(x.shape, int32), index, cast(source, dtype=int32), axis=dim)
        return e.bitwise_or(x, e.not_equal(hits, 0))
    if alpha == 1:  # sums of 16-bit floats are accumulated in more bits as they are
        return scatter_add(x, index, _along(source, x, dim, index), axis=dim)
    part = _along(wide(source), x, dim, index)
    part = part * convert(alpha, part.dtype)
    return narrow_to(scatter_add(wide(x), index, part, axis=dim), x.dtype)


def _along(source: Tensor, x: Tensor, dim: int, index: Tensor) -> Tensor:
    axis = dim % x.ndim
    return reshape(source, shape=(*x.shape[:axis], index.size, *x.shape[axis + 1 :]))


@aten("index_copy.default")
@_lift
def _(x, dim, index, source):
    return scatter(x, index, _along(source, x, dim, index), axis=dim) if index.size else x


@aten("index_fill.int_Scalar", "index_fill.int_Tensor")
@_lift
def _(x, dim, index, value):
    axis = dim % x.ndim
    shape = (*x.shape[:axis], index.size, *x.shape[axis + 1 :])
    return scatter(x, index, broadcast_to(convert(_as_scalar(value, x), x.dtype), shape=shape), axis=axis)


@aten("index_reduce.default")
@_lift
def _(x, dim, index, source, reduce, include_self=True):
    axis = dim % x.ndim
    shape = tuple(index.size if i == axis else 1 for i in range(x.ndim))
    spread = broadcast_to(reshape(index, shape=shape), shape=(*x.shape[:axis], index.size, *x.shape[axis + 1 :]))
    return _scatter_reduce(x, axis, spread, source, reduce, include_self)


# Masks.


@aten("masked_fill.Scalar", "masked_fill.Tensor")
def _(x, mask, value):
    return e.where(mask, convert(value, x.dtype), x)


@aten("masked_scatter.default")
def _(x, mask, source):
    shape = broadcast(x.shape, mask.shape)
    x, hit = broadcast_to(x, shape=shape), reshape(broadcast_to(mask, shape=shape), shape=(-1,))
    if not hit.size:
        return x
    number = r.cumsum(cast(hit, dtype=int64), axis=0) - 1
    flat = reshape(source, shape=(-1,))
    if not flat.size:
        return x
    found = gather(flat, _clamp_index(number, flat.shape[0]), axis=0)
    return reshape(e.where(hit, found, reshape(x, shape=(-1,))), shape=x.shape)


@aten("tril.default")
def _(x, diagonal=0):
    return tril(x, diagonal)


@aten("triu.default")
def _(x, diagonal=0):
    return triu(x, diagonal)


# Searches.


@aten("bucketize.Tensor")
def _(x, boundaries, out_int32=False, right=False):
    return search(boundaries, x, out_int32, right)


@aten("searchsorted.Tensor")
def _(row, x, out_int32=False, right=False, side=None, sorter=None):
    row = row if sorter is None else take_along_axis(row, sorter, -1)
    return search(row, x, out_int32, right or side == "right")


def search(row: Tensor, x: Tensor, out_int32: bool, right: bool) -> Tensor:
    """How many elements of a sorted row are less than each of `x`, or not greater with `right`."""
    row, x = unify(row, x)
    found = searchsorted(row, x, "right" if right else "left")
    return cast(found, dtype=int32) if out_int32 else found


@aten("isin.Tensor_Tensor")
def _(x, others, assume_unique=False, invert=False):
    a, b = unify(x, reshape(others, shape=(-1,)))
    found = r.any(e.equal(expand_dims(a, -1), b), axis=-1)
    return e.equal(found, False) if invert else found


@aten("isin.Tensor_Scalar")
def _(x, other, assume_unique=False, invert=False):
    return (e.not_equal if invert else e.equal)(*unify(x, other))


# Derivatives of views.


@aten("slice_backward.default")
def _(g, input_sizes, dim, start, end, step):
    axis = dim % len(input_sizes)
    first, last, _ = slice(start, end).indices(input_sizes[axis])
    return zeros(input_sizes, g.dtype).at[(slice(None),) * axis + (slice(first, max(first, last), step),)].set(g)


@aten("select_backward.default")
def _(g, input_sizes, dim, index):
    axis = dim % len(input_sizes)
    return zeros(input_sizes, g.dtype).at[(slice(None),) * axis + (index % input_sizes[axis],)].set(g)


# Negative log-likelihood, which picks the score of each target.


@aten("nll_loss_forward.default", "nll_loss2d_forward.default")
def _(x, target, weight, reduction, ignore_index):
    scores = wide(x)
    axis = 1 if x.ndim > 1 else 0
    kept, factor = _weigh_targets(scores, target, weight, ignore_index, axis)
    at = e.where(kept, target, 0)
    found = reshape(take_along_axis(scores, expand_dims(at, axis), axis), shape=target.shape)
    loss = e.where(kept, -found * factor, 0.0)
    total = r.sum(factor)
    if reduction == 0 and x.ndim > 1:
        return narrow_to(loss, x.dtype), zeros((), x.dtype)
    whole = r.sum(loss)
    return narrow_to(whole / total if reduction == 1 else whole, x.dtype), narrow_to(total, x.dtype)


def _weigh_targets(x: Tensor, target: Tensor, weight: Tensor | None, ignore: int, axis: int) -> tuple[Tensor, Tensor]:
    kept = e.not_equal(target, ignore)
    if weight is None:
        return kept, cast(kept, dtype=x.dtype)
    return kept, e.where(kept, gather(wide(weight), e.where(kept, target, 0), axis=0), 0.0)


@aten("nll_loss_backward.default", "nll_loss2d_backward.default")
def _(g, x, target, weight, reduction, ignore_index, total_weight):
    axis = 1 if x.ndim > 1 else 0
    scores, gw = wide(x), wide(g)
    _, factor = _weigh_targets(scores, target, weight, ignore_index, axis)
    slope = -factor * (gw / wide(total_weight) if reduction == 1 else gw)
    number = iota(shape=x.shape, axis=axis)
    hit = e.equal(number, expand_dims(target, axis))
    return narrow_to(e.where(hit, expand_dims(slope, axis), 0.0), x.dtype)

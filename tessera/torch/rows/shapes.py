"""Shape rows: views, joining, splitting, padding, creation, and sizes (ATen's view and factory ops)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tessera.core.symbolic_dim import Size
from tessera.core.types import DType, TensorType, bool_, f32, int64
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import random as draws
from tessera.ops.tensor.basic import broadcast_to, cast, splat
from tessera.ops.tensor.elementwise import where
from tessera.ops.tensor.matrices import diagonal, swapaxes
from tessera.ops.tensor.rearrange import flip, roll
from tessera.ops.tensor.scatter import scatter, update_slice
from tessera.ops.tensor.shape import (
    concatenate,
    expand_dims,
    gather,
    iota,
    pad,
    permute,
    reshape,
    slice_,
    squeeze,
    stack,
)
from tessera.torch.rows.elementwise import convert_element_type
from tessera.torch.table import aten, promote, zeros

# Views.


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a tensor in row-major order."""
    return tuple(math.prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape)))


@aten("view.default", "_unsafe_view.default", "reshape.default", "view_copy.default", "_reshape_alias.default")
def _(x, shape, strides=None):
    return reshape(x, shape=tuple(shape)) if -1 not in shape else reshape(x, shape=_infer_size(x, shape))


def _infer_size(x: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    known = math.prod(n for n in shape if n != -1)
    return tuple(x.size // max(known, 1) if n == -1 else n for n in shape)


@aten("flatten.using_ints")
def _(x, start_dim=0, end_dim=-1):
    first, last = start_dim % max(x.ndim, 1), end_dim % max(x.ndim, 1)
    return reshape(x, shape=(*x.shape[:first], math.prod(x.shape[first : last + 1]), *x.shape[last + 1 :]))


@aten("permute.default")
def _(x, dims):
    return permute(x, axes=tuple(d % x.ndim for d in dims)) if x.ndim else x


@aten("t.default", "numpy_T.default")
def _(x):
    return permute(x, axes=tuple(reversed(range(x.ndim))))


@aten("transpose.int")
def _(x, dim0, dim1):
    return swapaxes(x, dim0, dim1) if x.ndim else x


@aten("unsqueeze.default")
def _(x, dim):
    return expand_dims(x, dim)


@aten("squeeze.default")
def _(x):
    return squeeze(x)


@aten("squeeze.dim", "squeeze.dims")
def _(x, dim):
    axes = {d % max(x.ndim, 1) for d in ([dim] if isinstance(dim, int) else dim)} if x.ndim else set()
    return reshape(x, shape=tuple(n for i, n in enumerate(x.shape) if i not in axes or n != 1))


@aten("expand.default", "expand_copy.default")
def _(x, size, implicit=False):
    own = (None,) * (len(size) - x.ndim) + x.shape
    return broadcast_to(x, shape=tuple(o if n == -1 else n for n, o in zip(size, own, strict=True)))


@aten("select.int")
def _(x, dim, index):
    axis = dim % x.ndim
    if isinstance(index, Tensor):  # a number that depends on values
        return gather(x, index, axis=axis)
    at = index % x.shape[axis]
    cut = slice_axis(x, axis, at, at + 1)
    return reshape(cut, shape=(*x.shape[:axis], *x.shape[axis + 1 :]))


def slice_axis(x: Tensor, axis: int, start: int, stop: int, step: int = 1) -> Tensor:
    """`x` cut along one axis."""
    begin, end, steps = [0] * x.ndim, list(x.shape), [1] * x.ndim
    begin[axis], end[axis], steps[axis] = start, stop, step
    return slice_(x, start=tuple(begin), stop=tuple(end), step=tuple(steps))


def clamp_range(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """The bounds of `x[start:end]`, from 0 to `size`."""
    first, last, _ = slice(start, end).indices(size)
    return first, max(last, first)


@aten("slice.Tensor")
def _(x, dim=0, start=None, end=None, step=1):
    axis = dim % x.ndim
    return slice_axis(x, axis, *clamp_range(x.shape[axis], start, end), step)


@aten("narrow.default")
def _(x, dim, start, length):
    axis = dim % x.ndim
    first = start % x.shape[axis] if start < 0 else start
    return slice_axis(x, axis, first, first + length)


@aten("slice_scatter.default")
def _(x, source, dim=0, start=None, end=None, step=1):
    axis = dim % x.ndim
    first, last = clamp_range(x.shape[axis], start, end)
    if step == 1:
        return _set_part(x, source, axis, first)
    index = (slice(None),) * axis + (slice(first, last, step),)
    return x.at[index].set(convert_element_type(source, x.dtype))


@aten("select_scatter.default")
def _(x, source, dim, index):
    axis = dim % x.ndim
    return _set_part(x, expand_dims(source, axis), axis, index % x.shape[axis])


def _set_part(x: Tensor, source: Tensor, axis: int, first: Size) -> Tensor:
    """`x` with the elements from `first` on along an axis replaced by a tensor that is as large along the others."""
    start = tuple(first if i == axis else 0 for i in range(x.ndim))
    return update_slice(x, convert_element_type(source, x.dtype), start=start)


@aten("diagonal.default")
def _(x, offset=0, dim1=0, dim2=1):
    first, second = dim1 % x.ndim, dim2 % x.ndim
    rest = [i for i in range(x.ndim) if i not in (first, second)]
    return diagonal(permute(x, axes=(*rest, first, second)), offset)


@aten("diagonal_scatter.default")
def _(x, source, offset=0, dim1=0, dim2=1):
    places = reshape(iota(shape=(x.size,)), shape=x.shape)
    first, second = dim1 % x.ndim, dim2 % x.ndim
    rest = [i for i in range(x.ndim) if i not in (first, second)]
    return _set_flat(x, diagonal(permute(places, axes=(*rest, first, second)), offset), source)


@aten("as_strided.default", "as_strided_copy.default")
def _(x, size, stride, storage_offset=None):
    return gather(reshape(x, shape=(-1,)), _strided_index(size, stride, storage_offset or 0), axis=0)


@aten("as_strided_scatter.default")
def _(x, source, size, stride, storage_offset=None):
    return _set_flat(x, _strided_index(size, stride, storage_offset or 0), source)


def _strided_index(size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    places: Any = splat(offset, TensorType((), int64))
    for axis, step in enumerate(stride):
        places = places + iota(shape=tuple(size), axis=axis) * step
    return places


def _set_flat(x: Tensor, places: Tensor, source: Tensor) -> Tensor:
    flat = scatter(reshape(x, shape=(-1,)), places, convert_element_type(source, x.dtype), axis=0)
    return reshape(flat, shape=x.shape)


@aten("unfold.default")
def _(x, dimension, size, step):
    if not x.ndim:
        return reshape(x, shape=(size,))
    axis = dimension % x.ndim
    count = (x.shape[axis] - size) // step + 1
    places = iota(shape=(count, size), axis=0) * step + iota(shape=(count, size), axis=1)
    cut = gather(x, places, axis=axis)
    order = [i for i in range(cut.ndim) if i != axis + 1]
    return permute(cut, axes=(*order, axis + 1))


# Joining, splitting, repeating.


@aten("cat.default", "concat.default")
def _(tensors, dim=0):
    dtype = promote(*tensors)
    kept = [convert_element_type(t, dtype) for t in tensors if t.shape != (0,)]
    return concatenate(kept, axis=dim) if kept else convert_element_type(tensors[0], dtype)


@aten("stack.default")
def _(tensors, dim=0):
    dtype = promote(*tensors)
    return stack([convert_element_type(t, dtype) for t in tensors], axis=dim)


@aten("split_with_sizes.default", "split_with_sizes_copy.default")
def _(x, split_sizes, dim=0):
    axis, start, parts = dim % x.ndim, 0, []
    for size in split_sizes:
        parts.append(slice_axis(x, axis, start, start + size))
        start += size
    return parts


@aten("split.Tensor")
def _(x, split_size, dim=0):
    axis = dim % x.ndim
    size = x.shape[axis]
    starts = range(0, size, split_size) if size else [0]
    return [slice_axis(x, axis, i, min(i + split_size, size)) for i in starts]


@aten("unbind.int")
def _(x, dim=0):
    axis = dim % x.ndim
    shape = (*x.shape[:axis], *x.shape[axis + 1 :])
    return [reshape(slice_axis(x, axis, i, i + 1), shape=shape) for i in range(x.shape[axis])]


@aten("repeat.default")
def _(x, repeats):
    own = (1,) * (len(repeats) - x.ndim) + x.shape
    inner = tuple(n for pair in zip([1] * len(own), own, strict=True) for n in pair)
    outer = tuple(n for pair in zip(repeats, own, strict=True) for n in pair)
    spread = broadcast_to(reshape(x, shape=inner), shape=outer)
    return reshape(spread, shape=tuple(r * n for r, n in zip(repeats, own, strict=True)))


@aten("flip.default")
def _(x, dims):
    return flip(x, tuple(dims)) if dims and x.ndim else x


@aten("roll.default")
def _(x, shifts, dims=()):
    if not x.ndim or not x.size:
        return x
    if not dims:
        return reshape(roll(reshape(x, shape=(-1,)), shifts[0], 0), shape=x.shape)
    return roll(x, tuple(shifts), tuple(dims))


@aten("constant_pad_nd.default")
def _(x, pad_widths, value=0):
    low, high = [0] * x.ndim, [0] * x.ndim
    for i in range(len(pad_widths) // 2):
        low[x.ndim - 1 - i], high[x.ndim - 1 - i] = pad_widths[2 * i], pad_widths[2 * i + 1]
    return pad_or_cut(x, low, high, value)


def pad_or_cut(x: Tensor, low: Sequence[int], high: Sequence[int], value: Any) -> Tensor:
    """`x` with `value` around it; a negative width removes elements."""
    if any(n < 0 for n in (*low, *high)):
        stop = tuple(n + min(h, 0) for n, h in zip(x.shape, high, strict=True))
        x = slice_(x, start=tuple(max(-n, 0) for n in low), stop=stop, step=(1,) * x.ndim)
    number = bool(value) if x.dtype.kind == "bool" else float(value) if x.dtype.is_float else int(value)
    sides = {"low": tuple(max(n, 0) for n in low), "high": tuple(max(n, 0) for n in high)}
    return pad(x, value=number, **sides) if any(n > 0 for n in (*low, *high)) else x


# Creation.


def _fill(shape: Sequence[int], value: Any, dtype: DType) -> Tensor:
    if isinstance(value, Tensor):  # a number that depends on values
        return broadcast_to(convert_element_type(value, dtype), shape=tuple(shape))
    number = bool(value) if dtype == bool_ else float(value) if dtype.is_float else int(value)
    return splat(number, TensorType(tuple(shape), dtype))


@aten("full.default")
def _(size, value, dtype=None):
    return _fill(size, value, dtype or promote(value))


@aten("full_like.default")
def _(x, value, dtype=None):
    return _fill(x.shape, value, dtype or x.dtype)


@aten("new_full.default")
def _(x, size, value, dtype=None):
    return _fill(size, value, dtype or x.dtype)


@aten("scalar_tensor.default")
def _(value, dtype=None):
    return _fill((), value, dtype or f32)


@aten("fill.Scalar")
def _(x, value):
    return _fill(x.shape, value, x.dtype)


@aten("fill.Tensor")
def _(x, value):
    return broadcast_to(convert_element_type(value, x.dtype), shape=x.shape)


@aten("zeros.default", "empty.memory_format")
def _(size, dtype=None):
    return zeros(size, dtype or f32)


@aten("empty_strided.default")
def _(size, stride, dtype=None):
    return zeros(size, dtype or f32)


@aten("empty_permuted.default")
def _(size, physical_layout, dtype=None):
    return zeros(size, dtype or f32)


@aten("ones.default")
def _(size, dtype=None):
    return _fill(size, 1, dtype or f32)


@aten("zeros_like.default", "empty_like.default")
def _(x, dtype=None):
    return zeros(x.shape, dtype or x.dtype)


@aten("ones_like.default")
def _(x, dtype=None):
    return _fill(x.shape, 1, dtype or x.dtype)


@aten("new_zeros.default", "new_empty.default")
def _(x, size, dtype=None):
    return zeros(size, dtype or x.dtype)


@aten("new_empty_strided.default")
def _(x, size, stride, dtype=None):
    return zeros(size, dtype or x.dtype)


@aten("new_ones.default")
def _(x, size, dtype=None):
    return _fill(size, 1, dtype or x.dtype)


@aten("eye.default")
def _(n, dtype=None):
    return _identity(n, n, dtype)


@aten("eye.m")
def _(n, m, dtype=None):
    return _identity(n, m, dtype)


def _identity(rows: int, columns: int, dtype: DType | None) -> Tensor:
    same = iota(shape=(rows, columns), axis=0) == iota(shape=(rows, columns), axis=1)
    return cast(same, dtype=dtype or f32)


@aten("arange.default")
def _(end, dtype=None):
    return _count(0, end, 1, dtype)


@aten("arange.start")
def _(start, end, dtype=None):
    return _count(start, end, 1, dtype)


@aten("arange.start_step")
def _(start, end, step=1, dtype=None):
    return _count(start, end, step, dtype)


def _count(start: Any, end: Any, step: Any, dtype: DType | None) -> Tensor:
    whole = all(isinstance(n, int) for n in (start, end, step))
    dtype = dtype or (int64 if whole else f32)
    if dtype.kind in ("int", "uint"):
        start, step = int(start), int(step)
        size = max(0, math.ceil((int(end) - start) / step)) if not whole else len(range(start, end, step))
        return cast(iota(shape=(size,)) * step + start, dtype=dtype)
    size = max(0, math.ceil((end - start) / step))
    wide = dtype.bits > 32
    return cast(cast(iota(shape=(size,)), dtype=dtype if wide else f32) * float(step) + float(start), dtype=dtype)


@aten("linspace.default")
def _(start, end, steps, dtype=None):
    dtype = dtype or f32
    number = dtype if dtype.is_float and dtype.bits > 16 else f32
    if steps <= 1:
        return _fill((steps,), start, dtype)
    step, half = (end - start) / (steps - 1), steps // 2
    at = cast(iota(shape=(steps,)), dtype=number)
    forward, backward = at * float(step) + float(start), (at - (steps - 1)) * float(step) + float(end)
    return cast(where(iota(shape=(steps,)) < half, forward, backward), dtype=dtype)


# Random numbers: of Tessera's own counter-based generator, not PyTorch's values.


@aten("rand.default")
def _(size, dtype=None):
    return cast(draws.rand(tuple(size), dtype=f32), dtype=dtype or f32)


@aten("randn.default")
def _(size, dtype=None):
    return cast(draws.randn(tuple(size), dtype=f32), dtype=dtype or f32)


@aten("rand_like.default")
def _(x, dtype=None):
    return cast(draws.rand(x.shape, dtype=f32), dtype=dtype or x.dtype)


@aten("randn_like.default")
def _(x, dtype=None):
    return cast(draws.randn(x.shape, dtype=f32), dtype=dtype or x.dtype)


@aten("randperm.default")
def _(n, dtype=None):
    return cast(draws.permutation(n), dtype=dtype or int64)


# Sizes, as numbers. Values are in row-major order, so their strides follow from their shapes.


@aten("sym_size.int")
def _(x, dim):
    return x.shape[dim]


@aten("sym_numel.default")
def _(x):
    return x.size


@aten("sym_stride.int")
def _(x, dim):
    return contiguous_strides(x.shape)[dim]


@aten("sym_storage_offset.default")
def _(x):
    return 0


@aten("sym_is_contiguous.default")
def _(x):
    return True  # FORMS refuses tensors that PyTorch has in another order


# Memory and numbers of values. A resized tensor begins with the elements that it had; what it gains is undefined in
# PyTorch and 0 here. A number of a tensor is that tensor, without axes.


@aten("resize_.default", "resize.default")
def _(x, size):
    shape = tuple(size)
    count, flat = math.prod(shape), reshape(x, shape=(-1,))
    kept = slice_axis(flat, 0, 0, min(count, x.size))
    rest = zeros((count - kept.size,), x.dtype)
    return reshape(concatenate([kept, rest], axis=0) if rest.size else kept, shape=shape)


@aten("_local_scalar_dense.default", "item.default")
def _(x):
    return reshape(x, shape=())

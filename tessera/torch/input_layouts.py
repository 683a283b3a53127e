"""Memory layouts of inputs: what of a PyTorch tensor a program takes, and how its function restores the tensor.

A program takes row-major arrays. A tensor whose axes lie in another order is taken in that order, one that repeats
elements (`expand`) is taken once, and one with gaps between its elements (a slice) is taken as the row-major array that
it is a slice of, so that kernels read it in place.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from tessera.core.types import TensorType
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.basic import broadcast_to, fusion_barrier
from tessera.ops.tensor.scatter import update_slice
from tessera.ops.tensor.shape import permute, reshape, slice_
from tessera.torch.partition import hint


@dataclass(frozen=True)
class InputLayout:
    """How the elements of an input lie in memory, and what of it a program takes.

    Attributes:
        repeated: the axes along which elements are repeated; a program takes the first of them.
        order: the axes by descending strides; None where that is their own order.
        enclosing: the shape of the row-major array from whose beginning the rest is a slice, in that order of axes,
            with one more axis where elements of the last axis have gaps; None where there are no gaps, or where the
            program takes a copy.
        part: the sizes of the slice, along the axes of `enclosing`, which may be fewer than those of the tensor.
        strides: the strides that a tensor must have for `enclosing`.
    """

    repeated: tuple[int, ...] = ()
    order: tuple[int, ...] | None = None
    enclosing: tuple[int, ...] | None = None
    part: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    def make_view(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """What makes of a tensor the one that a program takes, gaps aside; None where that is the tensor itself."""
        axes, order = self.repeated, self.order
        if not axes:
            return None if order is None else lambda t: t.permute(order)
        return lambda t: _take_one(t, axes) if order is None else _take_one(t, axes).permute(order)

    def find_type(self, type: TensorType) -> TensorType:
        """The type of the array that a program takes for a tensor of this type."""
        if self.enclosing is not None:
            return type.with_shape(self.enclosing)
        shape = tuple(1 if i in self.repeated else n for i, n in enumerate(type.shape))
        return type.with_shape(shape if self.order is None else tuple(shape[i] for i in self.order))

    def restore(self, taken: Tensor, type: TensorType) -> Tensor:
        """The tensor of PyTorch's axes and sizes, of the array that a program took."""
        if self.enclosing is not None:
            taken = slice_(taken, start=(0,) * taken.ndim, stop=self.part, step=(1,) * taken.ndim)
            taken = reshape(taken, shape=self.drop_gaps().find_type(type).shape)
        found = taken if self.order is None else permute(taken, axes=invert_order(self.order))
        return found if found.shape == type.shape else broadcast_to(found, shape=type.shape)

    @property
    def may_be_written(self) -> bool:
        """Whether it is of a tensor with gaps, each element of which lies at a place of its own."""
        return self.enclosing is not None and not self.repeated

    def update(self, taken: Tensor, new: Tensor, apart: bool) -> Tensor:
        """The array that a program took, with a new tensor instead of the one that `restore` gives.

        `apart`: the new tensor is computed in other memory, and then copied.
        """
        part = new if self.order is None else permute(new, axes=self.order)
        part = fusion_barrier(part) if apart else part
        return update_slice(taken, reshape(part, shape=self.part), start=(0,) * taken.ndim)

    def drop_gaps(self) -> InputLayout:
        """The layout of a program that takes a copy without gaps."""
        return InputLayout(self.repeated, self.order)


def find_layout(fake: torch.Tensor) -> InputLayout:
    """The layout of an input that a graph was captured with.

    >>> find_layout(torch.empty(2, 3).t()).order
    (1, 0)
    >>> find_layout(torch.empty(4, 6, 5)[:, :3]).enclosing
    (4, 6, 5)
    """
    repeated = find_repeated_axes(fake)
    taken = _take_one(fake, repeated)
    order = find_axis_order(taken)
    numbers = all(isinstance(n, int) for n in (*taken.shape, *taken.stride()))
    if order is not None or not numbers or 0 in taken.shape:
        return InputLayout(repeated, order)
    falling = _sort_axes(list(taken.shape), list(taken.stride()))
    order = None if falling == list(range(len(falling))) else tuple(falling)
    axes = [taken.shape[i] for i in falling], [taken.stride(i) for i in falling]
    for sizes, strides in (axes, merge_axes(*axes)):
        enclosing = find_enclosing_shape(sizes, strides)
        if enclosing is not None:
            part = (*sizes, 1)[: len(enclosing)]
            return InputLayout(repeated, order, enclosing, part, tuple(fake.stride()))
    return InputLayout(repeated, order if _has_rows(*axes) else None)


def _has_rows(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements of descending strides lie in rows without gaps, which do not overlap."""
    reach = [n * s for n, s in zip(sizes, strides, strict=True)]
    return bool(strides) and strides[-1] == 1 and all(s >= r for s, r in zip(strides, reach[1:], strict=False))


def find_enclosing_shape(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """The shape of a row-major array that begins with a slice of these sizes and descending strides, if there is one.

    It has one more axis where the last stride is not 1. None also where the slice is all of it.

    >>> find_enclosing_shape((4, 3, 5), (30, 5, 1))
    (4, 6, 5)
    >>> find_enclosing_shape((7, 2), (8, 4))
    (7, 2, 4)
    >>> find_enclosing_shape((4, 3), (7, 2)) is None
    True
    """
    axes = [i for i, n in enumerate(sizes) if n > 1]
    shape = [1] * len(sizes)
    for i, outer in zip(axes, [None, *axes], strict=False):
        above = sizes[i] * strides[i] if outer is None else strides[outer]
        if not strides[i] or above % strides[i] or above // strides[i] < sizes[i]:
            return None
        shape[i] = above // strides[i]
    if axes and strides[axes[-1]] > 1:
        shape.append(strides[axes[-1]])
    return None if shape == list(sizes) else tuple(shape)


def merge_axes(sizes: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes and descending strides of fewer axes: of those whose elements follow each other without gaps, one.

    >>> merge_axes((4, 14, 14, 8), (1600, 112, 8, 1))
    ((4, 1568), (1600, 1))
    """
    merged: list[tuple[int, int]] = []
    for n, stride in zip(sizes, strides, strict=True):
        if merged and merged[-1][1] == n * stride:
            merged[-1] = (merged[-1][0] * n, stride)
        elif n > 1:
            merged.append((n, stride))
    return tuple(n for n, _ in merged), tuple(s for _, s in merged)


def holds_enclosing(tensor: torch.Tensor, layout: InputLayout, align: int, loose: bool = True) -> bool:
    """Whether a tensor is a slice as its layout says, of an array whose memory can all be read if that is `loose`."""
    if tensor.stride() != layout.strides or tensor.is_neg() or tensor.data_ptr() % align:
        return False
    if not loose:
        return True
    size = math.prod(layout.enclosing or ()) * tensor.element_size()
    held = tensor.untyped_storage()
    if tensor.data_ptr() + size <= held.data_ptr() + held.nbytes():
        return True
    return tensor.is_cuda and not _maps_segments() and _ends_behind(tensor.data_ptr(), size)


@cache
def _maps_segments() -> bool:
    """Whether PyTorch maps memory piece by piece into ranges of addresses: what follows a tensor may not be mapped."""
    settings = (os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    return any("expandable_segments:true" in text.lower().replace(" ", "") for text in settings)


def _ends_behind(address: int, size: int) -> bool:
    """Whether so many bytes lie in one allocation of a GPU: PyTorch's allocator divides them among tensors."""
    from tessera.codegen.ptx.runtime.device_memory import find_allocation

    base, extent = find_allocation(address)
    return address + size <= base + extent


def find_axis_order(fake: torch.Tensor) -> tuple[int, ...] | None:
    """The order of axes in which a dense tensor lies contiguous in memory; None for a row-major one, or one with gaps.

    >>> find_axis_order(torch.empty(2, 3).t())
    (1, 0)
    """
    sizes, strides = [hint(n) for n in fake.shape], [hint(n) for n in fake.stride()]
    if any(n == 0 for n in sizes):
        return None
    order = _sort_axes(sizes, strides)
    if order == list(range(len(sizes))) or not _is_dense([sizes[i] for i in order], [strides[i] for i in order]):
        return None
    plain = torch.empty_strided(sizes, strides, device="meta").is_contiguous()
    return None if plain else tuple(order)


def _sort_axes(sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda i: (-strides[i], -sizes[i] if strides[i] else 0, i))


def find_repeated_axes(fake: torch.Tensor) -> tuple[int, ...]:
    """The axes along which a tensor repeats the same elements (`expand`): a program takes one of them.

    >>> find_repeated_axes(torch.empty(2, 1).expand(2, 3))
    (1,)
    """
    sizes, strides = fake.shape, fake.stride()
    if not all(isinstance(n, int) for n in (*sizes, *strides)):
        return ()
    return tuple(i for i, (n, s) in enumerate(zip(sizes, strides, strict=True)) if n > 1 and s == 0)


def invert_order(order: Sequence[int]) -> tuple[int, ...]:
    """The order of axes that undoes another."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    step = 1
    for n, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if n != 1 and stride != step:
            return False
        step *= n
    return True


def _take_one(tensor: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """A tensor with its first element alone along some axes."""
    return tensor[tuple(slice(0, 1) if i in axes else slice(None) for i in range(tensor.ndim))] if axes else tensor

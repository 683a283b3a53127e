"""Matrix functions: diagonals, traces, powers, tensordot and axis exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.core.shapes import normalize_axis
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.api.creation import eye
from tessera.ops.tensor.argument_checks import check_arguments
from tessera.ops.tensor.basic import full
from tessera.ops.tensor.coercion import composite
from tessera.ops.tensor.contractions import matmul
from tessera.ops.tensor.elementwise import equal, where
from tessera.ops.tensor.rearrange import narrow
from tessera.ops.tensor.reduce import sum
from tessera.ops.tensor.shape import concatenate, count_elements, expand_dims, gather, iota, permute, reshape, transpose


@check_arguments
def matrix_transpose(x: Any) -> Tensor:
    """`x` with its last two axes exchanged."""
    return transpose(x)


@check_arguments
def moveaxis(x: Any, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
    """`x` with axis `source` (or several) moved to `destination`, the others keeping their order.

    >>> moveaxis([[[1, 2], [3, 4]]], (0, 1), (-1, 0)).shape
    (2, 2, 1)

    Raises:
        ShapeError: an axis does not exist or is repeated.
        ArgumentError: the numbers of sources and destinations differ.
    """
    x = as_tensor(x)
    moved, places = (
        [a + x.ndim for a in _each_axis((given,) if isinstance(given, int) else given, x.ndim)]
        for given in (source, destination)
    )
    if len(moved) != len(places):
        raise ArgumentError(
            "moveaxis needs a destination for each axis", location=user_location(), expected=f"{len(moved)}",
            received=f"{len(places)}",
        )  # fmt: skip
    rest = iter(a for a in range(x.ndim) if a not in moved)
    at = dict(zip(places, moved, strict=True))
    return permute(x, axes=tuple(at[i] if i in at else next(rest) for i in range(x.ndim)))


def _each_axis(axes: Sequence[int], rank: int) -> list[int]:
    """Axes in order, counted from the end, without repetition."""
    found = [normalize_axis(a, rank) for a in axes]
    if len(set(found)) != len(found):
        raise ShapeError("an axis is named twice", location=user_location(), received=str(tuple(axes)))
    return found


@check_arguments
def swapaxes(x: Any, first: int, second: int) -> Tensor:
    """`x` with two axes exchanged."""
    return transpose(x, first, second)


@check_arguments
def diagonal(x: Any, offset: int = 0) -> Tensor:
    """The elements on diagonal `offset` of the last two axes (0 is the main one, 1 the one above).

    Shapes: [..., M, N] gives [..., K], K the length of that diagonal.

    >>> diagonal([[1, 2], [3, 4]])
    Tensor([1, 4], int64)
    """
    x = _matrix(x, "diagonal")
    rows, columns = (int(n) for n in x.shape[-2:])
    length = max(0, min(rows + min(offset, 0), columns - max(offset, 0)))
    flat = reshape(x, shape=(*x.shape[:-2], rows * columns))
    return gather(flat, iota(shape=(length,)) * (columns + 1) + (max(offset, 0) - min(offset, 0) * columns), axis=-1)


@check_arguments
def diag(x: Any, k: int = 0) -> Tensor:
    """The diagonal `k` of a matrix; for a vector, the matrix with that diagonal and zeros elsewhere.

    >>> diag([1, 2])
    Tensor([[1, 0],
            [0, 2]], int64)
    """
    x = as_tensor(x)
    if x.ndim != 1:
        return diagonal(x, k)
    size = int(x.shape[0]) + abs(k)
    pad = full(shape=(abs(k),), value=0, dtype=x.dtype)
    wide = expand_dims(concatenate([x, pad]), 1) if k >= 0 else expand_dims(concatenate([pad, x]), 1)
    shape = (size, size)
    kept = equal(iota(shape=shape, axis=-2) + k, iota(shape=shape, axis=-1))
    return where(kept, wide, full(shape=(), value=0, dtype=x.dtype))


@check_arguments
def trace(x: Any, offset: int = 0) -> Tensor:
    """The sum of the elements on diagonal `offset` of the last two axes.

    >>> trace([[1, 2], [3, 4]])
    Tensor(5, int64)
    """
    return sum(diagonal(x, offset), axis=-1)


@composite
def tensordot(a: Any, b: Any, axes: int | tuple[Sequence[int], Sequence[int]] = 2) -> Tensor:
    """The sum of products over some axes of `a` and as many of `b`: the last of `a` and first of `b`, or pairs.

    >>> tensordot([[1.0, 2.0]], [[3.0], [4.0]], axes=1)
    Tensor([[11.]], f32)

    Raises:
        ShapeError: the axes do not have the same sizes.
    """
    a, b = as_tensor(a), as_tensor(b)
    left, right = (range(a.ndim - axes, a.ndim), range(axes)) if isinstance(axes, int) else axes
    left, right = ([normalize_axis(i, t.ndim) + t.ndim for i in each] for t, each in ((a, left), (b, right)))
    if [a.shape[i] for i in left] != [b.shape[i] for i in right]:
        raise ShapeError("the axes to sum over differ", location=user_location(), received=f"{a.type} and {b.type}")
    rest_a, rest_b = [i for i in range(a.ndim) if i not in left], [i for i in range(b.ndim) if i not in right]
    outer, inner = [a.shape[i] for i in rest_a], count_elements([a.shape[i] for i in left])
    last = [b.shape[i] for i in rest_b]
    rows = reshape(permute(a, axes=(*rest_a, *left)), shape=(count_elements(outer), inner))
    columns = reshape(permute(b, axes=(*right, *rest_b)), shape=(inner, count_elements(last)))
    return reshape(matmul(rows, columns), shape=(*outer, *last))


@composite
def cross(a: Any, b: Any, axis: int = -1) -> Tensor:
    """The cross product of vectors of three elements along `axis`.

    >>> cross([1.0, 0.0, 0.0], [0.0, 1.0, 0.0])
    Tensor([0., 0., 1.], f32)
    """
    a, b = as_tensor(a), as_tensor(b)
    for each in (a, b):
        if each.shape[normalize_axis(axis, each.ndim)] != 3:
            raise ShapeError(
                f"cross takes 3 elements along axis {axis}", location=user_location(), received=str(each.type)
            )
    x, y = ([narrow(t, axis, i, i + 1) for i in range(3)] for t in (a, b))
    parts = [x[i] * y[j] - x[j] * y[i] for i, j in ((1, 2), (2, 0), (0, 1))]
    return concatenate(parts, axis=axis)


@composite
def matrix_power(x: Any, n: int) -> Tensor:
    """The product of `n` ≥ 0 copies of square matrices `x` [..., N, N], by squaring.

    >>> matrix_power([[1.0, 1.0], [0.0, 1.0]], 5)
    Tensor([[1., 5.],
            [0., 1.]], f32)
    """
    x = _matrix(x, "matrix_power")
    if n < 0:
        raise ArgumentError(f"matrix_power with exponent {n}", location=user_location(), expected="n ≥ 0")
    if x.shape[-1] != x.shape[-2]:
        raise ShapeError("the matrices are not square", location=user_location(), received=str(x.type))
    out = eye(x.shape[-1], dtype=x.dtype) if n == 0 else None
    while n:
        out = (x if out is None else matmul(out, x)) if n & 1 else out
        n >>= 1
        x = matmul(x, x) if n else x
    assert out is not None
    return out.expand(x.shape) if out.ndim < x.ndim else out


def _matrix(x: Any, name: str) -> Tensor:
    x = as_tensor(x)
    if x.ndim < 2:
        raise ShapeError(f"{name} needs two axes", location=user_location(), received=str(x.type))
    return x

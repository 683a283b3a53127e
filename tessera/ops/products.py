"""Products made of matmul and mul: gemm, outer, kron, inner."""

from __future__ import annotations

from typing import Any

from tessera.errors import ShapeError, here
from tessera.ops.arguments import typed
from tessera.ops.linalg import matmul
from tessera.ops.reduce import sum
from tessera.ops.shape import expand_dims, reshape, transpose
from tessera.shapes import normalize_axis
from tessera.tensor import Tensor, as_tensor


@typed
def gemm(
    a: Any,
    b: Any,
    c: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    trans_a: bool = False,
    trans_b: bool = False,
) -> Tensor:
    """alpha · op(a) op(b) + beta · c, where op transposes the last two axes if its flag says so.

    Shapes: op(a) [..., M, K], op(b) [..., K, N], `c` what broadcasts with [..., M, N]; `c` is not read where
    `beta` is 0.

    >>> gemm([[1.0, 2.0]], [[3.0], [4.0]], [[1.0]], alpha=2.0, beta=-1.0)
    Tensor([[21.]], f32)
    """
    left = transpose(a) if trans_a else a
    right = transpose(b) if trans_b else b
    out = matmul(left, right)
    out = out if alpha == 1 else out * alpha
    return out if c is None or beta == 0 else out + as_tensor(c) * beta


@typed
def outer(a: Any, b: Any) -> Tensor:
    """Every product of an element of vector `a` [M] with one of vector `b` [N], as [M, N].

    >>> outer([1, 2], [3, 4])
    Tensor([[3, 4],
            [6, 8]], int64)
    """
    a, b = as_tensor(a), as_tensor(b)
    if a.ndim != 1 or b.ndim != 1:
        raise ShapeError("outer takes two vectors", location=here(), received=f"{a.type} and {b.type}")
    return expand_dims(a, 1) * expand_dims(b, 0)


@typed
def vecdot(a: Any, b: Any, axis: int = -1) -> Tensor:
    """The sum of the products of two tensors along `axis`, the others broadcast.

    >>> vecdot([1.0, 2.0], [3.0, 4.0])
    Tensor(11., f32)

    Raises:
        ShapeError: the axis is not as long in both.
    """
    a, b = as_tensor(a), as_tensor(b)
    sizes = [t.shape[normalize_axis(axis, t.ndim)] for t in (a, b)]
    if sizes[0] != sizes[1]:
        raise ShapeError(
            "the vectors differ in length", location=here(), expected=str(sizes[0]), received=str(sizes[1])
        )
    return sum(a * b, axis=axis)


@typed
def kron(a: Any, b: Any) -> Tensor:
    """The Kronecker product: each element of `a` replaced by itself times `b`.

    >>> kron([1, 10], [1, 2])
    Tensor([ 1,  2, 10, 20], int64)
    """
    a, b = as_tensor(a), as_tensor(b)
    rank = max(a.ndim, b.ndim)
    left, right = ((1,) * (rank - t.ndim) + tuple(t.shape) for t in (a, b))
    spread_a = tuple(n for size in left for n in (size, 1))
    spread_b = tuple(n for size in right for n in (1, size))
    product = reshape(a, shape=spread_a) * reshape(b, shape=spread_b)
    return reshape(product, shape=tuple(m * n for m, n in zip(left, right, strict=True)))

"""What follows from eigenvalues and singular values: norms of matrices, ranks, pseudo-inverses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tessera.errors import ArgumentError, ShapeError, here
from tessera.ops.arguments import typed
from tessera.ops.basic import cast
from tessera.ops.decompose import eigh, svd
from tessera.ops.elementwise import abs, greater, where
from tessera.ops.info import finfo
from tessera.ops.linalg import matmul
from tessera.ops.reduce import max, min, sum
from tessera.ops.shape import expand_dims, reshape, transpose
from tessera.ops.statistics import norm
from tessera.tensor import Tensor, as_tensor
from tessera.types import f32


@typed
def eigvalsh(x: Any) -> Tensor:
    """The eigenvalues [..., N], rising, of symmetric `x` [..., N, N].

    >>> eigvalsh([[2.0, 0.0], [0.0, 1.0]])
    Tensor([1., 2.], f32)
    """
    return eigh(x)[0]


@typed
def svdvals(x: Any) -> Tensor:
    """The singular values [..., K], falling, of `x` [..., M, N].

    >>> svdvals([[3.0, 0.0], [0.0, 4.0]])
    Tensor([4., 3.], f32)
    """
    return svd(x)[1]


@typed
def vector_norm(x: Any, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Tensor:
    """The `ord`-norm of vectors along `axis`, or of all elements: `norm` as the array API standard spells it.

    >>> vector_norm([[3.0, 4.0], [6.0, 8.0]], axis=1)
    Tensor([ 5., 10.], f32)
    """
    return norm(x, ord, axis, keepdims)


def _along(first: int, pick: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """The largest or least of the sums of magnitudes along one axis."""
    return lambda x: pick(sum(abs(x), axis=first), axis=-1)


NORMS: dict[Any, Callable[[Tensor], Tensor]] = {
    "fro": lambda x: norm(x, axis=(-2, -1)),
    "nuc": lambda x: sum(svdvals(x), axis=-1),
    1: _along(-2, max),
    -1: _along(-2, min),
    2: lambda x: max(svdvals(x), axis=-1),
    -2: lambda x: min(svdvals(x), axis=-1),
    math.inf: _along(-1, max),
    -math.inf: _along(-1, min),
}


@typed
def matrix_norm(x: Any, ord: Any = "fro", keepdims: bool = False) -> Tensor:
    """A norm of each matrix of `x` [..., M, N].

    `ord`: "fro" is the root of the sum of squares, "nuc" the sum of the singular values, 2 and -2 the largest and the
    least of them; 1 and -1 the largest and least sum of magnitudes of a column, inf and -inf of a row.

    >>> matrix_norm([[1.0, -2.0], [3.0, 4.0]], ord=1)
    Tensor(6., f32)

    Raises:
        ArgumentError: there is no such norm.
        ShapeError: `x` has fewer than two axes.
    """
    x = as_tensor(x)
    if ord not in NORMS:
        raise ArgumentError(f"there is no matrix norm {ord!r}", location=here(), expected=", ".join(map(str, NORMS)))
    if x.ndim < 2:
        raise ShapeError("matrix_norm takes [..., M, N]", location=here(), received=str(x.type))
    out = NORMS[ord](x if x.dtype.is_float else cast(x, dtype=f32))
    return reshape(out, shape=(*out.shape, 1, 1)) if keepdims else out


def _large(values: Tensor, rows: int, columns: int, rtol: Any) -> Tensor:
    """Which singular values count: those above `rtol` times the largest."""
    share = finfo(values.dtype).eps * (rows if rows > columns else columns) if rtol is None else rtol
    return greater(values, max(values, axis=-1, keepdims=True) * share)


@typed
def pinv(x: Any, rtol: float | None = None) -> Tensor:
    """The pseudo-inverse [..., N, M] of `x` [..., M, N] (Moore 1920, Penrose 1955).

    Singular values up to `rtol` times the largest count as 0; by default that is the type's eps times the longer side.

    >>> pinv([[2.0, 0.0], [0.0, 0.0]])
    Tensor([[0.5, 0. ],
            [0. , 0. ]], f32)
    """
    u, s, v = svd(x)
    kept = _large(s, u.shape[-2], v.shape[-1], rtol)
    inverse = where(kept, 1.0 / where(kept, s, 1.0), 0.0)
    return matmul(transpose(v) * expand_dims(inverse, -2), transpose(u))


@typed
def matrix_rank(x: Any, rtol: float | None = None) -> Tensor:
    """How many singular values of `x` [..., M, N] lie above `rtol` times the largest (int64).

    >>> matrix_rank([[1.0, 2.0], [2.0, 4.0]])
    Tensor(1, int64)
    """
    x = as_tensor(x)
    s = svdvals(x)
    return sum(_large(s, x.shape[-2], x.shape[-1], rtol), axis=-1)

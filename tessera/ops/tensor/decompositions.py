"""Matrix decompositions by LAPACK on the host, their derivatives and batching; norms, ranks and pseudo-inverses that
follow from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tessera.core.errors import (
    ArgumentError,
    ExecutionError,
    ShapeError,
    TesseraError,
    UnsupportedOpError,
    user_location,
)
from tessera.core.shapes import broadcast
from tessera.core.types import TensorType, f32
from tessera.ir.rules import Op, batch, jvp, op, transpose
from tessera.ir.tensor import Tensor, as_tensor, bind_op
from tessera.ops.api.creation import eye
from tessera.ops.api.dtype_info import finfo
from tessera.ops.tensor.argument_checks import check_arguments
from tessera.ops.tensor.basic import broadcast_to, cast, check_operand_count, instantiate_zero
from tessera.ops.tensor.coercion import coerce_floating, composite, unify_dtypes
from tessera.ops.tensor.contractions import matmul
from tessera.ops.tensor.elementwise import abs, equal, exp, greater, where
from tessera.ops.tensor.matrices import diagonal, trace
from tessera.ops.tensor.rearrange import tril
from tessera.ops.tensor.reduce import max, min, norm, sum
from tessera.ops.tensor.shape import expand_dims, iota, reshape, squeeze
from tessera.ops.tensor.shape import transpose as transpose_
from tessera.ops.tensor.shape import transpose as turned

# Decompositions of matrices, on the host by LAPACK through NumPy; leading axes are a batch.
#
# They have the effect "host": no target emits them, and a build reports it.


def _check_square(x: TensorType) -> None:
    if x.rank < 2 or x.shape[-1] != x.shape[-2]:
        raise ShapeError("the matrices are not square", expected="[..., N, N]", received=str(x))


def _find_smaller_side(x: TensorType) -> Any:
    if x.rank < 2:
        raise ShapeError("a decomposition needs two axes", expected="[..., M, N]", received=str(x))
    rows, columns = x.shape[-2:]
    return rows if isinstance(rows, int) and isinstance(columns, int) and rows < columns else columns


def _square_type(x: TensorType) -> TensorType:
    _check_square(x)
    return x


def _svd_type(x: TensorType) -> tuple[TensorType, ...]:
    k, lead = _find_smaller_side(x), x.shape[:-2]
    return (
        x.with_shape((*lead, x.shape[-2], k)),
        x.with_shape((*lead, k)),
        x.with_shape((*lead, k, x.shape[-1])),
    )


def _qr_type(x: TensorType) -> tuple[TensorType, ...]:
    k, lead = _find_smaller_side(x), x.shape[:-2]
    return x.with_shape((*lead, x.shape[-2], k)), x.with_shape((*lead, k, x.shape[-1]))


def _eig_type(x: TensorType) -> tuple[TensorType, ...]:
    _check_square(x)
    return x.with_shape(x.shape[:-1]), x


def _define_host_op(infer: Callable[..., Any]) -> Callable[[Any], Op]:
    """An op computed by LAPACK; its failures raise an ExecutionError."""
    return op(infer=infer, coerce=coerce_floating, effects=("host",))


def _run_lapack(name: str, run: Callable[..., Any], x: np.ndarray) -> Any:
    try:
        return run(x)
    except np.linalg.LinAlgError as error:
        raise ExecutionError(f"{name}: {error}", received=f"a matrix of shape {x.shape}") from None


def _infer_solve(a: TensorType, b: TensorType) -> TensorType:
    _check_square(a)
    if b.rank != a.rank or b.shape[:-1] != a.shape[:-1]:
        raise ShapeError("the right side does not fit the matrices", expected="[..., N, K]", received=f"{a} and {b}")
    return b


def _solve_coerce(op: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """The coercion of solve: a vector becomes a matrix of one column, and leading axes broadcast."""
    check_operand_count(op, operands)
    try:
        a, b = (t if t.dtype.is_float else cast(t, dtype=f32) for t in unify_dtypes(operands))
        if a.ndim < 2 or not b.ndim:
            raise ShapeError("solve takes matrices and a right side", received=f"{a.type} and {b.type}")
        if b.ndim == 1:
            return squeeze(_solve_coerce(op, [a, expand_dims(b, 1)], attrs), -1)
        lead = broadcast(a.shape[:-2], b.shape[:-2])
        return bind_op(
            op, [broadcast_to(t, shape=(*lead, *t.shape[-2:])) if t.shape[:-2] != lead else t for t in (a, b)], attrs
        )
    except TesseraError as error:
        raise error.at(user_location()) from None


@op(infer=_infer_solve, coerce=_solve_coerce, effects=("host",))
def solve(a, b):
    """X [..., N, K] with `a` X = `b`, for square `a` [..., N, N] and `b` [..., N, K], or [N] where it is a vector.

    >>> import tessera as ts
    >>> ts.solve([[2.0, 0.0], [0.0, 4.0]], [2.0, 2.0])
    Tensor([1. , 0.5], f32)

    Raises:
        ExecutionError: a matrix is singular.
    """
    return _run_lapack("solve", lambda m: np.linalg.solve(m, b), a)


def _slogdet_type(x: TensorType) -> tuple[TensorType, TensorType]:
    _check_square(x)
    return x.with_shape(x.shape[:-2]), x.with_shape(x.shape[:-2])


@_define_host_op(_slogdet_type)
def slogdet(x):
    """The sign (1, -1 or 0) of the determinant of `x` [..., N, N] and the logarithm of its magnitude."""
    return tuple(np.linalg.slogdet(x))


@composite
def det(x: Any) -> Tensor:
    """The determinant of `x` [..., N, N].

    >>> round(det([[1.0, 2.0], [3.0, 4.0]]).item(), 4)
    -2.0
    """
    sign, size = slogdet(x)
    return sign * exp(size)


@check_arguments
def inv(x: Any) -> Tensor:
    """The inverse of `x` [..., N, N].

    >>> inv([[2.0, 0.0], [0.0, 4.0]])
    Tensor([[0.5 , 0.  ],
            [0.  , 0.25]], f32)

    Raises:
        ExecutionError: a matrix is singular.
    """
    x = as_tensor(x)
    _check_square(x.type)
    return solve(x, eye(x.shape[-1], dtype=x.dtype if x.dtype.is_float else f32))


@_define_host_op(_square_type)
def cholesky(x):
    """The lower triangular L with L Lᵀ = `x`, for symmetric positive definite `x` [..., N, N].

    >>> import tessera as ts
    >>> ts.cholesky([[4.0, 2.0], [2.0, 5.0]])
    Tensor([[2., 0.],
            [1., 2.]], f32)

    Raises:
        ExecutionError: a matrix is not positive definite.
    """
    return _run_lapack("cholesky", np.linalg.cholesky, x)


@_define_host_op(_svd_type)
def svd(x):
    """U [..., M, K], S [..., K] and Vᵀ [..., K, N] with U · S · Vᵀ = `x` [..., M, N]; S is descending, K = min(M, N).

    >>> import tessera as ts
    >>> ts.svd([[3.0, 0.0], [0.0, 4.0]])[1]
    Tensor([4., 3.], f32)
    """
    return tuple(_run_lapack("svd", lambda a: np.linalg.svd(a, full_matrices=False), x))


@_define_host_op(_qr_type)
def qr(x):
    """Q [..., M, K] with orthonormal columns and upper triangular R [..., K, N] with Q R = `x`, K = min(M, N)."""
    return tuple(_run_lapack("qr", np.linalg.qr, x))


@_define_host_op(_eig_type)
def eigh(x):
    """The eigenvalues [..., N], ascending, and eigenvectors (columns) of symmetric `x` (its lower triangle)."""
    return tuple(_run_lapack("eigh", np.linalg.eigh, x))


@_define_host_op(_eig_type)
def eig(x):
    """The eigenvalues [..., N] and eigenvectors (columns, of length 1) of `x`, where they are real.

    Raises:
        ExecutionError: an eigenvalue is complex; there is no complex element type (see `complex_eig`).
    """
    values, vectors = _run_lapack("eig", np.linalg.eig, x)
    if np.iscomplexobj(values) and np.abs(values.imag).max(initial=0.0) > 0:
        raise ExecutionError(
            "eig: an eigenvalue is complex", received=f"a matrix of shape {x.shape}",
            suggestion="ts.complex_eig gives real and imaginary parts; symmetric matrices: use ts.eigh",
        )  # fmt: skip
    return values.real, vectors.real


@_define_host_op(lambda x: (_eig_type(x)[0],) * 2 + (x,) * 2)
def eig_parts(x):
    """The real and imaginary parts of the eigenvalues [..., N], then those of the eigenvectors (columns) of `x`."""
    values, vectors = _run_lapack("eig", np.linalg.eig, x)
    return values.real, values.imag, vectors.real, vectors.imag


@check_arguments
def complex_eig(x: Any) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The eigenvalues [..., N] and eigenvectors (columns, of length 1) of `x` [..., N, N], as real and imaginary parts.

    There are no complex numbers here: each of the two is a pair of real tensors. Complex eigenvalues come in conjugate
    pairs.

    >>> values, vectors = complex_eig([[0.0, 1.0], [-1.0, 0.0]])
    >>> values
    (Tensor([0., 0.], f32), Tensor([ 1., -1.], f32))

    Raises:
        ShapeError: the matrices are not square.
    """
    value, imaginary, vector, imaginary_vector = eig_parts(x)
    return (value, imaginary), (vector, imaginary_vector)


# Derivatives and batching of the decompositions (all but `eig`, whose matrices need not be symmetric).
#
# Formulas: Giles, "An extended collection of matrix derivative results" (2008); for svd and qr, Townsend,
# "Differentiating the singular value decomposition" (2016), and Walter and Lehmann (2018).


@jvp(solve)
def _(out, primals, tangents):
    a, b = primals
    moved = instantiate_zero(tangents[1], b.type)
    return solve(a, moved if tangents[0] is None else moved - matmul(tangents[0], out))


@transpose(solve)
def _(g, a, b):
    return None, solve(turned(a), g)


@jvp(cholesky)
def _(out, primals, tangents):
    # L⁻¹ dA L⁻ᵀ is symmetric; its lower triangle with half the diagonal, times L, is dL.
    inner = solve(out, turned(solve(out, turned(_symmetrise(tangents[0])))))
    return matmul(out, tril(inner) - where(_mask_off_diagonal(inner), inner * 0.5, 0.0))


@jvp(slogdet)
def _(out, primals, tangents):
    return None, trace(matmul(inv(primals[0]), tangents[0]))


@jvp(eigh)
def _(out, primals, tangents):
    values, vectors = out
    inner = matmul(turned(vectors), matmul(_symmetrise(tangents[0]), vectors))
    return diagonal(inner), matmul(vectors, inner * _reciprocal_gaps(values, values))


@jvp(svd)
def _(out, primals, tangents):
    u, s, vt = out
    moved = tangents[0]
    inner = matmul(turned(u), matmul(moved, turned(vt)))
    row, gaps = expand_dims(s, -2), _reciprocal_gaps(s * s, s * s)
    du = matmul(u, gaps * (inner * row + turned(inner) * expand_dims(s, -1)))
    dv = matmul(turned(vt), gaps * (turned(inner) * row + inner * expand_dims(s, -1)))
    if u.shape[-2] > s.shape[-1]:  # the component outside the column space of u
        du = du + (matmul(moved, turned(vt)) - matmul(u, inner)) / row
    if vt.shape[-1] > s.shape[-1]:
        dv = dv + (matmul(turned(moved), u) - matmul(turned(vt), turned(inner))) / row
    return du, diagonal(inner), turned(dv)


@jvp(qr)
def _(out, primals, tangents):
    q, r = out
    if q.shape[-1] != r.shape[-1]:
        raise UnsupportedOpError("the derivative of qr needs matrices with M ≥ N", received=str(primals[0].type))
    scaled = turned(solve(turned(r), turned(tangents[0])))
    inner = matmul(turned(q), scaled)
    lower = tril(inner, -1)
    spin = lower - turned(lower)
    return scaled + matmul(q, spin - inner), matmul(inner - spin, r)


@jvp(eig, eig_parts)
def _(out, primals, tangents):
    raise UnsupportedOpError(
        "eig of general matrices has no derivative", received=str(primals[0].type),
        suggestion="symmetric matrices: use ts.eigh",
    )  # fmt: skip


def _symmetrise(x: Tensor) -> Tensor:
    """A tangent of a symmetric matrix, of which only the lower triangle is read."""
    low = tril(x)
    return low + turned(tril(x, -1))


def _mask_off_diagonal(x: Tensor) -> Tensor:
    shape = x.shape[-2:]
    return equal(iota(shape=shape, axis=-2), iota(shape=shape, axis=-1))


def _reciprocal_gaps(left: Tensor, right: Tensor) -> Tensor:
    """1 / (right_j - left_i) off the diagonal, 0 on it."""
    apart = expand_dims(right, -2) - expand_dims(left, -1)
    same = _mask_off_diagonal(apart)
    return where(same, 0.0, 1.0 / where(same, 1.0, apart))


@batch(cholesky, svd, qr, eigh, eig, eig_parts, slogdet)
def _(lanes: Any):
    return lanes.op(*lanes.tensors)


@batch(solve)
def _(lanes: Any):
    return solve(*lanes.spread())


# Functions of eigenvalues and singular values: matrix norms, ranks, pseudo-inverses.


@check_arguments
def eigvalsh(x: Any) -> Tensor:
    """The eigenvalues [..., N], ascending, of symmetric `x` [..., N, N].

    >>> eigvalsh([[2.0, 0.0], [0.0, 1.0]])
    Tensor([1., 2.], f32)
    """
    return eigh(x)[0]


@check_arguments
def svdvals(x: Any) -> Tensor:
    """The singular values [..., K], descending, of `x` [..., M, N].

    >>> svdvals([[3.0, 0.0], [0.0, 4.0]])
    Tensor([4., 3.], f32)
    """
    return svd(x)[1]


@check_arguments
def vector_norm(x: Any, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Tensor:
    """The `ord`-norm of vectors along `axis`, or of all elements: `norm` as the array API standard spells it.

    >>> vector_norm([[3.0, 4.0], [6.0, 8.0]], axis=1)
    Tensor([ 5., 10.], f32)
    """
    return norm(x, ord, axis, keepdims)


def _define_induced_norm(first: int, pick: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """The largest or least of the sums of magnitudes along one axis."""
    return lambda x: pick(sum(abs(x), axis=first), axis=-1)


MATRIX_NORMS: dict[Any, Callable[[Tensor], Tensor]] = {
    "fro": lambda x: norm(x, axis=(-2, -1)),
    "nuc": lambda x: sum(svdvals(x), axis=-1),
    1: _define_induced_norm(-2, max),
    -1: _define_induced_norm(-2, min),
    2: lambda x: max(svdvals(x), axis=-1),
    -2: lambda x: min(svdvals(x), axis=-1),
    math.inf: _define_induced_norm(-1, max),
    -math.inf: _define_induced_norm(-1, min),
}


@composite
def matrix_norm(x: Any, ord: Any = "fro", keepdims: bool = False) -> Tensor:
    """A norm of each matrix of `x` [..., M, N].

    `ord`: "fro" is the root of the sum of squares, "nuc" the sum of the singular values, 2 and -2 the largest and the
    least of them; 1 and -1 the largest and least sum of magnitudes of a column, inf and -inf of a row.

    >>> matrix_norm([[1.0, -2.0], [3.0, 4.0]], ord=1)
    Tensor(6., f32)

    Raises:
        ArgumentError: the norm is unknown.
        ShapeError: `x` has fewer than two axes.
    """
    x = as_tensor(x)
    if ord not in MATRIX_NORMS:
        raise ArgumentError(
            f"unknown matrix norm {ord!r}", location=user_location(), expected=", ".join(map(str, MATRIX_NORMS))
        )
    if x.ndim < 2:
        raise ShapeError("matrix_norm takes [..., M, N]", location=user_location(), received=str(x.type))
    out = MATRIX_NORMS[ord](x if x.dtype.is_float else cast(x, dtype=f32))
    return reshape(out, shape=(*out.shape, 1, 1)) if keepdims else out


def _exceeds_tolerance(values: Tensor, rows: int, columns: int, rtol: Any, eps: float) -> Tensor:
    """The mask of the singular values above `rtol` times the largest."""
    if values.shape[-1] == 0:
        return greater(values, 0.0)
    share = eps * (rows if rows > columns else columns) if rtol is None else rtol
    if not isinstance(share, (int, float)):  # one for each matrix
        share = expand_dims(cast(as_tensor(share), dtype=values.dtype), -1)
    return greater(values, max(values, axis=-1, keepdims=True) * share)


@check_arguments
def pinv(x: Any, rtol: Any = None) -> Tensor:
    """The pseudo-inverse [..., N, M] of `x` [..., M, N] (Moore 1920, Penrose 1955).

    Singular values up to `rtol` (a number, or one for each matrix [...]) times the largest count as 0; by default that
    is the type's eps times the longer side.

    >>> pinv([[2.0, 0.0], [0.0, 0.0]])
    Tensor([[0.5, 0. ],
            [0. , 0. ]], f32)
    """
    x = as_tensor(x)
    return _pseudo_inverse(x, rtol, _find_eps(x))


def _find_eps(x: Tensor) -> float:
    return finfo(x.dtype if x.dtype.is_float else f32).eps


@composite
def _pseudo_inverse(x: Any, rtol: Any, eps: float) -> Tensor:
    u, s, v = svd(x)
    kept = _exceeds_tolerance(s, u.shape[-2], v.shape[-1], rtol, eps)
    inverse = where(kept, 1.0 / where(kept, s, 1.0), 0.0)
    return matmul(transpose_(v) * expand_dims(inverse, -2), transpose_(u))


@check_arguments
def matrix_rank(x: Any, rtol: Any = None) -> Tensor:
    """The rank of `x` [..., M, N] (int64): the number of singular values above `rtol` times the largest.

    `rtol` is a number, or one for each matrix [...]; by default the type's eps times the longer side.

    >>> matrix_rank([[1.0, 2.0], [2.0, 4.0]])
    Tensor(1, int64)
    >>> matrix_rank([[[3.0, 0.0], [0.0, 1.0]]] * 2, [0.1, 0.5])
    Tensor([2, 1], int64)
    """
    x = as_tensor(x)
    s = svdvals(x)
    return sum(_exceeds_tolerance(s, x.shape[-2], x.shape[-1], rtol, _find_eps(x)), axis=-1)

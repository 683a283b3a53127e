"""Decompositions of matrices, on the host by LAPACK through NumPy; leading axes are a batch.

They have the effect "host": no target emits them, and a build says so. Derivatives stand in `decompose_rules.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tessera.errors import ExecutionError, ShapeError, TesseraError, here
from tessera.op import Op, op
from tessera.ops.arguments import typed
from tessera.ops.basic import broadcast_to, cast, check_count
from tessera.ops.coerce import floating, same_dtype
from tessera.ops.creation import eye
from tessera.ops.elementwise import exp
from tessera.ops.shape import expand_dims, squeeze
from tessera.shapes import broadcast
from tessera.tensor import Tensor, as_tensor, bind
from tessera.types import TensorType, f32


def _square(x: TensorType) -> None:
    if x.rank < 2 or x.shape[-1] != x.shape[-2]:
        raise ShapeError("the matrices are not square", expected="[..., N, N]", received=str(x))


def _smaller(x: TensorType) -> Any:
    if x.rank < 2:
        raise ShapeError("a decomposition needs two axes", expected="[..., M, N]", received=str(x))
    rows, columns = x.shape[-2:]
    return rows if isinstance(rows, int) and isinstance(columns, int) and rows < columns else columns


def _square_type(x: TensorType) -> TensorType:
    _square(x)
    return x


def _svd_type(x: TensorType) -> tuple[TensorType, ...]:
    k, lead = _smaller(x), x.shape[:-2]
    return (
        x.with_shape((*lead, x.shape[-2], k)),
        x.with_shape((*lead, k)),
        x.with_shape((*lead, k, x.shape[-1])),
    )


def _qr_type(x: TensorType) -> tuple[TensorType, ...]:
    k, lead = _smaller(x), x.shape[:-2]
    return x.with_shape((*lead, x.shape[-2], k)), x.with_shape((*lead, k, x.shape[-1]))


def _eig_type(x: TensorType) -> tuple[TensorType, ...]:
    _square(x)
    return x.with_shape(x.shape[:-1]), x


def _host(infer: Callable[..., Any]) -> Callable[[Any], Op]:
    """An op that LAPACK does; its failures are told as ours."""
    return op(infer=infer, coerce=floating, effects=("host",))


def _solved(name: str, run: Callable[..., Any], x: np.ndarray) -> Any:
    try:
        return run(x)
    except np.linalg.LinAlgError as error:
        raise ExecutionError(f"{name}: {error}", received=f"a matrix of shape {x.shape}") from None


def _solve_type(a: TensorType, b: TensorType) -> TensorType:
    _square(a)
    if b.rank != a.rank or b.shape[:-1] != a.shape[:-1]:
        raise ShapeError("the right side does not fit the matrices", expected="[..., N, K]", received=f"{a} and {b}")
    return b


def _solve_coerce(op: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Vectors are matrices of one column, and leading axes broadcast."""
    check_count(op, operands)
    try:
        a, b = (t if t.dtype.is_float else cast(t, dtype=f32) for t in same_dtype(operands))
        if a.ndim < 2 or not b.ndim:
            raise ShapeError("solve takes matrices and a right side", received=f"{a.type} and {b.type}")
        if b.ndim == 1:
            return squeeze(_solve_coerce(op, [a, expand_dims(b, 1)], attrs), -1)
        lead = broadcast(a.shape[:-2], b.shape[:-2])
        return bind(
            op, [broadcast_to(t, shape=(*lead, *t.shape[-2:])) if t.shape[:-2] != lead else t for t in (a, b)], attrs
        )
    except TesseraError as error:
        raise error.at(here()) from None


@op(infer=_solve_type, coerce=_solve_coerce, effects=("host",))
def solve(a, b):
    """X [..., N, K] with `a` X = `b`, for square `a` [..., N, N] and `b` [..., N, K], or [N] where it is a vector.

    >>> import tessera as ts
    >>> ts.solve([[2.0, 0.0], [0.0, 4.0]], [2.0, 2.0])
    Tensor([1. , 0.5], f32)

    Raises:
        ExecutionError: a matrix is singular.
    """
    return _solved("solve", lambda m: np.linalg.solve(m, b), a)


def _slogdet_type(x: TensorType) -> tuple[TensorType, TensorType]:
    _square(x)
    return x.with_shape(x.shape[:-2]), x.with_shape(x.shape[:-2])


@_host(_slogdet_type)
def slogdet(x):
    """The sign (1, -1 or 0) of the determinant of `x` [..., N, N] and the logarithm of its magnitude."""
    return tuple(np.linalg.slogdet(x))


@typed
def det(x: Any) -> Tensor:
    """The determinant of `x` [..., N, N].

    >>> round(det([[1.0, 2.0], [3.0, 4.0]]).item(), 4)
    -2.0
    """
    sign, size = slogdet(x)
    return sign * exp(size)


@typed
def inv(x: Any) -> Tensor:
    """The inverse of `x` [..., N, N].

    >>> inv([[2.0, 0.0], [0.0, 4.0]])
    Tensor([[0.5 , 0.  ],
            [0.  , 0.25]], f32)

    Raises:
        ExecutionError: a matrix is singular.
    """
    x = as_tensor(x)
    _square(x.type)
    return solve(x, eye(x.shape[-1], dtype=x.dtype if x.dtype.is_float else f32))


@_host(_square_type)
def cholesky(x):
    """The lower triangular L with L Lᵀ = `x`, for symmetric positive definite `x` [..., N, N].

    >>> import tessera as ts
    >>> ts.cholesky([[4.0, 2.0], [2.0, 5.0]])
    Tensor([[2., 0.],
            [1., 2.]], f32)

    Raises:
        ExecutionError: a matrix is not positive definite.
    """
    return _solved("cholesky", np.linalg.cholesky, x)


@_host(_svd_type)
def svd(x):
    """U [..., M, K], S [..., K] and Vᵀ [..., K, N] with U · S · Vᵀ = `x` [..., M, N]; S falls, K = min(M, N).

    >>> import tessera as ts
    >>> ts.svd([[3.0, 0.0], [0.0, 4.0]])[1]
    Tensor([4., 3.], f32)
    """
    return tuple(_solved("svd", lambda a: np.linalg.svd(a, full_matrices=False), x))


@_host(_qr_type)
def qr(x):
    """Q [..., M, K] with orthonormal columns and upper triangular R [..., K, N] with Q R = `x`, K = min(M, N)."""
    return tuple(_solved("qr", np.linalg.qr, x))


@_host(_eig_type)
def eigh(x):
    """The eigenvalues [..., N], rising, and eigenvectors (columns) of symmetric `x`; its lower triangle is read."""
    return tuple(_solved("eigh", np.linalg.eigh, x))


@_host(_eig_type)
def eig(x):
    """The eigenvalues [..., N] and eigenvectors (columns, of length 1) of `x`, where they are real.

    Raises:
        ExecutionError: an eigenvalue is complex; there is no complex element type.
    """
    values, vectors = _solved("eig", np.linalg.eig, x)
    if np.iscomplexobj(values) and np.abs(values.imag).max(initial=0.0) > 0:
        raise ExecutionError(
            "eig: an eigenvalue is complex", received=f"a matrix of shape {x.shape}",
            suggestion="symmetric matrices have real ones: use ts.eigh",
        )  # fmt: skip
    return values.real, vectors.real

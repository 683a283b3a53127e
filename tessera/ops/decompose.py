"""Decompositions of matrices, on the host by LAPACK through NumPy; leading axes are a batch.

They run eagerly and in the Graph interpreter. Other targets refuse them by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.errors import ExecutionError, ShapeError
from tessera.op import Op, op
from tessera.ops.coerce import floating
from tessera.types import TensorType


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

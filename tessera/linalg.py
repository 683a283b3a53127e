"""Linear algebra under the names of the array API standard's extension, and `eig` and `norm` beside them.

Decompositions run on the host, by LAPACK through NumPy. `svd` and `qr` give the reduced factors, `eig` real eigenvalues
alone, `complex_eig` real and imaginary parts; factors have names: `svd(x).S`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tessera.core.errors import ArgumentError, user_location
from tessera.core.types import DType
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor import decompositions
from tessera.ops.tensor.argument_checks import check_arguments
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.contractions import matmul, outer, vecdot
from tessera.ops.tensor.decompositions import (
    complex_eig,
    det,
    eig,
    eigvalsh,
    inv,
    matrix_norm,
    matrix_rank,
    pinv,
    solve,
    svdvals,
    vector_norm,
)
from tessera.ops.tensor.matrices import cross, diagonal, matrix_power, matrix_transpose, tensordot
from tessera.ops.tensor.matrices import trace as diagonal_sum
from tessera.ops.tensor.reduce import norm

__all__ = [
    "cholesky", "complex_eig", "cross", "det", "diagonal", "eig", "eigh", "eigvalsh", "inv", "matmul", "matrix_norm",
    "matrix_power",
    "matrix_rank", "matrix_transpose", "norm", "outer", "pinv", "qr", "slogdet", "solve", "svd", "svdvals",
    "tensordot", "trace", "vecdot", "vector_norm",
]  # fmt: skip


class Factors(NamedTuple):
    """The factors of `qr`."""

    Q: Tensor
    R: Tensor


class SingularValues(NamedTuple):
    """The factors of `svd`."""

    U: Tensor
    S: Tensor
    Vh: Tensor


class Eigenvalues(NamedTuple):
    """What `eigh` gives."""

    eigenvalues: Tensor
    eigenvectors: Tensor


class Determinant(NamedTuple):
    """What `slogdet` gives."""

    sign: Tensor
    logabsdet: Tensor


@check_arguments
def cholesky(x: Any, upper: bool = False) -> Tensor:
    """The lower triangular L with L Lᵀ = `x`, or Lᵀ if `upper`, for symmetric positive definite `x` [..., N, N].

    Raises:
        ExecutionError: a matrix is not positive definite.
    """
    found = decompositions.cholesky(x)
    return matrix_transpose(found) if upper else found


@check_arguments
def trace(x: Any, offset: int = 0, dtype: DType | None = None) -> Tensor:
    """The sum of the elements on diagonal `offset` of the last two axes, in `dtype` if given."""
    found = diagonal_sum(as_tensor(x), offset)
    return found if dtype is None else cast(found, dtype=dtype)


@check_arguments
def qr(x: Any, mode: str = "reduced") -> Factors:
    """Q [..., M, K] with orthonormal columns and upper triangular R [..., K, N] with Q R = `x`, K = min(M, N).

    Raises:
        ArgumentError: another mode than "reduced".
    """
    if mode != "reduced":
        raise ArgumentError(f"qr has no mode {mode!r}", location=user_location(), expected='"reduced"')
    return Factors(*decompositions.qr(x))


@check_arguments
def svd(x: Any, full_matrices: bool = False) -> SingularValues:
    """U [..., M, K], S [..., K] and Vᵀ [..., K, N] with U · S · Vᵀ = `x` [..., M, N]; S falls, K = min(M, N).

    >>> svd([[3.0, 0.0], [0.0, 4.0]]).S
    Tensor([4., 3.], f32)

    Raises:
        ArgumentError: full matrices are asked for.
    """
    if full_matrices:
        raise ArgumentError("svd gives the reduced factors", location=user_location(), expected="full_matrices=False")
    return SingularValues(*decompositions.svd(x))


@check_arguments
def eigh(x: Any) -> Eigenvalues:
    """The eigenvalues [..., N], rising, and eigenvectors (columns) of symmetric `x`; its lower triangle is read."""
    return Eigenvalues(*decompositions.eigh(x))


@check_arguments
def slogdet(x: Any) -> Determinant:
    """The sign (1, -1 or 0) of the determinant of `x` [..., N, N] and the logarithm of its magnitude."""
    return Determinant(*decompositions.slogdet(x))

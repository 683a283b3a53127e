"""Linear algebra under the names of the array API standard's extension, and `eig` and `norm` beside them.

Decompositions run on the host, by LAPACK through NumPy. `svd` and `qr` give the reduced factors, `eig` real eigenvalues
alone; factors have names: `svd(x).S`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tessera.errors import ArgumentError, here
from tessera.ops import decompose
from tessera.ops.arguments import typed
from tessera.ops.basic import cast
from tessera.ops.decompose import det, eig, inv, solve
from tessera.ops.linalg import matmul
from tessera.ops.matrices import cross, diagonal, matrix_power, matrix_transpose, tensordot
from tessera.ops.matrices import trace as diagonal_sum
from tessera.ops.products import outer, vecdot
from tessera.ops.spectra import eigvalsh, matrix_norm, matrix_rank, pinv, svdvals, vector_norm
from tessera.ops.statistics import norm
from tessera.tensor import Tensor, as_tensor
from tessera.types import DType

__all__ = [
    "cholesky", "cross", "det", "diagonal", "eig", "eigh", "eigvalsh", "inv", "matmul", "matrix_norm", "matrix_power",
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


@typed
def cholesky(x: Any, upper: bool = False) -> Tensor:
    """The lower triangular L with L Lᵀ = `x`, or Lᵀ if `upper`, for symmetric positive definite `x` [..., N, N].

    Raises:
        ExecutionError: a matrix is not positive definite.
    """
    found = decompose.cholesky(x)
    return matrix_transpose(found) if upper else found


@typed
def trace(x: Any, offset: int = 0, dtype: DType | None = None) -> Tensor:
    """The sum of the elements on diagonal `offset` of the last two axes, in `dtype` if given."""
    found = diagonal_sum(as_tensor(x), offset)
    return found if dtype is None else cast(found, dtype=dtype)


@typed
def qr(x: Any, mode: str = "reduced") -> Factors:
    """Q [..., M, K] with orthonormal columns and upper triangular R [..., K, N] with Q R = `x`, K = min(M, N).

    Raises:
        ArgumentError: another mode than "reduced".
    """
    if mode != "reduced":
        raise ArgumentError(f"qr has no mode {mode!r}", location=here(), expected='"reduced"')
    return Factors(*decompose.qr(x))


@typed
def svd(x: Any, full_matrices: bool = False) -> SingularValues:
    """U [..., M, K], S [..., K] and Vᵀ [..., K, N] with U · S · Vᵀ = `x` [..., M, N]; S falls, K = min(M, N).

    >>> svd([[3.0, 0.0], [0.0, 4.0]]).S
    Tensor([4., 3.], f32)

    Raises:
        ArgumentError: full matrices are asked for.
    """
    if full_matrices:
        raise ArgumentError("svd gives the reduced factors", location=here(), expected="full_matrices=False")
    return SingularValues(*decompose.svd(x))


@typed
def eigh(x: Any) -> Eigenvalues:
    """The eigenvalues [..., N], rising, and eigenvectors (columns) of symmetric `x`; its lower triangle is read."""
    return Eigenvalues(*decompose.eigh(x))


@typed
def slogdet(x: Any) -> Determinant:
    """The sign (1, -1 or 0) of the determinant of `x` [..., N, N] and the logarithm of its magnitude."""
    return Determinant(*decompose.slogdet(x))

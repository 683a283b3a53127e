"""Linear algebra under the names of the array API standard's extension, and `eig` and `norm` beside them.

`svd` gives the reduced factors, `eig` real eigenvalues alone; decompositions run on the host, by LAPACK through NumPy.
"""

from __future__ import annotations

from tessera.ops.decompose import cholesky, det, eig, eigh, inv, qr, slogdet, solve, svd
from tessera.ops.linalg import matmul
from tessera.ops.matrices import cross, diagonal, matrix_power, matrix_transpose, tensordot, trace
from tessera.ops.products import outer, vecdot
from tessera.ops.spectra import eigvalsh, matrix_norm, matrix_rank, pinv, svdvals, vector_norm
from tessera.ops.statistics import norm

__all__ = [
    "cholesky", "cross", "det", "diagonal", "eig", "eigh", "eigvalsh", "inv", "matmul", "matrix_norm", "matrix_power",
    "matrix_rank", "matrix_transpose", "norm", "outer", "pinv", "qr", "slogdet", "solve", "svd", "svdvals",
    "tensordot", "trace", "vecdot", "vector_norm",
]  # fmt: skip

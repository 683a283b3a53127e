"""Matrix rows: solutions, determinants, decompositions by LAPACK on the host, and distances (ATen's linalg ops)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.core.shapes import broadcast
from tessera.core.types import int32
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import decompositions as d
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import reduce as r
from tessera.ops.tensor.basic import broadcast_to, cast
from tessera.ops.tensor.contractions import einsum, matmul
from tessera.ops.tensor.matrices import matrix_transpose
from tessera.ops.tensor.rearrange import tril, triu
from tessera.ops.tensor.shape import expand_dims, gather, iota, reshape
from tessera.torch.table import ATEN, R, aten, narrow_to, wide, zeros

HOST_OPS: set[str] = set()
"""The ops whose rows call LAPACK. The compile backend leaves them to PyTorch, which reports failures in a result."""


def lapack(*names: str) -> Callable[[R], R]:
    """Decorate the row of these ops, which calls LAPACK."""
    HOST_OPS.update(f"aten.{name}" for name in names)
    return aten(*names)


# What LAPACK finds. The numbers of a failure ("info") are zeros: a failure is an error. Factors that PyTorch keeps for
# the backward pass are left out.


def _info(x: Tensor) -> Tensor:
    return zeros(x.shape[:-2], int32)


def _find_factor(x: Tensor, upper: bool) -> Tensor:
    """The factor of Cholesky; LAPACK reads the lower triangle."""
    found = d.cholesky(matrix_transpose(x) if upper else x) if x.size else x
    return matrix_transpose(found) if upper else found


@lapack("cholesky.default", "linalg_cholesky.default")
def _(x, upper=False):
    return _find_factor(x, upper)


@lapack("linalg_cholesky_ex.default")
def _(x, upper=False, check_errors=False):
    return _find_factor(x, upper), _info(x)


@lapack("linalg_inv_ex.default")
def _(x, check_errors=False):
    return d.inv(x) if x.size else x, _info(x)


@lapack("linalg_inv.default", "inverse.default")
def _(x):
    return d.inv(x) if x.size else x


@lapack("_linalg_det.default")
def _(x):
    return d.det(x) if x.size else zeros(x.shape[:-2], x.dtype) + 1.0, None, None


@lapack("_linalg_slogdet.default")
def _(x):
    if not x.size:
        return zeros(x.shape[:-2], x.dtype) + 1.0, zeros(x.shape[:-2], x.dtype), None, None
    return *d.slogdet(x), None, None


@lapack("linalg_solve.default")
def _(a, b, left=True):
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    found = _solve(a, expand_dims(b, -1) if vector else b, left or vector)
    return reshape(found, shape=found.shape[:-1]) if vector else found


@lapack("_linalg_solve_ex.default")
def _(a, b, left=True, check_errors=False):
    return ATEN["aten.linalg_solve.default"](a, b, left), None, None, _info(a)


def _solve(a: Tensor, b: Tensor, left: bool) -> Tensor:
    """X with A X = B, or X A = B."""
    if not left:
        return matrix_transpose(_solve(matrix_transpose(a), matrix_transpose(b), True))
    lead = broadcast(a.shape[:-2], b.shape[:-2])
    shape = (*lead, *b.shape[-2:])
    return d.solve(a, b) if math.prod(shape) else zeros(shape, b.dtype)


def _triangle(a: Tensor, upper: bool, unit: bool) -> Tensor:
    kept = triu(a) if upper else tril(a)
    size = a.shape[-1]
    same = e.equal(iota(shape=(size, size), axis=0), iota(shape=(size, size), axis=1))
    return e.where(same, 1.0, kept) if unit else kept


@lapack("linalg_solve_triangular.default")
def _(a, b, upper, left=True, unitriangular=False):
    return _solve(_triangle(a, upper, unitriangular), b, left)


@lapack("triangular_solve.default")
def _(b, a, upper=True, transpose=False, unitriangular=False):
    given = _triangle(a, upper, unitriangular)
    lead = broadcast(a.shape[:-2], b.shape[:-2])
    found = _solve(matrix_transpose(given) if transpose else given, b, True)
    return found, broadcast_to(a, shape=(*lead, *a.shape[-2:]))


@lapack("cholesky_solve.default")
def _(b, factor, upper=False):
    half = _triangle(factor, upper, False)
    first, second = (matrix_transpose(half), half) if upper else (half, matrix_transpose(half))
    return _solve(second, _solve(first, b, True), True)


@lapack("cholesky_inverse.default")
def _(factor, upper=False):
    half = _triangle(factor, upper, False)
    return d.inv(matmul(matrix_transpose(half), half) if upper else matmul(half, matrix_transpose(half)))


@lapack("linalg_qr.default")
def _(x, mode="reduced"):
    rows, columns = x.shape[-2:]
    if mode == "complete" and rows > columns:  # the columns that follow leave the first ones as they are
        wider = ATEN["aten.constant_pad_nd.default"](x, [0, rows - columns], 0.0)
        q, upper = d.qr(wider)
        return q, ATEN["aten.slice.Tensor"](upper, -1, 0, columns)
    q, upper = d.qr(x)
    return zeros((0,), x.dtype) if mode == "r" else q, upper


@lapack("_linalg_eigh.default")
def _(x, UPLO="L", compute_v=True):
    values, vectors = d.eigh(x if UPLO.upper() == "L" else matrix_transpose(x))  # the lower triangle is read
    return values, vectors if compute_v else zeros((0,), x.dtype)


@lapack("_linalg_svd.default")
def _(x, full_matrices=False, compute_uv=True, driver=None):
    left, values, right = d.svd(x)
    return (left, values, right) if compute_uv else (zeros((0,), x.dtype), values, zeros((0,), x.dtype))


@lapack("linalg_pinv.atol_rtol_tensor")
def _(x, atol=None, rtol=None, hermitian=False):
    if not x.size:
        return matrix_transpose(x)
    whole = tril(x) + matrix_transpose(tril(x, -1)) if hermitian else x
    left, values, right = d.svd(whole)
    most = r.max(values, axis=-1, keepdims=True)
    least = most * _cutoff(x, rtol, 0.0 if atol is not None else float(np.finfo(x.dtype.numpy).eps) * max(x.shape[-2:]))
    least = e.maximum(least, _cutoff(x, atol, 0.0))
    inverses = e.where(e.greater(values, least), 1.0 / e.where(e.greater(values, least), values, 1.0), 0.0)
    return matmul(matrix_transpose(right) * expand_dims(inverses, -2), matrix_transpose(left))


def _cutoff(x: Tensor, given: Tensor | None, default: float) -> Any:
    return default if given is None else expand_dims(narrow_to(given, x.dtype), -1)


# Products of three tensors, whose axes of `expand` are left out.


@aten("_trilinear.default")
def _(x, y, z, expand1, expand2, expand3, sumdim, unroll_dim=1):
    expands = (expand1, expand2, expand3)
    letters = "abcdefghijklmnop"[: x.ndim + len(expand1)]
    terms = ["".join(c for i, c in enumerate(letters) if i not in expand) for expand in expands]
    kept = "".join(c for i, c in enumerate(letters) if i not in sumdim)
    found = einsum(f"{','.join(terms)}->{kept}", *(wide(v) for v in (x, y, z)))
    return narrow_to(found, x.dtype)


# Derivatives of distances.


@aten("_cdist_backward.default")
def _(g, x, y, p, distances):
    lead = broadcast(x.shape[:-2], y.shape[:-2])
    if not math.prod(lead) or not x.size or not y.size:
        return zeros(x.shape, x.dtype)
    apart = expand_dims(wide(x), -2) - expand_dims(wide(y), -3)
    slopes = _slope_of_distance(apart, expand_dims(wide(distances), -1), float(p))
    return narrow_to(r.sum(expand_dims(wide(g), -1) * slopes, axis=-2), x.dtype)


@aten("_pdist_backward.default")
def _(g, x, p, distances):
    count = x.shape[0]
    if count < 2 or not x.size:
        return zeros(x.shape, x.dtype)
    places = np.zeros((count, count), np.int64)  # where the distance of two rows is in the list
    places[np.triu_indices(count, 1)] = np.arange(distances.size)
    flat = Tensor(np.maximum(places, places.T).reshape(-1))
    apart = expand_dims(wide(x), 1) - expand_dims(wide(x), 0)
    far, slope = (reshape(gather(wide(v), flat, axis=0), shape=(count, count, 1)) for v in (distances, g))
    slopes = e.where(Tensor(np.eye(count, dtype=bool)[..., None]), 0.0, _slope_of_distance(apart, far, float(p)))
    return narrow_to(r.sum(slope * slopes, axis=1), x.dtype)


def _slope_of_distance(apart: Tensor, distance: Tensor, p: float) -> Tensor:
    """The derivative of a p-norm with respect to what it measures; 0 where that has none."""
    sign = cast(e.greater(apart, 0.0), dtype=apart.dtype) - cast(e.less(apart, 0.0), dtype=apart.dtype)
    if p == 0:
        return apart * 0.0
    if p == 1:
        return sign
    if math.isinf(p):
        return e.where(e.equal(e.abs(apart), distance), sign, 0.0)
    apart_somewhere = e.not_equal(distance, 0.0)
    safe = e.where(apart_somewhere, distance, 1.0)
    if p == 2:
        return e.where(apart_somewhere, apart / safe, 0.0)
    size = e.abs(apart)
    moved = e.bitwise_and(apart_somewhere, e.not_equal(size, 0.0))
    return e.where(moved, sign * e.pow(e.where(moved, size, 1.0) / safe, p - 1.0), 0.0)

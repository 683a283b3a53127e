"""Derivatives and batching of the decompositions (all but `eig`, whose matrices need not be symmetric).

Formulas: Giles, "An extended collection of matrix derivative results" (2008); for svd and qr, Townsend,
"Differentiating the singular value decomposition" (2016), and Walter and Lehmann (2018).
"""

from __future__ import annotations

from typing import Any

from tessera.errors import UnsupportedOpError
from tessera.op import batch, jvp, transpose
from tessera.ops.arrange import tril
from tessera.ops.decompose import cholesky, eig, eigh, inv, qr, slogdet, solve, svd
from tessera.ops.derivatives import dense
from tessera.ops.elementwise import equal, where
from tessera.ops.linalg import matmul
from tessera.ops.matrices import diagonal, trace
from tessera.ops.shape import expand_dims, iota
from tessera.ops.shape import transpose as turned
from tessera.tensor import Tensor


@jvp(solve)
def _(out, primals, tangents):
    a, b = primals
    moved = dense(tangents[1], b.type)
    return solve(a, moved if tangents[0] is None else moved - matmul(tangents[0], out))


@transpose(solve)
def _(g, a, b):
    return None, solve(turned(a), g)


@jvp(cholesky)
def _(out, primals, tangents):
    # L⁻¹ dA L⁻ᵀ is symmetric; its lower triangle with half the diagonal, times L, is dL.
    inner = solve(out, turned(solve(out, turned(_symmetric(tangents[0])))))
    return matmul(out, tril(inner) - where(_on_diagonal(inner), inner * 0.5, 0.0))


@jvp(slogdet)
def _(out, primals, tangents):
    return None, trace(matmul(inv(primals[0]), tangents[0]))


@jvp(eigh)
def _(out, primals, tangents):
    values, vectors = out
    inner = matmul(turned(vectors), matmul(_symmetric(tangents[0]), vectors))
    return diagonal(inner), matmul(vectors, inner * _gaps(values, values))


@jvp(svd)
def _(out, primals, tangents):
    u, s, vt = out
    moved = tangents[0]
    inner = matmul(turned(u), matmul(moved, turned(vt)))
    row, gaps = expand_dims(s, -2), _gaps(s * s, s * s)
    du = matmul(u, gaps * (inner * row + turned(inner) * expand_dims(s, -1)))
    dv = matmul(turned(vt), gaps * (turned(inner) * row + inner * expand_dims(s, -1)))
    if u.shape[-2] > s.shape[-1]:  # what lies outside the columns of u
        du = du + (matmul(moved, turned(vt)) - matmul(u, inner)) / row
    if vt.shape[-1] > s.shape[-1]:
        dv = dv + (matmul(turned(moved), u) - matmul(turned(vt), turned(inner))) / row
    return du, diagonal(inner), turned(dv)


@jvp(qr)
def _(out, primals, tangents):
    q, r = out
    if q.shape[-1] != r.shape[-1]:
        raise UnsupportedOpError("qr of matrices wider than tall has no derivative", received=str(primals[0].type))
    scaled = turned(solve(turned(r), turned(tangents[0])))
    inner = matmul(turned(q), scaled)
    lower = tril(inner, -1)
    spin = lower - turned(lower)
    return scaled + matmul(q, spin - inner), matmul(inner - spin, r)


@jvp(eig)
def _(out, primals, tangents):
    raise UnsupportedOpError(
        "eig of general matrices has no derivative", received=str(primals[0].type),
        suggestion="symmetric matrices: use ts.eigh",
    )  # fmt: skip


def _symmetric(x: Tensor) -> Tensor:
    """A tangent of a symmetric matrix, of which only the lower triangle is read."""
    low = tril(x)
    return low + turned(tril(x, -1))


def _on_diagonal(x: Tensor) -> Tensor:
    shape = x.shape[-2:]
    return equal(iota(shape=shape, axis=-2), iota(shape=shape, axis=-1))


def _gaps(left: Tensor, right: Tensor) -> Tensor:
    """1 / (right_j - left_i) off the diagonal, 0 on it."""
    apart = expand_dims(right, -2) - expand_dims(left, -1)
    same = _on_diagonal(apart)
    return where(same, 0.0, 1.0 / where(same, 1.0, apart))


@batch(cholesky, svd, qr, eigh, eig, slogdet)
def _(lanes: Any):
    return lanes.op(*lanes.tensors)


@batch(solve)
def _(lanes: Any):
    return solve(*lanes.spread())

"""Linear algebra: MatMul, Gemm, Einsum, Det."""

from __future__ import annotations

from tessera.ir.tensor import Tensor
from tessera.onnx.node_rules import NodeCall, rule
from tessera.ops.tensor import decompositions
from tessera.ops.tensor.coercion import composite
from tessera.ops.tensor.contractions import einsum, matmul
from tessera.ops.tensor.shape import transpose


@rule("MatMul")
def _(call: NodeCall, a: Tensor, b: Tensor) -> Tensor:
    return matmul(a, b, dtype=a.dtype)


@rule("Gemm")
def _(call: NodeCall, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    a = transpose(a) if call.attr("transA") else a
    b = transpose(b) if call.attr("transB") else b
    alpha, beta = call.attr("alpha"), call.attr("beta")
    if a.dtype.is_integer and (alpha != 1 or beta != 1):
        raise call.refuse("integers with factors")
    return _scale_product(a, b, c, alpha, beta)


@composite
def _scale_product(a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> Tensor:
    out = matmul(a, b, dtype=a.dtype)
    out = out if alpha == 1 else out * alpha
    return out if c is None else out + (c if beta == 1 else c * beta)


@rule("Einsum")
def _(call: NodeCall, *xs: Tensor) -> Tensor:
    return einsum(call.attr("equation").replace(" ", ""), *xs)


@rule("Det")
def _(call: NodeCall, x: Tensor) -> Tensor:
    return decompositions.det(x)

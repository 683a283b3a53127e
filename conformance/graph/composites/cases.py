"""Composites: their lowerings agree with their semantics within the bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from conformance.case import Case
from conformance.inputs import tensor
from tessera.core.types import f16
from tessera.frontend.jit.tracing import Jit
from tessera.ops.tensor import activations, contractions, nn, reduce
from tessera.ops.tensor.attention import positional_attention, rough_cast, scaled_dot_product_attention

UNARY = {
    "softmax": lambda x: nn.softmax(x, axis=-1),
    "softmax-first-axis": lambda x: nn.softmax(x, axis=0),
    "log_softmax": lambda x: nn.log_softmax(x, axis=-1),
    "relu": nn.relu,
    "sigmoid": nn.sigmoid,
    "silu": nn.silu,
    "gelu": nn.gelu,
    "gelu-tanh": lambda x: nn.gelu(x, approximate="tanh"),
    "elu": lambda x: nn.elu(x),
    "leaky_relu": lambda x: nn.leaky_relu(x),
    "mish": nn.mish,
    "softplus": lambda x: nn.softplus(x),
    "logsigmoid": activations.logsigmoid,
    "hardsigmoid": activations.hardsigmoid,
    "hardswish": activations.hardswish,
    "hardtanh": lambda x: activations.hardtanh(x, -2.0, 1.5),
    "celu": lambda x: activations.celu(x, alpha=2.0),
    "selu": activations.selu,
    "softsign": activations.softsign,
    "tanhshrink": activations.tanhshrink,
    "softshrink": lambda x: activations.softshrink(x),
    "hardshrink": lambda x: activations.hardshrink(x),
    "rms_norm": lambda x: nn.rms_norm(x),
    "layer_norm": lambda x: nn.layer_norm(x),
}


GROUPED: dict[str, dict[str, Any]] = {
    "grouped": {},
    "window": {"causal": True, "window": 7},
    "softcap": {"softcap": 1.5, "window": 3},
}


def cases() -> Iterator[Case]:
    """Activations and norms at three types; attention; a mask; a whole block."""
    for name, program in UNARY.items():
        for dtype in ("f32", "f16", "bf16"):
            yield _make_unary(name, program, dtype)
    for causal in (False, True):
        for dtype in ("f32", "bf16"):
            yield _make_attention(causal, dtype)
    for dtype, weights in (("f16", None), ("bf16", "f32"), ("f16", "bf16")):
        yield _make_weighed_attention(dtype, weights)
    yield _make_positional_attention()
    for dtype in ("f32", "bf16"):
        for name, options in GROUPED.items():
            yield _make_grouped_attention(name, options, dtype)
    yield _make_rough_cast()
    yield _make_masked_attention()
    yield _make_affine_norm()
    yield _make_block()


def _make_unary(name: str, program: Callable[..., Any], dtype: str) -> Case:
    full = f"graph/composites/{name}-{dtype}"
    x = tensor(full, (6, 50), dtype, -4, 4)
    return Case(full, lambda: (Jit(lambda x: program(x)), (x,)))


def _make_attention(causal: bool, dtype: str) -> Case:
    name = f"graph/composites/attention-{'causal' if causal else 'full'}-{dtype}"
    q, k, v = (tensor(f"{name}{i}", (2, 3, 20, 16), dtype) for i in range(3))
    return Case(name, lambda: (Jit(lambda q, k, v: scaled_dot_product_attention(q, k, v, causal=causal)), (q, k, v)))


def _make_weighed_attention(dtype: str, weights: str | None) -> Case:
    """Widely spread scores: some weights are subnormal numbers, which may be flushed to 0."""
    name = f"graph/composites/attention-weights-{dtype}-{weights or dtype}"
    q, k, v = (tensor(f"{name}{i}", (2, 70, 64), dtype) for i in range(3))
    attend = scaled_dot_product_attention
    return Case(name, lambda: (Jit(lambda q, k, v: attend(q, k, v, scale=4.0, weights=weights)), (q, k, v)))


def _make_positional_attention() -> Case:
    """Queries, keys and values as (batch, position, head, feature)."""
    operands = tuple(tensor(f"p{i}", (2, 20, 3, 16)) for i in range(3))
    return Case("graph/composites/attention-positional", lambda: (Jit(_attend_by_position), operands))


def _make_grouped_attention(name: str, options: dict[str, Any], dtype: str) -> Case:
    """Four heads of queries for two of keys and values."""
    full = f"graph/composites/attention-{name}-{dtype}"
    q, k, v = (tensor(f"{full}{i}", (2, h, 20, 16), dtype) for i, h in enumerate((4, 2, 2)))
    return Case(full, lambda: (Jit(lambda q, k, v: scaled_dot_product_attention(q, k, v, **options)), (q, k, v)))


def _attend_by_position(q: Any, k: Any, v: Any) -> Any:
    return positional_attention(q, k, v)


def _make_rough_cast() -> Case:
    x = tensor("rough", (6, 50), "f32", 0.0, 1.0)
    return Case("graph/composites/rough_cast-f16", lambda: (Jit(lambda x: rough_cast(x, dtype=f16)), (x,)))


def _make_masked_attention() -> Case:
    q = tensor("q", (2, 2, 9, 8))
    k, v = tensor("k", (2, 2, 33, 8)), tensor("v", (2, 2, 33, 8))
    mask = tensor("m", (2, 1, 1, 33), "bool").astype("f4") * -10000.0
    program = lambda q, k, v, m: scaled_dot_product_attention(q, k, v, m)  # noqa: E731
    return Case("graph/composites/attention-masked", lambda: (Jit(program), (q, k, v, mask)))


def _make_affine_norm() -> Case:
    operands = (tensor("x", (4, 7, 32)), tensor("w", (32,)), tensor("b", (32,)))
    return Case(
        "graph/composites/layer_norm-affine", lambda: (Jit(lambda x, w, b: nn.layer_norm(x, (32,), w, b)), operands)
    )


def _make_block() -> Case:
    def block(x, up, down, w):  # type: ignore[no-untyped-def]
        h = nn.layer_norm(x, weight=w)
        return x + contractions.matmul(nn.gelu(contractions.matmul(h, up)), down), reduce.mean(h, axis=-1)

    operands = (tensor("x", (2, 12, 16)), tensor("u", (16, 40)), tensor("d", (40, 16)), tensor("w", (16,)))
    return Case("graph/composites/mlp-block", lambda: (Jit(block), operands))

"""Matrix products of every rank, type and awkward size."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.case import Case
from conformance.inputs import tensor
from tessera.core.types import TensorType, accum, as_dtype, f32
from tessera.frontend.jit.tracing import Jit
from tessera.ops.tensor import contractions, elementwise, nn

SHAPES = {
    "square": ((32, 32), (32, 32)),
    "odd": ((17, 23), (23, 9)),
    "deep": ((5, 700), (700, 6)),
    "wide": ((3, 8), (8, 200)),
    "tall": ((200, 8), (8, 3)),
    "one": ((1, 1), (1, 1)),
    "vector-matrix": ((12,), (12, 20)),
    "matrix-vector": ((20, 12), (12,)),
    "vector-vector": ((40,), (40,)),
    "batched": ((3, 10, 12), (3, 12, 7)),
    "batch-broadcast": ((2, 1, 10, 12), (3, 12, 7)),
    "flattened": ((2, 9, 16), (16, 24)),
}


def _make_product(name: str, dtype: str) -> Case:
    full = f"graph/linalg/matmul-{name}-{dtype}"
    a, b = (tensor(f"{full}-{i}", s, dtype) for i, s in enumerate(SHAPES[name]))
    return Case(full, lambda: (Jit(lambda a, b: contractions.matmul(a, b)), (a, b)), exact=dtype.startswith("int"))


# Products with a result of another type: they are summed in the type of their operands, and rounded once.
SUMMED = (
    ("f64", "f32"), ("f64", "f16"), ("f32", "f64"), ("f32", "f16"), ("f32", "bf16"), ("f16", "f32"), ("bf16", "f16"),
    ("f16", "f64"), ("fp8_e4m3", "bf16"), ("int8", "f32"), ("int32", "f16"), ("f32", "int32"),
)  # fmt: skip


def _make_summed(stored: str, result: str) -> Case:
    name = f"graph/linalg/summed-{stored}-{result}"
    a, b = (tensor(f"{name}-{i}", s, stored) for i, s in enumerate(SHAPES["odd"]))
    return Case(name, lambda: (Jit(lambda a, b: contractions.matmul(a, b, dtype=as_dtype(result))), (a, b)))


def cases() -> Iterator[Case]:
    """Products, and products with fused prologues and epilogues."""
    for name in SHAPES:
        yield _make_product(name, "f32")
    for dtype in ("f16", "bf16", "f64", "int8", "int32"):
        yield _make_product("odd", dtype)
    for stored, result in SUMMED:
        yield _make_summed(stored, result)
    yield _make_fused("bias-gelu", lambda x, w, b: nn.gelu(contractions.linear(x, w, b)))
    yield _make_fused(
        "bias-relu-residual", lambda x, w, b: elementwise.maximum(contractions.linear(x, w, b), 0.0) + x[:, :24]
    )
    yield _make_fused("scaled-operand", lambda x, w, b: contractions.matmul(x * 0.5, w) - b)
    yield _make_chain()
    yield _make_transposed()
    yield _make_policy()


def _make_fused(name: str, program) -> Case:  # type: ignore[no-untyped-def]
    operands = (tensor("x", (40, 48)), tensor("w", (48, 24)), tensor("b", (24,)))
    return Case(f"graph/linalg/{name}", lambda: (Jit(program), operands))


def _make_chain() -> Case:
    operands = (tensor("a", (16, 20)), tensor("b", (20, 12)), tensor("c", (12, 8)))
    return Case("graph/linalg/chain", lambda: (Jit(lambda a, b, c: (a @ b) @ c), operands))


def _make_transposed() -> Case:
    operands = (tensor("a", (20, 16)), tensor("b", (12, 20)))
    return Case("graph/linalg/transposed-operands", lambda: (Jit(lambda a, b: a.T @ b.T), operands))


def _make_policy() -> Case:
    bf16 = as_dtype("bf16")

    def product(a: TensorType((8, 40), bf16, bf16 @ accum(f32)), b):  # type: ignore[no-untyped-def,valid-type]
        return a @ b

    product.__annotations__["a"] = TensorType((8, 40), bf16, bf16 @ accum(f32))
    return Case(
        "graph/linalg/policy-bf16-accumulate-f32",
        lambda: (Jit(product), (tensor("a", (8, 40), "bf16"), tensor("b", (40, 8), "bf16"))),
    )

"""Every pointwise op, read from its definition, at each element type it takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.case import Case
from conformance.inputs import tensor
from tessera.frontend.jit.tracing import Jit
from tessera.ir.rules import Op
from tessera.ops.tensor import basic, elementwise

FLOATS = ("f32", "f16", "bf16", "f64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
# Where an op is defined, for ops that are not defined everywhere.
DOMAINS = {
    "log": (0.01, 8.0), "log2": (0.01, 8.0), "sqrt": (0.0, 8.0), "rsqrt": (0.05, 8.0), "pow": (0.1, 3.0),
    "exp": (-6.0, 6.0), "exp2": (-8.0, 8.0), "tanh": (-5.0, 5.0), "erf": (-4.0, 4.0), "sin": (-20.0, 20.0),
    "cos": (-20.0, 20.0), "div": (0.5, 3.0), "floor_divide": (1.0, 7.0), "remainder": (1.0, 7.0),
    "shift_left": (0.0, 3.0), "shift_right": (0.0, 3.0),
}  # fmt: skip
BITWISE = ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "shift_left", "shift_right")
# Integers are cast to f32 by these, which is a case of `cast`.
FLOAT_ONLY = (
    "div",
    "pow",
    "exp",
    "exp2",
    "log",
    "log2",
    "sqrt",
    "rsqrt",
    "tanh",
    "erf",
    "sin",
    "cos",
    "floor",
    "ceil",
    "round",
)


def pointwise() -> list[Op]:
    """The ops of the family, `where` apart."""
    found = [
        o
        for o in vars(elementwise).values()
        if isinstance(o, Op) and o.pointwise and o.ref.__module__ == elementwise.__name__
    ]
    return [o for o in found if o is not elementwise.where]


def dtypes(op: Op) -> tuple[str, ...]:
    """The element types a case is made for."""
    name = op.__name__
    if name in BITWISE:
        return ("int32", "uint8", "int64", "uint32") + (() if name.startswith("shift") else ("bool",))
    return FLOATS if name in FLOAT_ONLY else (*FLOATS, "int32", "int64")


def _call(op: Op, name: str, dtype: str) -> tuple[Any, Any]:
    low, high = DOMAINS.get(op.__name__, (-3.0, 3.0))
    operands = tuple(tensor(f"{name}-{i}", (3, 37), dtype, low, high) for i in range(len(op.operands)))

    def program(*args: Any) -> Any:
        return op(*args)

    return Jit(_fixed(program, len(operands))), operands


def _fixed(program: Any, count: int) -> Any:
    """A function of exactly `count` parameters, since a traced one has named ones."""
    return {1: lambda x: program(x), 2: lambda x, y: program(x, y), 3: lambda x, y, z: program(x, y, z)}[count]


def _make(op: Op, dtype: str) -> Case:
    name = f"graph/elementwise/{op.__name__}-{dtype}"
    return Case(name, lambda: _call(op, name, dtype), exact=dtype in INTEGERS or dtype == "bool")


def cases() -> Iterator[Case]:
    """One case for each op and type, casts between all types, and select."""
    for op in pointwise():
        for dtype in dtypes(op):
            yield _make(op, dtype)
    for source in (*FLOATS, "int32", "int8", "bool"):
        for to in (*FLOATS, "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"):
            if source != to:
                yield _cast(source, to)
    for dtype in ("f32", "bf16", "int32"):
        yield _where(dtype)
    yield _broadcasting()


def _cast(source: str, to: str) -> Case:
    name = f"graph/elementwise/cast-{source}-{to}"
    low = 0.0 if "uint" in to or to == "bool" else -9.0
    return Case(name, lambda: (Jit(lambda x: basic.cast(x, dtype=to)), (tensor(name, (5, 17), source, low, 9.0),)))


def _where(dtype: str) -> Case:
    name = f"graph/elementwise/where-{dtype}"
    operands = (tensor("c", (4, 33), "bool"), tensor("x", (4, 33), dtype), tensor("y", (4, 33), dtype))
    return Case(name, lambda: (Jit(lambda c, x, y: elementwise.where(c, x, y)), operands))


def _broadcasting() -> Case:
    operands = (tensor("a", (4, 1, 8)), tensor("b", (6, 1)), tensor("c", (8,)))
    return Case("graph/elementwise/broadcasting", lambda: (Jit(lambda a, b, c: (a + b) * c - 2.0), operands))

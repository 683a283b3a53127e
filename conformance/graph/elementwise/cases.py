"""Every pointwise op, from the columns of its definition, at each element type that it is defined for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.case import Case
from conformance.inputs import tensor
from tessera.frontend.jit.tracing import Jit
from tessera.ir.rules import Op
from tessera.ops.tensor import basic, bits, elementwise

FLOATS = ("f32", "f16", "bf16", "f64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
# The element types of the cases, for each kind of elements that an op is defined for.
DTYPES = {"float": FLOATS, "int": ("int32", "int64"), "uint": ("uint8", "uint32"), "bool": ("bool",)}


def list_ops() -> list[Op]:
    """The ops of the family, `where` apart."""
    found = [
        o
        for o in vars(elementwise).values()
        if isinstance(o, Op) and o.pointwise and o.ref.__module__ == elementwise.__name__
    ]
    return [o for o in found if o is not elementwise.where]


def list_dtypes(op: Op) -> tuple[str, ...]:
    """The element types that the op has cases for."""
    return tuple(name for kind in op.kinds for name in DTYPES[kind])


def _make_program(op: Op, name: str, dtype: str) -> tuple[Any, Any]:
    operands = tuple(tensor(f"{name}-{i}", (3, 37), dtype, *op.domain) for i in range(len(op.operands)))

    def program(*args: Any) -> Any:
        return op(*args)

    return Jit(_fix_arity(program, len(operands))), operands


def _fix_arity(program: Any, count: int) -> Any:
    """A function of exactly `count` parameters, since a traced one has named ones."""
    return {1: lambda x: program(x), 2: lambda x, y: program(x, y), 3: lambda x, y, z: program(x, y, z)}[count]


def _make(op: Op, dtype: str) -> Case:
    name = f"graph/elementwise/{op.__name__}-{dtype}"
    return Case(name, lambda: _make_program(op, name, dtype), exact=dtype in INTEGERS or dtype == "bool")


def cases() -> Iterator[Case]:
    """One case for each op and type, casts between all types, and select."""
    for op in list_ops():
        for dtype in list_dtypes(op):
            yield _make(op, dtype)
    for source in (*FLOATS, "int32", "int8", "bool"):
        for to in (*FLOATS, "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"):
            if source != to:
                yield _make_cast(source, to)
    for source, to in (("f32", "uint32"), ("int32", "f32")):
        yield _make_bitcast(source, to)
    for dtype in ("f32", "bf16", "int32"):
        yield _make_where(dtype)
    for dtype in ("int32", "uint8"):
        yield _make_integer_power(dtype)
    yield _make_broadcasting()


def _make_cast(source: str, to: str) -> Case:
    name = f"graph/elementwise/cast-{source}-{to}"
    low = 0.0 if "uint" in to or to == "bool" else -9.0
    return Case(name, lambda: (Jit(lambda x: basic.cast(x, dtype=to)), (tensor(name, (5, 17), source, low, 9.0),)))


def _make_bitcast(source: str, to: str) -> Case:
    name = f"graph/elementwise/bitcast-{source}-{to}"
    operands = (tensor(name, (5, 17), source, 0.0, 9.0),)
    return Case(name, lambda: (Jit(lambda x: bits.bitcast(x, dtype=to)), operands), exact=True)


def _make_where(dtype: str) -> Case:
    name = f"graph/elementwise/where-{dtype}"
    operands = (tensor("c", (4, 33), "bool"), tensor("x", (4, 33), dtype), tensor("y", (4, 33), dtype))
    return Case(name, lambda: (Jit(lambda c, x, y: elementwise.where(c, x, y)), operands))


def _make_integer_power(dtype: str) -> Case:
    name = f"graph/elementwise/integer_power-{dtype}"
    operands = (tensor(f"{name}-0", (3, 37), dtype, 0.0, 3.0), tensor(f"{name}-1", (3, 37), dtype, 0.0, 4.0))
    return Case(name, lambda: (Jit(lambda x, y: elementwise.integer_power(x, y)), operands), exact=True)


def _make_broadcasting() -> Case:
    operands = (tensor("a", (4, 1, 8)), tensor("b", (6, 1)), tensor("c", (8,)))
    return Case("graph/elementwise/broadcasting", lambda: (Jit(lambda a, b, c: (a + b) * c - 2.0), operands))

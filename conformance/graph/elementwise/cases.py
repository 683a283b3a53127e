"""Every pointwise op, from the columns of its definition, at each element type that it is defined for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import tessera as ts
from conformance.case import Case
from conformance.inputs import tensor
from tessera.core.types import as_dtype
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


# Operands whose results may be zeros of either sign.
ENDS = (0.0, -0.0, 1.0, -1.0, 0.5, -0.5, np.inf, -np.inf)
TOGETHER = 8  # ops of one case


def observe_sign(x: Any) -> Any:
    """1 and -1 where `x` is a zero of this sign, and 0 elsewhere: comparison within a bound does not see the sign."""
    return ts.where(x == 0, ts.copysign(ts.ones_like(x), x), ts.zeros_like(x))


def make_zeros(name: str, ops: Sequence[Op], dtype: str) -> Case:
    """The signs of the zeros that pointwise ops give, of all pairs of some operands."""
    pairs = np.array(list(itertools.product(ENDS, ENDS)))
    operands = tuple(pairs[:, i].astype(as_dtype(dtype).numpy) for i in range(2))

    def program(x, y):  # type: ignore[no-untyped-def]
        return [observe_sign(op(*(x, y)[: len(op.operands)])) for op in ops]

    return Case(name, lambda: (Jit(program), operands), unknown=True)


def cases() -> Iterator[Case]:
    """One case for each op and type, casts between all types, select, and the signs of zeros."""
    signed = [op for op in list_ops() if "float" in op.kinds and len(op.operands) <= 2 and not op.attrs]
    for first in range(0, len(signed), TOGETHER):
        yield make_zeros(f"graph/elementwise/zeros-{first // TOGETHER}", signed[first : first + TOGETHER], "f32")
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

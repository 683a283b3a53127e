"""The scalar functions of tessera/ops/tensor/scalar_functions.py, at each float type, with values at domain edges."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from conformance.case import Case
from conformance.inputs import tensor
from tessera.core.types import as_dtype
from tessera.frontend.jit.tracing import Jit
from tessera.ir.rules import Op
from tessera.ops.tensor import scalar_functions

FLOATS = ("f32", "f16", "bf16", "f64")
SPECIAL = (0.0, -0.0, 1.0, -1.0, 1e-6, -1e-6, 2.5, -2.5, math.inf, -math.inf, math.nan)


def list_ops() -> list[Op]:
    """The ops of the family."""
    return [
        o
        for o in vars(scalar_functions).values()
        if isinstance(o, Op) and o.ref.__module__ == scalar_functions.__name__
    ]


def cases() -> Iterator[Case]:
    """One case for each op and type, and one of values at the edges of each op's domain."""
    for op in list_ops():
        for dtype in FLOATS:
            yield _make_case(op, dtype, f"graph/functions/{op.__name__}-{dtype}")
        yield _make_edges(op)
    for op in (scalar_functions.sign, scalar_functions.clipped, scalar_functions.isfinite):
        yield _make_case(op, "int32", f"graph/functions/{op.__name__}-int32")


def _make_case(op: Op, dtype: str, name: str) -> Case:
    operands = tuple(tensor(f"{name}-{i}", (3, 37), dtype, *op.domain) for i in range(len(op.operands)))
    return _make(op, name, operands)


def _make_edges(op: Op) -> Case:
    values = np.array(SPECIAL, as_dtype("f32").numpy)
    operands = tuple(np.roll(values, 3 * i) for i in range(len(op.operands)))
    exact = op is scalar_functions.fmod  # a remainder is a number of the type; its bound would say nothing
    return _make(op, f"graph/functions/{op.__name__}-edges", operands, exact)


def _make(op: Op, name: str, operands: Any, exact: bool = False) -> Case:
    calls: dict[int, Any] = {1: lambda x: op(x), 2: lambda x, y: op(x, y), 3: lambda x, y, z: op(x, y, z)}
    return Case(name, lambda: (Jit(calls[len(operands)]), operands), exact=exact)

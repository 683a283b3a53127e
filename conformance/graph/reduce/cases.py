"""Every reduction and scan, over every axis of a tensor of rank 3, with the reduced axes kept or dropped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.case import Case
from conformance.inputs import tensor
from tessera.frontend.jit.tracing import Jit
from tessera.ir.rules import Op
from tessera.ops.tensor import reduce, running_extremes

AXES: tuple[Any, ...] = (0, 1, -1, None, (0, 2))
SINGLE = (reduce.argmax, reduce.argmin)
COMPOSITES = (reduce.prod, reduce.std, reduce.logsumexp)
SCANS = (reduce.cumsum, reduce.cumprod, running_extremes.cummax, running_extremes.cummin)


def _make(op: Op, axis: Any, dtype: str, keepdims: bool) -> Case:
    shown = "all" if axis is None else str(axis).replace(" ", "")
    name = f"graph/reduce/{op.__name__}-{shown}-{dtype}" + ("-keep" if keepdims else "")
    x = tensor(name, (3, 5, 36), dtype)
    return Case(name, lambda: (Jit(lambda x: op(x, axis=axis, keepdims=keepdims)), (x,)), exact=dtype == "int32")


def cases() -> Iterator[Case]:
    """Sums, extremes, means, indices of extremes, composite reductions and scans."""
    for op in (reduce.sum, reduce.max, reduce.min, reduce.mean, reduce.var):
        for axis in AXES:
            yield _make(op, axis, "f32", keepdims=axis == 1)
    for op in (reduce.sum, reduce.max, reduce.min):
        for dtype in ("bf16", "f16", "f64", "int32"):
            yield _make(op, -1, dtype, keepdims=False)
    for op in (reduce.sum, reduce.max):
        yield _make(op, (), "f32", keepdims=False)  # no axis: the elements themselves
    for op in SINGLE:
        for axis in (0, -1):
            yield _make(op, axis, "f32", keepdims=False)
    yield from _make_composites()
    yield from _make_scans()
    yield _make_long()
    yield _make_long_variance()


def _make_composites() -> Iterator[Case]:
    for op in COMPOSITES:
        yield _make(op, -1, "f32", keepdims=False)
        yield _make(op, 0, "bf16", keepdims=True)
    for op in (reduce.any, reduce.all):
        yield _make(op, -1, "bool", keepdims=False)


def _make_scans() -> Iterator[Case]:
    for op in SCANS:
        for axis, dtype in ((0, "f32"), (-1, "f32"), (-1, "bf16"), (0, "int32")):
            yield _make_scan(op, axis, dtype)


def _make_scan(op: Op, axis: int, dtype: str) -> Case:
    name = f"graph/reduce/{op.__name__}-{axis}-{dtype}"
    x = tensor(name, (3, 5, 36), dtype)
    return Case(name, lambda: (Jit(lambda x: op(x, axis=axis)), (x,)))


def _make_long() -> Case:
    x = tensor("long", (2, 70001))
    return Case("graph/reduce/sum-long-row", lambda: (Jit(lambda x: reduce.sum(x, axis=-1)), (x,)))


def _make_long_variance() -> Case:
    """Of rows in parts, which are merged: 2 x 2 of 16,500 elements for each result."""
    x = tensor("long-variance", (2, 2, 16500))
    return Case("graph/reduce/var-long-rows", lambda: (Jit(lambda x: reduce.var(x, axis=(0, 2))), (x,)))

"""Functions that fuzzing found to be wrong on some engine, and relatives of them at other sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

import tessera as ts
from conformance.case import Case
from conformance.inputs import edge_values, tensor
from tessera.frontend.jit.tracing import Jit


def sort_empty(x: Any) -> Any:
    """The indices of an empty axis are constants that no element has: they are not outside it."""
    return ts.sort(x, axis=0), ts.topk(x, 0, axis=0)[0], ts.argsort(x, axis=-1)


def narrow_and_join(x: Any) -> Any:
    """A last vector with one element that was computed in a wider type: its store must not reach beyond the row."""
    return ts.concatenate([x, ts.cast(ts.cast(x, dtype=ts.f32) + 1.0, dtype=x.dtype)], axis=0)


def outer_products(x: Any) -> Any:
    """Products over one element: a vector of the packed operand holds several rows."""
    return ts.sum(ts.matmul(x, ts.permute(x, (1, 0))), axis=0)


def sliced_to_nothing(x: Any) -> Any:
    """A slice without elements beside a reversed axis."""
    return x[0:0:2, ::-1, :]


def constant_dividend(x: Any) -> Any:
    """A division of a constant by floats of 8 bits, whose storage is an integer."""
    return ts.remainder(0.5, x), ts.floor_divide(x, 0.5)


def extremes(x: Any) -> Any:
    """Extremes of types with and without infinities: what is past the end of an axis must not win."""
    ends = [f(x, axis=-1) for f in (ts.max, ts.min, ts.argmax, ts.argmin)]
    return *ends, ts.max(x, axis=0), ts.argmax(-x, axis=0), ts.argmin(-x, axis=0)


def extremes_below_zero(x: Any) -> Any:
    """Extremes of numbers that are all on one side of 0: the padding of pieces on a mesh must not win."""
    return ts.max(x), ts.min(-x), ts.max(x, axis=0), ts.argmax(x, axis=1), ts.argmin(-x, axis=0)


def folded(x: Any) -> Any:
    """What algebra simplifies and arithmetic does not: with NaN, infinities and zeros of both signs."""
    negated = -x
    parts = [x * 0.0, 0.0 * x, x + 0.0, x - 0.0, x - (-0.0), 0.0 - x, x * 1.0, x / 1.0, -negated, x - x, x / x, x**1.0]
    signs = [ts.copysign(1.0, v) for v in (x + 0.0, x - (-0.0), x * -1.0, negated)]
    return ts.stack([*parts, *signs, ts.maximum(x, x), ts.where(x == x, x, negated)])


def _extreme_cases() -> Iterator[Case]:
    """Extremes of values that bite, and of numbers on one side of 0."""
    for dtype in ("f32", "int32"):
        x = tensor("negative", (7, 35), dtype, -90, -1)
        yield Case(f"graph/found/extremes-below-zero-{dtype}", lambda x=x: (Jit(extremes_below_zero), (x,)), exact=True)  # type: ignore[misc]
    for dtype, columns in itertools.product(("fp8_e4m3", "fp8_e5m2", "fp6", "fp4", "bf16", "int8", "f32"), (3, 33)):
        for kind in ("extreme", "ties"):
            x = edge_values(kind, 1, (5, columns), dtype)
            yield Case(f"graph/found/extremes-{dtype}-{columns}-{kind}", lambda x=x: (Jit(extremes), (x,)), exact=True)  # type: ignore[misc]


def cases() -> Iterator[Case]:
    """Each function at the sizes around a vector."""
    for dtype in ("fp8_e4m3", "fp8_e5m2", "bf16", "f16"):
        x = tensor("divisor", (3, 4), dtype, 0.5, 3.0)
        yield Case(f"graph/found/constant-dividend-{dtype}", lambda x=x: (Jit(constant_dividend), (x,)))  # type: ignore[misc]
    yield from _extreme_cases()
    for dtype, kind in itertools.product(("f64", "f32", "f16", "bf16"), ("special", "zeros", "extreme")):
        x = edge_values(kind, 1, (3, 11), dtype)
        yield Case(f"graph/found/folded-{dtype}-{kind}", lambda x=x: (Jit(folded), (x,)), unknown=True)  # type: ignore[misc]
    for dtype in ("int64", "int32", "int16", "int8"):
        least = np.array([np.iinfo(dtype).min, np.iinfo(dtype).max, -3], dtype)
        yield Case(
            f"graph/found/abs-of-the-least-{dtype}", lambda x=least: (Jit(lambda y: ts.abs(y)), (x,)), exact=True
        )  # type: ignore[misc]
    for shape in ((0, 3), (3, 0), (0,)):
        name = "graph/found/sort-empty-" + "x".join(map(str, shape))
        yield Case(name, lambda s=shape: (Jit(sort_empty), (np.zeros(s, np.float32),)), exact=True)  # type: ignore[misc]
    yield Case("graph/found/sliced-to-nothing", lambda: (Jit(sliced_to_nothing), (np.ones((1, 2, 1), np.float32),)))
    for columns in (1, 9, 17, 33):
        for dtype in ("bf16", "f16", "int8"):
            x = tensor(f"join{columns}", (3, columns), dtype)
            yield Case(f"graph/found/narrow-and-join-{columns}-{dtype}", lambda x=x: (Jit(narrow_and_join), (x,)))  # type: ignore[misc]
    for rows in (1, 2, 5, 9, 17):
        x = tensor(f"outer{rows}", (rows, 1))
        yield Case(f"graph/found/outer-products-{rows}", lambda x=x: (Jit(outer_products), (x,)))  # type: ignore[misc]

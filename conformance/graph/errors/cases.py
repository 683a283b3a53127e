"""Graph programs that must be refused, and the text of the error."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import tessera as ts
from conformance.case import Case
from conformance.inputs import tensor
from tessera.core.errors import ArgumentError, DTypeError, OutOfBoundsError, ShapeError, TesseraError, TraceError
from tessera.core.types import f32
from tessera.frontend.jit.tracing import Jit
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import basic, contractions, reduce, shape

X, Y, H = tensor("x", (4, 6)), tensor("y", (3, 6)), tensor("h", (4, 6), "f16")

REFUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], type[TesseraError], tuple[str, ...]]] = {
    "broadcast": (lambda x, y: x + y, (X, Y), ShapeError, ("cannot broadcast", "(4, 6) and (3, 6)", "cases.py:")),
    "mixed-floats": (lambda x, h: x + h, (X, H), DTypeError, ("cannot mix f16 and f32", "x.to(ts.f32)")),
    "matmul-inner": (lambda x, y: contractions.matmul(x, y), (X, Y), ShapeError, ("6 columns", "3 rows")),
    "reshape-count": (lambda x: shape.reshape(x, shape=(5, 5)), (X,), ShapeError, ("24 elements", "25 elements")),
    "axis-range": (lambda x: reduce.sum(x, axis=2), (X,), ShapeError, ("axis 2 is out of range",)),
    "axis-twice": (lambda x: reduce.sum(x, axis=(0, -2)), (X,), ShapeError, ("twice",)),
    "index-range": (lambda x: x[7], (X,), OutOfBoundsError, ("index 7", "size 4")),
    "index-rank": (lambda x: x[0, 0, 0], (X,), ShapeError, ("3 indices",)),
    "concatenate": (lambda x, h: shape.concatenate([x, x[:, :2]], axis=0), (X, H), ShapeError, ("axis",)),
    "gather-dtype": (lambda x: shape.gather(x, x), (X,), DTypeError, ("indices are not integers",)),
    "empty-maximum": (lambda x: reduce.max(x[:0], axis=0), (X,), ShapeError, ("nothing",)),
    "where-condition": (lambda x: x & x, (X,), DTypeError, ("bitwise",)),
    "control-flow": (lambda x: x if x.sum() > 0 else -x, (X,), TraceError, ("traced", "ts.where")),
    "unknown-type": (lambda x: basic.cast(x, dtype="float31"), (X,), DTypeError, ("float31", "bf16")),
    "arguments": (lambda x: reduce.sum(x, axes=1), (X,), ArgumentError, ("axes", "keepdims")),
}


# Indices that a program finds outside when it runs: each check of several reports itself, on every engine.
SOURCES = tuple(tensor(f"source{n}", (n, 3)) for n in (8, 5, 3, 6))
PLACES = np.array([0, 2, 1, 0], np.int32)
CHECKED: dict[str, Callable[..., Any]] = {
    "take": lambda x, i: ts.take(x, i, axis=0),
    "add": lambda x, i: x.at[i].add(1.0)[:4],
    "set": lambda x, i: x.at[i].set(0.5)[:4],
}


def _look_up(op: str) -> Callable[..., Any]:
    def program(*given: Any) -> Any:
        return [CHECKED[op](x, i)[:3] for x, i in zip(given[:4], given[4:], strict=True)]

    return program


def _list_lookups() -> Iterator[Case]:
    for op, wrong in itertools.product(CHECKED, range(len(SOURCES))):
        size = len(SOURCES[wrong])
        places = [PLACES + (size - PLACES[2]) * (n == wrong) * (np.arange(4) == 2) for n in range(len(SOURCES))]
        arguments = (*SOURCES, *(p.astype(np.int32) for p in places))
        yield _make(f"run-{op}-{wrong}", _look_up(op), arguments, OutOfBoundsError, (f"outside axis 0 of size {size}",))


def cases() -> Iterator[Case]:
    """The programs of the table, annotations that the arguments violate, and indices that lie outside."""
    yield from _list_lookups()
    for name, (program, arguments, error, says) in REFUSED.items():
        yield _make(name, program, arguments, error, says)
    yield _make_annotated("rank", (X[0],), ShapeError, ("rank 2 expected, rank 1 received",))
    yield _make_annotated("size", (tensor("z", (4, 5)),), ShapeError, ("axis 1", "expected 6"))
    yield _make_annotated("dtype", (H,), DTypeError, ("f32", "f16"))


def _make(name: str, program: Any, arguments: Any, error: type[TesseraError], says: tuple[str, ...]) -> Case:
    return Case(f"graph/errors/{name}", lambda: (Jit(program), arguments), rejects=error, says=says)


def _make_annotated(name: str, arguments: Any, error: type[TesseraError], says: tuple[str, ...]) -> Case:
    def program(x):  # type: ignore[no-untyped-def]
        return x * 2.0

    program.__annotations__["x"] = Tensor["B", 6, f32]
    return Case(f"graph/errors/annotation-{name}", lambda: (Jit(program), arguments), rejects=error, says=says)

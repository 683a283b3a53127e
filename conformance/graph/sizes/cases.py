"""Programs of symbolic sizes: one program for every size, whose tiles are partial at sizes that they do not divide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import tessera as ts
from conformance.case import Case
from conformance.inputs import tensor
from tessera import tile
from tessera.frontend.jit.tracing import Jit

ROWS = {"x": {0: "B"}}
BOTH = {"x": {0: "B", 1: "S"}}
SIZES = ((1, 1), (5, 3), (17, 33), (64, 32))


def _heads(x: ts.Tensor) -> ts.Tensor:
    """[B, S, 8] to [B, 2, S, 4], as attention splits its features."""
    batch, length, _ = x.shape
    return ts.permute(ts.reshape(x, (batch, length, 2, 4)), (0, 2, 1, 3))


@ts.kernel
def _center_rows(x, out, *, BM: int = 8, BN: int = 16):
    """out = x less the mean of each row."""
    rows = tile.program_id(0) * BM
    total = tile.zeros((BM,), "f32")
    for start in tile.range(0, x.shape[1], BN):
        total += tile.sum(tile.load(x[rows : rows + BM, start : start + BN], edge="clip"), axis=1)
    mean = total / x.shape[1]
    for start in tile.range(0, x.shape[1], BN):
        block = tile.load(x[rows : rows + BM, start : start + BN], edge="clip")
        tile.store(out[rows : rows + BM, start : start + BN], block - mean[:, None], edge="clip")


def _launch_center(x: ts.Tensor) -> ts.Tensor:
    """A kernel of the user's on symbolic sizes, between ops that are fused into its loads and stores."""
    return ts.launch(_center_rows, (tile.cdiv(x.shape[0], 8),), x * 2.0, ts.like(x)) + 1.0


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "pointwise": lambda x: ts.tanh(x) * 2.0 + 1.0,
    "row-sum": lambda x: ts.sum(x, axis=-1),
    "column-max": lambda x: ts.max(x, axis=0),
    "mean-of-all": ts.mean,
    "variance": lambda x: ts.var(x, axis=-1),
    "softmax": lambda x: ts.softmax(x, axis=-1),
    "argmax": lambda x: ts.argmax(x, axis=-1),
    "transpose": lambda x: ts.permute(x, (1, 0)) + 1.0,
    "flatten": lambda x: ts.reshape(x, (-1,)) * 3.0,
    "size-as-value": lambda x: ts.sum(x, axis=0) / x.shape[0] + x.shape[1],
    "product": lambda x: ts.matmul(x, ts.permute(x, (1, 0))),
    "reversed": lambda x: ts.flip(x, axis=0),
    "padded": lambda x: ts.pad(x, ((1, 2), (0, 0))),
    "concatenated": lambda x: ts.concatenate([x, x * 2.0], axis=0),
    "kernel": _launch_center,
    "gradient": lambda x: ts.grad(lambda y: ts.mean(ts.tanh(y) ** 2))(x),
}


def _make(name: str, function: Callable[[Any], Any], shape: tuple[int, ...], dynamic: dict[str, Any]) -> Case:
    full = f"graph/sizes/{name}-" + "x".join(map(str, shape))
    return Case(full, lambda: (Jit(function), (tensor(full, shape, "f32"),)), dynamic=dynamic)


def _make_linear(shape: tuple[int, ...]) -> Case:
    name = "graph/sizes/linear-" + "x".join(map(str, shape))
    x, w = tensor(name, shape, "f32"), tensor(f"{name}/w", (shape[-1], 24), "f32")
    return Case(name, lambda: (Jit(lambda x, w: ts.gelu(ts.linear(x, w))), (x, w)), dynamic={"x": {0: "B", 1: "S"}})


def cases() -> Iterator[Case]:
    """Each program at several sizes, and gathers, heads and products of symbolic rows."""
    for name, function in PROGRAMS.items():
        for shape in SIZES:
            yield _make(name, function, shape, BOTH)
    yield _make("heads", _heads, (3, 5, 8), BOTH)
    yield _make("rows-alone", lambda x: ts.softmax(x, axis=-1), (9, 33), ROWS)
    for rows in (1, 9):
        yield _make("flipped-columns", lambda x: ts.flip(x, axis=1), (rows, 33), ROWS)
    yield _make_linear((3, 5, 16))
    places = np.array([[0, 3, 1]], np.int32)
    table = tensor("graph/sizes/rows", (4, 6), "f32")
    yield Case(
        "graph/sizes/gather", lambda: (Jit(lambda x, i: ts.take(x, i, axis=0)), (table, places)),
        dynamic={"x": {0: "N"}, "i": {0: "B", 1: "K"}},
    )  # fmt: skip

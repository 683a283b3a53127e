"""Ops that move elements: their results are exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from conformance.case import Case
from conformance.inputs import tensor
from tessera.frontend.jit.tracing import Jit
from tessera.ops.tensor import basic, elementwise, scatter, shape, sorting

X = tensor("x", (4, 6, 10))
Y = tensor("y", (4, 3, 10))
ROWS = tensor("rows", (5, 2), "int32", 0, 3)
BELOW = np.array([-1, 2, 9, -4])  # what a limit from above leaves negative counts from the end
DISTINCT = np.array([3, 1], np.int32)

PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "reshape-merge": (lambda x: shape.reshape(x, shape=(24, 10)), (X,)),
    "reshape-split": (lambda x: shape.reshape(x, shape=(4, 2, 3, -1)), (X,)),
    "reshape-across": (lambda x: shape.reshape(x, shape=(15, 16)), (X,)),
    "permute": (lambda x: shape.permute(x, axes=(2, 0, 1)), (X,)),
    "transpose": (lambda x: shape.transpose(x, 0, 2), (X,)),
    "heads": (lambda x: shape.permute(shape.reshape(x, shape=(4, 6, 2, 5)), axes=(0, 2, 1, 3)), (X,)),
    "slice": (lambda x: x[1:3, ::2, 3:], (X,)),
    "index": (lambda x: x[-1, :, 4], (X,)),
    "newaxis": (lambda x: x[:, None, ..., 0], (X,)),
    "pad": (lambda x: shape.pad(x, low=(0, 1, 2), high=(1, 0, 3), value=-1.5), (X,)),
    "concatenate": (lambda x, y: shape.concatenate([x, y, x], axis=1), (X, Y)),
    "concatenate-last": (lambda x: shape.concatenate([x, x * 2.0], axis=-1), (X,)),
    "stack": (lambda x: shape.stack([x, -x], axis=1), (X,)),
    "gather-rows": (lambda x, i: shape.gather(x, i, axis=0), (X, ROWS)),
    "gather-middle": (lambda x, i: shape.gather(x, i, axis=1), (X, ROWS)),
    "gather-capped": (lambda x, i: shape.gather(x, elementwise.minimum(i, 3), axis=0), (X, BELOW)),
    "embedding": (lambda w, i: shape.embedding(w, i), (tensor("table", (4, 32)), ROWS)),
    "iota": (lambda x: x + basic.cast(shape.iota(shape=(6, 10), axis=0), dtype="f32"), (X,)),
    "arange": (lambda x: x * basic.cast(shape.arange(1, 21, 2), dtype="f32"), (X,)),
    "broadcast": (lambda y: basic.broadcast_to(y[:, :1], shape=(2, 4, 3, 10)), (Y,)),
    "full": (lambda x: basic.full(shape=(3, 7), value=2.5, dtype="bf16"), (X,)),
    "flatten": (lambda x: shape.flatten(x, 1), (X,)),
    "squeeze": (lambda x: shape.squeeze(x[:, :1], 1), (X,)),
    "identity": (lambda x: x, (X,)),
    "argsort": (lambda x: sorting.argsort(x, axis=-1), (X,)),
    "scatter-rows": (lambda x, i, u: scatter.scatter(x, i, u, axis=0), (X, DISTINCT, tensor("u", (2, 6, 10)))),
    "stop_gradient": (lambda x: basic.stop_gradient(x), (X,)),
    "mesh_shift": (lambda x: shape.mesh_shift(x, axis=1, shift=2), (X,)),
}
# These also compute, so that their results are not exact.
COMPUTED = ("iota", "arange", "concatenate-last")


def cases() -> Iterator[Case]:
    """Each program above."""
    for name, (program, arguments) in PROGRAMS.items():
        yield _make(name, program, arguments)


def _make(name: str, program: Callable[..., Any], arguments: tuple[Any, ...]) -> Case:
    return Case(f"graph/shape/{name}", lambda: (Jit(program), arguments), exact=name not in COMPUTED)

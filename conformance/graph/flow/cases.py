"""Loops and branches of whole tensors: the host executes them, their bodies run on the target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import tessera as ts
from conformance.case import Case
from conformance.inputs import tensor
from tessera.frontend.jit.tracing import Jit


def recurrent(w: Any, xs: Any) -> Any:
    """A recurrent cell over a sequence: a state, and a result for each step."""
    return ts.scan(lambda state, x: (ts.tanh(state @ w + x),) * 2, xs[0] * 0.0, xs)


def backward(w: Any, xs: Any) -> Any:
    """From the last slice to the first."""
    return ts.scan(lambda state, x: (state * 0.5 + x, state @ w), xs[0], xs, reverse=True)


def swapping(w: Any, xs: Any) -> Any:
    """States that are exchanged: none may be written before it is read."""
    return ts.scan(lambda s, x: ((s[1], s[0] + x), s[0]), (xs[0], xs[1]), xs)


def nested(w: Any, xs: Any) -> Any:
    """A loop in a loop, whose results are slices of slices."""
    return ts.map(lambda x: ts.map(lambda row: row * x.sum(), w), xs)


def counted(w: Any, xs: Any) -> Any:
    """A loop whose condition depends on its state."""
    return ts.while_loop(lambda i, x: i * i < 30, lambda i, x: (i + 2, x * 0.5 + xs[0]), (0, xs[1]))


def branching(w: Any, xs: Any) -> Any:
    """A branch in each step of a loop."""

    def step(i: Any, x: Any) -> Any:
        return i + 1, ts.cond(i % 2 == 0, lambda: x @ w, lambda: x + w[0])

    return ts.scan(lambda i, x: step(i, x), 0, xs)


def folded(w: Any, xs: Any) -> Any:
    """A reduction by a binary tree."""
    return ts.fold(lambda a, b: a * 0.5 + b, xs)


def unsteady(w: Any, xs: Any) -> Any:
    """The final states of a loop whose first steps do not use its constants."""
    return ts.fori_loop(0, 4, lambda i, x: x + w[1] * i, xs[0])


PROGRAMS = (recurrent, backward, swapping, nested, counted, branching, folded, unsteady)


def cases() -> Iterator[Case]:
    """Each program in two types."""
    for program in PROGRAMS:
        for dtype in ("f32", "f64"):
            name = f"graph/flow/{program.__name__}-{dtype}"
            w, xs = tensor(f"{name} w", (6, 6), dtype, -0.5, 0.5), tensor(f"{name} x", (5, 6), dtype)
            yield Case(name, lambda p=program, w=w, xs=xs: (Jit(p), (w, xs)))  # type: ignore[misc]
    whole = np.arange(12, dtype=np.int32).reshape(4, 3)
    integers = lambda x: ts.scan(lambda s, y: (s + y, s * y), x[0], x)  # noqa: E731
    yield Case("graph/flow/integers", lambda: (Jit(integers), (whole,)), exact=True)

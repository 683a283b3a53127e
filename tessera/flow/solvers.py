"""Solvers of equations, in loops that trace: fixed points by iteration, conjugate gradients, Newton's method."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence

from tessera.autodiff.grad import jvp
from tessera.flow.branches import while_loop
from tessera.ops.elementwise import abs, maximum, where
from tessera.ops.reduce import max, sum
from tessera.tensor import Tensor

# From a list of tensors to a list of tensors.
Map = Callable[[list[Tensor]], list[Tensor]]
MOST_STEPS = 1000
MOST_HALVINGS = 30
ENOUGH = 1e-4  # of the decrease that the slope promises (Armijo 1966)


def iterate(residual: Map, start: Sequence[Tensor]) -> list[Tensor]:
    """x with residual(x) = 0, by x ← x + residual(x) until it stands still to rounding."""

    def go_on(xs: tuple, moved: Tensor, i: Tensor) -> Tensor:
        return (moved > 0) & (i < MOST_STEPS)

    def step(xs: tuple, moved: Tensor, i: Tensor) -> tuple:
        change = residual(list(xs))
        return tuple(x + c for x, c in zip(xs, change, strict=True)), _beyond(change, xs), i + 1

    return list(while_loop(go_on, step, (tuple(start), _one(start), 0))[0])


def _one(tensors: Sequence[Tensor]) -> Tensor:
    return sum(tensors[0] * 0.0) + 1.0


def _beyond(change: Sequence[Tensor], xs: Sequence[Tensor]) -> Tensor:
    """How far changes exceed the rounding of what they are added to; not above 0 where none does."""
    parts = [max(abs(c) - _unit(x) * (abs(x) + abs(c))) for c, x in zip(change, xs, strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = maximum(total, part.to(total.dtype))
    return total


def _unit(x: Tensor) -> float:
    return 2.0 ** -{64: 52, 32: 23}.get(x.dtype.bits, 8)


def conjugate(residual: Map, start: Sequence[Tensor]) -> list[Tensor]:
    """x with A x + b = residual(x) = 0 for a symmetric A that does not change sign (Hestenes and Stiefel 1952)."""
    offset = residual([x * 0.0 for x in start])

    def apply(xs: Sequence[Tensor]) -> list[Tensor]:
        return [r - b for r, b in zip(residual(list(xs)), offset, strict=True)]

    left = [-r for r in residual(list(start))]
    size = builtins.sum(int(x.size) for x in start)  # type: ignore[arg-type]
    first = _inner(left, left)
    enough = first * _unit(start[0]) ** 2

    def go_on(xs: tuple, r: tuple, p: tuple, rr: Tensor, i: Tensor) -> Tensor:
        return (rr > enough) & (i < 4 * size)

    def step(xs: tuple, r: tuple, p: tuple, rr: Tensor, i: Tensor) -> tuple:
        ap = apply(p)
        alpha = rr / _inner(p, ap)
        xs, r = _along(xs, p, alpha), _along(r, ap, -alpha)
        new = _inner(r, r)
        return xs, r, _along(r, p, new / rr), new, i + 1

    return list(while_loop(go_on, step, (tuple(start), tuple(left), tuple(left), first, 0))[0])


def _inner(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    total = sum(a[0] * b[0])
    for x, y in zip(a[1:], b[1:], strict=True):
        total = total + sum(x * y)
    return total


def _along(xs: Sequence[Tensor], direction: Sequence[Tensor], by: Tensor) -> tuple[Tensor, ...]:
    return tuple(x + by * d for x, d in zip(xs, direction, strict=True))


METHODS: dict[str, Callable[[Map, Sequence[Tensor]], list[Tensor]]] = {"iterate": iterate, "conjugate": conjugate}


def newton(gradient: Map, objective: Map, start: Sequence[Tensor], steps: int) -> list[Tensor]:
    """The minimum near `start`: Newton's steps by conjugate gradients, halved until they lower the objective enough."""

    def go_on(xs: tuple, size: Tensor, i: Tensor) -> Tensor:
        return (size > 0) & (i < steps)

    def step(xs: tuple, size: Tensor, i: Tensor) -> tuple:
        g = gradient(list(xs))
        d = _downhill(gradient, xs, g)
        scale = _scale(objective, xs, d, _inner(g, d))
        moved = _along(xs, d, scale)
        return moved, _beyond([a - b for a, b in zip(moved, xs, strict=True)], xs), i + 1

    return list(while_loop(go_on, step, (tuple(start), _one(start), 0))[0])


def _downhill(gradient: Map, xs: Sequence[Tensor], g: list[Tensor]) -> list[Tensor]:
    """Newton's direction, or the steepest where the curvature does not lead down."""

    def residual(d: list[Tensor]) -> list[Tensor]:
        moved = jvp(lambda *at: tuple(gradient(list(at))), tuple(xs), tuple(d))[1]
        return [m + each for m, each in zip(moved, g, strict=True)]

    found = conjugate(residual, [x * 0.0 for x in xs])
    slope = _inner(g, found)
    down = (slope < 0) & (slope == slope)
    return [where(down, d, -each) for d, each in zip(found, g, strict=True)]


def _scale(objective: Map, xs: Sequence[Tensor], d: list[Tensor], slope: Tensor) -> Tensor:
    (here,) = objective(list(xs))

    def too_far(scale: Tensor, i: Tensor) -> Tensor:
        (there,) = objective(list(_along(xs, d, scale)))
        lower = there <= here + ENOUGH * scale * slope + 4 * _unit(here) * abs(here)
        return ~lower & (i < MOST_HALVINGS)

    found, i = while_loop(too_far, lambda scale, i: (scale * 0.5, i + 1), (slope * 0.0 + 1.0, 0))
    return where(i < MOST_HALVINGS, found, 0.0)

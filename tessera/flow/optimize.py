"""Minima as nodes: `optimize`, whose result moves with everything that its objective rests on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tessera.autodiff.arguments import scalar
from tessera.autodiff.grad import grad
from tessera.flow.implicit import Equation, solved
from tessera.flow.solvers import Map, newton
from tessera.pytree import flatten
from tessera.tensor import Tensor, as_tensor

Function = Callable[..., Any]


def optimize(objective: Function, init: Any, steps: int = 100) -> Any:
    """The y near `init` that minimises objective(y), a smooth scalar function: Newton's method.

    The derivative with respect to what `objective` closes over follows from the gradient's being zero
    there (the implicit function theorem), whatever the path; with respect to `init` it is zero.

    >>> import tessera as ts
    >>> ts.grad(lambda a: optimize(lambda y: (y - a * a) ** 2, ts.Tensor(0.0)))(3.0)
    Tensor(6., f32)

    Raises:
        ShapeError: the objective is not a scalar.
    """
    leaves, tree = flatten(init)
    guess = [as_tensor(x) for _, x in leaves]

    def height(*ys: Tensor) -> Tensor:
        found = objective(tree.build(iter(ys)))
        scalar(found, "the objective")
        return found

    def both(ys: Sequence[Tensor]) -> list[Tensor]:
        return [*grad(height, argnums=tuple(range(len(guess))))(*ys), height(*ys)]

    def solve(gradient: Map, objective: Map, start: list[Tensor]) -> list[Tensor]:
        return newton(gradient, objective, start, steps)

    return tree.build(iter(solved(both, guess, Equation(len(guess), solve, "conjugate", summed=True))))


def diff_through_opt(function: Function) -> Function:
    """Mark a function whose result is a minimum found by `optimize`: gradients flow through the optimal solution.

    >>> import tessera as ts
    >>> @diff_through_opt
    ... def argmin_layer(x, objective):
    ...     return optimize(lambda y: objective(x, y), init=ts.zeros_like(x))
    >>> ts.grad(lambda x: argmin_layer(x, lambda x, y: ((y - 2.0 * x) ** 2).sum()).sum())(ts.Tensor([1.0, 2.0]))
    Tensor([2., 2.], f32)
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **keywords: Any) -> Any:
        return function(*args, **keywords)

    return wrapper

"""Implicit differentiation: solutions of equations and minima as ops, differentiated by the implicit function theorem.

The solvers are fixed-point iteration, conjugate gradients (Hestenes and Stiefel 1952) and Newton's method with a
backtracking line search (Armijo 1966).
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tessera.core.errors import ArgumentError, user_location
from tessera.core.pytree import flatten
from tessera.ir.builder import CURRENT_BUILDER
from tessera.ir.core import Block, Node
from tessera.ir.rules import STORAGE, op
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.dialects.control_flow import _refuse_inference, refuse_direct_call
from tessera.ops.tensor.basic import instantiate_zero
from tessera.ops.tensor.elementwise import abs, maximum, where
from tessera.ops.tensor.reduce import max, sum
from tessera.transforms.autodiff import linearisation
from tessera.transforms.autodiff.call_primitives import add_transpose_call
from tessera.transforms.autodiff.gradients import grad, jvp
from tessera.transforms.autodiff.linearisation import Dual, linearise, push_forward, select_live_nodes
from tessera.transforms.autodiff.tape import detach, record_on_tape
from tessera.transforms.batching import BatchValue, batch_block, broadcast_to_batch
from tessera.transforms.batching import call_batching_rules as batched
from tessera.transforms.flow.control_flow import while_loop
from tessera.transforms.recording import (
    TransformBuilder,
    check_scalar_result,
    control_flow_rules,
    eval_block,
    record_block,
    traced_value,
)

# Solvers of equations as traced loops: fixed-point iteration, conjugate gradients, Newton's method.


# From a list of tensors to a list of tensors.
TensorMap = Callable[[list[Tensor]], list[Tensor]]
MAX_STEPS = 1000
MAX_HALVINGS = 30
ARMIJO_FRACTION = 1e-4  # the fraction of the first-order decrease that a step must reach (Armijo 1966)


def solve_fixed_point(residual: TensorMap, start: Sequence[Tensor]) -> list[Tensor]:
    """x with residual(x) = 0, by x ← x + residual(x) until the change is below rounding."""

    def go_on(xs: tuple, moved: Tensor, i: Tensor) -> Tensor:
        return (moved > 0) & (i < MAX_STEPS)

    def step(xs: tuple, moved: Tensor, i: Tensor) -> tuple:
        change = residual(list(xs))
        return tuple(x + c for x, c in zip(xs, change, strict=True)), _excess_over_rounding(change, xs), i + 1

    return list(while_loop(go_on, step, (tuple(start), _positive_scalar(start), 0))[0])


def _positive_scalar(tensors: Sequence[Tensor]) -> Tensor:
    return sum(tensors[0] * 0.0) + 1.0


def _excess_over_rounding(change: Sequence[Tensor], xs: Sequence[Tensor]) -> Tensor:
    """The largest excess of the changes over the rounding error of the values; ≤ 0 after convergence."""
    parts = [max(abs(c) - _unit_roundoff(x) * (abs(x) + abs(c))) for c, x in zip(change, xs, strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = maximum(total, part.to(total.dtype))
    return total


def _unit_roundoff(x: Tensor) -> float:
    return 2.0 ** -{64: 52, 32: 23}.get(x.dtype.bits, 8)


def solve_conjugate_gradients(residual: TensorMap, start: Sequence[Tensor]) -> list[Tensor]:
    """x with A x + b = residual(x) = 0 for a symmetric A that does not change sign (Hestenes and Stiefel 1952)."""
    offset = residual([x * 0.0 for x in start])

    def apply(xs: Sequence[Tensor]) -> list[Tensor]:
        return [r - b for r, b in zip(residual(list(xs)), offset, strict=True)]

    left = [-r for r in residual(list(start))]
    size = builtins.sum(int(x.size) for x in start)  # type: ignore[arg-type]
    first = _inner_product(left, left)
    enough = first * _unit_roundoff(start[0]) ** 2

    def go_on(xs: tuple, r: tuple, p: tuple, rr: Tensor, i: Tensor) -> Tensor:
        return (rr > enough) & (i < 4 * size)

    def step(xs: tuple, r: tuple, p: tuple, rr: Tensor, i: Tensor) -> tuple:
        ap = apply(p)
        alpha = rr / _inner_product(p, ap)
        xs, r = _add_scaled(xs, p, alpha), _add_scaled(r, ap, -alpha)
        new = _inner_product(r, r)
        return xs, r, _add_scaled(r, p, new / rr), new, i + 1

    return list(while_loop(go_on, step, (tuple(start), tuple(left), tuple(left), first, 0))[0])


def _inner_product(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    total = sum(a[0] * b[0])
    for x, y in zip(a[1:], b[1:], strict=True):
        total = total + sum(x * y)
    return total


def _add_scaled(xs: Sequence[Tensor], direction: Sequence[Tensor], by: Tensor) -> tuple[Tensor, ...]:
    return tuple(x + by * d for x, d in zip(xs, direction, strict=True))


LINEAR_SOLVERS: dict[str, Callable[[TensorMap, Sequence[Tensor]], list[Tensor]]] = {
    "iterate": solve_fixed_point,
    "conjugate": solve_conjugate_gradients,
}


def minimise_newton(gradient: TensorMap, objective: TensorMap, start: Sequence[Tensor], steps: int) -> list[Tensor]:
    """The minimum near `start` by Newton's method: conjugate gradients and a backtracking line search."""

    def go_on(xs: tuple, size: Tensor, i: Tensor) -> Tensor:
        return (size > 0) & (i < steps)

    def step(xs: tuple, size: Tensor, i: Tensor) -> tuple:
        g = gradient(list(xs))
        d = _find_newton_direction(gradient, xs, g)
        scale = _line_search(objective, xs, d, _inner_product(g, d))
        moved = _add_scaled(xs, d, scale)
        return moved, _excess_over_rounding([a - b for a, b in zip(moved, xs, strict=True)], xs), i + 1

    return list(while_loop(go_on, step, (tuple(start), _positive_scalar(start), 0))[0])


def _find_newton_direction(gradient: TensorMap, xs: Sequence[Tensor], g: list[Tensor]) -> list[Tensor]:
    """Newton's direction, or that of steepest descent where Newton's is not a descent direction."""

    def residual(d: list[Tensor]) -> list[Tensor]:
        moved = jvp(lambda *at: tuple(gradient(list(at))), tuple(xs), tuple(d))[1]
        return [m + each for m, each in zip(moved, g, strict=True)]

    found = solve_conjugate_gradients(residual, [x * 0.0 for x in xs])
    slope = _inner_product(g, found)
    down = (slope < 0) & (slope == slope)
    return [where(down, d, -each) for d, each in zip(found, g, strict=True)]


def _line_search(objective: TensorMap, xs: Sequence[Tensor], d: list[Tensor], slope: Tensor) -> Tensor:
    (here,) = objective(list(xs))

    def too_far(scale: Tensor, i: Tensor) -> Tensor:
        (there,) = objective(list(_add_scaled(xs, d, scale)))
        lower = there <= here + ARMIJO_FRACTION * scale * slope + 4 * _unit_roundoff(here) * abs(here)
        return ~lower & (i < MAX_HALVINGS)

    found, i = while_loop(too_far, lambda scale, i: (scale * 0.5, i + 1), (slope * 0.0 + 1.0, 0))
    return where(i < MAX_HALVINGS, found, 0.0)


# Solutions of equations as nodes: differentiated by the implicit function theorem, independently of the solver.


Function = Callable[..., Any]


@dataclass(frozen=True)
class ImplicitEquation:
    """How a solution is found: `solve(residual, rest, guess)`; and how linear systems of its Jacobian are solved.

    The solution has `count` tensors; the region returns the residuals and then the other values that `solve` needs.
    """

    count: int
    solve: Callable[[TensorMap, TensorMap, list[Tensor]], list[Tensor]]
    method: str
    # Whether the other values that `solve` needs are summed over the examples of a batch.
    summed: bool = False


@op(infer=_refuse_inference, coerce=refuse_direct_call, numerics=STORAGE, dialect="transform")
def implicit_solution(*operands: Any, equation: Any) -> Any:
    """The root of the first results of the region; the search starts at the first operands."""


def solve_equation(function: TensorMap, guess: Sequence[Tensor], equation: ImplicitEquation) -> list[Tensor]:
    """The solution of function(x) = 0: a node in the trace of a transform, else computed at once."""
    body = record_block(function, [x.type for x in guess])
    return _bind_solution(body.block, [*guess, *body.closed], equation)


def _bind_solution(block: Block, operands: Sequence[Tensor], equation: ImplicitEquation) -> list[Tensor]:
    builder, types = CURRENT_BUILDER.get(), tuple(x.type for x in operands[: equation.count])
    if isinstance(builder, TransformBuilder):
        values = [traced_value(builder, t) for t in operands]
        made = builder.add(implicit_solution, values, {"equation": equation}, types=types, regions=(block,))
        return [Tensor(v) for v in made.results]
    bare = [detach(t) for t in operands] if builder is None else list(operands)
    guess, rest = bare[: equation.count], bare[equation.count :]

    def part(where: slice) -> TensorMap:
        results = block.results[where]
        small = Block(block.params, select_live_nodes(block.nodes, results), results)
        return lambda xs: eval_block(small, [*xs, *rest])

    found = equation.solve(part(slice(equation.count)), part(slice(equation.count, None)), guess)
    record_on_tape(implicit_solution, operands, {"equation": equation}, found, (block,))
    return found


@control_flow_rules(implicit_solution)
def _(node, tensors):
    return _bind_solution(node.regions[0], tensors, node.attrs["equation"])


def _solve_linear_system(apply: TensorMap, offset: Sequence[Tensor], method: str) -> list[Tensor]:
    """t with apply(t) + offset = 0, for a linear function."""
    equation = ImplicitEquation(
        len(offset), lambda residual, rest, guess: LINEAR_SOLVERS[method](residual, guess), method
    )
    return solve_equation(
        lambda t: [a + b for a, b in zip(apply(t), offset, strict=True)], [b * 0.0 for b in offset], equation
    )


@linearisation.call_jvp_rules(implicit_solution)
def _(node: Node, duals: list[Dual], walk: Any, reverse: bool) -> Sequence[Dual]:
    equation = node.attrs["equation"]
    count, found = equation.count, _bind_solution(node.regions[0], [d.primal for d in duals], equation)
    block = replace(node.regions[0], results=node.regions[0].results[:count])
    rest = duals[count:]  # the start has no influence on the derivative
    moves = [d.tangent is not None for d in rest]
    if not any(moves):
        return [Dual(x) for x in found]
    if not reverse:
        return _solution_jvp(block, found, rest, equation)

    def pull(saved: Sequence[Tensor], g: Sequence[Tensor]) -> list[Tensor]:
        by_solution = linearise(block, saved, [True] * count + [False] * len(rest))
        w = _solve_linear_system(by_solution.pull_back, g, equation.method)  # Aᵀ w + g = 0
        return linearise(block, saved, [False] * count + moves).pull_back(w)

    given = [*(Dual(x) for x in found), *rest]
    return add_transpose_call(pull, [d.primal for d in given], given, found)


def _solution_jvp(block: Block, found: list[Tensor], rest: Sequence[Dual], equation: ImplicitEquation) -> list[Dual]:
    """The tangent t of the solution: A t + b = 0, where b is the tangent of the residual at a fixed solution."""
    still = [Dual(d.primal) for d in rest]

    def moved(duals: Sequence[Dual]) -> list[Tensor]:
        return [instantiate_zero(d.tangent, d.primal.type) for d in push_forward(block, duals)]

    offset = moved([*(Dual(x) for x in found), *rest])
    t = _solve_linear_system(lambda ts: moved([*map(Dual, found, ts), *still]), offset, equation.method)
    return [Dual(x, each) for x, each in zip(found, t, strict=True)]


@batched(implicit_solution)
def _(node: Node, lanes: list[BatchValue], walk: Any, size: Any) -> Sequence[BatchValue]:
    equation, block = node.attrs["equation"], node.regions[0]
    guess = [x.tensor if x.batched else broadcast_to_batch(x.tensor, size) for x in lanes[: equation.count]]

    def many(xs: Sequence[Tensor]) -> list[Tensor]:
        outs = batch_block(block, [*(BatchValue(x, True) for x in xs), *lanes[equation.count :]], size)
        found = [o.tensor if o.batched else broadcast_to_batch(o.tensor, size) for o in outs]
        rest = found[equation.count :]
        return [*found[: equation.count], *([sum(x, axis=0) for x in rest] if equation.summed else rest)]

    return [BatchValue(x, True) for x in solve_equation(many, guess, equation)]


def implicit_diff(solver: Function) -> Function:
    """A solver of fixed points, `solver(f, x0, ...)` returns x = f(x), and is differentiated implicitly.

    The derivative with respect to captured tensors of `f` does not depend on the steps of `solver`:
    it solves w = g + wᵀ ∂f/∂x by iteration, which converges where f is a contraction. Eagerly,
    `solver` receives values; under jit it is traced (use `while_loop` there).

    >>> import tessera as ts
    >>> @ts.implicit_diff
    ... def solve(f, x0):
    ...     for _ in range(40):
    ...         x0 = f(x0)
    ...     return x0
    >>> slope = ts.grad(lambda a: solve(lambda x: 0.5 * x + a, ts.Tensor(0.0)))(3.0)
    >>> round(slope.item(), 4)
    2.0

    Raises:
        ArgumentError: `f` returns another container than `x0`.
    """

    @functools.wraps(solver)
    def wrapper(f: Function, x0: Any, *args: Any, **keywords: Any) -> Any:
        leaves, tree = flatten(x0)
        guess = [as_tensor(x) for _, x in leaves]

        def step(xs: Sequence[Tensor]) -> list[Tensor]:
            found, shape = flatten(f(tree.build(iter(xs))))
            if shape != tree:
                raise ArgumentError(
                    "f(x) has another container than x", location=user_location(), received=str(len(found))
                )
            return [as_tensor(x, t.type) for (_, x), t in zip(found, guess, strict=True)]

        def both(xs: Sequence[Tensor]) -> list[Tensor]:
            ys = step(xs)
            return [*(y - x for x, y in zip(xs, ys, strict=True)), *ys]

        def solve(residual: TensorMap, again: TensorMap, start: list[Tensor]) -> list[Tensor]:
            def named(x: Any) -> Any:
                return tree.build(iter(again([as_tensor(leaf) for _, leaf in flatten(x)[0]])))

            return [as_tensor(x) for _, x in flatten(solver(named, tree.build(iter(start)), *args, **keywords))[0]]

        return tree.build(iter(solve_equation(both, guess, ImplicitEquation(len(guess), solve, "iterate"))))

    return wrapper


# Minima as nodes: `optimize`, differentiated with respect to the inputs of its objective.


def optimize(objective: Function, init: Any, steps: int = 100) -> Any:
    """The y near `init` that minimises objective(y), a smooth scalar function: Newton's method.

    The derivative with respect to captured tensors of `objective` follows from the implicit function
    theorem for gradient = 0, independently of the steps; with respect to `init` it is zero.

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
        check_scalar_result(found, "the objective")
        return found

    def both(ys: Sequence[Tensor]) -> list[Tensor]:
        return [*grad(height, argnums=tuple(range(len(guess))))(*ys), height(*ys)]

    def solve(gradient: TensorMap, objective: TensorMap, start: list[Tensor]) -> list[Tensor]:
        return minimise_newton(gradient, objective, start, steps)

    return tree.build(iter(solve_equation(both, guess, ImplicitEquation(len(guess), solve, "conjugate", summed=True))))


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

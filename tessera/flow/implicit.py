"""Solutions of equations as nodes: differentiated by the implicit function theorem, however they were found."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tessera.autodiff import dual
from tessera.autodiff.calls import linear_call
from tessera.autodiff.dual import Dual, push
from tessera.autodiff.linear import linearise, needed
from tessera.autodiff.record import Recorder, _value, flows, record, replay
from tessera.autodiff.tape import plain, taped
from tessera.batching import Lane, repeated, spread_out
from tessera.batching import calls as batched
from tessera.errors import ArgumentError, here
from tessera.flow.solvers import METHODS, Map
from tessera.ir.builder import CURRENT
from tessera.ir.core import Block, Node
from tessera.op import STORAGE, op
from tessera.ops.control import _given, direct
from tessera.ops.derivatives import dense
from tessera.ops.reduce import sum
from tessera.pytree import flatten
from tessera.tensor import Tensor, as_tensor

Function = Callable[..., Any]


@dataclass(frozen=True)
class Equation:
    """How a solution is found: `solve(residual, rest, guess)`; and how linear systems of its Jacobian are solved.

    `count` tensors are sought; the region gives the residuals and then what else `solve` asks for.
    """

    count: int
    solve: Callable[[Map, Map, list[Tensor]], list[Tensor]]
    method: str
    # Whether what else `solve` asks for is summed over the examples of a batch.
    summed: bool = False


@op(infer=_given, coerce=direct, numerics=STORAGE, dialect="transform")
def solution(*operands: Any, equation: Any) -> Any:
    """Values, beginning at the first operands, at which the first results of the region are zero."""


def solved(function: Map, guess: Sequence[Tensor], equation: Equation) -> list[Tensor]:
    """The solution of function(x) = 0: a node where a transform reads the trace, else found at once."""
    body = record(function, [x.type for x in guess])
    return _solution(body.block, [*guess, *body.closed], equation)


def _solution(block: Block, operands: Sequence[Tensor], equation: Equation) -> list[Tensor]:
    builder, types = CURRENT.get(), tuple(x.type for x in operands[: equation.count])
    if isinstance(builder, Recorder):
        values = [_value(builder, t) for t in operands]
        made = builder.add(solution, values, {"equation": equation}, types=types, regions=(block,))
        return [Tensor(v) for v in made.results]
    bare = [plain(t) for t in operands] if builder is None else list(operands)
    guess, rest = bare[: equation.count], bare[equation.count :]

    def part(where: slice) -> Map:
        results = block.results[where]
        small = Block(block.params, needed(block.nodes, results), results)
        return lambda xs: replay(small, [*xs, *rest])

    found = equation.solve(part(slice(equation.count)), part(slice(equation.count, None)), guess)
    taped(solution, operands, {"equation": equation}, found, (block,))
    return found


@flows(solution)
def _(node, tensors):
    return _solution(node.regions[0], tensors, node.attrs["equation"])


def _linear(apply: Map, offset: Sequence[Tensor], method: str) -> list[Tensor]:
    """t with apply(t) + offset = 0, for a linear function."""
    equation = Equation(len(offset), lambda residual, rest, guess: METHODS[method](residual, guess), method)
    return solved(lambda t: [a + b for a, b in zip(apply(t), offset, strict=True)], [b * 0.0 for b in offset], equation)


@dual.calls(solution)
def _(node: Node, duals: list[Dual], walk: Any, reverse: bool) -> Sequence[Dual]:
    equation = node.attrs["equation"]
    count, found = equation.count, _solution(node.regions[0], [d.primal for d in duals], equation)
    block = replace(node.regions[0], results=node.regions[0].results[:count])
    rest = duals[count:]  # where the search begins does not matter
    moves = [d.tangent is not None for d in rest]
    if not any(moves):
        return [Dual(x) for x in found]
    if not reverse:
        return _forward(block, found, rest, equation)

    def pull(saved: Sequence[Tensor], g: Sequence[Tensor]) -> list[Tensor]:
        by_solution = linearise(block, saved, [True] * count + [False] * len(rest))
        w = _linear(by_solution.pull, g, equation.method)  # Aᵀ w + g = 0
        return linearise(block, saved, [False] * count + moves).pull(w)

    given = [*(Dual(x) for x in found), *rest]
    return linear_call(pull, [d.primal for d in given], given, found)


def _forward(block: Block, found: list[Tensor], rest: Sequence[Dual], equation: Equation) -> list[Dual]:
    """The tangent t of the solution: A t + b = 0, where b is how the residual moves with everything else."""
    still = [Dual(d.primal) for d in rest]

    def moved(duals: Sequence[Dual]) -> list[Tensor]:
        return [dense(d.tangent, d.primal.type) for d in push(block, duals)]

    offset = moved([*(Dual(x) for x in found), *rest])
    t = _linear(lambda ts: moved([*map(Dual, found, ts), *still]), offset, equation.method)
    return [Dual(x, each) for x, each in zip(found, t, strict=True)]


@batched(solution)
def _(node: Node, lanes: list[Lane], walk: Any, size: Any) -> Sequence[Lane]:
    equation, block = node.attrs["equation"], node.regions[0]
    guess = [x.tensor if x.batched else repeated(x.tensor, size) for x in lanes[: equation.count]]

    def many(xs: Sequence[Tensor]) -> list[Tensor]:
        outs = spread_out(block, [*(Lane(x, True) for x in xs), *lanes[equation.count :]], size)
        found = [o.tensor if o.batched else repeated(o.tensor, size) for o in outs]
        rest = found[equation.count :]
        return [*found[: equation.count], *([sum(x, axis=0) for x in rest] if equation.summed else rest)]

    return [Lane(x, True) for x in solved(many, guess, equation)]


def implicit_diff(solver: Function) -> Function:
    """A solver of fixed points, `solver(f, x0, ...)` gives x = f(x), differentiated as such.

    The derivative with respect to what `f` closes over does not depend on how `solver` finds the
    point: it solves w = g + wᵀ ∂f/∂x by iteration, which converges where f contracts. Run eagerly,
    `solver` sees values; under jit it is traced (use `while_loop` there).

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
        ArgumentError: `f` does not give a container like `x0`.
    """

    @functools.wraps(solver)
    def wrapper(f: Function, x0: Any, *args: Any, **keywords: Any) -> Any:
        leaves, tree = flatten(x0)
        guess = [as_tensor(x) for _, x in leaves]

        def step(xs: Sequence[Tensor]) -> list[Tensor]:
            found, shape = flatten(f(tree.build(iter(xs))))
            if shape != tree:
                raise ArgumentError("f(x) has another container than x", location=here(), received=str(len(found)))
            return [as_tensor(x, t.type) for (_, x), t in zip(found, guess, strict=True)]

        def both(xs: Sequence[Tensor]) -> list[Tensor]:
            ys = step(xs)
            return [*(y - x for x, y in zip(xs, ys, strict=True)), *ys]

        def solve(residual: Map, again: Map, start: list[Tensor]) -> list[Tensor]:
            def named(x: Any) -> Any:
                return tree.build(iter(again([as_tensor(leaf) for _, leaf in flatten(x)[0]])))

            return [as_tensor(x) for _, x in flatten(solver(named, tree.build(iter(start)), *args, **keywords))[0]]

        return tree.build(iter(solved(both, guess, Equation(len(guess), solve, "iterate"))))

    return wrapper

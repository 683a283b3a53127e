"""Derivatives of a random program computed in two ways, which must agree within the bounds of both.

An element of a gradient in forward and in reverse mode; the gradient of the tape; the rows of `jacrev` and the columns
of `jacfwd`; a Hessian and the derivative of the gradient; a checkpointed function; the gradient for each example of a
batch; microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from types import MappingProxyType
from typing import Any

import numpy as np

from tessera.core.errors import TesseraError
from tessera.core.pytree import flatten
from tessera.frontend.jit.tracing import Jit
from tessera.interp.bound import compare_with_bound
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.shape import count_elements
from tessera.runtime.program import prepare
from tessera.tools.fuzz.programs import TESSERA, Input, RandomProgram

MOST_ENTRIES = 1500  # of a Jacobian
MOST_INPUTS = 16  # of a Hessian
LANES = 4
SLACK = 1.01  # radii are sums of rounded numbers


class NotComparableError(Exception):
    """A variant that a program does not have: a transform refuses one of its ops, by a typed error."""


class RelationError(Exception):
    """Two ways to compute the same have different results."""


def choose_input(program: RandomProgram, random: Random) -> Input:
    """An input with derivatives.

    Raises:
        NotComparableError: no input has elements of a type that is exact enough.
    """
    inputs = [i for i in program.inputs if i.dtype in ("f32", "f64") and np.prod(i.shape) > 0]
    if not inputs:
        raise NotComparableError
    return random.choice(inputs)


def list_results(program: RandomProgram, chosen: Input) -> Callable[..., list[Any]]:
    """A function of one input of a program, and others by name: its float results as f64."""
    function = program.load().function
    rest = {name: Tensor(x) for name, x in program.arguments().items()}

    def run(x: Any, others: Mapping[str, Any] = MappingProxyType({})) -> list[Any]:
        given = {**rest, **others, chosen.name: x}
        found = function(*(given[i.name] for i in program.inputs))
        return [TESSERA.cast(r, dtype=TESSERA.f64) for _, r in flatten(found)[0] if r.dtype.is_float]

    return run


def make_total(program: RandomProgram, chosen: Input) -> Callable[..., Any]:
    """The sum of a program's float results, as a function of one input."""
    results = list_results(program, chosen)
    return lambda x, *others: sum((TESSERA.sum(r) for r in results(x, *others)), TESSERA.zeros((), TESSERA.f64))


def check_equal(what: str, pair: Callable[..., tuple[Any, Any]], arrays: Sequence[np.ndarray]) -> None:
    """Two pytrees of tensors that are computed by one program must agree.

    Raises:
        NotComparableError: the program has no such derivative.
        RelationError: two elements differ by more than the bounds of both.
    """
    try:
        bounds = prepare(Jit(_flat(pair)), tuple(arrays), lower=False).bounds()
    except TesseraError as error:
        raise NotComparableError from error
    count = len(bounds) // 2
    for left, right in zip(bounds[:count], bounds[count:], strict=True):
        if np.any(np.abs(left.value - right.value) > (left.radius + right.radius) * SLACK):
            raise RelationError(f"{what}: {left} and {right}")


def _flat(pair: Callable[..., tuple[Any, Any]]) -> Callable[..., list[Any]]:
    def run(*arrays: Any) -> list[Any]:
        sides = [[t for _, t in flatten(side)[0]] for side in pair(*arrays)]
        assert len(sides[0]) == len(sides[1])
        return [TESSERA.cast(t, dtype=TESSERA.f64) for side in sides for t in side]

    def one(x: Any) -> list[Any]:
        return run(x)

    def two(x: Any, v: Any) -> list[Any]:
        return run(x, v)

    return one if pair.__code__.co_argcount == 1 else two


def _compare_modes(program: RandomProgram, chosen: Input, random: Random) -> None:
    """One element of a gradient, in reverse and in forward mode."""
    x = chosen.make()
    direction = np.zeros(chosen.shape, x.dtype)
    direction.reshape(-1)[random.randrange(direction.size)] = 1.0
    total = make_total(program, chosen)

    def both(x: Any, v: Any) -> Any:
        return TESSERA.sum(TESSERA.grad(total)(x) * v), TESSERA.jvp(total, (x,), (v,))[1]

    check_equal("the derivatives in reverse and in forward mode", both, (x, direction))


def _compare_tape(program: RandomProgram, chosen: Input, random: Random) -> None:
    """The gradient that `backward` finds on the tape of an eager run, and that of `ts.grad`, within its bound."""
    total = make_total(program, chosen)
    try:
        (bound,) = prepare(Jit(lambda x: TESSERA.grad(total)(x)), (chosen.make(),), lower=False).bounds()
        leaf = Tensor(chosen.make(), requires_grad=True)
        walks = [_walk_tape(total, leaf) for _ in range(2)]
    except TesseraError as error:
        raise NotComparableError from error
    first, second = (walk.numpy() for walk in walks)
    agreement = compare_with_bound(first, bound)
    if not agreement.ok:
        raise RelationError(f"the gradient of the tape: {agreement}")
    twice = walks[0] + walks[0]  # by the policy of the gradient's type, which may saturate
    if not np.array_equal(second, twice.numpy(), equal_nan=True):
        raise RelationError("the tape does not add up the gradients of two walks")


def _walk_tape(total: Callable[..., Any], leaf: Tensor) -> Tensor:
    """The gradient of a leaf after one more walk."""
    total(leaf).backward()
    return Tensor(np.zeros(leaf.shape, leaf.dtype.numpy)) if leaf.grad is None else leaf.grad


def _compare_jacobians(program: RandomProgram, chosen: Input, random: Random) -> None:
    """The rows of `jacrev`, the columns of `jacfwd`, and what `vjp` makes of ones, which are sums of columns."""
    results = list_results(program, chosen)
    try:
        made = prepare(Jit(results), (chosen.make(),), lower=False).levels["graph"].main
    except TesseraError as error:
        raise NotComparableError from error
    entries = sum(count_elements(r.type.shape) for r in made.results) * count_elements(chosen.shape)
    if not 0 < entries <= MOST_ENTRIES:
        raise NotComparableError
    check_equal(
        "jacrev and jacfwd", lambda x: (TESSERA.jacrev(results)(x), TESSERA.jacfwd(results)(x)), (chosen.make(),)
    )

    def pull(x: Any) -> Any:
        outs, back = TESSERA.vjp(results, x)
        return back([TESSERA.ones_like(o) for o in outs])[0], TESSERA.grad(make_total(program, chosen))(x)

    check_equal("vjp and grad", pull, (chosen.make(),))


def _compare_hessians(program: RandomProgram, chosen: Input, random: Random) -> None:
    """A Hessian is the derivative of the gradient, in reverse mode, too."""
    if np.prod(chosen.shape) > MOST_INPUTS:
        raise NotComparableError
    total = make_total(program, chosen)
    again = TESSERA.jacrev(TESSERA.grad(total))
    check_equal("hessian and jacrev of grad", lambda x: (TESSERA.hessian(total)(x), again(x)), (chosen.make(),))


def _compare_checkpointed(program: RandomProgram, chosen: Input, random: Random) -> None:
    """A gradient whose backward pass computes the function again."""
    total = make_total(program, chosen)
    again = TESSERA.checkpoint(total)
    both = lambda x: (TESSERA.value_and_grad(total)(x), TESSERA.value_and_grad(again)(x))  # noqa: E731
    check_equal("a checkpointed function", both, (chosen.make(),))


def _compare_examples(program: RandomProgram, chosen: Input, random: Random) -> None:
    """Gradients for each example of a batch of another input, one by one, and their mean over microbatches."""
    others = [i for i in program.inputs if i.name != chosen.name]
    if not others:
        raise NotComparableError
    other = random.choice(others)
    lanes = np.stack([replace(other, seed=other.seed + n).make() for n in range(LANES)])
    total = make_total(program, chosen)
    loss = lambda x, one: total(x, {other.name: one})  # noqa: E731
    mean = lambda x, many: TESSERA.mean(TESSERA.vmap(partial(loss, x))(many))  # noqa: E731

    def examples(x: Any, many: Any) -> Any:
        one_by_one = [TESSERA.grad(loss)(x, many[n]) for n in range(LANES)]
        return TESSERA.per_example_grad(loss)(x, many), TESSERA.stack(one_by_one)

    def parts(x: Any, many: Any) -> Any:
        step = TESSERA.value_and_grad(TESSERA.gradient_accumulation(steps=2, shared=0)(mean))
        whole = TESSERA.value_and_grad(mean)(x, many)
        return (TESSERA.accumulate_grad(mean, 2)(x, many), step(x, many)), (whole, whole)

    check_equal("gradients for each example", examples, (chosen.make(), lanes))
    check_equal("gradients over microbatches", parts, (chosen.make(), lanes))


RELATIONS: dict[str, Callable[[RandomProgram, Input, Random], None]] = {
    "forward mode": _compare_modes,
    "tape": _compare_tape,
    "jacobians": _compare_jacobians,
    "hessian": _compare_hessians,
    "checkpoint": _compare_checkpointed,
    "microbatches": _compare_examples,
}


def compare_derivatives(name: str, program: RandomProgram, random: Random) -> list[np.ndarray]:
    """Check a relation of a program's derivatives; the results are those of the program.

    Raises:
        NotComparableError: the program has no such derivative.
        RelationError: the derivatives differ by more than their bounds.
    """
    RELATIONS[name](program, choose_input(program, random), random)
    return prepare(program.load(), program.arguments()).run("graph")

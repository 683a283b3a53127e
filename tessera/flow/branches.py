"""Branches, and loops that end when their state says so, as users write them: cond and while_loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tessera.autodiff.arguments import tensors
from tessera.errors import ArgumentError, DTypeError, ShapeError, here
from tessera.flow.nodes import cond_of, while_of
from tessera.flow.shapes import Carried, repeated
from tessera.ir.builder import CURRENT
from tessera.pytree import Tree, flatten
from tessera.tensor import Tensor, as_tensor
from tessera.tracing import _as_result

Function = Callable[..., Any]


def truth(value: Any, where: str) -> Tensor:
    """A condition as a bool scalar.

    Raises:
        DTypeError, ShapeError: it is none.
    """
    found = as_tensor(value)
    if found.shape:
        raise ShapeError(
            f"the condition of {where} is not a scalar", location=here(), expected="bool", received=str(found.type),
            suggestion="use .all() or .any(), or ts.where to choose element by element",
        )  # fmt: skip
    if found.dtype.kind != "bool":
        raise DTypeError(
            f"the condition of {where} is not bool", location=here(), expected="bool", received=str(found.type)
        )
    return found


def cond(condition: Any, then: Function, other: Function, *operands: Any) -> Any:
    """`then(*operands)` where the bool scalar `condition` holds, else `other(*operands)`; only one is computed.

    Both give containers of the same tensor types. Under `vmap` over the condition both are computed.

    >>> cond(Tensor(2.0) > 1.0, lambda x: x * 2.0, lambda x: -x, Tensor(3.0))
    Tensor(6., f32)

    Raises:
        ShapeError: the condition is not a scalar, or the branches give different types.
        DTypeError: the condition is not bool.
    """
    leaves, tree = flatten(list(tensors(operands)))
    given = [as_tensor(x) for _, x in leaves]
    found: list[tuple[Tree, list[Any]]] = []

    def branch(function: Function) -> Function:
        def run(operands: list[Tensor]) -> list[Tensor]:
            parts, shape = flatten(function(*tree.build(iter(operands))))
            results = [_as_result(x) for _, x in parts]
            found.append((shape, [t.type for t in results]))
            if found[0] != found[-1]:
                raise _unlike(found)
            return results

        return run

    outs = cond_of(truth(condition, "cond"), [branch(then), branch(other)], given)
    return found[0][0].build(iter(outs))


def _unlike(found: list[tuple[Tree, list[Any]]]) -> ShapeError:
    one, other = (", ".join(map(str, types)) for _, types in found)
    return ShapeError(
        "the branches of cond give different types", location=here(), expected=one, received=other,
        suggestion="cast or reshape one of them",
    )  # fmt: skip


def while_loop(
    cond: Function | None = None, body: Function | None = None, init: Any = None, max_iters: int | None = None
) -> Any:
    """The state after as many runs of `body` as `cond` allows: while cond(*state), state = body(*state).

    `init` is a tuple, whose parts are passed one by one, or a single value. `max_iters` bounds the
    number of runs. Forward mode goes through it, reverse mode does not: use `fori_loop` there.
    As a decorator of a function that calls it, it changes nothing but marks the function.

    >>> while_loop(cond=lambda x, i: x < 100.0, body=lambda x, i: (x * x, i + 1), init=(3.0, 0))
    (Tensor(6561., f32), Tensor(3, int64))

    Raises:
        ShapeError: the state changes its type, or the condition is not a scalar.
        DTypeError: the condition is not bool.
        ArgumentError: a function is missing.
    """
    if cond is not None and body is None and init is None:
        return functools.wraps(cond)(cond)
    if cond is None or body is None:
        raise ArgumentError("while_loop needs a condition and a body", location=here(), expected="cond=, body=, init=")
    if max_iters is not None:
        return _bounded(cond, body, init, max_iters)
    state = Carried.of(tensors(init), "while_loop")

    if CURRENT.get() is None:
        return _at_once(cond, body, state)

    def step(given: list[Tensor]) -> list[Tensor]:
        with repeated("while_loop"):
            return state.next(_applied(body, state.build(given)))

    def test(given: list[Tensor]) -> Tensor:
        return truth(_applied(cond, state.build(given)), "while_loop")

    return state.build(while_of(test, step, state.tensors))


def _at_once(cond: Function, body: Function, state: Carried) -> Any:
    """The loop in Python, where no trace is open: the functions see values."""
    found = state.tensors
    while bool(truth(_applied(cond, state.build(found)), "while_loop")):
        found = state.next(_applied(body, state.build(found)))
    return state.build(found)


def _applied(function: Function, state: Any) -> Any:
    return function(*state) if isinstance(state, tuple) else function(state)


def _bounded(cond: Function, body: Function, init: Any, most: int) -> Any:
    """The loop with a counter beside its state."""
    state, _ = while_loop(
        lambda state, i: truth(_applied(cond, state), "while_loop") & (i < most),
        lambda state, i: (_applied(body, state), i + 1),
        (init, 0),
    )
    return state

"""Loops of a known number of steps, as users write them: scan, fori_loop, map and fold."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tessera.autodiff.arguments import tensors
from tessera.batching import vmap
from tessera.errors import ArgumentError, ShapeError, here
from tessera.flow.nodes import scan_of
from tessera.flow.shapes import Carried, repeated, stacked
from tessera.ops.arguments import check_function
from tessera.ops.shape import concatenate, iota, slice_
from tessera.pytree import flatten, map_leaves
from tessera.tensor import Tensor

Function = Callable[..., Any]
_ABSENT = object()


def scan(
    function: Function, init: Any = _ABSENT, xs: Any = None, length: int | None = None, reverse: bool = False
) -> Any:
    """Carry a state through the slices of `xs` along its first axis: (the last state, the stacked results).

    `function(state, x)` gives (the next state, a result); state, `xs` and results may be containers of
    tensors. The state keeps its shapes and element types. `function` is traced once. Without `xs`, `length`
    says how many steps there are, and `x` is None. With `reverse` the last slice comes first; results lie where their
    inputs do. As a decorator, `@scan` makes a function of (init, xs).

    Shapes: `xs` leaves are [N, ...], results [N, ...].

    >>> scan(lambda total, x: (total + x, total), 0.0, Tensor([1.0, 2.0, 3.0]))
    (Tensor(6., f32), Tensor([0., 1., 3.], f32))

    Raises:
        ShapeError: the state changes its type, or the leaves of `xs` differ in length.
        ArgumentError: the function does not give a pair, or the number of steps is not known.
        EffectError: a step draws from a generator outside of it, which would give the same numbers each time.
    """
    if init is _ABSENT:
        return functools.wraps(function)(functools.partial(scan, function))
    state, inputs = Carried.of(init, "scan"), stacked(tensors(xs), length)
    results: list[Any] = []

    def step(given: list[Tensor]) -> list[Any]:
        count = len(state.tensors)
        x = inputs.build(given[count : count + len(inputs.tensors)])
        with repeated("scan"):
            pair = function(state.build(given[:count]), x)
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ArgumentError(
                "the function of a scan gives the next state and a result", location=here(),
                expected="(state, result); the result may be None", received=type(pair).__name__,
            )  # fmt: skip
        leaves, tree = ([], None) if pair[1] is None else flatten(pair[1])
        results[:] = [tree]
        return [*state.next(pair[0]), *(x for _, x in leaves)]

    outs = scan_of(step, state.tensors, inputs.tensors, [], inputs.length, reverse)
    count, tree = len(state.tensors), results[0]
    return state.build(outs[:count]), None if tree is None else tree.build(iter(outs[count:]))


def fori_loop(lower: int, upper: int, body: Function, init: Any) -> Any:
    """The state after `body(i, state)` for each i from `lower` to before `upper`.

    The bounds are Python numbers, so that reverse mode knows the number of steps; use `while_loop`
    where they are tensors.

    >>> fori_loop(0, 4, lambda i, x: x + i, 0)
    Tensor(6, int64)

    Raises:
        ShapeError: the state changes its type.
        ArgumentError: a bound is not a number.
    """
    if not (isinstance(lower, int) and isinstance(upper, int)):
        raise ArgumentError(
            "the bounds of fori_loop are not numbers", location=here(), expected="Python ints",
            received=f"{type(lower).__name__} and {type(upper).__name__}", suggestion="use ts.while_loop",
        )  # fmt: skip
    count = max(0, upper - lower)
    if not count:
        return Carried.of(init, "fori_loop").value
    return scan(lambda x, i: (body(i, x), None), init, iota(shape=(count,)) + lower)[0]


def map_(function: Function, xs: Any) -> Any:
    """`function` of each slice of `xs` along its first axis, one after the other, stacked.

    `vmap` gives the same all at once; this needs the memory of one slice at a time.

    >>> map_(lambda x: x * x, Tensor([1.0, 2.0]))
    Tensor([1., 4.], f32)
    """
    check_function(function, "map")
    return scan(lambda _, x: ((), function(x)), (), xs)[1]


def fold(function: Function, xs: Any = _ABSENT, init: Any = None) -> Any:
    """One value of all slices of `xs` along its first axis, joined in pairs: a tree, for speed and accuracy.

    `function(a, b)` joins two slices and must be associative; `a` comes before `b`. `init`, if given, is
    joined in front. As a decorator, `@fold` makes a function of `xs`.

    >>> fold(lambda a, b: a + b, Tensor([1.0, 2.0, 3.0]))
    Tensor(6., f32)

    Raises:
        ShapeError: there is no slice and no `init`.
    """
    if xs is _ABSENT:
        return functools.wraps(function)(functools.partial(fold, function))
    given = tensors(xs)
    count = stacked(given, None).length
    if not count and init is None:
        raise ShapeError("fold of nothing", location=here(), suggestion="give an init")
    join = vmap(function)
    while count > 1:
        half = count // 2
        joined = join(_every_other(given, 0, 2 * half), _every_other(given, 1, 2 * half))
        given = _with_rest(joined, given, 2 * half, count)
        count -= half
    if not count:
        return map_leaves(lambda x: x, tensors(init))
    first = map_leaves(lambda x: x[0], given)
    return first if init is None else function(tensors(init), first)


def _every_other(value: Any, start: int, stop: int) -> Any:
    return map_leaves(lambda x: _part(x, start, stop, 2), value)


def _part(x: Tensor, start: int, stop: int, step: int = 1) -> Tensor:
    rest = x.ndim - 1
    return slice_(x, start=(start, *[0] * rest), stop=(stop, *x.shape[1:]), step=(step, *[1] * rest))


def _with_rest(joined: Any, given: Any, start: int, stop: int) -> Any:
    """Joined pairs, and the slice that found no partner behind them."""
    if start == stop:
        return joined
    (left, tree), (right, _) = flatten(joined), flatten(given)
    pairs: Sequence[Any] = list(zip(left, right, strict=True))
    return tree.build(iter([concatenate([a, _part(b, start, stop)], axis=0) for (_, a), (_, b) in pairs]))

"""Structured control flow for users: scan, fori_loop, map, fold, cond and while_loop.

`LoopState` and `LoopInputs` flatten what a loop carries and iterates over.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.core.errors import ArgumentError, DTypeError, ShapeError, user_location
from tessera.core.pytree import TreeDef, call_and_warn, flatten, map_leaves
from tessera.core.types import TensorType, int64, to_python_numbers
from tessera.frontend.jit.tracing import to_result_tensor
from tessera.ir.builder import CURRENT_BUILDER, CURRENT_NUMERICS, override_numerics
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor.argument_checks import check_function
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.random import RandomState, get_random_state, trace_random_state
from tessera.ops.tensor.shape import concatenate, iota, slice_
from tessera.transforms.batching import vmap
from tessera.transforms.flow.region_ops import bind_cond, bind_scan, bind_while
from tessera.transforms.recording import arrays_to_tensors

# Loop states and inputs: containers of tensors of fixed types, and stacks of one length.


@dataclass(frozen=True)
class LoopState:
    """A state as tensors, and their container; errors name `owner`."""

    tensors: list[Tensor]
    names: list[str]
    tree: TreeDef
    owner: str

    @staticmethod
    def of(value: Any, owner: str) -> LoopState:
        """An initial state; Python numbers become f32 or int64 scalars."""
        leaves, tree = flatten(value, "state")
        found, context = [as_tensor(x) for _, x in leaves], CURRENT_NUMERICS.get()
        found = found if context is None else [context.cast_state(x) for x in found]
        return LoopState(found, [n for n, _ in leaves], tree, owner)

    @property
    def value(self) -> Any:
        """The initial state."""
        return self.build(self.tensors)

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """The container with these tensors."""
        return self.tree.build(iter(tensors))

    def next(self, value: Any) -> list[Tensor]:
        """A later state as tensors.

        Raises:
            ArgumentError: its container is another.
            ShapeError: a leaf has another type than in the initial state.
        """
        leaves, tree = flatten(value, "state")
        if tree != self.tree:
            raise ArgumentError(
                f"the state of {self.owner} changes its container", location=user_location(),
                expected=", ".join(self.names), received=", ".join(n for n, _ in leaves),
            )  # fmt: skip
        found = [_add_policy(as_tensor(x, t.type), t.type) for (_, x), t in zip(leaves, self.tensors, strict=True)]
        for name, new, old in zip(self.names, found, self.tensors, strict=True):
            if new.type != old.type:
                raise ShapeError(
                    f"{name} changes its type in {self.owner}", location=user_location(), expected=str(old.type),
                    received=str(new.type), suggestion="start with the type that a step returns, or cast",
                )  # fmt: skip
        return found


def _add_policy(x: Tensor, like: TensorType) -> Tensor:
    """A value without a policy with that of another type, if the types differ in this alone."""
    if like.policy is None or x.type != TensorType(like.shape, like.dtype):
        return x
    with override_numerics(None):
        return cast(x, dtype=like.policy)


@dataclass(frozen=True)
class LoopInputs:
    """Inputs of a loop: tensors whose first axis is the step."""

    tensors: list[Tensor]
    tree: TreeDef | None
    length: Any

    def build(self, slices: Sequence[Tensor]) -> Any:
        """The container of one step."""
        return None if self.tree is None else self.tree.build(iter(slices))


def flatten_loop_inputs(value: Any, length: int | None) -> LoopInputs:
    """The inputs of a loop.

    Raises:
        ShapeError: they differ in length, or one is a scalar.
        ArgumentError: there are no inputs, and no length.
    """
    leaves, tree = ([], None) if value is None else flatten(value, "xs")
    found = [as_tensor(x) for _, x in leaves]
    for (name, _), x in zip(leaves, found, strict=True):
        if not x.shape:
            raise ShapeError(f"{name} is a scalar, which has no axis to iterate over", location=user_location())
    sizes = {x.shape[0]: None for x in found} | ({} if length is None else {length: None})
    if not sizes:
        raise ArgumentError("a loop without inputs needs a length", location=user_location(), suggestion="give length=")
    if len(sizes) > 1:
        raise ShapeError(
            "the inputs of a loop differ in length", location=user_location(), expected="one size of the first axis",
            received=" and ".join(str(s) for s in sizes),
        )  # fmt: skip
    return LoopInputs(found, tree, next(iter(sizes)))


# The user's functions for branches and conditional loops: cond and while_loop.


Function = Callable[..., Any]


def check_condition(value: Any, where: str) -> Tensor:
    """A condition as a bool scalar.

    Raises:
        DTypeError, ShapeError: it is not a bool scalar.
    """
    found = as_tensor(value)
    if found.shape:
        raise ShapeError(
            f"the condition of {where} is not a scalar",
            location=user_location(),
            expected="bool",
            received=str(found.type),
            suggestion="use .all() or .any(), or ts.where to choose element by element",
        )
    if found.dtype.kind != "bool":
        raise DTypeError(
            f"the condition of {where} is not bool", location=user_location(), expected="bool", received=str(found.type)
        )
    return found


def cond(condition: Any, then: Function, other: Function, *operands: Any) -> Any:
    """`then(*operands)` where the bool scalar `condition` holds, else `other(*operands)`; only one is computed.

    Both return containers of the same tensor types. Under `vmap` over the condition both are computed.

    >>> cond(Tensor(2.0) > 1.0, lambda x: x * 2.0, lambda x: -x, Tensor(3.0))
    Tensor(6., f32)

    Raises:
        ShapeError: the condition is not a scalar, or the branches return different types.
        DTypeError: the condition is not bool.
    """
    for function in (then, other):
        check_function(function, "cond")
    leaves, tree = flatten(list(arrays_to_tensors(operands)))
    given = [as_tensor(x) for _, x in leaves]
    found: list[tuple[TreeDef, list[Any]]] = []

    def branch(function: Function) -> Function:
        def run(operands: list[Tensor]) -> list[Tensor]:
            parts, shape = flatten(function(*tree.build(iter(operands))))
            results = [to_result_tensor(x) for _, x in parts]
            if found and found[0][0] == shape:
                results = [_add_policy(x, t) for x, t in zip(results, found[0][1], strict=True)]
            found.append((shape, [t.type for t in results]))
            if found[0] != found[-1]:
                raise _branch_mismatch_error(found)
            return results

        return run

    outs = bind_cond(check_condition(condition, "cond"), [branch(then), branch(other)], given)
    return found[0][0].build(iter(outs))


def _branch_mismatch_error(found: list[tuple[TreeDef, list[Any]]]) -> ShapeError:
    one, other = (", ".join(map(str, types)) for _, types in found)
    return ShapeError(
        "the branches of cond give different types", location=user_location(), expected=one, received=other,
        suggestion="cast or reshape one of them",
    )  # fmt: skip


def while_loop(
    cond: Function | None = None, body: Function | None = None, init: Any = None, max_iters: int | None = None
) -> Any:
    """The state after the loop: while cond(*state), state = body(*state).

    `init` is a tuple, whose parts are passed one by one, or a single value; a function of one argument is passed the
    tuple itself, as in JAX. `max_iters` bounds the number of iterations. It supports forward mode, not reverse mode:
    use `fori_loop` there.
    As a decorator of a function that calls it, it only marks the function.

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
        raise ArgumentError(
            "while_loop needs a condition and a body", location=user_location(), expected="cond=, body=, init="
        )
    for function in (cond, body):
        check_function(function, "while_loop")
    if max_iters is not None:
        return _run_bounded_while(cond, body, init, max_iters)
    state = LoopState.of(arrays_to_tensors(init), "while_loop")

    if CURRENT_BUILDER.get() is None:
        return _run_while_eagerly(cond, body, state)

    def step(given: list[Tensor]) -> list[Tensor]:
        return state.next(_apply_to_state(body, state.build(given)))

    def test(given: list[Tensor]) -> Tensor:
        with trace_random_state(RandomState(first=None, owner="the condition of while_loop", loop=True)):
            return check_condition(_apply_to_state(cond, state.build(given)), "while_loop")

    return state.build(bind_while(test, step, state.tensors))


def _run_while_eagerly(cond: Function, body: Function, state: LoopState) -> Any:
    """The loop in Python, outside of a trace: the functions receive values."""
    found, random = state.tensors, get_random_state()
    start = random.count
    while bool(check_condition(_apply_to_state(cond, state.build(found)), "while_loop")):
        found = state.next(_apply_to_state(body, state.build(found)))
    random.reserve(start)
    return state.build(found)


def _apply_to_state(function: Function, state: Any) -> Any:
    parts = isinstance(state, tuple) and not (len(state) > 1 and _takes_one_argument(function))
    return function(*state) if parts else function(state)


def _takes_one_argument(function: Function) -> bool:
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return False
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    kinds = [p.kind for p in found if p.kind not in named]
    return len(kinds) == 1 and inspect.Parameter.VAR_POSITIONAL not in kinds


def _run_bounded_while(cond: Function, body: Function, init: Any, most: int) -> Any:
    """The loop with a counter added to its state."""
    state, _ = while_loop(
        lambda state, i: check_condition(_apply_to_state(cond, state), "while_loop") & (i < most),
        lambda state, i: (_apply_to_state(body, state), i + 1),
        (init, 0),
    )
    return state


# The user's functions for loops with a known number of steps: scan, fori_loop, map and fold.


_MISSING = object()


def scan(
    function: Function, init: Any = _MISSING, xs: Any = None, length: int | None = None, reverse: bool = False
) -> Any:
    """Fold a state over the slices of `xs` along its first axis: (the final state, the stacked results).

    `function(state, x)` returns (the next state, a result); state, `xs` and results may be containers of
    tensors. The state keeps its shapes and element types. `function` is traced once; draws from the default generator
    are new in each step. Without `xs`, `length`
    is the number of steps, and `x` is None. With `reverse` the last slice comes first; results keep the indices of
    their inputs. As a decorator, `@scan` gives a function of (init, xs).

    Shapes: `xs` leaves are [N, ...], results [N, ...].

    >>> scan(lambda total, x: (total + x, total), 0.0, Tensor([1.0, 2.0, 3.0]))
    (Tensor(6., f32), Tensor([0., 1., 3.], f32))

    Raises:
        ShapeError: the state changes its type, or the leaves of `xs` differ in length.
        ArgumentError: the function does not return a pair, or the number of steps is unknown.
        EffectError: a step draws from an outer explicit generator, which would repeat the same numbers.
    """
    check_function(function, "scan")
    if init is _MISSING:
        return functools.wraps(function)(functools.partial(scan, function))
    state, inputs = LoopState.of(init, "scan"), flatten_loop_inputs(arrays_to_tensors(xs), length)
    results: list[Any] = []

    def step(given: list[Tensor]) -> list[Any]:
        count = len(state.tensors)
        held, x = state.build(given[:count]), inputs.build(given[count : count + len(inputs.tensors)])
        pair = call_and_warn(function, held, x)
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ArgumentError(
                "the function of a scan must return the next state and a result", location=user_location(),
                expected="(state, result); the result may be None", received=type(pair).__name__,
            )  # fmt: skip
        leaves, tree = ([], None) if pair[1] is None else flatten(pair[1])
        results[:] = [tree]
        return [*state.next(pair[0]), *(x for _, x in leaves)]

    outs = bind_scan(step, state.tensors, inputs.tensors, [], inputs.length, reverse, draws=True)
    count, tree = len(state.tensors), results[0]
    return state.build(outs[:count]), None if tree is None else tree.build(iter(outs[count:]))


def fori_loop(lower: int, upper: int, body: Function, init: Any) -> Any:
    """The state after `body(i, state)` for each i from `lower` to before `upper`.

    Where a bound is a tensor, this is a `while_loop`, which has no reverse mode: the number of steps is not known.

    >>> fori_loop(0, 4, lambda i, x: x + i, 0)
    Tensor(6, int64)

    Raises:
        ShapeError: the state changes its type.
        ArgumentError: a bound is no integer.
    """
    check_function(body, "fori_loop")
    lower, upper = to_python_numbers(lower), to_python_numbers(upper)
    if not (isinstance(lower, int) and isinstance(upper, int)):
        return _count_up(_as_bound(lower), _as_bound(upper), body, init)
    count = max(0, upper - lower)
    if not count:
        return LoopState.of(init, "fori_loop").value
    return scan(lambda x, i: (body(i, x), None), init, iota(shape=(count,)) + lower)[0]


def _as_bound(x: Any) -> Tensor:
    found = as_tensor(x)
    if not found.dtype.is_integer or found.shape:
        raise ArgumentError(
            "a bound of fori_loop is no integer", location=user_location(), received=str(found.type),
            expected="an integer, or a scalar tensor of an integer type",
        )  # fmt: skip
    return cast(found, dtype=int64)


def _count_up(lower: Tensor, upper: Tensor, body: Function, init: Any) -> Any:
    return while_loop(lambda i, _: i < upper, lambda i, x: (i + 1, body(i, x)), (lower, init))[1]


def map_(function: Function, xs: Any) -> Any:
    """`function` of each slice of `xs` along its first axis, one after the other, stacked.

    `vmap` computes the same in parallel; this needs the memory of one slice at a time.

    >>> map_(lambda x: x * x, Tensor([1.0, 2.0]))
    Tensor([1., 4.], f32)
    """
    check_function(function, "map")
    return scan(lambda _, x: ((), function(x)), (), xs)[1]


def fold(function: Function, xs: Any = _MISSING, init: Any = None) -> Any:
    """Reduce the slices of `xs` along its first axis by a binary tree, for speed and accuracy.

    `function(a, b)` combines two slices and must be associative; `a` comes before `b`. `init`, if not None, comes
    first. As a decorator, `@fold` gives a function of `xs`.

    >>> fold(lambda a, b: a + b, Tensor([1.0, 2.0, 3.0]))
    Tensor(6., f32)

    Raises:
        ShapeError: there is no slice and no `init`.
    """
    if xs is _MISSING:
        return functools.wraps(function)(functools.partial(fold, function))
    given = arrays_to_tensors(xs)
    count = flatten_loop_inputs(given, None).length
    if not count and init is None:
        raise ShapeError("fold needs at least one slice", location=user_location(), suggestion="give an init")
    join = vmap(function)
    while count > 1:
        half = count // 2
        joined = join(_slice_strided(given, 0, 2 * half), _slice_strided(given, 1, 2 * half))
        given = _append_remainder(joined, given, 2 * half, count)
        count -= half
    if not count:
        return map_leaves(lambda x: x, arrays_to_tensors(init))
    first = map_leaves(lambda x: x[0], given)
    return first if init is None else function(arrays_to_tensors(init), first)


def _slice_strided(value: Any, start: int, stop: int) -> Any:
    return map_leaves(lambda x: _slice_leading_axis(x, start, stop, 2), value)


def _slice_leading_axis(x: Tensor, start: int, stop: int, step: int = 1) -> Tensor:
    rest = x.ndim - 1
    return slice_(x, start=(start, *[0] * rest), stop=(stop, *x.shape[1:]), step=(step, *[1] * rest))


def _append_remainder(joined: Any, given: Any, start: int, stop: int) -> Any:
    """The combined pairs, followed by the unpaired slice."""
    if start == stop:
        return joined
    (left, tree), (right, _) = flatten(joined), flatten(given)
    pairs: Sequence[Any] = list(zip(left, right, strict=True))
    return tree.build(iter([concatenate([a, _slice_leading_axis(b, start, stop)], axis=0) for (_, a), (_, b) in pairs]))

"""Gradient accumulation: averages losses and gradients over microbatches; per-example gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.core.pytree import flatten, map_leaves
from tessera.core.types import to_python_numbers
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor.argument_checks import check_function
from tessera.ops.tensor.shape import reshape
from tessera.transforms.autodiff.custom_rules import checkpoint
from tessera.transforms.autodiff.gradients import function_name, grad, value_and_grad
from tessera.transforms.batching import vmap
from tessera.transforms.flow.control_flow import scan
from tessera.transforms.recording import arrays_to_tensors, normalise_argnums, replace_arguments

Function = Callable[..., Any]


def per_example_grad(function: Function, argnums: int | Sequence[int] = 0) -> Function:
    """The gradient of `function` for each example: along the first axis of all arguments but those of `argnums`.

    Shapes: where `grad` gives [*A], this gives [N, *A] for N examples.

    >>> loss = lambda w, x: (w * x) ** 2
    >>> per_example_grad(loss)(2.0, Tensor([1.0, 3.0]))
    Tensor([ 4., 36.], f32)
    """
    check_function(function, "per_example_grad")

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        shared = normalise_argnums(argnums, len(args))
        dims = [None if i in shared else 0 for i in range(len(args))]
        return vmap(grad(function, argnums), in_dims=dims)(*args)

    return wrapper


def accumulate_grad(function: Function, parts: int, argnums: int | Sequence[int] = 0) -> Function:
    """As `value_and_grad`, with the batch split into `parts` that are computed one at a time and averaged.

    All arguments but those of `argnums` are split along their first axis. For a loss that is a mean over
    the batch, the result is that of the whole batch, with the memory of one part.

    >>> loss = lambda w, x: ((w * x) ** 2).mean()
    >>> accumulate_grad(loss, 2)(1.0, Tensor([1.0, 2.0, 3.0, 4.0]))
    (Tensor(7.5, f32), Tensor(15., f32))

    Raises:
        ShapeError: an argument's first axis does not divide into `parts`.
    """
    check_function(function, "accumulate_grad")
    both = value_and_grad(function, argnums)

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return _average_over_microbatches(
            both, args, normalise_argnums(argnums, len(args)), parts, function_name(function)
        )

    return wrapper


def gradient_accumulation(steps: int, shared: int | Sequence[int] = ()) -> Callable[[Function], Function]:
    """A decorator: the function's mean over `steps` parts of its batch, computed one after the other.

    All arguments but those at the positions `shared` are split along their first axis. Derivatives are summed over the
    parts; the backward pass recomputes each part, so that the memory is that of one part.

    >>> @gradient_accumulation(steps=2, shared=0)
    ... def loss(w, x):
    ...     return ((w * x) ** 2).mean()
    >>> x = Tensor([1.0, 2.0, 3.0, 4.0])
    >>> loss(1.0, x), grad(loss)(1.0, x)
    (Tensor(7.5, f32), Tensor(15., f32))

    Raises:
        ArgumentError: `steps` is not an integer ≥ 1.
        ShapeError: an argument's first axis does not divide into `steps`.
    """
    steps = to_python_numbers(steps)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ArgumentError(
            "gradient_accumulation takes a number of steps", location=user_location(), received=repr(steps),
            expected="@ts.gradient_accumulation(steps=4)",
        )  # fmt: skip

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def wrapper(*args: Any) -> Any:
            return _average_over_microbatches(
                checkpoint(function), args, normalise_argnums(shared, len(args)), steps, function_name(function)
            )

        return wrapper

    return decorate


def _average_over_microbatches(
    function: Function, args: Sequence[Any], shared: Sequence[int], parts: int, name: str
) -> Any:
    """The mean of a function's results over the parts of all arguments but the shared ones, as one loop."""
    cut = [i for i in range(len(args)) if i not in shared]
    stacks = [_split_into_microbatches(args[i], parts, name) for i in cut]

    def part(pieces: Any) -> Any:
        return function(*replace_arguments(args, cut, pieces))

    first = part(map_leaves(lambda x: x[0], stacks))
    if parts == 1:
        return first
    rest = map_leaves(lambda x: x[1:], stacks)
    total = scan(lambda sums, pieces: (_add_trees(sums, part(pieces)), None), first, rest)[0]
    return map_leaves(lambda x: x * (1.0 / parts), total)


def _add_trees(sums: Any, more: Any) -> Any:
    (left, tree), (right, _) = flatten(sums), flatten(more)
    return tree.build(iter([a + b for (_, a), (_, b) in zip(left, right, strict=True)]))


def _split_into_microbatches(value: Any, parts: int, name: str) -> Any:
    return map_leaves(lambda x: _split_leading_axis(as_tensor(x), parts, name), arrays_to_tensors(value))


def _split_leading_axis(x: Tensor, parts: int, name: str) -> Tensor:
    if not x.shape or x.shape[0] % parts:  # type: ignore[operator]
        raise ShapeError(
            f"an argument of {name} does not divide into {parts} parts", location=user_location(), received=str(x.type),
            expected=f"a first axis that is a multiple of {parts}",
        )  # fmt: skip
    return reshape(x, shape=(parts, x.shape[0] // parts, *x.shape[1:]))  # type: ignore[operator]

"""Derivatives of Python functions over tensors: grad, value_and_grad, vjp and jvp."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tessera.autodiff.arguments import floats, insert_at, places, recorded, scalar, tensors
from tessera.autodiff.dual import Dual, push
from tessera.autodiff.linear import Linearised, linearise
from tessera.errors import ArgumentError, ShapeError, here
from tessera.ops.arguments import check_function
from tessera.ops.basic import splat
from tessera.pytree import flatten
from tessera.tensor import Tensor, as_tensor

Function = Callable[..., Any]


def named(function: Function) -> str:
    """What errors call a function."""
    return getattr(function, "__name__", "the function")


def value_and_grad(function: Function, argnums: int | Sequence[int] | None = None, has_aux: bool = False) -> Function:
    """A function that gives `function`'s scalar result and its gradient.

    The gradient has the container, shapes and element types of the argument that `argnums` names (a
    tuple of them for several). With `has_aux` the function returns (loss, aux), and so does its value.
    It may be jitted, and differentiated again.

    >>> value_and_grad(lambda w: (w * w).sum())(Tensor([1.0, 2.0]))
    (Tensor(5., f32), Tensor([2., 4.], f32))

    Raises:
        ShapeError: the result is not a scalar.
        DTypeError: the argument or the result is not of a float type.
        ArgumentError: the result is no tensor.
    """
    check_function(function, "grad")
    chosen = getattr(function, "differentiated", 0) if argnums is None else argnums

    @functools.wraps(function)
    def wrapper(*args: Any, **keywords: Any) -> Any:
        where = places(chosen, len(args))
        args, keywords = tensors(args), tensors(keywords)
        given = floats([args[i] for i in where], named(function))
        body, outcome = recorded(function, given, lambda new: function(*insert_at(args, where, new), **keywords))
        scalar(_loss(outcome, has_aux, named(function)), named(function))
        moves = [i < len(given.tensors) for i in range(len(body.block.params))]
        point = linearise(body.block, [*given.tensors, *body.closed], moves)
        grads = given.build(point.pull(_one(point)))
        value = body.build(point.results)
        return (tuple(value) if has_aux else value), (grads[0] if isinstance(chosen, int) else tuple(grads))

    return wrapper


def _loss(outcome: Any, has_aux: bool, name: str) -> Any:
    if not has_aux:
        return outcome
    if not isinstance(outcome, tuple) or len(outcome) != 2:
        raise ArgumentError(
            f"with has_aux, {name} returns a loss and something else", location=here(),
            expected="(loss, aux)", received=type(outcome).__name__,
        )  # fmt: skip
    return outcome[0]


def _one(point: Linearised) -> list[Tensor | None]:
    """The cotangents that pick the first result."""
    return [splat(1, point.results[0].type), *([None] * (len(point.results) - 1))]


def grad(function: Function, argnums: int | Sequence[int] | None = None, has_aux: bool = False) -> Function:
    """A function that gives the gradient of `function`'s scalar result; see `value_and_grad`.

    With `has_aux` it gives (gradient, aux).

    >>> grad(lambda x: x * x * x)(2.0)
    Tensor(12., f32)
    """
    both = value_and_grad(function, argnums, has_aux)

    @functools.wraps(function)
    def wrapper(*args: Any, **keywords: Any) -> Any:
        value, grads = both(*args, **keywords)
        return (grads, value[1]) if has_aux else grads

    return wrapper


def vjp(function: Function, *primals: Any) -> tuple[Any, Callable[[Any], tuple[Any, ...]]]:
    """The result of a function, and what takes a cotangent of it to those of the arguments (a tuple).

    >>> out, pull = vjp(lambda x, y: x * y, 2.0, 3.0)
    >>> pull(1.0)
    (Tensor(3., f32), Tensor(2., f32))

    Raises:
        DTypeError: an argument is not of a float type.
        ShapeError: a cotangent does not have the shape of the result.
    """
    check_function(function, "vjp")
    given = floats(list(primals), named(function))
    body, _ = recorded(function, given, lambda new: function(*new))
    moves = [i < len(given.tensors) for i in range(len(body.block.params))]
    point = linearise(body.block, [*given.tensors, *body.closed], moves)

    def pull(cotangent: Any) -> tuple[Any, ...]:
        found = matched(cotangent, point.results, "cotangent")
        return tuple(given.build(point.pull(found)))

    return body.build(point.results), pull


def jvp(function: Function, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """The result of a function and how it moves when the arguments move by `tangents` (forward mode).

    >>> jvp(lambda x: x * x, (3.0,), (1.0,))
    (Tensor(9., f32), Tensor(6., f32))

    Raises:
        DTypeError: an argument is not of a float type.
        ShapeError: a tangent does not have the shape of its argument.
    """
    check_function(function, "jvp")
    given = floats(list(primals), named(function))
    moved = matched(list(tangents), given.tensors, "tangent")
    body, _ = recorded(function, given, lambda new: function(*new))
    duals = [Dual(x, t) for x, t in zip(given.tensors, moved, strict=True)]
    outs = push(body.block, [*duals, *(Dual(x) for x in body.closed)])
    zeros = [splat(0, d.primal.type) if d.tangent is None else d.tangent for d in outs]
    return body.build([d.primal for d in outs]), body.build(zeros)


def matched(value: Any, like: Sequence[Tensor], what: str) -> list[Tensor]:
    """Tangents as tensors, one for each of `like` and of its shape and element type."""
    leaves, _ = flatten(value, what, empty=True)
    if len(leaves) != len(like):
        raise ArgumentError(
            f"there is not one {what} for each tensor",
            location=here(),
            expected=f"{len(like)}",
            received=f"{len(leaves)}",
        )
    return [_matched(n, as_tensor(x, x0.type), x0) for (n, x), x0 in zip(leaves, like, strict=True)]


def _matched(name: str, tensor: Tensor, like: Tensor) -> Tensor:
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise ShapeError(
            f"{name} is not like the tensor it belongs to", location=here(),
            expected=str(like.type), received=str(tensor.type),
        )  # fmt: skip
    return tensor

"""Derivative transforms: grad, value_and_grad, vjp, jvp, and Jacobians and Hessians by batched basis vectors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.core.pytree import flatten, store_updates
from tessera.core.types import TensorType, to_python_numbers
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor.argument_checks import check_function
from tessera.ops.tensor.basic import cast, splat
from tessera.ops.tensor.elementwise import equal
from tessera.ops.tensor.random import get_random_state
from tessera.ops.tensor.shape import count_elements, iota, reshape
from tessera.transforms.autodiff.linearisation import Dual, LinearisedBlock, linearise, push_forward
from tessera.transforms.batching import vmap
from tessera.transforms.recording import (
    arrays_to_tensors,
    check_scalar_result,
    flatten_chosen_arguments,
    flatten_float_arguments,
    normalise_argnums,
    record_arguments,
    record_with_updates,
    replace_arguments,
)

# Derivatives of Python functions over tensors: grad, value_and_grad, vjp and jvp.


Function = Callable[..., Any]


def function_name(function: Function) -> str:
    """The name of a function in errors."""
    return getattr(function, "__name__", "the function")


def value_and_grad(function: Function, argnums: int | Sequence[int] | None = None, has_aux: bool = False) -> Function:
    """A function that returns `function`'s scalar result and its gradient.

    The gradient has the container, shapes and element types of the argument `argnums` (a
    tuple of gradients for several). With `has_aux` the function returns (loss, aux), which is then the value.
    It can be jitted and differentiated again. Buffers of a module in `argnums` that the function replaces and does not
    return, such as statistics of batch norm, are replaced in the module that was passed.

    >>> value_and_grad(lambda w: (w * w).sum())(Tensor([1.0, 2.0]))
    (Tensor(5., f32), Tensor([2., 4.], f32))

    Raises:
        ShapeError: the result is not a scalar.
        DTypeError: the argument or the result is not of a float type.
        ArgumentError: the result is not a tensor.
    """
    check_function(function, "grad")
    if hasattr(function, "__value_and_grad__"):  # an SPMD function has its own
        return function.__value_and_grad__(argnums, has_aux)  # type: ignore[no-any-return]
    chosen = getattr(function, "differentiated", 0) if argnums is None else to_python_numbers(argnums)

    @functools.wraps(function)
    def wrapper(*args: Any, **keywords: Any) -> Any:
        where = normalise_argnums(chosen, len(args))
        passed = [args[i] for i in where]
        args, keywords = arrays_to_tensors(args), arrays_to_tensors(keywords)
        given = flatten_chosen_arguments(function, args, where)
        body, outcome, paths = record_with_updates(
            given, lambda new: function(*replace_arguments(args, where, new), **keywords)
        )
        check_scalar_result(_split_loss(outcome, has_aux, function_name(function)), function_name(function))
        moves = [i < len(given.tensors) for i in range(len(body.block.params))]
        point = linearise(body.block, [*given.tensors, *body.closed], moves)
        grads = given.build_gradients(point.pull_back(_seed_cotangents(point)))
        value, updates = body.build(point.results)
        store_updates(passed, dict(zip(paths, updates, strict=True)))
        return (tuple(value) if has_aux else value), (grads[0] if isinstance(chosen, int) else tuple(grads))

    return wrapper


def _split_loss(outcome: Any, has_aux: bool, name: str) -> Any:
    if not has_aux:
        return outcome
    if not isinstance(outcome, tuple) or len(outcome) != 2:
        raise ArgumentError(
            f"with has_aux, {name} returns a loss and something else", location=user_location(),
            expected="(loss, aux)", received=type(outcome).__name__,
        )  # fmt: skip
    return outcome[0]


def _seed_cotangents(point: LinearisedBlock) -> list[Tensor | None]:
    """The cotangents that select the first result."""
    return [splat(1, point.results[0].type), *([None] * (len(point.results) - 1))]


def grad(function: Function, argnums: int | Sequence[int] | None = None, has_aux: bool = False) -> Function:
    """A function that returns the gradient of `function`'s scalar result; see `value_and_grad`.

    With `has_aux` it returns (gradient, aux).

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
    """The result of a function, and the function from a cotangent of it to those of the arguments (a tuple).

    >>> out, pull = vjp(lambda x, y: x * y, 2.0, 3.0)
    >>> pull(1.0)
    (Tensor(3., f32), Tensor(2., f32))

    Raises:
        DTypeError: an argument is not of a float type.
        ShapeError: a cotangent does not have the shape of the result.
    """
    check_function(function, "vjp")
    given = flatten_chosen_arguments(function, primals, range(len(primals)))
    body, _ = record_arguments(function, given, lambda new: function(*new))
    moves = [i < len(given.tensors) for i in range(len(body.block.params))]
    point = linearise(body.block, [*given.tensors, *body.closed], moves)

    def pull(cotangent: Any) -> tuple[Any, ...]:
        found = match_tangents(cotangent, point.results, "cotangent")
        return tuple(given.build_gradients(point.pull_back(found)))

    return body.build(point.results), pull


def jvp(function: Function, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """The result of a function and its tangent for `tangents` of the arguments (forward mode).

    >>> jvp(lambda x: x * x, (3.0,), (1.0,))
    (Tensor(9., f32), Tensor(6., f32))

    Raises:
        DTypeError: an argument is not of a float type.
        ShapeError: a tangent does not have the shape of its argument.
    """
    check_function(function, "jvp")
    given = flatten_chosen_arguments(function, primals, range(len(primals)))
    moved = match_tangents(list(tangents), given.tensors, "tangent")
    body, _ = record_arguments(function, given, lambda new: function(*new))
    duals = [Dual(x, t) for x, t in zip(given.tensors, moved, strict=True)]
    outs = push_forward(body.block, [*duals, *(Dual(x) for x in body.closed)])
    zeros = [splat(0, d.primal.type) if d.tangent is None else d.tangent for d in outs]
    return body.build([d.primal for d in outs]), body.build(zeros)


def match_tangents(value: Any, like: Sequence[Tensor], what: str) -> list[Tensor]:
    """Tangents as tensors, one for each of `like` and of its shape and element type."""
    leaves, tree = flatten(value, what, empty=True)
    leaves = [leaf for leaf, fixed in zip(leaves, tree.list_fixed(), strict=True) if not fixed]
    if len(leaves) != len(like):
        raise ArgumentError(
            f"the number of {what}s is wrong",
            location=user_location(),
            expected=f"{len(like)}",
            received=f"{len(leaves)}",
        )
    return [check_tangent(n, as_tensor(x, x0.type), x0) for (n, x), x0 in zip(leaves, like, strict=True)]


def check_tangent(name: str, tensor: Tensor, like: Tensor) -> Tensor:
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise ShapeError(
            f"{name} does not have the type of its tensor", location=user_location(),
            expected=str(like.type), received=str(tensor.type),
        )  # fmt: skip
    return tensor


# Whole Jacobians and Hessians: a forward or reverse pass for each basis vector, batched.


def build_basis(type: TensorType) -> Tensor:
    """The unit tensors of a type, one for each element, along a leading axis."""
    size = count_elements(type.shape)
    one = equal(iota(shape=(size, size), axis=0), iota(shape=(size, size), axis=1))
    return reshape(cast(one, dtype=type.dtype), shape=(size, *type.shape))


def jacfwd(function: Function, argnums: int = 0) -> Function:
    """A function that returns the Jacobian of `function`, by one forward pass for each element of the argument.

    Shapes: for an argument [*A] and a result [*R] it is [*R, *A]; containers nest, results outside.

    >>> jacfwd(lambda x: x * x)(Tensor([1.0, 2.0]))
    Tensor([[2., 0.],
            [0., 4.]], f32)
    """
    check_function(function, "jacfwd")

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        (at,) = normalise_argnums(argnums, len(args), exactly=1)
        given = flatten_float_arguments(args[at], function_name(function))
        state = get_random_state()
        start, columns = state.save(), []
        for place in range(len(given.tensors)):
            state.restore(start)  # one function of all leaves: it draws the same numbers for each
            columns.append(_compute_columns(function, args, at, given, place))
        first, tree = flatten(columns[0], empty=True)
        leaves = [flatten(c, empty=True)[0] for c in columns]
        return tree.build(iter([given.build_gradients([c[i][1] for c in leaves]) for i in range(len(first))]))

    return wrapper


def _compute_columns(function: Function, args: Any, at: int, given: Any, place: int) -> Any:
    """The Jacobian with respect to one leaf: its axes come last."""
    leaf = given.tensors[place]

    def call(x: Tensor) -> Any:
        leaves = [x if i == place else t for i, t in enumerate(given.tensors)]
        return function(*replace_arguments(args, (at,), [given.build(leaves)]))

    moved = vmap(lambda t: jvp(call, (leaf,), (t,))[1], out_dims=-1, randomness="same")(build_basis(leaf.type))
    leaves, tree = flatten(moved, empty=True)
    return tree.build(iter([reshape(m, shape=(*m.shape[:-1], *leaf.shape)) for _, m in leaves]))


def jacrev(function: Function, argnums: int = 0) -> Function:
    """A function that returns the Jacobian of `function`, by one backward pass for each element of the result.

    Shapes: as for `jacfwd`.

    >>> jacrev(lambda x: (x * x).sum())(Tensor([1.0, 2.0]))
    Tensor([2., 4.], f32)
    """
    check_function(function, "jacrev")

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        (at,) = normalise_argnums(argnums, len(args), exactly=1)
        out, pull = vjp(lambda x: function(*replace_arguments(args, (at,), [x])), args[at])
        leaves, tree = flatten(out, empty=True)
        return tree.build(iter([_compute_rows(pull, [t for _, t in leaves], i, tree) for i in range(len(leaves))]))

    return wrapper


def _compute_rows(pull: Function, outs: list[Tensor], place: int, tree: Any) -> Any:
    """The Jacobian of one leaf of the results: its axes come first."""

    def back(g: Tensor) -> Any:
        zeros = [g if i == place else t * 0.0 for i, t in enumerate(outs)]
        return pull(tree.build(iter(zeros)))[0]

    found, inner = flatten(vmap(back)(build_basis(outs[place].type)), empty=True)
    return inner.build(iter([reshape(m, shape=(*outs[place].shape, *m.shape[1:])) for _, m in found]))


def hessian(function: Function, argnums: int = 0) -> Function:
    """A function that returns the second derivatives of `function`'s scalar result: forward over reverse.

    >>> hessian(lambda x: (x * x * x).sum())(Tensor([1.0, 2.0]))
    Tensor([[ 6.,  0.],
            [ 0., 12.]], f32)
    """
    check_function(function, "hessian")
    return jacfwd(jacrev(function, argnums), argnums)

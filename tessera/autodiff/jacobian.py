"""Whole Jacobians and Hessians: a forward or reverse pass for each basis vector, batched."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tessera.autodiff.arguments import floats, insert_at, places
from tessera.autodiff.grad import jvp, named, vjp
from tessera.batching import vmap
from tessera.ops.arguments import check_function
from tessera.ops.basic import cast
from tessera.ops.elementwise import equal
from tessera.ops.shape import count, iota, reshape
from tessera.pytree import flatten
from tessera.tensor import Tensor
from tessera.types import TensorType

Function = Callable[..., Any]


def basis(type: TensorType) -> Tensor:
    """The unit tensors of a type, one for each element, along a leading axis."""
    size = count(type.shape)
    one = equal(iota(shape=(size, size), axis=0), iota(shape=(size, size), axis=1))
    return reshape(cast(one, dtype=type.dtype), shape=(size, *type.shape))


def jacfwd(function: Function, argnums: int = 0) -> Function:
    """A function that gives the Jacobian of `function`, one forward pass for each element of the argument.

    Shapes: for an argument [*A] and a result [*R] it is [*R, *A]; containers nest, results outside.

    >>> jacfwd(lambda x: x * x)(Tensor([1.0, 2.0]))
    Tensor([[2., 0.],
            [0., 4.]], f32)
    """
    check_function(function, "jacfwd")

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        (at,) = places(argnums, len(args))
        given = floats(args[at], named(function))
        columns = [_columns(function, args, at, given, i) for i in range(len(given.tensors))]
        first, tree = flatten(columns[0], empty=True)
        leaves = [flatten(c, empty=True)[0] for c in columns]
        return tree.build(iter([given.build([c[i][1] for c in leaves]) for i in range(len(first))]))

    return wrapper


def _columns(function: Function, args: Any, at: int, given: Any, place: int) -> Any:
    """How the results move with each element of one leaf: the leaf's axes come last."""
    leaf = given.tensors[place]

    def call(x: Tensor) -> Any:
        leaves = [x if i == place else t for i, t in enumerate(given.tensors)]
        return function(*insert_at(args, (at,), [given.build(leaves)]))

    moved = vmap(lambda t: jvp(call, (leaf,), (t,))[1], out_dims=-1)(basis(leaf.type))
    leaves, tree = flatten(moved, empty=True)
    return tree.build(iter([reshape(m, shape=(*m.shape[:-1], *leaf.shape)) for _, m in leaves]))


def jacrev(function: Function, argnums: int = 0) -> Function:
    """A function that gives the Jacobian of `function`, one backward pass for each element of the result.

    Shapes: as for `jacfwd`.

    >>> jacrev(lambda x: (x * x).sum())(Tensor([1.0, 2.0]))
    Tensor([2., 4.], f32)
    """
    check_function(function, "jacrev")

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        (at,) = places(argnums, len(args))
        out, pull = vjp(lambda x: function(*insert_at(args, (at,), [x])), args[at])
        leaves, tree = flatten(out, empty=True)
        return tree.build(iter([_rows(pull, [t for _, t in leaves], i, tree) for i in range(len(leaves))]))

    return wrapper


def _rows(pull: Function, outs: list[Tensor], place: int, tree: Any) -> Any:
    """How one leaf of the results moves: its axes come first."""

    def back(g: Tensor) -> Any:
        zeros = [g if i == place else t * 0.0 for i, t in enumerate(outs)]
        return pull(tree.build(iter(zeros)))[0]

    found, inner = flatten(vmap(back)(basis(outs[place].type)), empty=True)
    return inner.build(iter([reshape(m, shape=(*outs[place].shape, *m.shape[1:])) for _, m in found]))


def hessian(function: Function, argnums: int = 0) -> Function:
    """A function that gives the second derivatives of `function`'s scalar result: forward over reverse.

    >>> hessian(lambda x: (x * x * x).sum())(Tensor([1.0, 2.0]))
    Tensor([[ 6.,  0.],
            [ 0., 12.]], f32)
    """
    return jacfwd(jacrev(function, argnums), argnums)

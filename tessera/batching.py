"""vmap: a function of one example made a function of many, each op by its batching rule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.autodiff.arguments import tensors
from tessera.autodiff.record import again, located, record
from tessera.errors import ArgumentError, ShapeError, here
from tessera.evaluate import evaluate, lowering_of
from tessera.ir.core import Block, Node
from tessera.op import Op, Rules, batch, lower
from tessera.ops.arguments import check_function
from tessera.ops.basic import broadcast_to
from tessera.ops.shape import permute, reshape
from tessera.pytree import flatten
from tessera.shapes import Size, normalize_axis
from tessera.tensor import Tensor, as_tensor, bind
from tessera.types import TensorType


@dataclass(frozen=True)
class Lane:
    """A value of the batched program: with a leading axis of lanes, or the same in all of them."""

    tensor: Tensor
    batched: bool


@dataclass(frozen=True)
class Lanes:
    """The operands of one op: `size` lanes, at least one operand `batched`."""

    op: Op
    size: Size
    tensors: tuple[Tensor, ...]
    batched: tuple[bool, ...]

    def spread(self) -> list[Tensor]:
        """All operands with a leading axis of lanes."""
        return [t if b else repeated(t, self.size) for t, b in zip(self.tensors, self.batched, strict=True)]


def repeated(tensor: Tensor, size: Size) -> Tensor:
    """A tensor with a leading axis along which it is the same."""
    return broadcast_to(reshape(tensor, shape=(1, *tensor.shape)), shape=(size, *tensor.shape))


# rule(node, lanes, walk, size) gives the lanes of a call's results.
calls = Rules("batching of a call")


def spread_out(block: Block, lanes: Sequence[Lane], size: Size) -> list[Lane]:
    """The results of a block for all lanes."""

    def meaning(node: Node, args: list[Lane], walk: Any) -> Sequence[Lane]:
        with located(node.loc):
            if not any(a.batched for a in args):
                return [Lane(t, False) for t in again(node, [a.tensor for a in args])]
            if node.op in calls:
                return calls.of(node.op)(node, args, walk, size)
            if node.op not in batch and not node.op.pointwise and node.op in lower:
                return walk(lowering_of(node), *args)
            operands = Lanes(node.op, size, tuple(a.tensor for a in args), tuple(a.batched for a in args))
            rule = _pointwise if node.op.pointwise else batch.of(node.op)
            out = rule(operands, **node.attrs)
            return [Lane(t, True) for t in (out if isinstance(out, tuple) else (out,))]

    return evaluate(block, lanes, meaning)


def _pointwise(lanes: Lanes, **attrs: Any) -> Any:
    """The same op: it meets each element alone."""
    return bind(lanes.op, lanes.spread(), attrs)


def vmap(function: Callable[..., Any] | None = None, in_dims: Any = 0, out_dims: Any = 0) -> Any:
    """A function of one example made a function of a batch of them.

    `in_dims` says which axis of each positional argument counts the examples: one number for all, or
    one for each argument, where None means that all examples share it. An argument that is a container has that axis
    in every leaf, or is given a container of axes. The results have the axis at `out_dims` (one for all leaves,
    or one for each part of a tuple). Composes with jit, grad and itself.

    >>> vmap(lambda x, w: (x * w).sum(), in_dims=(0, None))(Tensor([[1.0, 2.0], [3.0, 4.0]]), Tensor([1.0, 10.0]))
    Tensor([21., 43.], f32)

    Raises:
        ArgumentError: `in_dims` does not fit the arguments, or names none.
        ShapeError: the arguments do not agree in the number of examples.
    """
    if function is None:
        return functools.partial(vmap, in_dims=in_dims, out_dims=out_dims)
    check_function(function, "vmap")

    @functools.wraps(function)
    def wrapper(*args: Any, **keywords: Any) -> Any:
        leaves, tree = flatten(list(tensors(args)), empty=True)
        dims = _dims(args, in_dims)
        given = [(as_tensor(x), d) for (_, x), d in zip(leaves, dims, strict=True) if _mapped(x, d)]
        lanes = [_in_front(t, d) for t, d in given]
        size = _size(lanes)
        types = [_one(lane) for lane in lanes]

        def one(examples: list[Tensor]) -> Any:
            found = iter(examples)
            return function(
                *tree.build(
                    iter([next(found) if _mapped(x, d) else x for (_, x), d in zip(leaves, dims, strict=True)])
                ),
                **keywords,
            )

        body = record(one, types)
        outs = spread_out(body.block, [*lanes, *(Lane(t, False) for t in body.closed)], size)
        results = [o.tensor if o.batched else repeated(o.tensor, size) for o in outs]
        return _placed(body.build(results), out_dims)

    return wrapper


def _mapped(leaf: Any, dim: int | None) -> bool:
    """Whether a leaf is a parameter of the recorded function: what is shared and no tensor stays as it is."""
    return dim is not None or isinstance(leaf, Tensor)


def _dims(args: Sequence[Any], in_dims: Any) -> list[int | None]:
    """The mapped axis of each leaf."""
    listed = [in_dims] * len(args) if isinstance(in_dims, int) or in_dims is None else list(in_dims)
    if len(listed) != len(args) or all(d is None for d in listed):
        raise ArgumentError(
            "in_dims does not fit the arguments", location=here(), received=str(in_dims),
            expected=f"an axis, or one (or None) for each of {len(args)} arguments, at least one an axis",
        )  # fmt: skip
    return [d for arg, dim in zip(args, listed, strict=True) for d in _of_leaves(arg, dim)]


def _of_leaves(arg: Any, dim: Any) -> Iterator[int | None]:
    """The axis of each leaf of an argument: one for all of them, or a container of axes like the argument's."""
    if dim is None or isinstance(dim, int):
        yield from [dim] * len(flatten(arg, empty=True)[0])
        return
    if isinstance(dim, Mapping) and isinstance(arg, Mapping) and dim.keys() == arg.keys():
        parts = [(arg[k], dim[k]) for k in sorted(arg)]
    elif isinstance(dim, (list, tuple)) and isinstance(arg, (list, tuple)) and len(dim) == len(arg):
        parts = list(zip(arg, dim, strict=True))
    else:
        raise ArgumentError(
            "in_dims does not fit an argument", location=here(), received=str(dim),
            expected="an axis, None, or a container of them like the argument",
        )  # fmt: skip
    for part, axis in parts:
        yield from _of_leaves(part, axis)


def _in_front(tensor: Tensor, dim: int | None) -> Lane:
    if dim is None:
        return Lane(tensor, False)
    if not tensor.shape:
        raise ShapeError("a scalar has no axis to map over", location=here(), suggestion="give it None in in_dims")
    try:
        at = normalize_axis(dim, tensor.ndim) + tensor.ndim
    except ShapeError as error:
        raise error.at(here()) from None
    order = (at, *(i for i in range(tensor.ndim) if i != at))
    return Lane(permute(tensor, axes=order) if at else tensor, True)


def _size(lanes: Sequence[Lane]) -> Size:
    sizes = {lane.tensor.shape[0]: None for lane in lanes if lane.batched}
    if len(sizes) != 1:
        raise ShapeError(
            "the arguments do not agree in the number of examples", location=here(),
            expected="one size along the mapped axes", received=" and ".join(str(s) for s in sizes),
        )  # fmt: skip
    return next(iter(sizes))


def _one(lane: Lane) -> TensorType:
    return lane.tensor.type.with_shape(lane.tensor.shape[1:]) if lane.batched else lane.tensor.type


def _placed(outcome: Any, out_dims: Any) -> Any:
    """Results with their leading axis moved to where `out_dims` says."""
    if isinstance(out_dims, int):
        leaves, tree = flatten(outcome, empty=True)
        return tree.build(iter([_moved(x, out_dims) for _, x in leaves]))
    parts = [_placed(part, dim) for part, dim in zip(outcome, out_dims, strict=True)]
    return type(outcome)(parts)


def _moved(tensor: Tensor, dim: int) -> Tensor:
    at = normalize_axis(dim, tensor.ndim) + tensor.ndim
    order = [*range(1, tensor.ndim)]
    order.insert(at, 0)
    return permute(tensor, axes=tuple(order)) if at else tensor

"""Vectorisation (vmap): turns a function of one example into a function of a batch, by a batching rule for each op."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.core.pytree import call_and_warn, flatten
from tessera.core.shapes import normalize_axis
from tessera.core.symbolic_dim import Size
from tessera.core.types import TensorType, to_python_numbers
from tessera.ir.builder import evaluate_block
from tessera.ir.core import Block, Node
from tessera.ir.rewrite import lower_node
from tessera.ir.rules import Op, Rules, batch, lower
from tessera.ir.tensor import Tensor, as_tensor, bind_op
from tessera.ops.tensor.argument_checks import check_function
from tessera.ops.tensor.basic import broadcast_to
from tessera.ops.tensor.random import get_random_state
from tessera.ops.tensor.shape import permute, reshape
from tessera.transforms.recording import (
    arrays_to_tensors,
    rebind_node,
    record_block,
    record_drawing_block,
    set_location,
)

RANDOMNESS = ("different", "same")


@dataclass(frozen=True)
class BatchValue:
    """A value of the batched program: with a leading axis of lanes, or shared by all of them."""

    tensor: Tensor
    batched: bool


@dataclass(frozen=True)
class BatchOperands:
    """The operands of one op: `size` lanes, at least one operand `batched`."""

    op: Op
    size: Size
    tensors: tuple[Tensor, ...]
    batched: tuple[bool, ...]

    def spread(self) -> list[Tensor]:
        """All operands with a leading axis of lanes."""
        return [t if b else broadcast_to_batch(t, self.size) for t, b in zip(self.tensors, self.batched, strict=True)]


def broadcast_to_batch(tensor: Tensor, size: Size) -> Tensor:
    """A tensor broadcast along a new leading axis of lanes."""
    return broadcast_to(reshape(tensor, shape=(1, *tensor.shape)), shape=(size, *tensor.shape))


# rule(node, lanes, walk, size) returns the lanes of a call's results.
call_batching_rules = Rules("batching of a call")


def batch_block(block: Block, lanes: Sequence[BatchValue], size: Size) -> list[BatchValue]:
    """The results of a block for all lanes."""

    def meaning(node: Node, args: list[BatchValue], walk: Any) -> Sequence[BatchValue]:
        with set_location(node.loc):
            if not any(a.batched for a in args):
                return [BatchValue(t, False) for t in rebind_node(node, [a.tensor for a in args])]
            if node.op in call_batching_rules:
                return call_batching_rules.of(node.op)(node, args, walk, size)
            if node.op not in batch and not node.op.pointwise and node.op in lower:
                return walk(lower_node(node), *args)
            operands = BatchOperands(node.op, size, tuple(a.tensor for a in args), tuple(a.batched for a in args))
            rule = _batch_pointwise if node.op.pointwise else batch.of(node.op)
            out = rule(operands, **node.attrs)
            return [BatchValue(t, True) for t in (out if isinstance(out, tuple) else (out,))]

    return evaluate_block(block, lanes, meaning)


def _batch_pointwise(lanes: BatchOperands, **attrs: Any) -> Any:
    """The op itself: a pointwise op batches without a rule."""
    return bind_op(lanes.op, lanes.spread(), attrs)


def vmap(
    function: Callable[..., Any] | None = None, in_dims: Any = 0, out_dims: Any = 0, randomness: str = "different",
    *, in_axes: Any = 0, out_axes: Any = 0,
) -> Any:  # fmt: skip
    """A function of one example made a function of a batch of them.

    `in_dims` is the axis of examples of each positional argument: one number for all, or
    one for each argument, where None means that all examples share it. An argument that is a container has that axis
    in every leaf, or has a container of axes. The results have the axis at `out_dims` (one for all leaves,
    or one for each part of a tuple). Composes with jit, grad and itself. Draws from the default generator are those of
    calls for one example after the other; with `randomness="same"` all examples get the same numbers. `in_axes` and
    `out_axes` are other names of `in_dims` and `out_dims`.

    >>> vmap(lambda x, w: (x * w).sum(), in_dims=(0, None))(Tensor([[1.0, 2.0], [3.0, 4.0]]), Tensor([1.0, 10.0]))
    Tensor([21., 43.], f32)

    Raises:
        ArgumentError: `in_dims` does not fit the arguments, or maps none of them; both names of it were given; there
            is no such `randomness`.
        ShapeError: the numbers of examples differ.
    """
    in_dims = _choose_name("in_dims", in_dims, "in_axes", in_axes)
    out_dims = _choose_name("out_dims", out_dims, "out_axes", out_axes)
    if function is None:
        return functools.partial(vmap, in_dims=in_dims, out_dims=out_dims, randomness=randomness)
    check_function(function, "vmap")
    if randomness not in RANDOMNESS:
        raise ArgumentError(
            "vmap has no such randomness", location=user_location(), expected=" or ".join(map(repr, RANDOMNESS)),
            received=repr(randomness),
        )  # fmt: skip

    @functools.wraps(function)
    def wrapper(*args: Any, **keywords: Any) -> Any:
        leaves, tree = flatten(list(arrays_to_tensors(args)), empty=True)
        dims = _flatten_in_dims(args, in_dims)
        given = [(as_tensor(x), d) for (_, x), d in zip(leaves, dims, strict=True) if _is_mapped(x, d)]
        lanes = [_move_axis_to_front(t, d) for t, d in given]
        size = _find_batch_size(lanes)
        types = [_example_type(lane) for lane in lanes]

        def one(examples: list[Tensor]) -> Any:
            found = iter(examples)
            return call_and_warn(
                function,
                *tree.build(
                    iter([next(found) if _is_mapped(x, d) else x for (_, x), d in zip(leaves, dims, strict=True)])
                ),
                **keywords,
            )

        if randomness == "same":
            body = record_block(one, types)
        else:
            outer = get_random_state()
            body, state = record_drawing_block(one, types, len(types), "a function under vmap", loop=False)
            if state.drawn:
                lanes.append(BatchValue(outer.spread(state, size), True))
        outs = batch_block(body.block, [*lanes, *(BatchValue(t, False) for t in body.closed)], size)
        results = [o.tensor if o.batched else broadcast_to_batch(o.tensor, size) for o in outs]
        return _move_axes_to_out_dims(body.build(results), out_dims)

    return wrapper


def _choose_name(name: str, value: Any, other: str, given: Any) -> Any:
    """The axes that were given under one of two names; 0 where neither was."""
    if value != 0 and given != 0:
        raise ArgumentError(
            f"vmap got {name} and {other}", location=user_location(), expected="one of them: they are the same"
        )
    return given if value == 0 else value


def _is_mapped(leaf: Any, dim: int | None) -> bool:
    """Whether a leaf is a parameter of the recorded function; shared values that are not tensors are constants."""
    return dim is not None or isinstance(leaf, Tensor)


def _flatten_in_dims(args: Sequence[Any], in_dims: Any) -> list[int | None]:
    """The mapped axis of each leaf."""
    in_dims = to_python_numbers(in_dims)
    listed = [in_dims] * len(args) if isinstance(in_dims, int) or in_dims is None else list(in_dims)
    if len(listed) != len(args) or all(d is None for d in listed):
        raise ArgumentError(
            "in_dims does not fit the arguments", location=user_location(), received=str(in_dims),
            expected=f"an axis, or one (or None) for each of {len(args)} arguments, at least one an axis",
        )  # fmt: skip
    return [d for arg, dim in zip(args, listed, strict=True) for d in _iterate_leaf_axes(arg, dim)]


def _iterate_leaf_axes(arg: Any, dim: Any) -> Iterator[int | None]:
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
            "in_dims does not fit an argument", location=user_location(), received=str(dim),
            expected="an axis, None, or a container of them like the argument",
        )  # fmt: skip
    for part, axis in parts:
        yield from _iterate_leaf_axes(part, axis)


def _move_axis_to_front(tensor: Tensor, dim: int | None) -> BatchValue:
    if dim is None:
        return BatchValue(tensor, False)
    if not tensor.shape:
        raise ShapeError(
            "a scalar has no axis of examples", location=user_location(), suggestion="pass None for it in in_dims"
        )
    try:
        at = normalize_axis(dim, tensor.ndim) + tensor.ndim
    except ShapeError as error:
        raise error.at(user_location()) from None
    order = (at, *(i for i in range(tensor.ndim) if i != at))
    return BatchValue(permute(tensor, axes=order) if at else tensor, True)


def _find_batch_size(lanes: Sequence[BatchValue]) -> Size:
    sizes = {lane.tensor.shape[0]: None for lane in lanes if lane.batched}
    if len(sizes) != 1:
        raise ShapeError(
            "the arguments do not agree in the number of examples", location=user_location(),
            expected="one size along the mapped axes", received=" and ".join(str(s) for s in sizes),
        )  # fmt: skip
    return next(iter(sizes))


def _example_type(lane: BatchValue) -> TensorType:
    return lane.tensor.type.with_shape(lane.tensor.shape[1:]) if lane.batched else lane.tensor.type


def _move_axes_to_out_dims(outcome: Any, out_dims: Any) -> Any:
    """Results with their leading axis moved to the position `out_dims`."""
    if isinstance(out_dims := to_python_numbers(out_dims), int):
        leaves, tree = flatten(outcome, empty=True)
        return tree.build(iter([_move_axis_from_front(x, out_dims) for _, x in leaves]))
    parts = [_move_axes_to_out_dims(part, dim) for part, dim in zip(outcome, out_dims, strict=True)]
    return type(outcome)(parts)


def _move_axis_from_front(tensor: Tensor, dim: int) -> Tensor:
    try:
        at = normalize_axis(dim, tensor.ndim) + tensor.ndim
    except ShapeError as error:
        raise error.at(user_location()) from None
    order = [*range(1, tensor.ndim)]
    order.insert(at, 0)
    return permute(tensor, axes=tuple(order)) if at else tensor

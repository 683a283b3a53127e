"""Reductions and contractions of tiles: in one step, or carried by a loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes

from tessera.core.types import DType, int64
from tessera.ir.core import Node, Value
from tessera.ir.rewrite import UseDef
from tessera.ir.rules import Rules
from tessera.lower.indexing_maps import get_tensor_type, make_index
from tessera.lower.schedule_to_tile.tile_emitter import BlockValue, TileEmitter, reads_zero_padding
from tessera.ops.dialects import schedule
from tessera.ops.tensor import basic, contractions, reduce
from tessera.ops.tensor import elementwise as e

COMBINERS = {"sum": e.add, "max": e.maximum, "min": e.minimum}
BLOCK_REDUCTIONS = {
    "sum": reduce.sum,
    "max": reduce.max,
    "min": reduce.min,
    "argmax": reduce.argmax,
    "argmin": reduce.argmin,
}
ARG_TO_VALUE_KIND = {"argmax": "max", "argmin": "min"}


@dataclass(frozen=True)
class LoopReduction:
    """A loop-carried reduction: its initial values, the combination with a tile, and its result."""

    initialise: Callable[[TileEmitter], list[Value]]
    combine: Callable[[TileEmitter, Sequence[Value]], list[Value]]
    finish: Callable[[TileEmitter, Sequence[Value]], BlockValue]


# rule(emitter, node, uses) gives the loop-carried reduction of a node; `uses` are the use-def chains of the body.
reduction_rules = Rules("carried reduction")


def emit_whole_reduction(emit: TileEmitter, node: Node, uses: UseDef) -> BlockValue:
    """Emit a reduction within one tile."""
    found: LoopReduction = reduction_rules.of(node.op)(emit, node, uses)
    return found.finish(emit, found.combine(emit, ()))


def find_neutral_element(kind: str, dtype: DType) -> Any:
    """The neutral element of a reduction."""
    if kind == "sum":
        return 0.0 if dtype.is_float else 0
    low, high = _find_value_range(dtype)
    return low if kind in ("max", "argmax") else high


def _find_value_range(dtype: DType) -> tuple[Any, Any]:
    if dtype.is_float:
        return (-math.inf, math.inf) if _has_infinity(dtype) else _find_finite_range(dtype)
    if dtype.kind == "bool":
        return False, True
    info = ml_dtypes.iinfo(dtype.numpy)
    return int(info.min), int(info.max)


def _find_finite_range(dtype: DType) -> tuple[float, float]:
    top = float(ml_dtypes.finfo(dtype.numpy).max)
    return -top, top


def _has_infinity(dtype: DType) -> bool:
    return math.isinf(float(dtype.numpy.type(math.inf)))


def _mask_tail(emit: TileEmitter, tile: BlockValue, dim: int, value: Any) -> BlockValue:
    """A tile with a number where it reaches past the end of a dim."""
    inside = emit.make_range_mask((dim,))
    if inside is None:
        return tile
    other = BlockValue(emit.full((), value, tile.value.type.dtype))
    return emit.add_pointwise(e.where, [inside, tile, other])


def _reduce_axis(emit: TileEmitter, kind: str, value: Value, axis: int) -> Value:
    axes: Any = axis if kind in ARG_TO_VALUE_KIND else (axis,)
    return emit.add(BLOCK_REDUCTIONS[kind], [value], axis=axes, keepdims=False)


@reduction_rules(schedule.reduce)
def _(emit: TileEmitter, node: Node, uses: UseDef) -> LoopReduction:
    rule = _make_arg_reduction if node.attrs["kind"] in ARG_TO_VALUE_KIND else _make_value_reduction
    return rule(emit, node)


def _prepare_operand(emit: TileEmitter, node: Node) -> tuple[Value, tuple[int, ...], int]:
    """The block to reduce, masked; the dims that remain; and its axis, counted from the end."""
    dim, kind = node.attrs["dim"], node.attrs["kind"]
    x = emit.env[node.args[0]]
    if kind == "sum":
        x = BlockValue(emit.cast(x.value, get_tensor_type(x.value).accumulate), x.axes)
    x = _mask_tail(emit, x, dim, find_neutral_element(kind, x.value.type.dtype))
    axes = tuple(sorted({*x.axes, dim}))
    kept = tuple(d for d in axes if d != dim)
    return emit.broadcast_to_dims(x, axes), kept, axes.index(dim) - len(axes)


def _find_result_axes(emit: TileEmitter, node: Node) -> tuple[int, ...]:
    return emit.axes(emit.forms.depends[node.out])


def _make_value_reduction(emit: TileEmitter, node: Node) -> LoopReduction:
    kind, type = node.attrs["kind"], get_tensor_type(node.args[0])
    wide = type.accumulate if kind == "sum" else type.dtype
    axes = _find_result_axes(emit, node)

    def initialise(emit: TileEmitter) -> list[Value]:
        start = emit.full(emit.shape(axes), find_neutral_element(kind, wide), wide)
        return [emit.round_to_type(start, type) if wide == type.dtype else start]  # with the policy that tiles have

    def combine(emit: TileEmitter, carried: Sequence[Value]) -> list[Value]:
        x, kept, axis = _prepare_operand(emit, node)
        part = emit.broadcast_to_dims(BlockValue(_reduce_axis(emit, kind, x, axis), kept), axes)
        return [emit.add(COMBINERS[kind], [carried[0], part]) if carried else part]

    def finish(emit: TileEmitter, carried: Sequence[Value]) -> BlockValue:
        return BlockValue(emit.round_to_type(carried[0], get_tensor_type(node.out)), axes)

    return LoopReduction(initialise, combine, finish)


def _make_arg_reduction(emit: TileEmitter, node: Node) -> LoopReduction:
    kind, dtype, dim = node.attrs["kind"], node.args[0].type.dtype, node.attrs["dim"]
    axes = _find_result_axes(emit, node)

    def initialise(emit: TileEmitter) -> list[Value]:
        shape = emit.shape(axes)
        start = emit.full(shape, find_neutral_element(kind, dtype), dtype)
        return [emit.round_to_type(start, get_tensor_type(node.args[0])), emit.full(shape, 0, int64)]

    def combine(emit: TileEmitter, carried: Sequence[Value]) -> list[Value]:
        x, kept, axis = _prepare_operand(emit, node)
        place = BlockValue(_reduce_axis(emit, kind, x, axis), kept)
        best = emit.broadcast_to_dims(BlockValue(_reduce_axis(emit, ARG_TO_VALUE_KIND[kind], x, axis), kept), axes)
        if not carried:
            return [best, emit.broadcast_to_dims(place, axes)]
        first = BlockValue(emit.emit_first_index(make_index(dim, emit.forms.dims[dim][1])))
        there = emit.broadcast_to_dims(emit.add_pointwise(e.add, [place, first]), axes)
        return _combine_arg_results(emit, kind, (best, there), carried)

    return LoopReduction(initialise, combine, lambda emit, carried: BlockValue(carried[1], axes))


def _combine_arg_results(emit: TileEmitter, kind: str, new: tuple[Value, Value], old: Sequence[Value]) -> list[Value]:
    """Combine two candidates: the later wins only where it is strictly better; the first NaN wins."""
    (value, place), (best, held) = new, old
    ahead = emit.add(e.greater if kind == "argmax" else e.less, [value, best])
    fresh = emit.add(e.bitwise_and, [emit.add(e.not_equal, [value, value]), emit.add(e.equal, [best, best])])
    take = emit.add(e.bitwise_or, [ahead, fresh])
    return [emit.add(e.where, [take, value, best]), emit.add(e.where, [take, place, held])]


@dataclass(frozen=True)
class MatmulDims:
    """The dims of a product of blocks: those of both, of the left, of the right, and the one summed over."""

    batch: tuple[int, ...]
    m: tuple[int, ...]
    n: tuple[int, ...]
    k: int

    @staticmethod
    def of(left: Sequence[int], right: Sequence[int], k: int) -> MatmulDims:
        """The dims of a product, from those of its operands."""
        batch = tuple(d for d in left if d in right and d != k)
        m, n = (tuple(d for d in dims if d not in (*batch, k)) for dims in (left, right))
        return MatmulDims(batch, m, n, k)

    def shape(self, emit: TileEmitter) -> tuple[int, ...]:
        """The shape of the product."""
        return (*emit.shape(self.batch), math.prod(emit.shape(self.m)), math.prod(emit.shape(self.n)))


@reduction_rules(schedule.contract)
def _(emit: TileEmitter, node: Node, uses: UseDef) -> LoopReduction:
    dim, wide = node.attrs["dim"], get_tensor_type(node.args[0]).accumulate
    left, right = (emit.axes(emit.forms.depends[v]) for v in node.args)
    dims = MatmulDims.of(left, right, dim)

    def initialise(emit: TileEmitter) -> list[Value]:
        return [emit.full(dims.shape(emit), find_neutral_element("sum", wide), wide)]

    def combine(emit: TileEmitter, carried: Sequence[Value]) -> list[Value]:
        a, b = (_mask_factor(emit, v, dim, uses) for v in node.args)
        x = _fold_to_matrices(emit, a, (*dims.batch, *dims.m, dim), len(dims.batch), len(dims.m))
        y = _fold_to_matrices(emit, b, (*dims.batch, dim, *dims.n), len(dims.batch), 1)
        dtype = node.attrs["dtype"] if not carried else wide
        part = emit.add(contractions.dot, [x, y], dtype=dtype)
        return [emit.add(e.add, [carried[0], part]) if carried else part]

    def finish(emit: TileEmitter, carried: Sequence[Value]) -> BlockValue:
        listed = (*dims.batch, *dims.m, *dims.n)
        block = emit.reshape(emit.round_to_type(carried[0], get_tensor_type(node.out)), emit.shape(listed))
        return BlockValue(
            emit.permute(block, sorted(range(len(listed)), key=listed.__getitem__)), tuple(sorted(listed))
        )

    return LoopReduction(initialise, combine, finish)


def _mask_factor(emit: TileEmitter, value: Value, dim: int, uses: UseDef) -> BlockValue:
    """An operand of a product, with zeros past the end of the summed dim."""
    tile, node = emit.env[value], uses.get(value)
    while node is not None and node.op is basic.cast:
        node = uses.get(node.args[0])
    if not emit.is_ragged(dim) or reads_zero_padding(emit, node, dim):
        return tile
    return _mask_tail(emit, tile, dim, find_neutral_element("sum", tile.value.type.dtype))


def _fold_to_matrices(emit: TileEmitter, tile: BlockValue, order: tuple[int, ...], batch: int, rows: int) -> Value:
    """Reshape a block to a batch of matrices, with its axes in an order: batch, rows, columns."""
    axes = tuple(sorted(order))
    ordered = emit.permute(emit.broadcast_to_dims(tile, axes), [axes.index(d) for d in order])
    sizes = emit.shape(order)
    shape = (*sizes[:batch], math.prod(sizes[batch : batch + rows]), math.prod(sizes[batch + rows :]))
    return emit.reshape(ordered, shape)

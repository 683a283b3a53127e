"""Tile emitter: records the ops of a tile function, with the layout of each block over the loop dims: loads, stores,
reductions and contractions of tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tessera.core.symbolic_dim import Dim, Size, order_of_size
from tessera.core.types import DType, TensorType, int64
from tessera.ir.analysis import IntervalAnalysis
from tessera.ir.builder import Builder
from tessera.ir.core import Node, Value
from tessera.ir.rewrite import UseDef
from tessera.ir.rules import Op, Rules
from tessera.lower.indexing_maps import BodyIndexing, IndexDigit, IndexExpr, OpaqueIndex, get_tensor_type, make_index
from tessera.ops.dialects import schedule, tile
from tessera.ops.tensor import basic, contractions, reduce, shape
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor.reduce import find_neutral_element

# Block layouts: the access of a tile as one rectangular block of memory, if it is one.


@dataclass(frozen=True)
class LayoutMode:
    """A mode: (t // divisor) % size for the index t in a dim's tile; it has `size` values along an axis of memory."""

    axis: int
    dim: int
    divisor: Size
    size: int


@dataclass(frozen=True)
class BlockLayout:
    """A block of memory: the modes of each axis, from the outermost to the innermost."""

    axes: tuple[tuple[LayoutMode, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the block in memory."""
        return tuple(math.prod(p.size for p in parts) for parts in self.axes)

    @property
    def parts(self) -> tuple[LayoutMode, ...]:
        """All modes in memory order."""
        return tuple(p for parts in self.axes for p in parts)

    @property
    def dims(self) -> tuple[int, ...]:
        """The dims whose tiles the block spans, in order."""
        return tuple(sorted({p.dim for p in self.parts}))

    def order(self) -> tuple[int, ...]:
        """The permutation of the modes that sorts them by dim, the high digits of each first."""
        parts = self.parts
        return tuple(sorted(range(len(parts)), key=lambda i: (parts[i].dim, -parts[i].divisor)))


def find_block_layout(exprs: Sequence[IndexExpr], tile: Sequence[int]) -> BlockLayout | None:
    """The block that indices cover in one tile; None where it is not rectangular."""
    axes = []
    for axis, expr in enumerate(exprs):
        parts = _find_axis_modes(axis, expr, tile)
        if parts is None:
            return None
        axes.append(parts)
    found = BlockLayout(tuple(axes))
    return found if all(_covers_dim(found, d, tile[d]) for d in found.dims) else None


def _find_axis_modes(axis: int, expr: IndexExpr, tile: Sequence[int]) -> tuple[LayoutMode, ...] | None:
    """The modes of one axis, if they are contiguous."""
    strides: dict[LayoutMode, Size] = {}
    for atom, stride in expr.terms:
        size = find_digit_span(atom, tile) if isinstance(atom, IndexDigit) else _find_opaque_span(atom.dims, tile)
        if not size:
            return None
        if size > 1:
            assert isinstance(atom, IndexDigit)
            strides[LayoutMode(axis, atom.dim, atom.divisor, size)] = stride
    parts = sorted(strides, key=lambda mode: order_of_size(strides[mode]))
    expected = 1
    for part in parts:
        if strides[part] != expected:
            return None
        expected *= part.size
    return tuple(reversed(parts))


def _find_opaque_span(dims: Iterable[int], tile: Sequence[int]) -> int:
    """1 where the index is uniform in the tile; 0 where it is irregular."""
    return 1 if all(tile[d] == 1 for d in dims) else 0


def find_digit_span(digit: IndexDigit, tile: Sequence[int]) -> Any:
    """How many consecutive values a digit has in a tile; 0 where it is irregular."""
    size = tile[digit.dim]
    if digit.divisor % size == 0:
        return 1
    if size % digit.divisor:
        return 0
    inner = size // digit.divisor
    if not digit.modulus or digit.modulus % inner == 0:
        return inner
    return digit.modulus if inner % digit.modulus == 0 else 0


def _covers_dim(found: BlockLayout, dim: int, size: int) -> bool:
    """Whether the modes of a dim cover all its digits, each once."""
    expected = 1
    for part in sorted((p for p in found.parts if p.dim == dim), key=lambda p: p.divisor):
        if part.divisor != expected:
            return False
        expected *= part.size
    return expected == size


@dataclass(frozen=True)
class BlockValue:
    """A block of values: its axes are the dims it spans, in order."""

    value: Value
    axes: tuple[int, ...] = ()


class TileEmitter:
    """The state of the emission of a kernel: tile sizes, first indices of the tile, and values so far."""

    def __init__(self, forms: BodyIndexing, tile: Sequence[int], refs: Mapping[Value, Value]) -> None:
        self.forms = forms
        self.tile = tuple(tile)
        self.builder = Builder()
        self.starts: dict[int, Value] = {}
        self.env: dict[Value, BlockValue] = {}
        self.refs = refs
        self._scalars: dict[IndexExpr, Value] = {}
        self._whole: frozenset[int] = frozenset()  # dims whose tile at hand is not partial

    @cached_property
    def intervals(self) -> IntervalAnalysis:
        """The intervals of the integers so far."""
        return IntervalAnalysis(self.builder.producers, None)

    def add(self, op: Op, args: Sequence[Value], **attrs: Any) -> Value:
        """One more node with one result."""
        return self.builder.add(op, args, attrs).out

    def make_constant(self, value: Size) -> Value:
        """An int64 constant."""
        if isinstance(value, Dim):
            return self.add(basic.dim_value, [], size=value)
        return self.full((), value, int64)

    def full(self, shape: tuple[int, ...], value: Any, dtype: DType) -> Value:
        """A block of one number."""
        return self.add(basic.full, [], shape=shape, value=value, dtype=dtype)

    def cast(self, value: Value, dtype: DType) -> Value:
        """A block in another element type."""
        return value if value.type.dtype == dtype else self.add(basic.cast, [value], dtype=dtype)

    def round_to_type(self, value: Value, type: TensorType) -> Value:
        """Round a block once to the storage of a type, by its policy if it has one."""
        if type.policy is None or getattr(value.type, "policy", None) == type.policy:
            return self.cast(value, type.dtype)
        return self.add(basic.cast, [value], dtype=type.policy)

    def reshape(self, value: Value, to: tuple[int, ...]) -> Value:
        """Reshape a block; a reshape of a reshape is one reshape."""
        value = self._find_operand(value, shape.reshape)
        return value if value.type.shape == to else self.add(shape.reshape, [value], shape=to)

    def permute(self, value: Value, axes: Sequence[int]) -> Value:
        """Permute the axes of a block; a permutation of a permutation is one permutation."""
        below = self._find_operand(value, shape.permute)
        if below is not value:
            inner = self.builder.producers[value].attrs["axes"]
            value, axes = below, [inner[a] for a in axes]
        return value if list(axes) == sorted(axes) else self.add(shape.permute, [value], axes=tuple(axes))

    def _find_operand(self, value: Value, op: Op) -> Value:
        """The operand of the node that defines a value, if it is of this op."""
        node = self.builder.producers.get(value)
        return node.args[0] if node is not None and node.op is op else value

    def shape(self, axes: Iterable[int]) -> tuple[int, ...]:
        """The shape of a block that spans these dims."""
        return tuple(self.tile[d] for d in axes)

    def axes(self, dims: Iterable[int]) -> tuple[int, ...]:
        """The dims among these that have more than one element in a tile, in order."""
        return tuple(d for d in sorted(dims) if self.tile[d] > 1)

    def is_ragged(self, dim: int) -> bool:
        """Whether the last tile along a dim is partial."""
        return dim not in self._whole and self.forms.dims[dim][1] % self.tile[dim] != 0

    def align_axes(self, tile: BlockValue, axes: Sequence[int]) -> Value:
        """A block with an axis of size 1 for each dim it lacks."""
        return self.reshape(tile.value, tuple(self.tile[d] if d in tile.axes else 1 for d in axes))

    def broadcast_to_dims(self, tile: BlockValue, axes: Sequence[int]) -> Value:
        """A block that spans exactly these dims."""
        to = self.shape(axes)
        node = self.builder.producers.get(tile.value)
        if node is not None and node.op is basic.full:
            return self.full(to, node.attrs["value"], node.attrs["dtype"])
        leveled = self.align_axes(tile, axes)
        return leveled if leveled.type.shape == to else self.add(basic.broadcast_to, [leveled], shape=to)

    def emit_first_index(self, expr: IndexExpr) -> Value:
        """An index at the first element of the tile."""
        if expr not in self._scalars:
            parts = [(self._atom(a), c) for a, c in expr.terms if not self._is_zero(a)]
            values = [v if c == 1 else self.add(e.mul, [v, self.make_constant(c)]) for v, c in parts]
            if expr.constant or not values:
                values.append(self.make_constant(expr.constant))
            total = values[0]
            for each in values[1:]:
                total = self.add(e.add, [total, each])
            self._scalars[expr] = total
        return self._scalars[expr]

    def _is_zero(self, atom: IndexDigit | OpaqueIndex) -> bool:
        """Whether a digit is 0 at the first index of every tile."""
        if not isinstance(atom, IndexDigit):
            return False
        return atom.dim not in self.starts or find_digit_span(atom, self.tile) == atom.modulus

    def _atom(self, atom: IndexDigit | OpaqueIndex) -> Value:
        if isinstance(atom, OpaqueIndex):
            assert isinstance(atom.key, Value)
            return self.env[atom.key].value
        value = self.starts[atom.dim]
        if atom.divisor != 1:
            value = self.add(e.floor_divide, [value, self.make_constant(atom.divisor)])
        return self.add(e.remainder, [value, self.make_constant(atom.modulus)]) if atom.modulus else value

    def emit_indices(self, dim: int) -> BlockValue:
        """The indices of the tile along a dim."""
        size = self.tile[dim]
        start = self.starts.get(dim)
        if size == 1:
            return BlockValue(self.make_constant(0) if start is None else start)
        along = self.add(shape.iota, [], shape=(size,), axis=-1, dtype=int64)
        if start is None:
            return BlockValue(along, (dim,))
        first = self.add(basic.broadcast_to, [start], shape=(size,))
        return BlockValue(self.add(e.add, [first, along]), (dim,))

    def make_range_mask(self, dims: Iterable[int]) -> BlockValue | None:
        """The mask of the indices of these dims that are in range; None where all are."""
        found: BlockValue | None = None
        for dim in dims:
            if not self.is_ragged(dim):
                continue
            end = BlockValue(self.make_constant(self.forms.dims[dim][1]))
            test = self.add_pointwise(e.less, [self.emit_indices(dim), end])
            found = test if found is None else self.add_pointwise(e.bitwise_and, [found, test])
        return found

    def add_pointwise(self, op: Op, tiles: Sequence[BlockValue], node: Node | None = None) -> BlockValue:
        """An elementwise op on blocks, broadcast to one shape."""
        axes = tuple(sorted({d for t in tiles for d in t.axes}))
        args = [self.broadcast_to_dims(t, axes) for t in tiles]
        types = None if node is None else (get_tensor_type(node.out).with_shape(self.shape(axes)),)
        return BlockValue(self.builder.add(op, args, node.attrs if node else {}, types=types).out, axes)

    @contextmanager
    def open_region(self) -> Iterator[list[Node]]:
        """Open a region: its values are out of scope after it."""
        with self.open_scope(), self.builder.region() as nodes:
            yield nodes

    @contextmanager
    def open_scope(self) -> Iterator[None]:
        """Values that are emitted here are not reused after it."""
        env, scalars, starts = dict(self.env), dict(self._scalars), dict(self.starts)
        yield
        self.env, self._scalars, self.starts = env, scalars, starts

    @contextmanager
    def resize(self, dim: int, size: int, whole: bool) -> Iterator[None]:
        """Tiles of another size along a dim; `whole` says that none is partial."""
        tile, known = self.tile, self._whole
        self.tile = (*tile[:dim], size, *tile[dim + 1 :])
        self._whole = known | {dim} if whole else known
        yield
        self.tile, self._whole = tile, known


# Loads and stores of tiles: a block access where the tile is a block of memory, else a gather or scatter.


def emit_load(emit: TileEmitter, node: Node) -> BlockValue:
    """Emit a schedule.load."""
    rank = node.args[0].type.rank
    exprs = emit.forms.indices(node)
    mask = emit.env[node.args[rank + 1]] if len(node.args) > rank + 1 else None
    found = find_block_layout(exprs, emit.tile)
    if found is None:
        return _emit_gather(emit, node, mask)
    ragged = any(emit.is_ragged(d) for d in emit.forms.depends[node.out])
    edge = "clip" if ragged or mask else "error"
    starts = [emit.emit_first_index(expr) for expr in exprs]
    data = emit.add(tile.load, [emit.refs[node.args[0]], *starts], shape=found.shape, edge=edge)
    block = _reorder_to_dims(emit, data, found)
    if mask is None:
        return block
    zero = BlockValue(emit.full((), _make_zero(data), data.type.dtype))
    return emit.add_pointwise(e.where, [mask, block, zero])


def _make_zero(data: Value) -> float | int:
    return 0.0 if data.type.dtype.is_float else 0


def _reorder_to_dims(emit: TileEmitter, data: Value, found: BlockLayout) -> BlockValue:
    """Permute a block of memory to one axis for each dim, in order."""
    parts = emit.reshape(data, tuple(p.size for p in found.parts))
    ordered = emit.permute(parts, found.order())
    return BlockValue(emit.reshape(ordered, emit.shape(found.dims)), found.dims)


def _emit_gather(emit: TileEmitter, node: Node, mask: BlockValue | None) -> BlockValue:
    indices = [emit.env[v] for v in node.args[1 : node.args[0].type.rank + 1]]
    axes = tuple(sorted({d for t in indices for d in t.axes}))
    # Elements past the end of a dim may have no valid index.
    sizes = node.args[0].type.shape
    unproven = emit.intervals.find_unproven_axes([t.value for t in indices], (1,) * len(sizes), sizes)
    inside = emit.make_range_mask(axes) if unproven else None
    if inside is not None:
        mask = inside if mask is None else emit.add_pointwise(e.bitwise_and, [mask, inside])
    axes = tuple(sorted({*axes, *(mask.axes if mask else ())}))
    args = [emit.align_axes(t, axes) for t in [*indices, *([mask] if mask else [])]]
    shape = emit.shape(axes)
    if mask and any(args[-1].type.shape[i] != n for i, n in enumerate(shape)):
        args[-1] = emit.broadcast_to_dims(mask, axes)
    if not mask and indices:
        args[0] = emit.broadcast_to_dims(indices[0], axes)
    return BlockValue(emit.add(tile.gather, [emit.refs[node.args[0]], *args]), axes)


def emit_store(emit: TileEmitter, node: Node) -> None:
    """Emit a schedule.store."""
    exprs = emit.forms.indices(node)
    found = find_block_layout(exprs, emit.tile)
    value = emit.env[node.args[1]]
    ragged = {d for d in emit.forms.depends[node.args[1]] if emit.is_ragged(d)} | _find_ragged_dims(emit, found)
    if found is None or not all(ends_with_memory(emit, node, d) for d in ragged):
        _emit_scatter(emit, node, value)
        return
    assert set(value.axes) <= set(found.dims), "a value is stored at the same index more than once"
    block = _reorder_to_memory(emit, emit.broadcast_to_dims(value, found.dims), found)
    starts = [emit.emit_first_index(expr) for expr in exprs]
    edge = "clip" if ragged else "error"
    emit.builder.add(tile.store, [emit.refs[node.args[0]], block, *starts], {"edge": edge})


def _find_ragged_dims(emit: TileEmitter, found: BlockLayout | None) -> set[int]:
    return {d for d in found.dims if emit.is_ragged(d)} if found else set()


def _reorder_to_memory(emit: TileEmitter, value: Value, found: BlockLayout) -> Value:
    """Permute a block to memory order: the inverse of `_reorder_to_dims`."""
    order = found.order()
    parts = emit.reshape(value, tuple(found.parts[i].size for i in order))
    back = emit.permute(parts, [order.index(i) for i in range(len(order))])
    return emit.reshape(back, found.shape)


def _emit_scatter(emit: TileEmitter, node: Node, value: BlockValue) -> None:
    indices = [emit.env[v] for v in node.args[2:]]
    axes = tuple(sorted({d for t in (value, *indices) for d in t.axes}))
    mask = emit.make_range_mask(axes)
    args = [emit.broadcast_to_dims(value, axes), *(emit.broadcast_to_dims(i, axes) for i in indices)]
    if mask is not None:
        args.append(emit.broadcast_to_dims(mask, axes))
    emit.builder.add(tile.scatter, [emit.refs[node.args[0]], *args], {})


def ends_with_memory(emit: TileEmitter, node: Node, dim: int) -> bool:
    """Whether indices past the end of a dim are out of bounds of the memory, too."""
    extent = emit.forms.dims[dim][1]
    for expr, size in zip(emit.forms.indices(node), node.args[0].type.shape, strict=True):
        digits = [a for a, _ in expr.terms if isinstance(a, IndexDigit)]
        found = expr.bounds()
        if len(digits) == len(expr.terms) == 1 and digits[0].dim == dim and not digits[0].modulus:
            return extent % digits[0].divisor == 0 and found is not None and found[1] == size - 1
    return False


def reads_zero_padding(emit: TileEmitter, node: Node | None, dim: int) -> bool:
    """Whether a node is a load that gives 0 past the end of a dim."""
    unmasked = node is not None and node.op is schedule.load and len(node.args) == node.args[0].type.rank + 1
    if not unmasked or node is None or find_block_layout(emit.forms.indices(node), emit.tile) is None:
        return False
    return ends_with_memory(emit, node, dim)


# Reductions and contractions of tiles: in one step, or carried by a loop.


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
        if not carried:
            return [part]
        plain = get_tensor_type(part).policy is None  # sums are rounded by a policy once, at the end
        return [emit.add(e.add, [carried[0], part if plain else emit.add(basic.cast, [part], dtype=wide)])]

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

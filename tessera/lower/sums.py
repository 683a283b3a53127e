"""Reductions and contractions of tiles: whole ones, and those that a loop carries on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes

from tessera.ir.core import Node, Value
from tessera.lower.accesses import reads_zero
from tessera.lower.affine import index
from tessera.lower.emitter import Emitter, Tile
from tessera.lower.points import type_of
from tessera.op import Rules
from tessera.ops import basic, linalg, reduce, schedule
from tessera.ops import elementwise as e
from tessera.types import DType, int64

COMBINE = {"sum": e.add, "max": e.maximum, "min": e.minimum}
ALONG = {"sum": reduce.sum, "max": reduce.max, "min": reduce.min, "argmax": reduce.argmax, "argmin": reduce.argmin}
EXTREME = {"argmax": "max", "argmin": "min"}


@dataclass(frozen=True)
class Sum:
    """A reduction that a loop carries: its first values, how a tile is added, and what comes out."""

    start: Callable[[Emitter], list[Value]]
    more: Callable[[Emitter, Sequence[Value]], list[Value]]
    end: Callable[[Emitter, Sequence[Value]], Tile]


# rule(emitter, node, makers) gives the Sum of a node; `makers` finds the node a body value comes from.
sums = Rules("carried reduction")
Makers = dict[Value, Node]


def whole(emit: Emitter, node: Node, makers: Makers) -> Tile:
    """A reduction that needs no loop."""
    found: Sum = sums.of(node.op)(emit, node, makers)
    return found.end(emit, found.more(emit, ()))


def neutral(kind: str, dtype: DType) -> Any:
    """What does not change a reduction."""
    if kind == "sum":
        return 0.0 if dtype.is_float else 0
    low, high = _range(dtype)
    return low if kind in ("max", "argmax") else high


def _range(dtype: DType) -> tuple[Any, Any]:
    if dtype.is_float:
        return (-math.inf, math.inf) if _has_infinity(dtype) else _finite(dtype)
    if dtype.kind == "bool":
        return False, True
    info = ml_dtypes.iinfo(dtype.numpy)
    return int(info.min), int(info.max)


def _finite(dtype: DType) -> tuple[float, float]:
    top = float(ml_dtypes.finfo(dtype.numpy).max)
    return -top, top


def _has_infinity(dtype: DType) -> bool:
    return math.isinf(float(dtype.numpy.type(math.inf)))


def _masked(emit: Emitter, tile: Tile, dim: int, value: Any) -> Tile:
    """A tile with a number where it reaches past the end of a dim."""
    inside = emit.inside((dim,))
    if inside is None:
        return tile
    other = Tile(emit.full((), value, tile.value.type.dtype))
    return emit.pointwise(e.where, [inside, tile, other])


def _along(emit: Emitter, kind: str, value: Value, axis: int) -> Value:
    axes: Any = axis if kind in EXTREME else (axis,)
    return emit.add(ALONG[kind], [value], axis=axes, keepdims=False)


@sums(schedule.reduce)
def _(emit: Emitter, node: Node, makers: Makers) -> Sum:
    rule = _place if node.attrs["kind"] in EXTREME else _value
    return rule(emit, node)


def _operand(emit: Emitter, node: Node) -> tuple[Value, tuple[int, ...], int]:
    """The block to reduce, masked; the dims that remain; and its axis, counted from the end."""
    dim, kind = node.attrs["dim"], node.attrs["kind"]
    x = emit.env[node.args[0]]
    if kind == "sum":
        x = Tile(emit.cast(x.value, type_of(x.value).accumulate), x.axes)
    x = _masked(emit, x, dim, neutral(kind, x.value.type.dtype))
    axes = tuple(sorted({*x.axes, dim}))
    kept = tuple(d for d in axes if d != dim)
    return emit.fit(x, axes), kept, axes.index(dim) - len(axes)


def _kept(emit: Emitter, node: Node) -> tuple[int, ...]:
    return emit.axes(emit.forms.depends[node.out])


def _value(emit: Emitter, node: Node) -> Sum:
    kind, type = node.attrs["kind"], type_of(node.args[0])
    wide = type.accumulate if kind == "sum" else type.dtype
    axes = _kept(emit, node)

    def start(emit: Emitter) -> list[Value]:
        return [emit.full(emit.shape(axes), neutral(kind, wide), wide)]

    def more(emit: Emitter, carried: Sequence[Value]) -> list[Value]:
        x, kept, axis = _operand(emit, node)
        part = emit.fit(Tile(_along(emit, kind, x, axis), kept), axes)
        return [emit.add(COMBINE[kind], [carried[0], part]) if carried else part]

    return Sum(start, more, lambda emit, carried: Tile(emit.stored(carried[0], type_of(node.out)), axes))


def _place(emit: Emitter, node: Node) -> Sum:
    kind, dtype, dim = node.attrs["kind"], node.args[0].type.dtype, node.attrs["dim"]
    axes = _kept(emit, node)

    def start(emit: Emitter) -> list[Value]:
        shape = emit.shape(axes)
        return [emit.full(shape, neutral(kind, dtype), dtype), emit.full(shape, 0, int64)]

    def more(emit: Emitter, carried: Sequence[Value]) -> list[Value]:
        x, kept, axis = _operand(emit, node)
        place = Tile(_along(emit, kind, x, axis), kept)
        best = emit.fit(Tile(_along(emit, EXTREME[kind], x, axis), kept), axes)
        if not carried:
            return [best, emit.fit(place, axes)]
        first = Tile(emit.start(index(dim, emit.forms.dims[dim][1])))
        there = emit.fit(emit.pointwise(e.add, [place, first]), axes)
        return _better(emit, kind, (best, there), carried)

    return Sum(start, more, lambda emit, carried: Tile(carried[1], axes))


def _better(emit: Emitter, kind: str, new: tuple[Value, Value], old: Sequence[Value]) -> list[Value]:
    """The better of two places: later ones only where they are ahead; the first NaN wins."""
    (value, place), (best, held) = new, old
    ahead = emit.add(e.greater if kind == "argmax" else e.less, [value, best])
    fresh = emit.add(e.bitwise_and, [emit.add(e.not_equal, [value, value]), emit.add(e.equal, [best, best])])
    take = emit.add(e.bitwise_or, [ahead, fresh])
    return [emit.add(e.where, [take, value, best]), emit.add(e.where, [take, place, held])]


@dataclass(frozen=True)
class Matrices:
    """The dims of a product of blocks: those of both, of the left, of the right, and the one summed over."""

    batch: tuple[int, ...]
    m: tuple[int, ...]
    n: tuple[int, ...]
    k: int

    @staticmethod
    def of(left: Sequence[int], right: Sequence[int], k: int) -> Matrices:
        """The dims of a product, from those of its operands."""
        batch = tuple(d for d in left if d in right and d != k)
        m, n = (tuple(d for d in dims if d not in (*batch, k)) for dims in (left, right))
        return Matrices(batch, m, n, k)

    def shape(self, emit: Emitter) -> tuple[int, ...]:
        """The shape of the product."""
        return (*emit.shape(self.batch), math.prod(emit.shape(self.m)), math.prod(emit.shape(self.n)))


@sums(schedule.contract)
def _(emit: Emitter, node: Node, makers: Makers) -> Sum:
    dim, wide = node.attrs["dim"], type_of(node.args[0]).accumulate
    left, right = (emit.axes(emit.forms.depends[v]) for v in node.args)
    dims = Matrices.of(left, right, dim)

    def start(emit: Emitter) -> list[Value]:
        return [emit.full(dims.shape(emit), neutral("sum", wide), wide)]

    def more(emit: Emitter, carried: Sequence[Value]) -> list[Value]:
        a, b = (_factor(emit, v, dim, makers) for v in node.args)
        x = _matrix(emit, a, (*dims.batch, *dims.m, dim), len(dims.batch), len(dims.m))
        y = _matrix(emit, b, (*dims.batch, dim, *dims.n), len(dims.batch), 1)
        dtype = node.attrs["dtype"] if not carried else wide
        part = emit.add(linalg.dot, [x, y], dtype=dtype)
        return [emit.add(e.add, [carried[0], part]) if carried else part]

    def end(emit: Emitter, carried: Sequence[Value]) -> Tile:
        listed = (*dims.batch, *dims.m, *dims.n)
        block = emit.reshape(emit.stored(carried[0], type_of(node.out)), emit.shape(listed))
        return Tile(emit.permute(block, sorted(range(len(listed)), key=listed.__getitem__)), tuple(sorted(listed)))

    return Sum(start, more, end)


def _factor(emit: Emitter, value: Value, dim: int, makers: Makers) -> Tile:
    """An operand of a product, 0 past the end of the summed dim."""
    tile, node = emit.env[value], makers.get(value)
    while node is not None and node.op is basic.cast:
        node = makers.get(node.args[0])
    if not emit.is_ragged(dim) or reads_zero(emit, node, dim):
        return tile
    return _masked(emit, tile, dim, neutral("sum", tile.value.type.dtype))


def _matrix(emit: Emitter, tile: Tile, order: tuple[int, ...], batch: int, rows: int) -> Value:
    """A block as a stack of matrices, with its axes in an order: the batch, the rows, the columns."""
    axes = tuple(sorted(order))
    ordered = emit.permute(emit.fit(tile, axes), [axes.index(d) for d in order])
    sizes = emit.shape(order)
    shape = (*sizes[:batch], math.prod(sizes[batch : batch + rows]), math.prod(sizes[batch + rows :]))
    return emit.reshape(ordered, shape)

"""Rows of operations with a function of scalars: reduce, reduce_window, select_and_scatter, sort, map and top_k.

A region that is one known operation becomes the reduction of that operation. Any other is evaluated on whole tensors
(`vmap`), in a binary tree that keeps the order of elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from tessera.core.symbolic_dim import Size
from tessera.core.types import DType, bool_, int64
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import reduce as r
from tessera.ops.tensor import shape as s
from tessera.ops.tensor.basic import broadcast_to, cast, full
from tessera.ops.tensor.rearrange import take_along_axis
from tessera.ops.tensor.sorting import argsort, topk
from tessera.stablehlo import elementwise
from tessera.stablehlo.padding import pad_with
from tessera.stablehlo.regions import MONOIDS, Join, find_join, find_monoid, scatter_flat, vectorise
from tessera.stablehlo.table import Site, row
from tessera.stablehlo.text import HloRegion


@row("stablehlo.map")
def _(site: Site, *operands: Tensor) -> list[Tensor]:
    return vectorise(site.body())(*operands)


# Reductions.

_OF_BOOLS = {"add": r.any, "maximum": r.any, "or": r.any, "multiply": r.all, "minimum": r.all, "and": r.all}


@row("stablehlo.reduce", "mhlo.reduce")
def _(site: Site, *operands: Tensor) -> list[Tensor]:
    axes, half = site.numbers("dimensions"), len(operands) // 2
    inputs, starts = list(operands[:half]), list(operands[half:])
    if math.prod(inputs[0].shape[a] for a in axes) == 0:
        return [broadcast_to(b, shape=t.shape) for b, t in zip(starts, site.operation.types, strict=True)]
    monoid = find_monoid(site.operation.regions[0])
    if len(inputs) == 1 and (found := _reduce_monoid(inputs[0], monoid, axes)) is not None:
        return [found if _is_neutral(site, inputs[0], monoid) else MONOIDS[monoid][0](found, starts[0])]
    join = find_join(site, site.operation.regions[0])
    rows = [_axes_to_front(x, axes) for x in inputs]
    return join(*(broadcast_to(b, shape=x.shape[1:]) for b, x in zip(starts, rows, strict=True)), *_fold(join, rows))


def _reduce_monoid(x: Tensor, monoid: str, axes: tuple[int, ...]) -> Tensor | None:
    if x.dtype == bool_:
        return _OF_BOOLS[monoid](x, axis=axes) if monoid in _OF_BOOLS else None
    whole = MONOIDS[monoid][1] if monoid in MONOIDS else None
    if whole is None:
        return None
    found = whole(x, axis=axes) if axes else x
    return found if found.dtype == x.dtype else cast(found, dtype=x.dtype)


def _is_neutral(site: Site, x: Tensor, monoid: str) -> bool:
    """Whether the initial value is known, and changes nothing."""
    number = site.constant(1)
    if number is None:
        return False
    if x.dtype.is_integer and monoid in ("maximum", "minimum"):
        low = 0 if x.dtype.kind == "uint" else -(2 ** (x.dtype.bits - 1))
        high = 2 ** (x.dtype.bits - (x.dtype.kind == "int")) - 1
        return bool(number == (low if monoid == "maximum" else high))
    if x.dtype == bool_:
        return bool(number == (monoid in ("multiply", "minimum", "and")))
    return bool(number == MONOIDS[monoid][2]) and monoid != "and"


def _axes_to_front(x: Tensor, axes: Sequence[int]) -> Tensor:
    """[elements of the axes in row-major order, the other axes]."""
    rest = [a for a in range(x.ndim) if a not in axes]
    moved = s.permute(x, axes=(*sorted(axes), *rest))
    return s.reshape(moved, shape=(math.prod(x.shape[a] for a in axes), *(x.shape[a] for a in rest)))


def _fold(join: Join, rows: Sequence[Tensor]) -> list[Tensor]:
    """Join the slices of the first axis in a binary tree, neighbours first."""
    parts, count = list(rows), rows[0].shape[0]
    while count > 1:
        pairs = count // 2
        joined = join(
            *(_slice_first(x, 0, 2 * pairs, 2) for x in parts), *(_slice_first(x, 1, 2 * pairs, 2) for x in parts)
        )
        if count % 2:
            joined = [
                s.concatenate([j, _slice_first(x, count - 1, count, 1)], axis=0)
                for j, x in zip(joined, parts, strict=True)
            ]
        parts, count = joined, count - pairs
    return [s.reshape(x, shape=x.shape[1:]) for x in parts]


def _slice_first(x: Tensor, start: int, stop: Size, step: int, axis: int = 0) -> Tensor:
    starts, stops, steps = [0] * x.ndim, list(x.shape), [1] * x.ndim
    starts[axis], stops[axis], steps[axis] = start, stop, step
    return s.slice_(x, start=tuple(starts), stop=tuple(stops), step=tuple(steps))


# Windows.


@row("stablehlo.reduce_window")
def _(site: Site, *operands: Tensor) -> list[Tensor]:
    half = len(operands) // 2
    inputs, starts = list(operands[:half]), list(operands[half:])
    rank = inputs[0].ndim
    if any(0 in t.shape for t in site.operation.types):
        return [full(shape=t.shape, value=0, dtype=t.dtype) for t in site.operation.types]
    ones = (1,) * rank
    sizes, steps = site.numbers("window_dimensions"), site.numbers("window_strides", ones)
    reach, spread = site.numbers("window_dilations", ones), site.numbers("base_dilations", ones)
    sides = _read_padding(site, rank)
    padded = [
        pad_with(x, b, site.constant(half + i), [(*side, d - 1) for side, d in zip(sides, spread, strict=True)])
        for i, (x, b) in enumerate(zip(inputs, starts, strict=True))
    ]
    join = find_join(site, site.operation.regions[0])
    if math.prod(sizes) <= MAX_WINDOW:
        counts = site.operation.types[0].shape
        padded = _join_in_order(join, padded, counts, sizes, steps, reach)
    else:
        for axis in reversed(range(rank)):
            padded = _join_windows(join, padded, axis, sizes[axis], steps[axis], reach[axis])
    first = [broadcast_to(b, shape=x.shape) for b, x in zip(starts, padded, strict=True)]
    monoid = find_monoid(site.operation.regions[0])
    if half == 1 and monoid in MONOIDS and _is_neutral(site, inputs[0], monoid):
        return padded
    return join(*first, *padded)


def _read_padding(site: Site, rank: int) -> list[tuple[int, int]]:
    given = site.get("padding")
    if given is None:
        return [(0, 0)] * rank
    return [(int(low), int(high)) for low, high in given]


MAX_WINDOW = 32  # elements of a window that are joined one after the other; those of a larger one in a binary tree


def _join_in_order(
    join: Join, parts: list[Tensor], counts: Sequence[Size], sizes: Sequence[int], steps: Sequence[int],
    reach: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    """The joined elements of each window, in row-major order."""
    found: list[Tensor] = []
    for offset in itertools.product(*(range(n) for n in sizes)):
        start = [o * d for o, d in zip(offset, reach, strict=True)]
        cut = [slice_window(x, start, counts, steps) for x in parts]
        found = join(*found, *cut) if found else cut
    return found


def _join_windows(join: Join, parts: list[Tensor], axis: int, size: int, step: int, reach: int) -> list[Tensor]:
    """The joined elements of each window along an axis: windows of 1, 2, 4, ... elements, then those of `size`."""
    count = (parts[0].shape[axis] - reach * (size - 1) - 1) // step + 1
    known, wide = {1: parts}, 1
    while 2 * wide <= size:
        shorter = known[wide]
        length = shorter[0].shape[axis] - wide * reach
        known[2 * wide] = join(
            *(_slice_first(x, 0, length, 1, axis) for x in shorter),
            *(_slice_first(x, wide * reach, wide * reach + length, 1, axis) for x in shorter),
        )
        wide *= 2
    found: list[Tensor] = []
    at = 0
    for wide in sorted(known, reverse=True):
        if size & wide:
            stop = at * reach + (count - 1) * step + 1
            part = [_slice_first(x, at * reach, stop, step, axis) for x in known[wide]]
            found = join(*found, *part) if found else part
            at += wide
    return found


@row("stablehlo.select_and_scatter")
def _(site: Site, x: Tensor, source: Tensor, start: Tensor) -> Tensor:
    rank, ones = x.ndim, (1,) * x.ndim
    sizes, steps = site.numbers("window_dimensions", ones), site.numbers("window_strides", ones)
    sides = [(*side, 0) for side in _read_padding(site, rank)]
    numbers = s.reshape(s.iota(shape=(math.prod(x.shape),)), shape=x.shape)
    zero = full(shape=(), value=0, dtype=x.dtype)
    padded, places = pad_with(x, zero, 0, sides), pad_with(numbers, zero, -1, sides)
    select = vectorise(site.body(0))
    best: list[Tensor] = []
    for offset in itertools.product(*(range(n) for n in sizes)):
        cut = [slice_window(each, offset, source.shape, steps) for each in (padded, places)]
        best = cut if not best else _select_better(select, best, cut)
    first = broadcast_to(start, shape=x.shape)
    flat = s.reshape(e.where(e.less(best[1], 0), math.prod(x.shape), best[1]), shape=(-1,))
    return scatter_flat(site, [first], flat, [s.reshape(source, shape=(-1,))], 1)[0]


def slice_window(x: Tensor, offset: Sequence[int], counts: Sequence[Size], steps: Sequence[int]) -> Tensor:
    stop = tuple(o + (n - 1) * d + 1 for o, n, d in zip(offset, counts, steps, strict=True))
    return s.slice_(x, start=tuple(offset), stop=stop, step=tuple(steps))


def _select_better(select: Join, best: list[Tensor], cut: list[Tensor]) -> list[Tensor]:
    """The selected value and its number; an element outside the operand (number -1) is never selected."""
    (kept,) = select(best[0], cut[0])
    keeps = e.less(cut[1], 0) | (e.greater_equal(best[1], 0) & kept)
    return [e.where(keeps, old, new) for old, new in zip(best, cut, strict=True)]


# Sorting.


@row("stablehlo.sort")
def _(site: Site, *operands: Tensor) -> list[Tensor]:
    axis = site.get("dimension", -1) % operands[0].ndim
    if operands[0].shape[axis] <= 1 or 0 in operands[0].shape:
        return list(operands)
    key = _find_sort_key(site.operation.regions[0])
    if key is not None:
        order = argsort(operands[key[0]], axis=axis, descending=key[1])
    else:
        order = _order_by_ranks(vectorise(site.body()), operands, axis)
    return [take_along_axis(x, order, axis) for x in operands]


def _find_sort_key(region: HloRegion) -> tuple[int, bool] | None:
    """The operand that a comparator compares, and whether it sorts down; None for another comparator.

    JAX's comparator gives zeros one sign and NaNs one payload before it compares: the order of `ts.argsort`.
    """
    sources = {name: (i // 2, i % 2) for i, name in enumerate(region.params)}
    canonical = set()
    *body, end = region.operations
    for operation in body[:-1]:
        (name, _) = operation.results[0]
        if operation.name == "stablehlo.select":
            found = {sources[n] for n in operation.operands[1:] if n in sources}
            if len(found) != 1:
                return None
            sources[name] = found.pop()
            canonical.add(name)
        elif operation.name not in ("stablehlo.constant", "stablehlo.compare"):
            return None
    last = body[-1] if body else end
    if last.name != "stablehlo.compare" or end.operands != [last.results[0][0]]:
        return None
    direction, kind = elementwise.comparison_of(last)
    left, right = (sources.get(n, (-1, -1)) for n in last.operands)
    if left[0] != right[0] or (left[1], right[1]) != (0, 1) or direction not in ("LT", "GT"):
        return None
    if kind == "TOTALORDER" and not canonical.issuperset(last.operands):
        return None
    return left[0], direction == "GT"


def _order_by_ranks(before: Join, operands: Sequence[Tensor], axis: int) -> Tensor:
    """The stable order by any comparator: the rank of an element is the number of those before it (n² comparisons)."""
    count = operands[0].shape[axis]
    rest = [a for a in range(operands[0].ndim) if a != axis]
    rows = [s.permute(x, axes=(*rest, axis)) for x in operands]
    shape = (*rows[0].shape, count)
    mine = [broadcast_to(s.expand_dims(x, -1), shape=shape) for x in rows]
    other = [broadcast_to(s.expand_dims(x, -2), shape=shape) for x in rows]
    pairs = [x for pair in zip(other, mine, strict=True) for x in pair]
    (precedes,) = before(*pairs)
    (follows,) = before(*(x for pair in zip(mine, other, strict=True) for x in pair))
    earlier = e.less(s.iota(shape=(count, count), axis=-1), s.iota(shape=(count, count), axis=-2))
    rank = r.sum(precedes | (e.bitwise_not(follows) & earlier), axis=-1)
    hit = e.equal(s.expand_dims(rank, -2), s.iota(shape=(count, count), axis=-2))
    order = r.sum(e.where(hit, s.iota(shape=(count, count), axis=-1), 0), axis=-1)
    back = [*range(axis), len(rest), *range(axis, len(rest))]
    return s.permute(cast(order, dtype=int64), axes=tuple(back))


@row("chlo.top_k")
def _(site: Site, x: Tensor) -> list[Tensor]:
    return take_largest(x, site.get("k"), True, site.operation.types[1].dtype)


def take_largest(x: Tensor, k: int, largest: bool, dtype: DType) -> list[Tensor]:
    """The `k` largest (or smallest) elements of the last axis in the total order of floats, and their indices."""
    _, places = topk(elementwise.order_key(x) if x.dtype.is_float else x, k, largest=largest)
    return [take_along_axis(x, places, -1), cast(places, dtype=dtype)]

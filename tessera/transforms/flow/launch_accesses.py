"""Accesses of a kernel: the elements of a memory that programs of a launch, or trips of its loops, have in common; and
a bound, in symbolic sizes, of the trips that a loop makes in any of its programs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.core.shapes import broadcast
from tessera.core.symbolic_dim import Dim, Size, ceil_divide, proves_at_most
from tessera.core.types import int64, scalar
from tessera.ir.analysis import AffineAnalysis, AffineForm, IntervalAnalysis
from tessera.ir.core import Block, Node, Value
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import basic, elementwise, shape

# Accesses of a kernel: the elements of a memory that programs of a launch, or trips of its loops, have in common.
#
# The derivatives of kernels depend on it: an addition that no other program makes needs no atomics, and a value that is
# overwritten has no derivative. The indices are affine forms of the programs and the loops' indices (Karr 1976).


LOCAL = -1  # the place of a tile in its group, beside the axes of the grid


@dataclass(frozen=True)
class KernelAccesses:
    """The body of a kernel, the grid of its launch, and the tiles of a group."""

    body: Block
    grid: tuple[Size, ...]
    group: int

    def may_be_overwritten(self, node: Node) -> bool:
        """Whether another store, or another trip of a loop, may write the elements that a store writes."""
        ref = node.args[0]
        if len([n for n in self.body.walk() if n.args and n.args[0] is ref and "write" in n.op.effects]) > 1:
            return True
        loops = [n for n in self.body.walk() if n.op is control_flow.for_ and node in n.regions[0].walk()]
        if not loops or node.op is not tile.store:
            return bool(loops)
        indices = {n.regions[0].params[0]: n for n in loops}
        inner = [n for loop in loops for n in loop.regions[0].walk() if n.op is not tile.program_id]
        varying = {v for n in inner for v in (*n.results, *(p for r in n.regions for p in r.params))}
        varying |= {p for n in loops for p in n.regions[0].params[1:]}
        apart: set[Value] = set()
        for form, width in zip(self._find_forms(node), node.args[1].type.shape, strict=True):  # type: ignore[union-attr]
            if form is not None and not form.ramps and (varying - indices.keys()).isdisjoint(form.scalars):
                trips = {v: self.measure_trips(indices[v]) for v in form.scalars if v in indices}
                strides = {v: abs(form.scalars[v]) * step for v, (_, step) in trips.items()}
                apart |= _find_separated(strides, {v: count for v, (count, _) in trips.items()}, int(width))
        return not indices.keys() <= apart

    def _find_forms(self, node: Node) -> list[AffineForm | None]:
        """The affine forms of the indices of a store."""
        analysis = AffineAnalysis({v: n for n in self.body.walk() for v in n.results if not n.regions})
        return [analysis.find_form(v) for v in node.args[2 : 2 + node.args[0].type.rank]]  # type: ignore[union-attr]

    def overlap_between_programs(self, node: Node) -> bool:
        """Whether several programs certainly store to the same elements, so that the order of programs decides."""
        rank = node.args[0].type.rank  # type: ignore[union-attr]
        branches = [n for n in self.body.walk() if n.op is control_flow.if_]
        if len(node.args) > 2 + rank or any(node in r.walk() for n in branches for r in n.regions):
            return False
        sizes = {**dict(enumerate(self.grid)), LOCAL: self.group}
        ref, shape = node.args[0].type, broadcast(*(v.type.shape for v in node.args[1 : 2 + rank]))  # type: ignore[union-attr]
        is_whole = node in self.body.nodes and node.attrs.get("edge") != "clip"
        stored, room = math.prod(sizes.values()) * math.prod(shape), math.prod(ref.shape)  # type: ignore[union-attr]
        if is_whole and proves_at_most(room + 1, stored):
            return True  # they store more elements than there are
        used = [self._find_programs(v) for v in node.args[2 : 2 + rank]]
        if node.op is not tile.store:
            return any(proves_at_most(2, n) and all(axis not in u for u in used) for axis, n in sizes.items())
        indices = list(zip(self._find_forms(node), used, node.args[1].type.shape, strict=True))  # type: ignore[union-attr]

        def meets(axis: int) -> bool:
            return all(axis not in u or self._is_narrow(form, axis, int(width)) for form, u, width in indices)

        return any(proves_at_most(2, size) and meets(axis) for axis, size in sizes.items())

    def _is_narrow(self, form: AffineForm | None, axis: int, width: int) -> bool:
        """Whether the windows of neighbouring programs certainly have an element in common along a dim."""
        if form is None or form.ramps:
            return False
        own = {v for n in self.body.walk() if n.op is tile.program_id and n.attrs["axis"] == axis for v in n.results}
        if any(axis in self._find_programs(v) for v in form.scalars if v not in own):
            return False
        return abs(sum(k for v, k in form.scalars.items() if v in own)) < width

    def _find_programs(self, value: Value) -> set[int]:
        """The axes of the grid on which an index may depend."""
        producers = {v: n for n in self.body.walk() for v in n.results}
        bounds = {n.regions[0].params[0]: n.args[:3] for n in self.body.walk() if n.op is control_flow.for_}
        every = {LOCAL, *range(max(len(self.grid), 1))}
        found: set[int] = set()
        pending, seen = [value], set(self.body.params)
        while pending:
            current = pending.pop()
            if current in seen:
                continue
            seen.add(current)
            node = producers.get(current)
            if node is not None and node.op in (tile.program_id, tile.local_id):
                found.add(node.attrs.get("axis", LOCAL))
            elif current in bounds:
                pending += bounds[current]
            elif node is None or node.regions:
                return every
            else:
                pending += node.args
        return found

    def is_owned_by_program(self, ref: Value) -> bool:
        """Whether no two programs of the launch load the same element of a memory.

        Along each axis of the grid, some axis of the memory is cut into windows that no program leaves.
        """
        if self.group > 1:
            return False
        accesses = [n for n in self.body.walk() if n.args and n.args[0] is ref]
        if any(n.op is not tile.load for n in accesses):
            return False
        analysis = AffineAnalysis({v: n for n in self.body.walk() for v in n.results if not n.regions})
        forms = [[analysis.find_form(v) for v in n.args[1 : 1 + ref.type.rank]] for n in accesses]  # type: ignore[union-attr]
        grid = self.grid
        walked = {axis for axis, size in enumerate(grid) if not proves_at_most(size, 1)}
        programs = {v: n.attrs["axis"] for n in self.body.walk() if n.op is tile.program_id for v in n.results}
        covered: set[int] = set()
        for dim in range(ref.type.rank):  # type: ignore[union-attr]
            blocks = [int(n.attrs["shape"][dim]) for n in accesses]
            covered |= _find_windowed_axes([f[dim] for f in forms], blocks, programs, grid)
        return walked <= covered

    def measure_trips(self, node: Node) -> tuple[float, float]:
        """The most trips that a loop makes in any program (infinite: no bound is known), and its least step."""
        producers = {v: n for n in self.body.walk() for v in n.results}
        analysis = IntervalAnalysis(producers, tuple(math.inf if isinstance(n, Dim) else n for n in self.grid))
        for each in self.body.walk():
            if each.op is control_flow.for_:
                analysis.loop(each)
        (low, _), (_, high), (step, _) = (analysis.of(v) for v in node.args[:3])
        if step <= 0 or not math.isfinite(high - low):
            return math.inf, max(step, 0) if math.isfinite(step) else 0
        return max(math.ceil((high - low) / step), 1), step


def _find_windowed_axes(
    forms: Sequence[AffineForm | None], blocks: Sequence[int], programs: Mapping[Value, int], grid: Sequence[Size]
) -> set[int]:
    """The axes of the grid whose programs stay in windows of their own along one axis of a memory."""
    strides: list[dict[int, int]] = []
    for form in forms:
        if form is None or form.ramps or not programs.keys() >= form.scalars.keys():
            return set()
        listed: dict[int, int] = {}
        for value, factor in form.scalars.items():
            listed[programs[value]] = listed.get(programs[value], 0) + factor
        strides.append({a: k for a, k in listed.items() if not proves_at_most(grid[a], 1)})
    if any(s != strides[0] for s in strides):
        return set()
    lowest = min(f.constant for f in forms if f is not None)
    width = max(f.constant + b for f, b in zip(forms, blocks, strict=True) if f is not None) - lowest
    return _find_separated(strides[0], dict(enumerate(grid)), width)


def _find_separated(strides: Mapping[Any, float], counts: Mapping[Any, Any], width: Any) -> set[Any]:
    """The variables of an index of which any two settings give windows of `width` without a common element."""
    for key, stride in sorted(strides.items(), key=lambda item: item[1]):
        if not proves_at_most(width, stride):
            return set()
        width = stride * counts[key]
    return set(strides)


# Trip counts: a bound, in symbolic sizes, of the trips that a loop of a kernel makes in any of its programs.


_SCALAR_MOVES = (basic.cast, basic.broadcast_to, shape.reshape)
# A sum of values with factors, and a constant under None.
SizeForm = Mapping[Value | None, Size]
MAX_FORMS = 16  # of one bound: minima of minima


def bound_trips(body: Block, node: Node, grid: Sequence[Size]) -> Size | None:
    """The most trips of a loop in any program of the grid; None where the sizes of the launch do not bound them."""
    forms = _SizeForms({v: n for n in body.walk() for v in n.results}, grid)
    lower, upper, step = node.args[:3]
    (stride, *others) = forms.bound(step, above=True)
    if others or set(stride) - {None} or not isinstance(by := stride.get(None, 0), int) or by < 1:
        return None
    found = [_subtract(a, b) for a in forms.bound(upper, above=True) for b in forms.bound(lower, above=False)]
    gaps = [gap for form in found if (gap := forms.resolve(form)) is not None]
    trips = next((ceil_divide(gap, by) for gap in gaps), None)
    return trips if trips is not None and proves_at_most(1, trips) else None


def _subtract(a: SizeForm, b: SizeForm) -> SizeForm:
    return _combine(a, {key: -factor for key, factor in b.items()})


def _combine(a: SizeForm, b: SizeForm) -> SizeForm:
    summed = {key: a.get(key, 0) + b.get(key, 0) for key in (*a, *b)}
    return {key: factor for key, factor in summed.items() if isinstance(factor, Dim) or factor}


def _is_index(value: Value) -> bool:
    return value.type == scalar(int64)


@dataclass(frozen=True)
class _SizeForms:
    """The sums that bound the indices of a kernel."""

    producers: Mapping[Value, Node]
    grid: Sequence[Size]

    def bound(self, value: Value, above: bool) -> list[SizeForm]:
        """Sums each of which is at least (`above`) or at most an index; the index itself where nothing is known."""
        node = self.producers.get(value)
        found = list(self._list_bounds(node, above))[:MAX_FORMS] if node is not None else []
        return found or [{value: 1}]

    def _list_bounds(self, node: Node, above: bool) -> Iterator[SizeForm]:
        op, args = node.op, node.args
        if op is basic.full:
            yield {None: int(node.attrs["value"])}
        elif op is basic.dim_value:
            yield {None: node.attrs["size"]}
        elif op is tile.program_id:  # one value for all that ask for the same place
            same = (n for n in self.producers.values() if n.op is op and n.attrs["axis"] == node.attrs["axis"])
            yield {next(same).out: 1}
        elif op in _SCALAR_MOVES and _is_index(args[0]) and _is_index(node.out):
            yield from self.bound(args[0], above)
        elif op in (elementwise.add, elementwise.sub):
            combine, flips = (_combine, False) if op is elementwise.add else (_subtract, True)
            for a in self.bound(args[0], above):
                yield from (combine(a, b) for b in self.bound(args[1], above != flips))
        elif op is elementwise.mul:
            yield from self._scale(args, above)
        elif op is (elementwise.minimum if above else elementwise.maximum):
            for arg in args:
                yield from self.bound(arg, above)

    def _scale(self, args: Sequence[Value], above: bool) -> Iterator[SizeForm]:
        """The sums of a product with a constant that is not negative."""
        for factor, other in (args, args[::-1]):
            (form, *rest), least = self.bound(factor, above=True), self.bound(factor, above=False)
            if not rest and least == [form] and not set(form) - {None} and proves_at_most(0, form.get(None, 0)):
                by = form.get(None, 0)
                yield from ({key: by * n for key, n in each.items()} for each in self.bound(other, above))
                return

    def resolve(self, form: SizeForm) -> Size | None:
        """The greatest value of a sum over the programs of the grid; None where it has other values."""
        total = form.get(None, 0)
        for value, factor in form.items():
            if value is None:
                continue
            node = self.producers.get(value)
            if node is None or node.op is not tile.program_id:
                return None
            if proves_at_most(0, factor):
                axis = node.attrs["axis"]
                total = total + factor * ((self.grid[axis] if axis < len(self.grid) else 1) - 1)
            elif not proves_at_most(factor, 0):
                return None
        return total

"""Accesses of a kernel: the elements of a memory that programs of a launch, or trips of its loops, have in common.

The derivatives of kernels depend on it: an addition that no other program makes needs no atomics, and a value that is
overwritten has no derivative. The indices are affine forms of the programs and the loops' indices (Karr 1976).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.core.shapes import broadcast
from tessera.core.symbolic_dim import Dim, Size, proves_at_most
from tessera.ir.analysis import AffineAnalysis, AffineForm, IntervalAnalysis
from tessera.ir.core import Block, Node, Value
from tessera.ops.dialects import control_flow, tile

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

"""Windows of a launch: the part of each memory that the programs of one element access, from affine access maps.

A launch is cut into tiles of programs, one for each element (and round). The index of an access is an affine form of
the program's place in the grid plus a rest with known bounds, so a tile of programs stays in a box of each memory. A
choice of tiles is legal if the boxes of written memories do not overlap (owner computes, Callahan and Kennedy 1988).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from tessera.core.errors import Location
from tessera.core.types import TensorType
from tessera.ir.analysis import AffineAnalysis, IntervalAnalysis
from tessera.ir.core import Block, Node, Value
from tessera.lower.mesh.cost_model import estimate_peak_memory
from tessera.lower.mesh.program_splitting import list_splits
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import contractions

# The number of choices of tiles that are compared; a larger grid is cut into powers of two only.
MAX_CHOICES = 4096
# Operands before the indices of an access.
BEFORE_INDICES = {
    tile.load: 1,
    tile.gather: 1,
    tile.store: 2,
    tile.scatter: 2,
    tile.atomic: 2,
    tile.compare_exchange: 3,
}


LaunchCost = tuple[int, int, int, int]


@dataclass(frozen=True)
class Footprint:
    """The indices that one program accesses along an axis: from `low` to before `high`, plus `steps` by grid axis."""

    steps: Mapping[int, int]
    low: int
    high: int

    def lies_within(self, size: int, grid: Sequence[int]) -> bool:
        """Whether all programs of a grid access indices from 0 to before `size`."""
        reaches = [k * (grid[a] - 1) for a, k in self.steps.items()]
        low, high = self.low + sum(min(r, 0) for r in reaches), self.high + sum(max(r, 0) for r in reaches)
        return low >= 0 and high <= size


@dataclass(frozen=True)
class Window:
    """The window of a memory along each axis: its shape, its first start, and its steps by tile axis.

    `moved` tells the axes whose indices are relative to the start; along the others each element holds all indices.
    """

    shape: tuple[int, ...]
    first: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    moved: tuple[bool, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Obstacle:
    """The reason why programs cannot be cut apart, and the line."""

    reason: str
    loc: Location


@dataclass(frozen=True)
class LaunchTiling:
    """A cut of a launch: the programs of a tile and the tiles along each grid axis, and the window of each memory."""

    grid: tuple[int, ...]
    programs: tuple[int, ...]
    tiles: tuple[int, ...]
    windows: tuple[Window, ...]

    def count_rounds(self, elements: int) -> int:
        """The number of tiles that an element computes in turn."""
        return -(-math.prod(self.tiles) // elements)

    def padded_axes(self, elements: int) -> list[int]:
        """The grid axes along which a tile may have programs past the grid's end."""
        spare = self.count_rounds(elements) * elements != math.prod(self.tiles)
        sizes = zip(self.grid, self.programs, self.tiles, strict=True)
        return [a for a, (g, n, t) in enumerate(sizes) if n * t != g or (a == 0 and spare)]


class LaunchAccesses:
    """The accesses of a kernel's body, in terms of a grid."""

    def __init__(self, body: Block, grid: Sequence[int]) -> None:
        self.body, self.grid = body, tuple(int(n) for n in grid) or (1,)
        nodes = list(body.walk())
        self.programs = {n.out: n.attrs["axis"] for n in nodes if n.op is tile.program_id}
        producers = {v: n for n in nodes for v in n.results}
        self.affine = AffineAnalysis({v: n for v, n in producers.items() if not n.regions})
        self.intervals = IntervalAnalysis(producers, self.grid)
        for node in nodes:
            if node.op is control_flow.for_:
                self.intervals.loop(node)
        self.written = tile.find_written_refs(body)
        self.accesses = {p: [n for n in nodes if p in n.args] for p in body.params}
        self.footprints = {p: self._find_footprints(p) for p in body.params}
        self._windows: dict[tuple[int, ...], tuple[Window, ...]] = {}

    @cached_property
    def splits(self) -> tuple[LaunchAccesses, ...]:
        """The accesses after each split of the programs along a parallel axis."""
        return tuple(LaunchAccesses(*split) for split in list_splits(self.body, self.grid))

    @cached_property
    def temporaries(self) -> int:
        """The peak memory of the values of a program, in bytes."""
        return estimate_peak_memory(self.body)

    @cached_property
    def work(self) -> int:
        """The elements that the ops of a program compute."""
        return estimate_work(self.body)

    def _find_footprints(self, ref: Value) -> list[Footprint | None]:
        """Along each axis of a memory the footprint of all accesses; None where they are not affine."""
        rank = len(ref.type.shape)  # type: ignore[union-attr]
        found = [self._find_access(n, ref) for n in self.accesses[ref]]
        return [_join_footprints([f[axis] for f in found]) for axis in range(rank)]

    def _find_access(self, node: Node, ref: Value) -> list[Footprint | None]:
        rank, first = len(ref.type.shape), BEFORE_INDICES.get(node.op)  # type: ignore[union-attr]
        if first is None or node.args[0] is not ref:
            return [None] * rank
        lengths: Sequence[Any] = (1,) * rank
        if node.op is tile.load:
            lengths = node.attrs["shape"]
        elif node.op is tile.store:
            lengths = node.args[1].type.shape  # type: ignore[union-attr]
        indices = node.args[first : first + rank]
        return [self._find_footprint(v, int(n)) for v, n in zip(indices, lengths, strict=True)]

    def _find_footprint(self, index: Value, length: int) -> Footprint | None:
        form = self.affine.find_form(index)
        if form is None:
            return None
        low = high = float(form.constant)
        steps: dict[int, int] = {}
        shape = index.type.shape  # type: ignore[union-attr]
        for axis, factor in form.ramps.items():
            reach = factor * (int(shape[axis]) - 1)
            low, high = low + min(reach, 0), high + max(reach, 0)
        for value, factor in form.scalars.items():
            if value in self.programs:
                place = self.programs[value]
                steps[place] = steps.get(place, 0) + factor
                continue
            ends = [factor * end for end in self.intervals.of(value)]
            low, high = low + min(ends), high + max(ends)
        if not math.isfinite(high - low):
            return None
        return Footprint({a: k for a, k in steps.items() if k and self.grid_size(a) > 1}, int(low), int(high) + length)

    def grid_size(self, axis: int) -> int:
        """The number of programs along a grid axis."""
        return self.grid[axis] if axis < len(self.grid) else 1

    def tile(self, programs: Sequence[int], tiles: Sequence[int] = ()) -> LaunchTiling:
        """The cut into tiles of so many programs along each grid axis; `tiles` may count more than are needed."""
        programs = tuple(programs)
        if programs not in self._windows:
            self._windows[programs] = tuple(self._find_window(p, programs) for p in self.body.params)
        tiles = tiles or [-(-g // n) for g, n in zip(self.grid, programs, strict=True)]
        return LaunchTiling(self.grid, programs, tuple(tiles), self._windows[programs])

    def _find_window(self, ref: Value, programs: Sequence[int]) -> Window:
        parts = []
        for size, footprint in zip(ref.type.shape, self.footprints[ref], strict=True):  # type: ignore[union-attr]
            parts.append(_find_axis_window(int(size), footprint, programs, self.grid))
        shape, first, steps, moved = zip(*parts, strict=True) if parts else ((), (), (), ())
        return Window(shape, first, steps, moved)

    def find_obstacle(self, tiling: LaunchTiling) -> Obstacle | None:
        """Why two tiles may write the same element, or None."""
        for ref, window in zip(self.body.params, tiling.windows, strict=True):
            if ref not in self.written:
                continue
            apart: set[int] = set()
            for length, steps in zip(window.shape, window.steps, strict=True):
                apart |= _find_separated_axes(steps, tiling.tiles, length)
            if any(n > 1 and axis not in apart for axis, n in enumerate(tiling.tiles)):
                return self._explain(ref)
        return None

    def _explain(self, ref: Value) -> Obstacle:
        opaque = [n for n in self.accesses[ref] if None in self._find_access(n, ref)]
        name = ref.hint or "a memory"
        if opaque:
            return Obstacle(f"the index of `{name}` is no affine function of the program's ids", opaque[0].loc)
        store = next(n for n in self.accesses[ref] if "write" in n.op.effects)
        return Obstacle(f"several programs access the elements of `{name}` that this writes", store.loc)

    def count_bytes(self, tiling: LaunchTiling) -> int:
        """The bytes of the windows of one element; 8-bit elements have 16 bits there."""
        pairs = zip(self.body.params, tiling.windows, strict=True)
        return sum(w.size * max(p.type.dtype.numpy.itemsize, 2) for p, w in pairs)

    def choose(self, elements: int, budget: int) -> tuple[LaunchTiling, LaunchCost]:
        """The legal cut with the fewest programs in turn among those whose windows and temporaries fit `budget` bytes.

        Where none fits, the one of the fewest bytes.
        """
        budget -= self.temporaries
        whole = self.tile(self.grid)
        best, cost = whole, self._estimate(whole, elements, budget)
        for programs in _list_choices(self.grid, elements):
            tiling = self.tile(programs)
            if self.find_obstacle(tiling) is None:
                found = self._estimate(tiling, elements, budget)
                best, cost = (tiling, found) if found < cost else (best, cost)
        return best, cost

    def _estimate(self, tiling: LaunchTiling, elements: int, budget: int) -> LaunchCost:
        """The cost of a cut, in order: bytes beyond the budget, work of one element, rounds, bytes."""
        held, rounds = self.count_bytes(tiling), tiling.count_rounds(elements)
        return max(0, held - budget), rounds * math.prod(tiling.programs) * self.work, rounds, held


@lru_cache(maxsize=32)
def analyse_launch(body: Block, grid: tuple[int, ...]) -> LaunchAccesses:
    """The accesses of a kernel's body. The layout search asks for those of one launch for each layout that it tries."""
    return LaunchAccesses(body, grid)


def explain_whole(body: Block, grid: Sequence[int]) -> Obstacle | None:
    """Why a launch runs whole on every element of a mesh, or None if it can be cut."""
    accesses = analyse_launch(body, tuple(grid))
    obstacles = []
    for axis, size in enumerate(accesses.grid):
        if size > 1:
            programs = [1 if a == axis else n for a, n in enumerate(accesses.grid)]
            obstacles.append(accesses.find_obstacle(accesses.tile(programs)))
    return obstacles[0] if obstacles and None not in obstacles else None


# A split of programs must save this share of an element's work.
LEAST_SAVING = 1 / 10


def cut_launch(body: Block, grid: Sequence[int], elements: int, budget: int) -> tuple[LaunchAccesses, LaunchTiling]:
    """The best cut of a launch over the elements of a mesh; programs are split where one does not fit or many idle."""
    accesses = analyse_launch(body, tuple(grid))
    tiling, cost = accesses.choose(elements, budget)
    while True:
        found = [(*each.choose(elements, budget), each) for each in accesses.splits]
        if not found:
            return accesses, tiling
        best = min(found, key=lambda f: f[1])
        if best[1][0] >= cost[0] and not (best[1][0] == cost[0] and best[1][1] < (1 - LEAST_SAVING) * cost[1]):
            return accesses, tiling
        tiling, cost, accesses = best


def estimate_work(block: Block) -> int:
    """The elements that the ops of a block compute, a product's with those of its sums; loops count once."""
    total = 0
    for node in block.walk():
        for value in node.results:
            if isinstance(value.type, TensorType) and not node.regions:
                depth = int(node.types[0].shape[-1]) if node.op is contractions.dot else 1  # type: ignore[union-attr]
                total += math.prod(map(int, value.type.shape)) * depth
    return total


def _join_footprints(found: Sequence[Footprint | None]) -> Footprint | None:
    """The footprint of several accesses along one axis, if all move alike with the programs."""
    if not found or None in found or any(f.steps != found[0].steps for f in found):  # type: ignore[union-attr]
        return None
    return Footprint(found[0].steps, min(f.low for f in found), max(f.high for f in found))  # type: ignore[union-attr]


def _find_axis_window(
    size: int, footprint: Footprint | None, programs: Sequence[int], grid: Sequence[int]
) -> tuple[int, int, tuple[int, ...], bool]:
    """Length, first start, steps and whether it moves, of the window along one axis of a memory."""
    whole = size, 0, (0,) * len(grid), False
    if footprint is None or all(programs[a] >= grid[a] for a in footprint.steps):
        return whole
    reaches = [k * (programs[a] - 1) for a, k in footprint.steps.items()]
    low = footprint.low + sum(min(r, 0) for r in reaches)
    length = footprint.high + sum(max(r, 0) for r in reaches) - low
    steps = tuple(
        footprint.steps.get(a, 0) * n if n < g else 0 for a, (n, g) in enumerate(zip(programs, grid, strict=True))
    )
    return (length, low, steps, True) if length < size else whole


def _find_separated_axes(steps: Sequence[int], tiles: Sequence[int], width: int) -> set[int]:
    """The tile axes such that tiles that differ there have windows of `width` without a common index."""
    moving = sorted((abs(s), axis) for axis, s in enumerate(steps) if s and tiles[axis] > 1)
    for step, axis in moving:
        if step < width:
            return set()
        width = step * (tiles[axis] - 1) + width
    return {axis for _, axis in moving}


def _list_choices(grid: Sequence[int], elements: int) -> Iterator[tuple[int, ...]]:
    """The programs of a tile along each grid axis, as many combinations as are worth comparing."""
    options = [sorted({-(-g // t) for t in (*range(1, min(g, 2 * elements) + 1), g)} | {1}) for g in grid]
    if math.prod(map(len, options)) > MAX_CHOICES:
        options = [sorted({-(-g // (1 << i)) for i in range(g.bit_length() + 1)}) for g in grid]
    return itertools.product(*options)

"""A result takes the memory of an argument only where no element is overwritten before all that needs it is computed.

Kernels are drawn, and every program and element of them is followed: what is stored is known as the elements of the
argument that it needs. The order of programs is arbitrary, and so is that of the elements of a block, each of which may
be loaded, computed and stored by itself.
"""

import math
from collections import defaultdict
from typing import NamedTuple

import numpy as np
import pytest

from tessera.codegen.donation import find_reusable
from tessera.core.types import RefType, int64
from tessera.ir.builder import Builder, evaluate_block
from tessera.ir.core import Attrs, Function, Module, Value
from tessera.ops.dialects import host, tile
from tessera.ops.tensor import basic, shape
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor.reduce import sum as sum_

TABLE = np.array([3, 0, 2, 1])  # an argument that holds places
FIRST_RESULT = 2  # of the parameters
ODD = (  # what a kernel has that donation must look at
    "step", "number", "numbers", "other place", "held place", "other shape", "moved", "count", "counts", "again",
    "more", "repeated",
)  # fmt: skip


class Drawn:
    """A module of one launch, `kernel(x, table, out, more)`, which stores what it computes of blocks of `x`."""

    def __init__(self, seed):
        self.rng, self.builder = np.random.default_rng(seed), Builder()
        self.odd = set(self.rng.choice(ODD, self.rng.integers(3)).tolist())
        self.sizes = ((24,), (6, 8))[self.rng.integers(2)]
        self.grid = tuple(self.rng.integers(2, 4, self.rng.integers(1, len(self.sizes) + 1)).tolist())
        self.block = tuple(self.rng.choice((2, 2, 4, 1), len(self.sizes)).tolist())
        if "numbers" in self.odd:
            self.sizes, self.grid, self.block = (24,), (2, 3), (2,)
        params = [Value(RefType(s, int64)) for s in (self.sizes, TABLE.shape, self.sizes, self.sizes)]
        self.x, self.table, *self.results = params
        self.draw_body()
        kernel, entry = Function("kernel", self.builder.block(params, ())), Builder()
        given = [Value(p.type) for p in params]
        entry.add(host.launch, given, {"kernel": "kernel", "grid": self.grid})
        main = Function("main", entry.block(given, ()), Attrs({"outputs": len(self.results)}))
        self.module = Module("tile", (main, kernel))

    def pick(self, *choices):
        return choices[self.rng.integers(len(choices))]

    def add(self, op, *args, **attrs):
        return next(iter(self.builder.add(op, args, attrs).results), None)

    def make_number(self, number):
        return self.add(basic.full, shape=(), value=int(number), dtype=int64)

    def draw_body(self):
        at = self.draw_starts()
        sizes = self.block[::-1] if "other shape" in self.odd else self.block
        value = self.add(tile.load, self.x, *at, shape=sizes, edge="clip")
        starts = self.draw_starts() if "other place" in self.odd else at
        store = self.scatter if self.odd & {"count", "counts"} else self.pick(self.store, self.scatter)
        store(self.results[0], self.move(value) if "moved" in self.odd else self.add(e.neg, value), starts)
        if "again" in self.odd:
            value = self.add(tile.load, self.x, *at, shape=self.block, edge="clip")
        if "repeated" in self.odd:
            self.scatter_repeated(self.results[1], value)
        elif self.odd & {"again", "more"}:
            self.store(self.results[1], value, starts)

    def draw_starts(self):
        return [self.draw_start(axis) for axis in range(len(self.sizes))]

    def draw_start(self, axis):
        """Where a block begins: the number of a program times its size; other steps, places that are held."""
        size, number = self.block[axis], min(axis, len(self.grid) - 1)
        numbers = (
            (0, 1) if "numbers" in self.odd else (0 if "number" in self.odd else number,) * (1 + ("step" in self.odd))
        )
        at = self.make_number(self.rng.integers(-1, 3) if "other place" in self.odd else 0)
        for each in numbers:
            step = self.rng.integers(-1, 4) if "step" in self.odd else size
            moved = self.add(e.mul, self.add(tile.program_id, axis=each), self.make_number(step))
            at = self.add(self.pick(e.add, e.sub), moved, at)
        if "held place" not in self.odd:
            return at
        held = self.add(tile.load, self.table, self.make_number(self.rng.integers(4)), shape=(1,))
        return self.add(e.add, at, self.add(shape.reshape, held, shape=()))

    def move(self, value):
        """The elements in another order, or their sums."""
        sizes = value.type.shape
        if len(sizes) == 2 and self.rng.random() < 0.5:
            return self.add(shape.permute, value, axes=(1, 0))
        return self.add(basic.broadcast_to, self.add(sum_, value, axis=(0,), keepdims=True), shape=sizes)

    def store(self, memory, value, starts):
        self.add(tile.store, memory, self.add(shape.reshape, value, shape=self.block), *starts, edge="clip")

    def scatter(self, memory, value, starts):
        """To places that count up along an axis of the block for each axis of the memory, or in another order."""
        places = []
        for axis, at in enumerate(starts):
            first = self.add(basic.broadcast_to, at, shape=self.block)
            places.append(self.add(e.add, *self.pick((first, self.count(axis)), (self.count(axis), first))))
        self.add(tile.scatter, memory, self.add(shape.reshape, value, shape=self.block), *places)

    def count(self, axis):
        """The numbers along an axis, as wide as the block: in order, or of a block of another shape."""
        size, sizes = self.block[axis], self.block
        if "counts" in self.odd and self.rng.random() < 0.8:
            return self.add(shape.iota, shape=sizes, axis=-int(self.rng.integers(1, len(sizes) + 1)))
        if "count" not in self.odd or self.rng.random() < 0.3:
            line = tuple(size if a == axis else 1 for a in range(len(sizes)))
            counted = self.add(shape.reshape, self.add(shape.iota, shape=(size,)), shape=line)
            return self.add(basic.broadcast_to, counted, shape=sizes)
        whole = math.prod(sizes)
        half = min(whole, 2)
        other = self.pick((1,), (1, whole), (whole // half, half), (half, whole // half), (whole, 1))
        counted = self.add(shape.iota, shape=other, axis=-int(self.rng.integers(1, len(other) + 1)))
        if self.rng.random() < 0.2:
            counted = self.add(e.add, counted, counted)
        return self.add(basic.broadcast_to if other == (1,) else shape.reshape, counted, shape=sizes)

    def scatter_repeated(self, memory, value):
        """Operands that a scatter repeats: a column of what was loaded, as the value or as places along one axis."""
        count, rank = math.prod(self.block), len(self.sizes)
        column = self.add(shape.reshape, value, shape=(count, 1))
        if self.rng.random() < 0.5:
            column = self.add(basic.broadcast_to, column, shape=(count, 2))
        counted = [self.add(shape.iota, shape=(count, 2), axis=-a) for a in (2, 1)[:rank]]
        held = rank == 2 and self.rng.random() < 0.5
        stored, places = (counted[0], [column, counted[1]]) if held else (column, counted)
        self.add(tile.scatter, memory, stored, *places)


# What each element is, and which elements of `x` it needs.


class Followed(NamedTuple):
    """Elements, and for each what it needs: elements of `x`, a row for each set of results that is stored before."""

    numbers: np.ndarray
    needs: np.ndarray


def join(function, *operands):
    needs = np.logical_or.reduce(np.broadcast_arrays(*(o.needs for o in operands)))
    return Followed(function(*(o.numbers for o in operands)), needs)


def count_up(sizes, axis):
    return np.indices(sizes)[axis]


FOLLOWED = {
    e.mul: lambda attrs, x, y: join(np.multiply, x, y),
    e.add: lambda attrs, x, y: join(np.add, x, y),
    e.sub: lambda attrs, x, y: join(np.subtract, x, y),
    e.neg: lambda attrs, x: join(np.negative, x),
    shape.reshape: lambda attrs, x: Followed(
        x.numbers.reshape(attrs["shape"]), x.needs.reshape(*attrs["shape"], x.needs.shape[-1])
    ),
    basic.broadcast_to: lambda attrs, x: Followed(
        np.broadcast_to(x.numbers, attrs["shape"]), np.broadcast_to(x.needs, (*attrs["shape"], x.needs.shape[-1]))
    ),
    shape.permute: lambda attrs, x: Followed(
        x.numbers.transpose(attrs["axes"]), x.needs.transpose(*attrs["axes"], len(attrs["axes"]))
    ),
    sum_: lambda attrs, x: Followed(
        x.numbers.sum(attrs["axis"], keepdims=True), x.needs.any(attrs["axis"], keepdims=True)
    ),
}


class Program:
    """One program of the grid: the elements that it stores, each with its place and what it needs."""

    def __init__(self, drawn, ids):
        self.drawn, self.ids, self.size = drawn, ids, math.prod(drawn.sizes)
        self.stored = {memory: [] for memory in drawn.results}  # pairs of places, -1 outside, and needs
        evaluate_block(drawn.module.functions[1].body, drawn.module.functions[1].params, self.follow)

    def follow(self, node, args, walk):
        attrs = node.attrs.plain()
        if node.op is tile.load:
            return [self.load(args, attrs["shape"])]
        if node.op in (tile.store, tile.scatter):
            self.store(node.op, *args)
            return []
        if node.op in FOLLOWED:
            return [FOLLOWED[node.op](attrs, *args)]
        if node.op is tile.program_id:
            return [self.make(np.array(self.ids[attrs["axis"]]))]
        counted = node.op is shape.iota
        return [
            self.make(count_up(attrs["shape"], attrs["axis"]) if counted else np.full(attrs["shape"], attrs["value"]))
        ]

    def make(self, numbers):
        return Followed(numbers, np.zeros((*numbers.shape, self.size << len(self.stored)), bool))

    def load(self, args, sizes):
        memory, starts = args[0], [a.numbers for a in args[1:]]
        if memory is self.drawn.table:
            return self.make(TABLE[int(starts[0])].reshape(sizes))
        places = find_places(self.drawn.sizes, [s + count_up(sizes, a) for a, s in enumerate(starts)])
        loaded = self.make(places)
        before = sum(bool(stored) << k for k, stored in enumerate(self.stored.values()))
        for at in zip(*np.nonzero(places >= 0), strict=True):
            loaded.needs[(*at, places[at] + before * self.size)] = True
        return loaded

    def store(self, op, memory, value, *indices):
        if op is tile.store:
            numbers = [i.numbers + count_up(value.numbers.shape, a) for a, i in enumerate(indices)]
            needs = value.needs
        else:
            numbers = np.broadcast_arrays(*(i.numbers for i in indices))
            needs = np.logical_or.reduce(np.broadcast_arrays(*(v.needs for v in (value, *indices))))
        places = find_places(self.drawn.sizes, numbers).ravel()
        self.stored[memory] += zip(places.tolist(), needs.reshape(places.size, -1), strict=True)


def find_places(sizes, indices):
    """The numbers of elements of row-major memory; -1 outside of it."""
    inside = np.logical_and.reduce([(i >= 0) & (i < n) for i, n in zip(indices, sizes, strict=True)])
    return np.where(inside, np.ravel_multi_index(tuple(indices), sizes, mode="clip"), -1)


def find_conflict(drawn, result):
    """An element of `x` that a store to a result overwrites before all that needs it is computed, or None."""
    programs = [Program(drawn, ids) for ids in np.ndindex(*drawn.grid)]
    stored = [
        ((number, lane), memory, place, needs)
        for number, program in enumerate(programs)
        for memory, elements in program.stored.items()
        for lane, (place, needs) in enumerate(elements)
    ]
    writers = defaultdict(set)
    for each, memory, place, _ in stored:
        if memory is result:
            writers[place].add(each)
    for each, _, _, needs in stored:
        for needed in np.flatnonzero(needs).tolist():
            before, place = divmod(needed, math.prod(drawn.sizes))
            late = before >> drawn.results.index(result) & 1
            if writers[place] - (set() if late else {each}):
                return place
    return None


KERNELS, LEAST = 100, 15  # of a test, and how many of each kind there are at least


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_overwritten_that_is_needed(seed):
    allowed, conflicts = 0, 0
    for number in range(KERNELS):
        drawn = Drawn([seed, number])
        found = find_reusable(drawn.module, [0])
        for result in found:
            place = find_conflict(drawn, drawn.results[result - FIRST_RESULT])
            assert place is None, f"kernel {seed}, {number}: element {place}"
        allowed += bool(found)
        if not found and conflicts < LEAST:
            conflicts += find_conflict(drawn, drawn.results[0]) is not None
    assert allowed >= LEAST and conflicts == LEAST  # kernels of both kinds are drawn

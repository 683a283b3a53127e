"""Mesh lowering state: the SPMD program under construction, and the sharding and resharding of its values (GSPMD, Xu
et al. 2021).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tessera.core.errors import UnsupportedOpError
from tessera.core.types import DType, TensorType, int64
from tessera.ir.builder import Builder
from tessera.ir.core import Node, Value
from tessera.ir.rules import Op
from tessera.lower.mesh.cost_model import estimate_all_gather_cycles
from tessera.ops.dialects import mesh, tile
from tessera.ops.dialects.mesh import UNSPLIT
from tessera.ops.tensor import basic, shape
from tessera.ops.tensor import elementwise as e

# Sharding: the mesh, how tensors are cut over its axes, and values held in pieces (GSPMD, Xu et al. 2021).


# The sharding of an axis: a mesh axis, WHOLE, constant along the axis, or open (not yet chosen).
CONSTANT, OPEN = -2, -3
Sharding = tuple[int, ...]
SUMMA, CANNON = "summa", "cannon"


def tensor_type_of(value: Value) -> TensorType:
    """The type of a value that is a tensor."""
    assert isinstance(value.type, TensorType), "a mesh holds tensors"
    return value.type


@dataclass(frozen=True)
class MeshShape:
    """A grid of processing elements."""

    rows: int = 1
    columns: int = 1
    product: str = SUMMA  # the algorithm of distributed products

    @property
    def grid(self) -> tuple[int, int]:
        """Rows, then columns."""
        return self.rows, self.columns

    @property
    def panels(self) -> int:
        """The number of panels: the least that both rows and columns divide."""
        return math.lcm(*self.grid)

    def piece(self, size: int, cut: int) -> int:
        """The length of a piece of an axis: pieces are equal, and of whole panels."""
        if cut == CONSTANT:
            return 1
        return size if cut == UNSPLIT else -(-size // self.panels) * (self.panels // self.grid[cut])

    def plain(self, split: Sharding) -> Sharding:
        """A sharding in which axes of one piece are whole."""
        return tuple(UNSPLIT if s >= 0 and self.grid[s] == 1 else s for s in split)

    def padded(self, size: int, cut: int) -> bool:
        """Whether the pieces extend past the end of the tensor."""
        return cut >= 0 and self.piece(size, cut) * self.grid[cut] != size

    def local(self, type: TensorType, split: Sharding) -> TensorType:
        """The type of one piece."""
        return type.with_shape(tuple(self.piece(int(n), s) for n, s in zip(type.shape, split, strict=True)))


@dataclass
class ShardedTensor:
    """A tensor on the mesh: its sharding, and `make(split)`, its piece at a compatible sharding."""

    type: TensorType
    split: Sharding
    make: Callable[[Sharding], Value]
    clean: bool = False  # elements past its end are 0
    source: Value | None = None  # the host memory of an input that nothing else uses
    copy_back: Callable[[Value], None] | None = None  # copies the windows of a launch's result to host memory
    made: dict[Sharding, Value] = field(default_factory=dict)

    def at(self, split: Sharding) -> Value:
        """The piece at a sharding; each is computed once."""
        if split not in self.made:
            self.made[split] = self.make(split)
        return self.made[split]


def choose_default_sharding(type: TensorType, split: Sharding) -> Sharding:
    """Shard open and constant axes by the mesh axes that are not used, the last axis first."""
    cut, free = list(split), [a for a in (0, 1) if a not in split]
    for axis in reversed(range(len(cut))):
        if cut[axis] in (OPEN, CONSTANT):
            alone = int(type.shape[axis]) == 1
            wanted = 1 if axis == len(cut) - 1 else 0
            cut[axis] = CONSTANT if alone else wanted if wanted in free and axis >= len(cut) - 2 else UNSPLIT
            free = [a for a in free if a != cut[axis]]
    return tuple(cut)


def find_common_sharding(splits: Sequence[Sharding]) -> Sharding | None:
    """The sharding at which several values of one shape can all be computed; None where theirs conflict."""
    found = []
    for axis in zip(*splits, strict=True):
        cuts = {s for s in axis if s >= 0}
        if len(cuts) > 1:
            return None
        known = cuts or {s for s in axis if s == UNSPLIT} or {s for s in axis if s == OPEN} or {CONSTANT}
        found.append(known.pop())
    cut = [s for s in found if s >= 0]
    return tuple(found) if len(set(cut)) == len(cut) else None


# Mesh lowering state: the SPMD program under construction, and resharding of its values.


# The part of an element's memory for pieces; code and temporaries need the rest.
PIECE_MEMORY_BYTES = 36 * 1024
# The share of it for which a launch is cut: its emission may need more temporaries than are estimated.
LAUNCH_SHARE = 2 / 3


class NoMapping(UnsupportedOpError):
    """An op cannot be computed with the shardings of its operands."""


@dataclass
class MeshLowering:
    """The program that each element of the mesh runs, and the sharding of each value of the graph."""

    mesh: MeshShape
    builder: Builder = field(default_factory=Builder)
    held: dict[Value, ShardedTensor] = field(default_factory=dict)
    # Estimated costs, by which shardings of the inputs are compared.
    cycles: float = 0.0
    kept: int = 0  # bytes of the pieces of inputs and outputs
    largest: int = 0  # bytes of the largest piece in between

    def add(self, op: Op, *args: Value, **attrs: Any) -> Value:
        """The result of a node of the program."""
        out = self.builder.add(op, args, attrs).out
        self.cycles += 24 + count_piece_elements(out) / 2
        self.largest = max(self.largest, count_piece_elements(out) * out.type.dtype.numpy.itemsize)
        return out

    def has_memory_for(self, bytes: int) -> bool:
        """Whether so many more bytes fit into an element's memory, beside host buffers and temporaries."""
        return self.kept + 2 * self.largest + bytes <= PIECE_MEMORY_BYTES

    def index(self, value: int) -> Value:
        """A constant index."""
        return self.builder.add(basic.full, (), {"shape": (), "value": value, "dtype": int64}).out

    def place(self, cut: int) -> Value:
        """This element's coordinate along a mesh axis."""
        return self.builder.add(tile.program_id, (), {"axis": cut}).out

    def hold(self, node: Node, split: Sharding, value: Value) -> ShardedTensor:
        """The result of a node, computed at one sharding."""
        return self.lying(tensor_type_of(node.out), split, value)

    def lying(self, type: TensorType, split: Sharding, value: Value, clean: bool = False) -> ShardedTensor:
        """A replicated tensor: each element holds `value`."""
        found = ShardedTensor(type, split, lambda wanted: self.moved(type, split, value, wanted), clean)
        found.made[split] = value
        return found

    def moved(self, type: TensorType, split: Sharding, value: Value, wanted: Sharding) -> Value:
        """Reshard a piece: gather it, slice the whole axis, or repeat a constant one."""
        pairs = list(enumerate(zip(split, wanted, strict=True)))
        for axis, (has, wants) in pairs:
            if has >= 0 and wants != has:
                value = self.together(type, value, axis, has)
        for axis, (has, wants) in pairs:
            if has != CONSTANT and wants >= 0 and wants != has:
                value = self.cut(type, value, axis, wants)
        return self.broadcast_axes(value, self.mesh.local(type, wanted))

    def together(self, type: TensorType, value: Value, axis: int, cut: int) -> Value:
        """All-gather a sharded axis."""
        size = int(type.shape[axis])
        found = self.add(mesh.all_gather, value, axis=axis - type.rank, along=cut, size=size)
        self.cycles += estimate_all_gather_cycles(count_piece_elements(found), self.mesh.grid[cut])
        return found

    def broadcast_axes(self, value: Value, type: TensorType) -> Value:
        """A value with its axes of size 1 repeated."""
        shape = tuple(type.shape)
        return value if tuple(value.type.shape) == shape else self.add(basic.broadcast_to, value, shape=shape)

    def cut(self, type: TensorType, value: Value, axis: int, cut: int) -> Value:
        """Slice this element's piece of a whole axis; zeros past the end."""
        size, pieces = int(type.shape[axis]), self.mesh.grid[cut]
        if pieces == 1:
            return value
        if lacking := self.mesh.piece(size, cut) * pieces - size:
            sizes = tuple(lacking if a == axis else int(n) for a, n in enumerate(value.type.shape))
            value = self.add(mesh.join, value, self.full(type.with_shape(sizes), 0), axis=axis - type.rank)
        return self.add(mesh.panel, value, self.place(cut), axis=axis - type.rank, count=pieces)

    def settle(self, x: ShardedTensor) -> Sharding:
        """A sharding at which a value can be computed, without open axes."""
        return self.mesh.plain(choose_default_sharding(x.type, x.split))

    def unshard_axes(self, x: ShardedTensor, axes: Sequence[int]) -> Sharding:
        """A sharding of a value in which some of its axes are whole."""
        split = list(self.settle(x))
        for axis in axes:
            split[axis] = CONSTANT if x.split[axis] == CONSTANT and int(x.type.shape[axis]) == 1 else UNSPLIT
        return tuple(split)

    def fill_padding(
        self, x: ShardedTensor, split: Sharding, axis: int, fill: float, value: Value | None = None
    ) -> Value:
        """The piece at a sharding, with `fill` past the tensor's end along an axis."""
        value = x.at(split) if value is None else value
        size = int(x.type.shape[axis])
        if not self.mesh.padded(size, split[axis]) or (fill == 0 and x.clean):
            return value
        return self.add(
            e.where,
            self.inside(tensor_type_of(value), axis, split[axis], size),
            value,
            self.full(tensor_type_of(value), fill),
        )

    def inside(self, type: TensorType, axis: int, cut: int, size: int) -> Value:
        """Which elements of a piece lie before the tensor's end along an axis."""
        places = self.places(type, axis, cut, int64)
        limit = self.full(tensor_type_of(places), size)
        return self.broadcast_axes(self.add(e.less, places, limit), type)

    def places(self, type: TensorType, axis: int, cut: int, dtype: DType) -> Value:
        """The indices along an axis of the tensor of this element's piece; other axes have size 1."""
        length = int(type.shape[axis])
        shape_ = tuple(length if a == axis else 1 for a in range(type.rank))
        found = self.add(shape.iota, shape=shape_, axis=axis, dtype=dtype)
        if cut < 0 or self.mesh.grid[cut] == 1:
            return found
        first = self.add(e.mul, self.place(cut), self.index(length))
        start = first if dtype == int64 else self.add(basic.cast, first, dtype=dtype)
        level = self.add(shape.reshape, start, shape=(1,) * type.rank)
        return self.add(e.add, found, self.broadcast_axes(level, tensor_type_of(found)))

    def full(self, type: TensorType, value: Any) -> Value:
        """A block of one value."""
        one = self.builder.add(basic.full, (), {"shape": (1,) * type.rank, "value": value, "dtype": type.dtype}).out
        return self.broadcast_axes(one, type)

    def make_mapping_error(self, why: str) -> NoMapping:
        """Make the error for an op that no mesh computes, of whatever size."""
        return NoMapping(
            f"this has no mapping onto a mesh of processing elements: {why}", location=self.builder.location,
            suggestion="run this part on another target: llvm, ptx or the interpreter",
        )  # fmt: skip


def count_piece_elements(value: Value) -> int:
    """The elements of a piece."""
    return math.prod(map(int, value.type.shape))

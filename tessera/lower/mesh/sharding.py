"""Sharding: the mesh, how tensors are cut over its axes, and values held in pieces (GSPMD, Xu et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tessera.core.types import TensorType
from tessera.ir.core import Value
from tessera.ops.dialects.mesh import UNSPLIT

# The sharding of an axis: a mesh axis, WHOLE, constant along the axis, or open (not yet chosen).
CONSTANT, OPEN = -2, -3
Sharding = tuple[int, ...]
SUMMA, CANNON = "summa", "cannon"


def tensor_type_of(value: Value) -> TensorType:
    """The type of a value that is a tensor."""
    assert isinstance(value.type, TensorType), "a mesh holds tensors"
    return value.type


@dataclass(frozen=True)
class Mesh:
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

"""Elements named by blocks of indices: a gather or a scatter, or a plain block where the indices run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tessera.kernel import affine
from tessera.kernel.fit import to_dtype, to_shape
from tessera.kernel.place import Memory, Place, View
from tessera.kernel.trace import as_index, emit, shaped
from tessera.ops import tile
from tessera.ops.basic import broadcast_to
from tessera.shapes import broadcast
from tessera.tensor import Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Cells(Place):
    """One index for each axis of the memory, scalars or blocks, broadcast together."""

    memory: Memory
    given: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the indices, broadcast."""
        return tuple(int(n) for n in broadcast(*(t.shape for t in self.given)))  # type: ignore[arg-type]

    def load(self, mask: Any = None, other: Any = None, edge: str = "error") -> Tensor:
        """The elements that the indices name now."""
        run = self.run()
        if run is not None:
            return shaped(run.load(*self._reshaped(run, mask, other), edge), self.shape)
        given, rest = self.operands(self._inside(mask, edge), other)
        if len(rest) > 1 and rest[1].shape:
            rest[1] = to_shape(rest[1], self.shape, "the block")
        return emit(tile.gather, [self.memory.ref(), *self.indices(), *rest])

    def store(self, value: Any, mask: Any = None, edge: str = "error") -> None:
        """Write the elements that the indices name; numbers and smaller shapes are broadcast."""
        name = self.memory.name
        block = to_shape(to_dtype(value, self.dtype, name), self.shape, name)
        run = self.run()
        if run is not None:
            run.store(shaped(block, run.shape), self._reshaped(run, mask, None)[0], edge)
            return
        _, rest = self.operands(self._inside(mask, edge))
        emit(tile.scatter, [self.memory.ref(), block, *self.indices(), *rest])

    def indices(self) -> list[Tensor]:
        """An index for each axis of the ref, each of the shape of the block."""
        blocks = [t if t.shape == self.shape else broadcast_to(t, shape=self.shape) for t in self.given]
        return [*(as_index(i) for i in self.memory.prefix), *(as_index(t) for t in blocks)]

    def _inside(self, mask: Any, edge: str) -> Any:
        """With "clip" the elements outside are masked off: a gather has no edge of its own."""
        if edge == "error":
            return mask
        for index, size in zip(self.given, self.memory.shape, strict=True):
            inside = (index >= 0) & (index < size)  # type: ignore[operator]
            mask = inside if mask is None else mask & inside
        return mask

    def _reshaped(self, run: View, mask: Any, other: Any) -> tuple[Any, Any]:
        return self._fitted(run, mask), self._fitted(run, other)

    def _fitted(self, run: View, block: Any) -> Any:
        if not isinstance(block, Tensor) or not block.shape:
            return block
        return shaped(to_shape(block, self.shape, "the block"), run.shape)

    def run(self) -> View | None:
        """The block these elements form, where each axis of the memory is walked by its own axis of the indices.

        A block access is faster than a gather on every target, and can be checked as a whole.
        """
        forms = [affine.form(t, deep=False) for t in self.given]
        shape, rank = self.shape, len(self.shape)
        starts, sizes, dropped, walked = [], [], set(), []
        for axis, found in enumerate(forms):
            if found is None or len(found.ramps) > 1 or any(step != 1 for step in found.ramps.values()):
                return None
            walked += list(found.ramps)
            if not found.ramps:
                dropped.add(axis)
            starts.append(found)
            sizes.append(shape[next(iter(found.ramps))] if found.ramps else 1)
        if walked != [a - rank for a in range(rank) if shape[a] != 1]:
            return None
        return View(self.memory, tuple(affine.scalar_part(f) for f in starts), tuple(sizes), frozenset(dropped))

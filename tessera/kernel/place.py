"""Places in memory: a tensor or buffer that a kernel names, and blocks of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tessera.errors import OutOfBoundsError
from tessera.ir.core import Value
from tessera.kernel import affine
from tessera.kernel.fit import to_dtype, to_mask, to_shape
from tessera.kernel.trace import Index, as_index, emit, shaped
from tessera.ops import tile
from tessera.ops.basic import broadcast_to, full
from tessera.ops.shape import iota, reshape
from tessera.shapes import Size
from tessera.shapes.rules import show
from tessera.tensor import Tensor
from tessera.types import DType, RefType, TensorType, bool_


@dataclass(eq=False)
class Memory:
    """What a ref stands for: its name in the kernel, the dims it was declared with, and its IR value.

    Buffers in a list come to share one allocation: `prefix` is then this one's place in it. That
    works only as long as no node has `used` the value.
    """

    value: Value
    name: str
    dims: tuple[Size, ...] = ()
    prefix: tuple[int, ...] = ()
    used: bool = False

    @property
    def type(self) -> RefType:
        """The type of the ref."""
        assert isinstance(self.value.type, RefType)
        return self.value.type

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the memory, the shared axis left out."""
        return tuple(int(s) for s in self.type.shape[len(self.prefix) :])  # type: ignore[arg-type]

    def named(self, name: str) -> None:
        """Call a buffer by the first variable that holds it."""
        if self.name.startswith("the "):
            self.name = name

    def ref(self) -> Value:
        """The IR value, now in use."""
        self.used = True
        return self.value


class Place:
    """What can be read and written: `load` and `store` record it, and arithmetic loads by itself."""

    memory: Memory

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the block that a load gives."""
        raise NotImplementedError

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self.memory.type.dtype

    @property
    def ndim(self) -> int:
        """The number of axes of the block."""
        return len(self.shape)

    @property
    def type(self) -> TensorType:
        """The type of the block."""
        return self.memory.type.block(self.shape)

    @property
    def is_element(self) -> bool:
        """Whether this is one element of a larger memory."""
        return not self.shape and bool(self.memory.shape)

    def load(self, mask: Any = None, other: Any = None, edge: str = "error") -> Tensor:
        """The block that lies here now."""
        raise NotImplementedError

    def store(self, value: Any, mask: Any = None, edge: str = "error") -> None:
        """Write a block here; numbers and smaller shapes are broadcast."""
        raise NotImplementedError

    def indices(self) -> list[Tensor]:
        """An index for each axis of the memory, which together broadcast to the shape of the block."""
        raise NotImplementedError

    def operands(self, mask: Any, other: Any = None) -> tuple[Tensor | None, list[Tensor]]:
        """The mask, and the mask and the value beside it as operands; a value alone brings a mask along."""
        given = to_mask(mask, self.shape)
        if other is None:
            return given, [] if given is None else [given]
        given = full(shape=self.shape, value=True, dtype=bool_) if given is None else given
        return given, [given, to_dtype(value(other), self.dtype, self.memory.name)]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.load(), name)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"{self.memory.name}: {self.memory.type}"


def value(x: Any) -> Any:
    """A place read; anything else as it is."""
    return x.load() if isinstance(x, Place) else x


@dataclass(frozen=True, eq=False, repr=False)
class View(Place):
    """A block of memory: where it starts and how far it goes along each axis; `dropped` axes have one element."""

    memory: Memory
    starts: tuple[Index, ...]
    sizes: tuple[int, ...]
    dropped: frozenset[int] = frozenset()
    vector: int = 1  # how many elements lie together, at a multiple of their number

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the block: the axes that were not indexed by a scalar."""
        return tuple(n for axis, n in enumerate(self.sizes) if axis not in self.dropped)

    @property
    def is_whole(self) -> bool:
        """Whether this is all of its memory."""
        at_zero = all(isinstance(s, int) and s == 0 for s in self.starts)
        return at_zero and not self.dropped and self.sizes == self.memory.shape

    @property
    def full_sizes(self) -> tuple[int, ...]:
        """The size of the block along each axis of the ref."""
        return (1,) * len(self.memory.prefix) + self.sizes

    def load(self, mask: Any = None, other: Any = None, edge: str = "error") -> Tensor:
        """The block that lies here now."""
        given, rest = self.operands(mask, other)
        if given is None and edge == "error":
            self.check()
        if given is not None:
            rest[0] = shaped(given, self.full_sizes)
        if len(rest) > 1 and rest[1].shape:
            rest[1] = shaped(to_shape(rest[1], self.shape, "the block"), self.full_sizes)
        operands = [self.memory.ref(), *self.origin(), *rest]
        return shaped(emit(tile.load, operands, shape=self.full_sizes, edge=edge, vector=self.vector), self.shape)

    def store(self, value: Any, mask: Any = None, edge: str = "error") -> None:
        """Write a block here; numbers and smaller shapes are broadcast."""
        name = self.memory.name
        given, rest = self.operands(mask)
        if given is None and edge == "error":
            self.check()
        block = to_shape(to_dtype(value, self.dtype, name), self.shape, name)
        masks = [shaped(m, self.full_sizes) for m in rest]
        operands = [self.memory.ref(), shaped(block, self.full_sizes), *self.origin(), *masks]
        emit(tile.store, operands, edge=edge, vector=self.vector)

    def origin(self) -> list[Tensor]:
        """The start along each axis of the ref."""
        return [as_index(i) for i in (*self.memory.prefix, *self.starts)]

    def indices(self) -> list[Tensor]:
        """An index for each axis of the ref, which together broadcast to the shape of the block."""
        kept = [axis for axis in range(len(self.sizes)) if axis not in self.dropped]
        found: list[Tensor] = [as_index(i) for i in self.memory.prefix]
        for axis, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            if axis in self.dropped:
                found.append(as_index(start))
                continue
            along = tuple(size if a == axis else 1 for a in kept)
            ramp = reshape(iota(shape=(size,)), shape=along)
            found.append(broadcast_to(ramp + start, shape=self.shape))
        return found

    def check(self) -> None:
        """Refuse a block that certainly lies outside its memory."""
        for axis, (start, size, room) in enumerate(zip(self.starts, self.sizes, self.memory.shape, strict=True)):
            first = affine.constant(start)
            if first is not None and (first < 0 or first + size > room):
                raise OutOfBoundsError(
                    f"{_span(first, size)} of {self.memory.name} is outside axis {axis} of size {room}",
                    expected=f"{self.memory.name} has shape {show(self.memory.shape)}",
                    suggestion='tile.load(..., edge="clip") reads zeros outside' if size > 1 else None,
                )


def _span(first: int, size: int) -> str:
    return f"index {first}" if size == 1 else f"the block {first}:{first + size}"

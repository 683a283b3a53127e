"""The operands of a DSD operation under way: where each stands, what it lacks to go on, what it gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tessera.interp.target.csl.streams import FLOATING, read, scalar, vector
from tessera.interp.target.csl.values import Circular, Fabin, Fifo, Mem1d, Mem4d
from tessera.interp.target.csl.wavelets import CONTROL, MARKED, WORD

if TYPE_CHECKING:
    from tessera.interp.target.csl.pe import Pe


class Wait(NamedTuple):
    """What a thread waits for: a wavelet ("in"), room ("out"), a FIFO, or a state."""

    kind: str
    key: Any


class Source:
    """One operand of an operation under way; as it stands here, a scalar."""

    waits = False
    local = True  # it is memory or a scalar, and always there

    def __init__(self, pe: Pe, operand: Any, dtype: np.dtype[Any], count: int) -> None:
        self.pe, self.operand, self.dtype = pe, operand, dtype
        self.prepare(count)

    def prepare(self, count: int) -> None:
        """What can be worked out before the first of `count` elements."""
        self.value = scalar(self.operand, self.dtype)

    def ready(self, count: int) -> int:
        """How many elements can be read or written now, up to `count`."""
        return count

    def wait(self, count: int) -> Wait:
        """What to wait for when none can."""
        raise AssertionError("memory never waits")

    def read(self, start: int, count: int) -> Any:
        """Take elements."""
        return self.value


class FromMemory(Source):
    """Memory behind a descriptor."""

    def prepare(self, count: int) -> None:
        """See all elements at once, where they lie inside their array and apart."""
        self.view = whole(self.operand, self.dtype, count)

    def read(self, start: int, count: int) -> Any:
        """The elements, not copied."""
        if self.view is not None:
            return self.view[start : start + count]
        return read(self.operand, self.dtype, start, count)


def whole(d: Any, dtype: np.dtype[Any], count: int) -> np.ndarray[Any, Any] | None:
    """All elements of a vector; None where some lie outside of its array, or all at one place."""
    if type(d) is not Mem1d or d.stride == 0 or d.array.dtype == object:
        return None
    first, held = d.byte // dtype.itemsize, len(d.array) * d.array.dtype.itemsize // dtype.itemsize
    last = first + (count - 1) * d.stride
    return vector(d, dtype, 0, count) if count and 0 <= min(first, last) and max(first, last) < held else None


class FromRing(Source):
    """A circular buffer."""

    local = False

    def prepare(self, count: int) -> None:
        """Nothing."""

    def read(self, start: int, count: int) -> Any:
        """The elements, around the end of the array."""
        return self.operand.array.view(self.dtype)[ring(self.operand, self.dtype, start, count)]


def ring(d: Circular, dtype: np.dtype[Any], start: int, count: int) -> np.ndarray[Any, Any]:
    """The positions of elements in a circular buffer."""
    return (d.byte // dtype.itemsize + start + np.arange(count)) % len(d.array)


class FromFabric(Source):
    """Wavelets of a color."""

    waits, local = True, False

    def prepare(self, count: int) -> None:
        """Find the queue."""
        self.queue, self.events = self.pe.fabric.queue(self.operand.color), self.pe.events
        self.waiting = Wait("in", self.operand.color)

    def ready(self, count: int) -> int:
        """Data words that have arrived."""
        found = self.queue.count(self.events.now)
        return found if found < count else count

    def wait(self, count: int) -> Wait:
        """Ask to be told when `count` are there."""
        self.queue.want(count)
        return self.waiting

    def read(self, start: int, count: int) -> Any:
        """Take words off the queue."""
        return words_to(np.array(self.queue.take(self.events.now, count), np.uint32), self.dtype)


class FromPairs(FromFabric):
    """Wavelets that carry two elements of 16 bits each, the first in the low half; the last may carry one."""

    def prepare(self, count: int) -> None:
        """Find the queue; no element is left of a wavelet."""
        super().prepare(count)
        self.left = np.zeros(0, self.dtype)

    def ready(self, count: int) -> int:
        """Elements of the words that have arrived."""
        return min(count, len(self.left) + 2 * self.queue.count(self.events.now))

    def wait(self, count: int) -> Wait:
        """Ask to be told when the words of `count` elements are there."""
        return super().wait(-(-(count - len(self.left)) // 2))

    def read(self, start: int, count: int) -> Any:
        """Take words off the queue, and keep the element that is too many."""
        words = self.queue.take(self.events.now, -(-(count - len(self.left)) // 2))
        found = np.concatenate([self.left, np.array(words, np.uint32).view(self.dtype)])
        self.left = found[count:]
        return found[:count]


class FromMarked(FromFabric):
    """Wavelets of both kinds: those of control are marked in their upper two bits, which data does not have."""

    def ready(self, count: int) -> int:
        """Words that have arrived."""
        return min(count, self.queue.arrived(self.events.now))

    def read(self, start: int, count: int) -> Any:
        """Take words off the queue."""
        words = [self.queue.take_any(self.events.now) for _ in range(count)]
        marked = [word & ~MARKED & WORD | (MARKED if word & CONTROL else 0) for word in words]
        return words_to(np.array(marked, np.uint32), self.dtype)


def words_to(words: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> Any:
    """Wavelets as elements; 16-bit ones are in the low half."""
    return words.view(dtype) if dtype.itemsize == 4 else (words & 0xFFFF).astype(np.uint16).view(dtype)


class FromFifo(Source):
    """Elements that leave a FIFO."""

    waits, local = True, False

    def prepare(self, count: int) -> None:
        """Nothing."""

    def ready(self, count: int) -> int:
        """Elements that it holds."""
        return min(count, len(self.operand.words))

    def wait(self, count: int) -> Wait:
        """Note that a read found nothing."""
        self.operand.starved = True
        return Wait("fifo", self.operand)

    def read(self, start: int, count: int) -> Any:
        """Take elements, and tell who waits for room."""
        taken = [self.operand.words.popleft() for _ in range(count)]
        self.pe.notify("fifo", self.operand)
        if self.operand.on_pop is not None and self.operand.choked:
            self.pe.activate(self.operand.on_pop)
        self.operand.choked = False
        return np.array(taken, self.dtype) if self.dtype.kind in FLOATING else np.array(taken).astype(self.dtype)


class IntoFifo(FromFifo):
    """Elements that enter a FIFO."""

    def ready(self, count: int) -> int:
        """For how many it has room."""
        return min(count, self.operand.capacity - len(self.operand.words))

    def wait(self, count: int) -> Wait:
        """Note that a write found no room."""
        self.operand.choked = True
        return Wait("fifo", self.operand)


SOURCES: dict[type, type[Source]] = {
    Mem1d: FromMemory,
    Mem4d: FromMemory,
    Circular: FromRing,
    Fabin: FromFabric,
    Fifo: FromFifo,
}


def opened(pe: Pe, operand: Any, dtype: np.dtype[Any], count: int) -> Source:
    """An operand of an operation on `count` elements."""
    kind = SOURCES.get(type(operand), Source)
    if kind is FromFabric and operand.transform:
        kind = FromMarked
    elif kind is FromFabric and lanes_of(operand, dtype) == 2:
        kind = FromPairs
    return kind(pe, operand, dtype, count)


def lanes_of(d: Any, dtype: np.dtype[Any]) -> int:
    """How many elements a wavelet of a fabric descriptor carries: two at most, and only where they have 16 bits."""
    return d.lanes if dtype.itemsize == 2 else 1

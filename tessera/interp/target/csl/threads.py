"""DSD operations that touch the fabric or a FIFO, as generators that wait for data and room."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tessera.interp.target.csl.dsd_ops import DsdOp
from tessera.interp.target.csl.faults import CslFault
from tessera.interp.target.csl.streams import Thread, apply, convert, length, read, scalar, write
from tessera.interp.target.csl.values import Circular, Fabin, Fabout, Fifo, Mem1d, Mem4d, Pointer

if TYPE_CHECKING:
    from tessera.interp.target.csl.pe import Pe


class Wait(NamedTuple):
    """What a thread waits for: a wavelet ("in"), room ("out"), a FIFO, or a state."""

    kind: str
    key: Any


class Stream:
    """One operand of an operation under way: where it stands, and what it lacks to go on."""

    def __init__(self, pe: Pe, operand: Any, dtype: np.dtype[Any], writes: bool = False) -> None:
        self.pe, self.operand, self.dtype, self.writes = pe, operand, dtype, writes
        self.kind = KINDS.get(type(operand), SCALAR)

    def ready(self, count: int) -> int:
        """How many elements can be read or written now, up to `count`."""
        return self.kind.ready(self, count)

    def wait(self, count: int) -> Wait:
        """What to wait for when none can."""
        return self.kind.wait(self, count)

    def read(self, start: int, count: int) -> Any:
        """Take elements."""
        return self.kind.read(self, start, count)


class Kind(NamedTuple):
    """How one kind of operand behaves."""

    ready: Callable[[Stream, int], int]
    wait: Callable[[Stream, int], Wait]
    read: Callable[[Stream, int, int], Any]


def _always(s: Stream, count: int) -> int:
    return count


def _never(s: Stream, count: int) -> Wait:
    raise AssertionError("memory never waits")


def _fabin_ready(s: Stream, count: int) -> int:
    return min(count, s.pe.fabric.count(s.operand.color))


def _fabin_wait(s: Stream, count: int) -> Wait:
    s.pe.fabric.want(s.operand.color, count)
    return Wait("in", s.operand.color)


def _fabin_read(s: Stream, start: int, count: int) -> Any:
    words = np.array(s.pe.fabric.pop(s.operand.color, count), np.uint32)
    return words_to(words, s.dtype)


def words_to(words: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> Any:
    """Wavelets as elements; 16-bit ones are in the low half."""
    return words.view(dtype) if dtype.itemsize == 4 else (words & 0xFFFF).astype(np.uint16).view(dtype)


def to_words(found: np.ndarray[Any, Any]) -> list[int]:
    """Elements as wavelets."""
    flat = np.ascontiguousarray(found)
    return flat.view(np.uint32 if flat.dtype.itemsize == 4 else np.uint16).astype(np.uint32).tolist()


def _fifo_ready(s: Stream, count: int) -> int:
    held = len(s.operand.words)
    return min(count, s.operand.capacity - held if s.writes else held)


def _fifo_wait(s: Stream, count: int) -> Wait:
    s.operand.choked |= s.writes
    s.operand.starved |= not s.writes
    return Wait("fifo", s.operand)


def _fifo_read(s: Stream, start: int, count: int) -> Any:
    taken = [s.operand.words.popleft() for _ in range(count)]
    s.pe.notify("fifo", s.operand)
    if s.operand.on_pop is not None and s.operand.choked:
        s.pe.activate(s.operand.on_pop)
    s.operand.choked = False
    return np.array(taken, s.dtype) if s.dtype.kind == "f" else np.array(taken).astype(s.dtype)


def _memory_read(s: Stream, start: int, count: int) -> Any:
    return read(s.operand, s.dtype, start, count)


def _scalar_read(s: Stream, start: int, count: int) -> Any:
    return scalar(s.operand, s.dtype)


def _circular(d: Circular, dtype: np.dtype[Any], start: int, count: int) -> np.ndarray[Any, Any]:
    return (d.byte // dtype.itemsize + start + np.arange(count)) % len(d.array)


def _circular_read(s: Stream, start: int, count: int) -> Any:
    return s.operand.array.view(s.dtype)[_circular(s.operand, s.dtype, start, count)]


MEMORY = Kind(_always, _never, _memory_read)
SCALAR = Kind(_always, _never, _scalar_read)
KINDS: dict[type, Kind] = {
    Mem1d: MEMORY,
    Mem4d: MEMORY,
    Circular: Kind(_always, _never, _circular_read),
    Fabin: Kind(_fabin_ready, _fabin_wait, _fabin_read),
    Fifo: Kind(_fifo_ready, _fifo_wait, _fifo_read),
}


def stream(
    pe: Pe, op: DsdOp, operands: tuple[Any, ...], options: dict[str, Any], sync: bool = False
) -> Generator[Any, None, bool]:
    """Run an operation, as far as its operands allow at a time. False where a synchronous one met an empty or full
    FIFO; `options["ended"]` is set where a control wavelet ended it."""
    dest, *given = operands
    count = length(operands)
    if type(dest) is Pointer:
        return (yield from _into_pointer(pe, op, dest, given, count, sync))
    sources = [Stream(pe, o, x.dtype) for o, x in zip(given, op.sources, strict=True)]
    target = Stream(pe, dest, op.result.dtype, writes=True)
    waiting = [*sources, target] if type(dest) is Fifo else sources
    done, width = 0, op.width[pe.wide]
    while done < count:
        step = count - done
        for s in waiting:
            step = s.ready(step)
            if step:
                continue
            if "on_control" in options and _ended(s, options):
                return True
            if sync and type(s.operand) is Fifo:
                _remaining(s, count - done)
                return False
            yield s.wait(count - done)
            break
        if step:
            yield from _step(pe, op, target, sources, done, step, options.get("index", 0))
            done += step
            yield pe.events.now + -(-step // width)
    return True


def _ended(s: Stream, options: dict[str, Any]) -> bool:
    """Whether a control wavelet stands where data is wanted; it is taken."""
    if type(s.operand) is not Fabin or s.pe.fabric.pop_control(s.operand.color) is None:
        return False
    options["ended"] = True
    return True


def _remaining(s: Stream, count: int) -> None:
    """A synchronous operation stops at a FIFO: note the event, and the length that is left."""
    s.wait(count)
    if s.writes:
        s.operand.write_length = min(s.operand.write_length, count)
    else:
        s.operand.read_length = min(s.operand.read_length, count)


def _step(pe: Pe, op: DsdOp, target: Stream, sources: list[Stream], done: int, step: int, index: int = 0) -> Thread:
    dest = target.operand
    if isinstance(dest, (Mem1d, Mem4d)) and all(s.kind in (MEMORY, SCALAR) for s in sources):
        apply(op, dest, [s.operand for s in sources], done, step)
        return
    args = [s.read(done, step) for s in sources]
    if isinstance(dest, Mem1d) and dest.stride == 0 and step > 1:
        _accumulate(op, dest, sources, args, done, step)
        return
    found = convert(op.compute(*args), op.result.dtype)
    if type(dest) is Fabout:
        yield from send(pe, dest, _spread(found, step), index)
    elif type(dest) is Fifo:
        dest.words.extend(_spread(found, step))
        pe.notify("fifo", dest)
        if dest.on_push is not None and dest.starved:
            pe.activate(dest.on_push)
        dest.starved = False
    elif type(dest) is Circular:
        dest.array.view(op.result.dtype)[_circular(dest, op.result.dtype, done, step)] = found
    elif isinstance(dest, (Mem1d, Mem4d)):
        write(dest, op.result.dtype, done, step, found)
    else:
        raise CslFault(f"'@{op.name}' into an uninitialized descriptor")


def _spread(found: Any, count: int) -> np.ndarray[Any, Any]:
    flat = np.atleast_1d(found)
    return flat if len(flat) == count else np.repeat(flat, count)


def _accumulate(op: DsdOp, dest: Mem1d, sources: list[Stream], args: list[Any], done: int, step: int) -> None:
    """Fold into one cell, in order: sources at that cell are read anew for each element."""
    for i in range(step):
        values = []
        for s, a in zip(sources, args, strict=True):
            fixed = np.ndim(a) == 0 or len(a) == 1
            values.append(read(s.operand, s.dtype, done, 1) if s.kind is MEMORY and fixed else a if fixed else a[i])
        write(dest, op.result.dtype, done + i, 1, op.compute(*values))


def send(pe: Pe, dest: Fabout, found: np.ndarray[Any, Any], index: int = 0) -> Thread:
    """Put elements into an output queue and wait until the router has room for what is left."""
    words = to_words(found)
    if dest.indexed:
        words = [word & 0xFFFF | index << 16 for word in words]
    while not pe.fabric.push(dest.color, words, dest.control):
        yield Wait("out", dest.color)
    while not pe.fabric.settled(dest.color):
        yield Wait("out", dest.color)


def _into_pointer(
    pe: Pe, op: DsdOp, dest: Pointer, given: list[Any], count: int, sync: bool
) -> Generator[Any, None, bool]:
    """Fold a stream into one cell, which stays as it is where a FIFO runs out."""
    sequence = Stream(pe, given[-1], op.sources[-1].dtype)
    value = scalar(given[0], op.result.dtype) if len(given) > 1 else None
    done = 0
    while done < count:
        step = sequence.ready(count - done)
        if not step and sync and type(sequence.operand) is Fifo:
            _remaining(sequence, count - done)
            return False
        if not step:
            yield sequence.wait(count - done)
            continue
        for item in _spread(sequence.read(done, step), step):
            found = op.compute(item) if value is None or len(given) == 1 else op.compute(value, item)
            value = convert(found, _of(op))[()]
        done += step
        yield pe.events.now + step
    if value is not None:
        dest.array[dest.index] = np.array([value], _of(op)).view(dest.array.dtype)[0]
    return True


def _of(op: DsdOp) -> np.dtype[Any]:
    return op.result.dtype


__all__ = ["Wait", "send", "stream", "to_words", "words_to"]

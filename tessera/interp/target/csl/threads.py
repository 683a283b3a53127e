"""DSD operations that touch the fabric or a FIFO, as generators that wait for data and room."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.interp.target.csl.dsd_ops import DsdOp
from tessera.interp.target.csl.faults import CslFault
from tessera.interp.target.csl.sources import (
    FromMemory,
    IntoFifo,
    Source,
    Wait,
    lanes_of,
    opened,
    ring,
    whole,
    words_to,
)
from tessera.interp.target.csl.streams import Thread, apply, convert, length, read, scalar, write
from tessera.interp.target.csl.values import Circular, Fabin, Fabout, Fifo, Mem1d, Mem4d, Pointer
from tessera.interp.target.csl.wavelets import ADVANCE, CONTROL, MARKED, WORD

if TYPE_CHECKING:
    from tessera.interp.target.csl.pe import Pe


def to_words(found: np.ndarray[Any, Any]) -> list[int]:
    """Elements as wavelets."""
    flat = np.ascontiguousarray(found)
    return flat.view(np.uint32 if flat.dtype.itemsize == 4 else np.uint16).astype(np.uint32).tolist()


def stream(
    pe: Pe, op: DsdOp, operands: tuple[Any, ...], options: dict[str, Any], sync: bool = False
) -> Generator[Any, None, bool]:
    """Run an operation, as far as its operands allow at a time. False where a synchronous one met an empty or full
    FIFO; `options["ended"]` is set where a control wavelet ended it."""
    dest, *given = operands
    count = length(operands)
    if type(dest) is Pointer:
        return (yield from _into_pointer(pe, op, dest, given, count, sync))
    sources = [opened(pe, o, x.dtype, count) for o, x in zip(given, op.sources, strict=True)]
    waiting = [s for s in sources if s.waits]
    if type(dest) is Fifo:
        waiting.append(IntoFifo(pe, dest, op.result.dtype, count))
    store = _delivery(pe, op, dest, sources, count)
    done, width = 0, op.width[pe.wide]
    sender = Sender(pe, dest, op.result.dtype, count, options.get("index", 0)) if type(dest) is Fabout else None
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
            found = store(done, step)
            if sender is not None:
                yield from sender.send(found)
            done += step
            yield pe.events.now + -(-step // width)
    return True


def _ended(s: Source, options: dict[str, Any]) -> bool:
    """Whether a control wavelet stands where data is wanted; it is taken."""
    if type(s.operand) is not Fabin or s.pe.fabric.pop_control(s.operand.color) is None:
        return False
    options["ended"] = True
    return True


def _remaining(s: Source, count: int) -> None:
    """A synchronous operation stops at a FIFO: note the event, and the length that is left."""
    s.wait(count)
    if isinstance(s, IntoFifo):
        s.operand.write_length = min(s.operand.write_length, count)
    else:
        s.operand.read_length = min(s.operand.read_length, count)


Delivery = Callable[[int, int], Any]


def _delivery(pe: Pe, op: DsdOp, dest: Any, sources: list[Source], count: int) -> Delivery:
    """What computes elements `done` to `done + step` and puts them where they belong; it gives back what is to be
    sent."""
    if isinstance(dest, (Mem1d, Mem4d)):
        return _into_memory(op, dest, sources, count)
    dtype = op.result.dtype

    def found(done: int, step: int) -> np.ndarray[Any, Any]:
        return _spread(convert(op.compute(*[s.read(done, step) for s in sources]), dtype), step)

    def into_fifo(done: int, step: int) -> None:
        dest.words.extend(found(done, step))
        pe.notify("fifo", dest)
        if dest.on_push is not None and dest.starved:
            pe.activate(dest.on_push)
        dest.starved = False

    def into_ring(done: int, step: int) -> None:
        dest.array.view(dtype)[ring(dest, dtype, done, step)] = found(done, step)

    ways: dict[type, Delivery] = {Fabout: found, Fifo: into_fifo, Circular: into_ring}
    if type(dest) not in ways:
        raise CslFault(f"'@{op.name}' into an uninitialized descriptor")
    return ways[type(dest)]


def _into_memory(op: DsdOp, dest: Mem1d | Mem4d, sources: list[Source], count: int) -> Delivery:
    """What computes elements and writes them to memory."""
    dtype, view = op.result.dtype, whole(dest, op.result.dtype, count)
    if all(s.local for s in sources):
        return lambda done, step: apply(op, dest, [s.operand for s in sources], done, step)

    def store(done: int, step: int) -> None:
        args = [s.read(done, step) for s in sources]
        if type(dest) is Mem1d and dest.stride == 0 and step > 1:
            _accumulate(op, dest, sources, args, done, step)
        elif view is not None:
            view[done : done + step] = convert(op.compute(*args), dtype)
        else:
            write(dest, dtype, done, step, op.compute(*args))

    return store


def _spread(found: Any, count: int) -> np.ndarray[Any, Any]:
    flat = np.atleast_1d(found)
    return flat if len(flat) == count else np.repeat(flat, count)


def _accumulate(op: DsdOp, dest: Mem1d, sources: list[Source], args: list[Any], done: int, step: int) -> None:
    """Fold into one cell, in order: sources at that cell are read anew for each element."""
    for i in range(step):
        values = []
        for s, a in zip(sources, args, strict=True):
            fixed = np.ndim(a) == 0 or len(a) == 1
            anew = fixed and isinstance(s, FromMemory)
            values.append(read(s.operand, s.dtype, done, 1) if anew else a if fixed else a[i])
        write(dest, op.result.dtype, done + i, 1, op.compute(*values))


class Sender:
    """The way of `count` elements into an output queue: as wavelets, with what the descriptor adds to them."""

    def __init__(self, pe: Pe, dest: Fabout, dtype: np.dtype[Any], count: int, index: int = 0) -> None:
        self.pe, self.dest, self.index, self.due = pe, dest, index, count
        self.paired = lanes_of(dest, dtype) == 2
        self.left = np.zeros(0, dtype)

    def words(self, found: np.ndarray[Any, Any]) -> list[int]:
        """Elements as wavelets; of an odd number of paired ones the last stays until there are more, or no more."""
        self.due -= len(found)
        words = self._pairs(found) if self.paired else to_words(found)
        if self.dest.indexed:
            words = [word & 0xFFFF | self.index << 16 for word in words]
        if self.dest.transform:
            words = [word & ~MARKED | CONTROL if word & MARKED == MARKED else word for word in words]
        if self.dest.control:
            words = [word | CONTROL for word in words]
        if self.dest.advance and not self.due and words:
            words[-1] |= ADVANCE
        return words

    def _pairs(self, found: np.ndarray[Any, Any]) -> list[int]:
        flat = np.concatenate([self.left, found])
        whole = len(flat) if not self.due else len(flat) // 2 * 2
        self.left, flat = flat[whole:], flat[:whole]
        padded = np.concatenate([flat, np.zeros(whole % 2, flat.dtype)])
        return padded.view(np.uint32).tolist()

    def send(self, found: np.ndarray[Any, Any]) -> Thread:
        """Put elements into the queue and wait until the router has room for what is left."""
        color, words = self.dest.color, self.words(found)
        while words and not self.pe.fabric.push(color, words):
            yield Wait("out", color)
        while not self.pe.fabric.settled(color):
            yield Wait("out", color)


def dropping(pe: Any, source: Fabin) -> Thread:
    """Take words off a queue until as many control words were among them as the descriptor is long."""
    queue, left = pe.fabric.queue(source.color), source.extent
    while left:
        while not queue.arrived(pe.events.now):
            yield Wait("in", source.color)
        left -= queue.take_any(pe.events.now) > WORD
        yield pe.events.now + 1


def _into_pointer(
    pe: Pe, op: DsdOp, dest: Pointer, given: list[Any], count: int, sync: bool
) -> Generator[Any, None, bool]:
    """Fold a stream into one cell, which stays as it is where a FIFO runs out."""
    sequence = opened(pe, given[-1], op.sources[-1].dtype, count)
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


__all__ = ["Sender", "Wait", "stream", "to_words", "words_to"]

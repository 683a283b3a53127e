"""Microthreads: DSD operations on the fabric or a FIFO, as generators that wait for data and room."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from tessera.interp.target.csl.cost_model import COSTS
from tessera.interp.target.csl.fabric.routing import (
    ADVANCE_FLAG,
    CONTROL_FLAG,
    CONTROL_MARK,
    WORD_MASK,
    decode_entry_point,
)
from tessera.interp.target.csl.pe.dsd_operations import (
    FLOAT_KINDS,
    Microthread,
    apply_operation,
    convert_result,
    convert_scalar,
    count_parts,
    operation_length,
    read_elements,
    view_vector,
    write_elements,
)
from tessera.interp.target.csl.pe.dsd_table import DsdOp
from tessera.interp.target.csl.pe.pe_state import PeState, WaitCondition
from tessera.interp.target.csl.pe.scheduler import activate, notify
from tessera.interp.target.csl.pe.stream_reading import StoreElements, read_stream
from tessera.interp.target.csl.sema.values import Circular, Fabin, Fabout, Fifo, Mem1d, Mem4d, Pointer
from tessera.interp.target.csl.text.diagnostics import CslFault

# The operands of a DSD operation in progress.


class DsdSource:
    """One operand of an operation in progress; the base class is a scalar."""

    waits = False
    local = True  # whether it is memory or a scalar, which is always ready

    def __init__(self, pe: PeState, operand: Any, dtype: np.dtype[Any], count: int) -> None:
        self.pe, self.operand, self.dtype = pe, operand, dtype
        self.prepare(count)

    def prepare(self, count: int) -> None:
        """Compute what is known before the first of `count` elements."""
        self.value = convert_scalar(self.operand, self.dtype)

    def ready(self, count: int) -> int:
        """The number of elements that can be read or written now, up to `count`."""
        return count

    def wait(self, count: int) -> WaitCondition:
        """The condition to wait for when none is ready."""
        raise AssertionError("memory never waits")

    def read(self, start: int, count: int) -> Any:
        """Read elements."""
        return self.value


class MemorySource(DsdSource):
    """A memory DSD."""

    def prepare(self, count: int) -> None:
        """View all elements at once if they are in bounds and distinct."""
        self.view = view_whole_vector(self.operand, self.dtype, count)

    def read(self, start: int, count: int) -> Any:
        """A view of the elements."""
        if self.view is not None:
            return self.view[start : start + count]
        return read_elements(self.operand, self.dtype, start, count)


def view_whole_vector(d: Any, dtype: np.dtype[Any], count: int) -> np.ndarray[Any, Any] | None:
    """All elements of a vector; None if some are out of bounds, or the stride is 0."""
    if type(d) is not Mem1d or d.stride == 0 or d.array.dtype == object:
        return None
    first, cell_count = d.byte // dtype.itemsize, len(d.array) * d.array.dtype.itemsize // dtype.itemsize
    last = first + (count - 1) * d.stride * count_parts(d.array, dtype)
    return (
        view_vector(d, dtype, 0, count) if count and 0 <= min(first, last) and max(first, last) < cell_count else None
    )


class CircularBufferSource(DsdSource):
    """A circular buffer."""

    local = False

    def prepare(self, count: int) -> None:
        """Do nothing."""

    def read(self, start: int, count: int) -> Any:
        """Read elements, and wrap at the end of the array."""
        return self.operand.array.view(self.dtype)[ring_positions(self.operand, self.dtype, start, count)]


def ring_positions(d: Circular, dtype: np.dtype[Any], start: int, count: int) -> np.ndarray[Any, Any]:
    """The positions of elements in a circular buffer."""
    return (d.byte // dtype.itemsize + start + np.arange(count)) % len(d.array)


class FabricSource(DsdSource):
    """Wavelets of a color."""

    waits, local = True, False

    def prepare(self, count: int) -> None:
        """Find the queue."""
        self.queue, self.events = self.pe.fabric.get_queue(self.operand.color), self.pe.events
        self.waiting = WaitCondition("in", self.operand.color)

    def ready(self, count: int) -> int:
        """The number of arrived data words."""
        found = self.queue.count(self.events.now)
        return found if found < count else count

    def wait(self, count: int) -> WaitCondition:
        """Request a notification at `count` words; a control wavelet at the head waits for its task.

        One that names no task is dropped.
        """
        while self.queue.is_control_next(self.events.now):
            if decode_entry_point(self.queue.words.runs[0][1][0]) is not None:
                return self.waiting
            self.queue.take_control(self.events.now)
        self.queue.want(count)
        return self.waiting

    def read(self, start: int, count: int) -> Any:
        """Remove words from the queue."""
        return unpack_words(np.array(self.queue.take(self.events.now, count), np.uint32), self.dtype)


class PackedFabricSource(FabricSource):
    """Wavelets that carry two elements of 16 bits each, the first in the low half; the last may carry one."""

    def prepare(self, count: int) -> None:
        """Find the queue; no element of a wavelet is left over."""
        super().prepare(count)
        self.left = np.zeros(0, self.dtype)

    def ready(self, count: int) -> int:
        """The number of arrived elements; of two wavelets each with `in_pairs`, except the rest."""
        found = len(self.left) + 2 * self.queue.count(self.events.now)
        pairs = self.operand.in_pairs and found < count and not self.queue.controls
        return min(count, found - found % 4 if pairs else found)

    def wait(self, count: int) -> WaitCondition:
        """Request a notification at the words of `count` elements."""
        return super().wait(-(-(count - len(self.left)) // 2))

    def read(self, start: int, count: int) -> Any:
        """Remove words from the queue, and keep a left-over element."""
        words = self.queue.take(self.events.now, -(-(count - len(self.left)) // 2))
        found = np.concatenate([self.left, np.array(words, np.uint32).view(self.dtype)])
        self.left = found[count:]
        return found[:count]


class ControlFabricSource(FabricSource):
    """Wavelets of both kinds; control wavelets are marked in their upper two bits, which data does not use."""

    def wait(self, count: int) -> WaitCondition:
        """Request a notification at `count` words."""
        self.queue.want(count)
        return self.waiting

    def ready(self, count: int) -> int:
        """The number of arrived words."""
        return min(count, self.queue.count_arrived(self.events.now))

    def read(self, start: int, count: int) -> Any:
        """Remove words from the queue."""
        words = [self.queue.take_any(self.events.now) for _ in range(count)]
        marked = [word & ~CONTROL_MARK & WORD_MASK | (CONTROL_MARK if word & CONTROL_FLAG else 0) for word in words]
        return unpack_words(np.array(marked, np.uint32), self.dtype)


def unpack_words(words: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> Any:
    """The elements of wavelets; 16-bit elements are in the low half."""
    return words.view(dtype) if dtype.itemsize == 4 else (words & 0xFFFF).astype(np.uint16).view(dtype)


class FifoSource(DsdSource):
    """Elements popped from a FIFO."""

    waits, local = True, False

    def prepare(self, count: int) -> None:
        """Do nothing."""

    def ready(self, count: int) -> int:
        """The number of elements in the FIFO."""
        return min(count, len(self.operand.words))

    def wait(self, count: int) -> WaitCondition:
        """Note that a read found the FIFO empty."""
        self.operand.starved = True
        return WaitCondition("fifo", self.operand)

    def read(self, start: int, count: int) -> Any:
        """Pop elements, and notify the writers."""
        popped = [self.operand.words.popleft() for _ in range(count)]
        notify(self.pe, "fifo", self.operand)
        if self.operand.on_pop is not None and self.operand.choked:
            activate(self.pe, self.operand.on_pop)
        self.operand.choked = False
        return np.array(popped, self.dtype) if self.dtype.kind in FLOAT_KINDS else np.array(popped).astype(self.dtype)


class FifoSink(FifoSource):
    """Elements pushed into a FIFO."""

    def ready(self, count: int) -> int:
        """The free room of the FIFO in elements."""
        return min(count, self.operand.capacity - len(self.operand.words))

    def wait(self, count: int) -> WaitCondition:
        """Note that a write found the FIFO full."""
        self.operand.choked = True
        return WaitCondition("fifo", self.operand)


SOURCE_CLASSES: dict[type, type[DsdSource]] = {
    Mem1d: MemorySource,
    Mem4d: MemorySource,
    Circular: CircularBufferSource,
    Fabin: FabricSource,
    Fifo: FifoSource,
}


def open_source(pe: PeState, operand: Any, dtype: np.dtype[Any], count: int) -> DsdSource:
    """The source of an operand for `count` elements."""
    kind = SOURCE_CLASSES.get(type(operand), DsdSource)
    if kind is FabricSource and operand.transform:
        kind = ControlFabricSource
    elif kind is FabricSource and count_lanes(operand, dtype) == 2:
        kind = PackedFabricSource
    return kind(pe, operand, dtype, count)


def count_lanes(d: Any, dtype: np.dtype[Any]) -> int:
    """The number of elements in a wavelet of a fabric DSD: at most two, and only of 16 bits."""
    return d.lanes if dtype.itemsize == 2 else 1


# DSD operations on the fabric or a FIFO.


def pack_words(found: np.ndarray[Any, Any]) -> list[int]:
    """The wavelets of elements."""
    flat = np.ascontiguousarray(found)
    return flat.view(np.uint32 if flat.dtype.itemsize == 4 else np.uint16).tolist()


def stream_operation(
    pe: PeState, op: DsdOp, operands: tuple[Any, ...], options: dict[str, Any], sync: bool = False
) -> Generator[Any, None, bool]:
    """Run an operation in steps, as far as its operands allow.

    The generator returns False if a synchronous operation found a FIFO empty or full. It sets `options["ended"]` if a
    control wavelet ended the operation.
    """
    kind = type(operands[0])
    if kind is Pointer:
        return _reduce_into_pointer(pe, op, operands, sync)
    if kind is Fabout and _WAITING_SOURCES.isdisjoint(map(type, operands)):
        return _send_vector(pe, op, operands, options)
    return _stream_in_steps(pe, op, operands, options, sync)


_WAITING_SOURCES = frozenset((Fabin, Fifo, Circular))


def _stream_in_steps(
    pe: PeState, op: DsdOp, operands: tuple[Any, ...], options: dict[str, Any], sync: bool
) -> Generator[Any, None, bool]:
    """Run an operation as far as its operands allow in each step."""
    dest, count = operands[0], operation_length(operands)
    sources = [open_source(pe, o, x.dtype, count) for o, x in zip(operands[1:], op.sources, strict=True)]
    waiting = _list_waiting(pe, op, dest, sources, count)
    store = _make_store(pe, op, dest, sources, count)
    done, width = 0, op.width[pe.wide]
    stream = _find_stream(pe, dest, sources, options)
    if stream is not None:
        return (yield from read_stream(stream, store, count, width, 0 if sync else COSTS.receive_end))
    sender = _open_sender(pe, op, dest, count, options)
    while done < count:
        step = count - done
        for s in waiting:
            step = s.ready(step)
            if step:
                continue
            if _is_stopped(s, options, sync, count - done):
                return type(s.operand) is not Fifo
            yield s.wait(count - done)
            break
        if step:
            words, end = store(done, step), pe.events.now + -(-step // width)
            if sender is not None:
                rest = sender.send(words)
                if rest is not None:
                    yield from rest
                end = max(end, pe.fabric.find_written(dest.color))
            done += step
            yield end
    return True


def _send_vector(
    pe: PeState, op: DsdOp, operands: tuple[Any, ...], options: dict[str, Any]
) -> Generator[Any, None, bool]:
    """Send elements of memory or scalars, which are all ready: one step."""
    count, (result, kinds, _) = operation_length(operands), op.at_once
    args = [
        read_elements(o, x, 0, count) if type(o) is Mem1d or type(o) is Mem4d else convert_scalar(o, x)
        for o, x in zip(operands[1:], kinds, strict=True)
    ]
    if count > 0:
        found, end = convert_result(op.compute(*args), result), pe.events.now + -(-count // op.width[pe.wide])
        dest, found = operands[0], _spread_elements(found, count)
        if is_plain(dest, result):
            rest = send_words(pe, dest.color, pack_words(found))
        else:
            rest = WaveletSender(pe, dest, result, count, options.get("index", 0)).send(found)
        if rest is not None:
            yield from rest
        yield max(end, pe.fabric.find_written(dest.color))
    return True


def _open_sender(pe: PeState, op: DsdOp, dest: Any, count: int, options: dict[str, Any]) -> WaveletSender | None:
    """The sender of an operation into the fabric."""
    return WaveletSender(pe, dest, op.result.dtype, count, options.get("index", 0)) if type(dest) is Fabout else None


def _list_waiting(pe: PeState, op: DsdOp, dest: Any, sources: list[DsdSource], count: int) -> list[DsdSource]:
    """The operands that may keep an operation waiting."""
    waiting = [s for s in sources if s.waits]
    return [*waiting, FifoSink(pe, dest, op.result.dtype, count)] if type(dest) is Fifo else waiting


def _find_stream(pe: PeState, dest: Any, sources: list[DsdSource], options: dict[str, Any]) -> FabricSource | None:
    """The fabric source of an operation into memory that has no other: each word is removed in time."""
    waiting = [s for s in sources if s.waits]
    if len(waiting) != 1 or type(waiting[0]) is not FabricSource or "on_control" in options:
        return None
    local = isinstance(dest, (Mem1d, Mem4d)) and all(s.local for s in sources if s is not waiting[0])
    return waiting[0] if local else None


def _is_stopped(s: DsdSource, options: dict[str, Any], sync: bool, left: int) -> bool:
    """Whether a control wavelet ends an operation that waits, or a FIFO stops a synchronous one."""
    if sync and type(s.operand) is Fifo:
        _save_remaining_length(s, left)
        return True
    return "on_control" in options and _is_ended_by_control(s, options)


def _is_ended_by_control(s: DsdSource, options: dict[str, Any]) -> bool:
    """Whether the next wavelet is a control wavelet, which is then removed."""
    if type(s.operand) is not Fabin or s.pe.fabric.pop_control(s.operand.color) is None:
        return False
    options["ended"] = True
    return True


def _save_remaining_length(s: DsdSource, count: int) -> None:
    """Note that a FIFO stopped a synchronous operation, and save the remaining length."""
    s.wait(count)
    if isinstance(s, FifoSink):
        s.operand.write_length = min(s.operand.write_length, count)
    else:
        s.operand.read_length = min(s.operand.read_length, count)


def _make_store(pe: PeState, op: DsdOp, dest: Any, sources: list[DsdSource], count: int) -> StoreElements:
    """A function that computes elements `done` to `done + step` and stores them; it returns the elements to send."""
    if isinstance(dest, (Mem1d, Mem4d)):
        return _make_memory_store(op, dest, sources, count)
    dtype = op.result.dtype

    def found(done: int, step: int) -> np.ndarray[Any, Any]:
        return _spread_elements(convert_result(op.compute(*[s.read(done, step) for s in sources]), dtype), step)

    def into_fifo(done: int, step: int) -> None:
        dest.words.extend(found(done, step))
        notify(pe, "fifo", dest)
        if dest.on_push is not None and dest.starved:
            activate(pe, dest.on_push)
        dest.starved = False

    def into_ring(done: int, step: int) -> None:
        dest.array.view(dtype)[ring_positions(dest, dtype, done, step)] = found(done, step)

    stores: dict[type, StoreElements] = {Fabout: found, Fifo: into_fifo, Circular: into_ring}
    if type(dest) not in stores:
        raise CslFault(f"'@{op.name}' into an uninitialized descriptor")
    return stores[type(dest)]


def _make_memory_store(op: DsdOp, dest: Mem1d | Mem4d, sources: list[DsdSource], count: int) -> StoreElements:
    """A function that computes elements and writes them to memory."""
    dtype, view = op.result.dtype, view_whole_vector(dest, op.result.dtype, count)
    if all(s.local for s in sources):
        return lambda done, step: apply_operation(op, dest, [s.operand for s in sources], done, step)

    def store(done: int, step: int) -> None:
        args = [s.read(done, step) for s in sources]
        if type(dest) is Mem1d and dest.stride == 0 and step > 1:
            _accumulate_into_cell(op, dest, sources, args, done, step)
        elif view is not None:
            view[done : done + step] = convert_result(op.compute(*args), dtype)
        else:
            write_elements(dest, dtype, done, step, op.compute(*args))

    return store


def _spread_elements(found: Any, count: int) -> np.ndarray[Any, Any]:
    flat = found if type(found) is np.ndarray and found.ndim == 1 else np.atleast_1d(found)
    return flat if len(flat) == count else np.repeat(flat, count)


def _accumulate_into_cell(
    op: DsdOp, dest: Mem1d, sources: list[DsdSource], args: list[Any], done: int, step: int
) -> None:
    """Accumulate into one cell in order; sources at that cell are read again for each element."""
    for i in range(step):
        values = []
        for s, a in zip(sources, args, strict=True):
            fixed = np.ndim(a) == 0 or len(a) == 1
            anew = fixed and isinstance(s, MemorySource)
            values.append(read_elements(s.operand, s.dtype, done, 1) if anew else a if fixed else a[i])
        write_elements(dest, op.result.dtype, done + i, 1, op.compute(*values))


def is_plain(dest: Fabout, dtype: np.dtype[Any]) -> bool:
    """Whether each element is a data wavelet of its own."""
    return not (dest.indexed or dest.transform or dest.control or dest.advance or count_lanes(dest, dtype) == 2)


def send_words(pe: PeState, color: int, words: list[int]) -> Microthread | None:
    """Send wavelets; what then waits until the queue accepts the rest, or None if it accepts all at once."""
    fabric = pe.fabric
    if not words or fabric.push(color, words):
        if fabric.is_settled(color):
            return None
        words = []
    return _wait_for_room(fabric, color, words)


def _wait_for_room(fabric: Any, color: int, words: list[int]) -> Microthread:
    while words and not fabric.push(color, words):
        yield WaitCondition("out", color)
    while not fabric.is_settled(color):
        yield WaitCondition("out", color)


class WaveletSender:
    """Sends `count` elements to an output queue as wavelets, with the options of the DSD."""

    def __init__(self, pe: PeState, dest: Fabout, dtype: np.dtype[Any], count: int, index: int = 0) -> None:
        self.pe, self.dest, self.index, self.due = pe, dest, index, count
        self.paired = count_lanes(dest, dtype) == 2
        self.plain = is_plain(dest, dtype)
        self.left = np.zeros(0, dtype) if self.paired else None

    def words(self, found: np.ndarray[Any, Any]) -> list[int]:
        """The wavelets of elements; an odd packed element is kept until more elements follow or none are left."""
        if self.plain:
            return pack_words(found)
        self.due -= len(found)
        words = self._pairs(found) if self.paired else pack_words(found)
        if self.dest.indexed:
            words = [word & 0xFFFF | self.index << 16 for word in words]
        if self.dest.transform:
            words = [
                word & ~CONTROL_MARK | CONTROL_FLAG if word & CONTROL_MARK == CONTROL_MARK else word for word in words
            ]
        if self.dest.control:
            words = [word | CONTROL_FLAG for word in words]
        if self.dest.advance and not self.due and words:
            words[-1] |= ADVANCE_FLAG
        return words

    def _pairs(self, found: np.ndarray[Any, Any]) -> list[int]:
        assert self.left is not None
        flat = np.concatenate([self.left, found])
        whole = len(flat) if not self.due else len(flat) // 2 * 2
        self.left, flat = flat[whole:], flat[:whole]
        padded = np.concatenate([flat, np.zeros(whole % 2, flat.dtype)])
        return padded.view(np.uint32).tolist()

    def send(self, found: np.ndarray[Any, Any]) -> Microthread | None:
        """Send elements; what then waits until the queue accepts the rest, or None if it accepts all at once."""
        return send_words(self.pe, self.dest.color, self.words(found))


def drop_wavelets(pe: Any, source: Fabin) -> Microthread:
    """Remove words from a queue until it has seen as many control words as the DSD's extent."""
    queue, left = pe.fabric.get_queue(source.color), source.extent
    while left:
        while not queue.count_arrived(pe.events.now):
            yield WaitCondition("in", source.color)
        left -= queue.take_any(pe.events.now) > WORD_MASK
        yield pe.events.now + 1


def _reduce_into_pointer(pe: PeState, op: DsdOp, operands: tuple[Any, ...], sync: bool) -> Generator[Any, None, bool]:
    """Reduce a stream into one cell; the cell keeps its value if a FIFO runs empty."""
    dest, *given = operands
    count = operation_length(operands)
    sequence = open_source(pe, given[-1], op.sources[-1].dtype, count)
    value = convert_scalar(given[0], op.result.dtype) if len(given) > 1 else None
    done = 0
    while done < count:
        step = sequence.ready(count - done)
        if not step and sync and type(sequence.operand) is Fifo:
            _save_remaining_length(sequence, count - done)
            return False
        if not step:
            yield sequence.wait(count - done)
            continue
        for item in _spread_elements(sequence.read(done, step), step):
            found = op.compute(item) if value is None or len(given) == 1 else op.compute(value, item)
            value = convert_result(found, _element_dtype(op))[()]
        done += step
        yield pe.events.now + step
    if value is not None:
        dest.array[dest.index] = np.array([value], _element_dtype(op)).view(dest.array.dtype)[0]
    return True


def _element_dtype(op: DsdOp) -> np.dtype[Any]:
    return op.result.dtype


__all__ = ["WaveletSender", "WaitCondition", "stream_operation", "pack_words", "unpack_words"]

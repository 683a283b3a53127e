"""DSD issue: resolves the operands of a DSD operation, and runs it at once or as a microthread."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from types import GeneratorType
from typing import Any

import numpy as np

from tessera.core.errors import Location
from tessera.interp.target.csl.cost_model import COSTS
from tessera.interp.target.csl.pe.dsd_operations import (
    Microthread,
    compute,
    operation_length,
    view_vector,
    write_elements,
)
from tessera.interp.target.csl.pe.dsd_table import DsdOp
from tessera.interp.target.csl.pe.microthreads import WaveletSender, drop_wavelets, open_source, stream_operation
from tessera.interp.target.csl.pe.pe_state import PeState
from tessera.interp.target.csl.pe.product_loops import map_products
from tessera.interp.target.csl.pe.program import put
from tessera.interp.target.csl.pe.scheduler import activate, begin, unblock, wake
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.values import (
    Circular,
    Dsr,
    DsrContents,
    Fabin,
    Fabout,
    Fifo,
    Mem1d,
    Mem4d,
    Pointer,
    increment_dsd_offset,
)
from tessera.interp.target.csl.text.diagnostics import CslFault

_STREAMING_OPERANDS = frozenset((Fabin, Fabout, Fifo, Circular))
_NUMBERS = frozenset((int, np.float32, np.float16))  # operands that need not be resolved


def load_dsr(pe: PeState, dsr: Dsr, dsd: Any, options: dict[str, Any]) -> None:
    """`@load_to_dsr`."""
    pe.dsrs[dsr] = DsrContents(dsd, options, bool(options.get("save_address")))


def move_dsr(pe: PeState, dsr: Dsr, base: Pointer) -> None:
    """`@set_dsr_base_addr`: the memory DSD of a register begins at another address.

    Raises:
        CslFault: the register has no memory DSD.
    """
    dsd = pe.dsrs[dsr].dsd if dsr in pe.dsrs else None
    if not isinstance(dsd, (Mem1d, Mem4d)):
        raise CslFault(f"{dsr.file} {dsr.number} holds no memory DSD whose base address could change")
    pe.dsrs[dsr].dsd = dsd._replace(array=base.array, byte=base.index * base.array.dtype.itemsize)


def _resolve_operands(
    pe: PeState, operands: tuple[Any, ...], options: dict[str, Any], loc: Location
) -> tuple[Any, ...]:
    """The operands with DSRs replaced by their contents, queues by their colors, and the wavelet index added."""
    return tuple([_resolve_operand(pe, o, options, loc) for o in operands])


def _resolve_operand(pe: PeState, o: Any, options: dict[str, Any], loc: Location) -> Any:
    kind = type(o)
    if kind is Dsr:
        contents = pe.dsrs.get(o)
        if contents is None:
            raise CslFault(f"{o.file} {o.number} is used before '@load_to_dsr'", location=loc)
        o = contents.dsd
        kind = type(o)
    if kind is Mem1d or kind is Mem4d:
        index = options.get("index") if options else None
        # The index counts 16-bit words for every element type.
        return o if index is None or not o.indexed else o._replace(byte=o.byte + 2 * index)
    if kind is Fabin or kind is Fabout:
        color = _get_queue_color(pe, o, loc)
        return o if o.color == color else o._replace(color=color)
    return o


def _get_queue_color(pe: PeState, o: Fabin | Fabout, loc: Location) -> int:
    """The color of a fabric DSD, which must equal the color that its queue was initialized with."""
    table, side = (pe.in_colors, "input") if type(o) is Fabin else (pe.out_colors, "output")
    bare = pe.needs_queue_initialisation if type(o) is Fabin else pe.wide
    color = table.get(o.queue, -1 if bare else o.color)
    if color < 0:
        raise CslFault(f"{side} queue {o.queue} is not initialized", location=loc)
    if type(o) is Fabin and o.color >= 0 and not bare:
        return o.color  # early programs read several colors through one queue of WSE-2
    if o.color >= 0 and o.color != color:
        raise CslFault(f"color {o.color} is not the color {color} of {side} queue {o.queue}", location=loc)
    return color


def _resolve_synchronous(
    pe: PeState, operands: tuple[Any, ...], options: dict[str, Any], loc: Location
) -> tuple[tuple[Any, ...], list[DsrContents], bool] | None:
    """The resolved operands of a synchronous operation, the registers that keep their address, and whether it streams.

    None if a register makes it asynchronous.
    """
    dsrs, found, saved, streams = pe.dsrs, [], [], False
    for o in operands:
        kind = type(o)
        if kind is Dsr:
            contents = dsrs.get(o)
            if contents is not None:
                if contents.options and contents.options.get("async"):
                    return None
                if contents.save:
                    saved.append(contents)
                o = contents.dsd
                kind = type(o)
        if kind not in _NUMBERS and (kind is not Mem1d or options):
            o = _resolve_operand(pe, o, options, loc)
            streams = streams or type(o) in _STREAMING_OPERANDS
        found.append(o)
    return tuple(found), saved, streams


def perform(pe: PeState, op: DsdOp, operands: tuple[Any, ...], options: dict[str, Any], loc: Location) -> Iterable[Any]:
    """Run a synchronous operation in the task: what is left of it, for `yield from`.

    Its value is False if the operation found a FIFO empty or full.
    """
    found = _resolve_synchronous(pe, operands, options, loc)
    if found is None:
        launch(pe, op, operands, options, loc)
        return _complete()
    resolved, saved, streams = found
    if streams:
        return _perform_in_steps(pe, op, operands, resolved, options, loc)
    if pe.threads and pe.clock > pe.events.now:
        return _perform_later(pe, op, operands, resolved, options)
    compute(pe, op, resolved)  # type: ignore[arg-type]
    if options or pe.front is None:
        _finish_operation(pe, operands, resolved, options)
    elif saved:
        _save_addresses(saved, resolved)
    return _NOTHING_LEFT


_NOTHING_LEFT = ()


def _complete() -> Generator[Any, None, bool]:
    yield from ()
    return True


def _perform_later(
    pe: PeState, op: DsdOp, operands: tuple[Any, ...], resolved: tuple[Any, ...], options: dict[str, Any]
) -> Generator[Any, None, bool]:
    """Run an operation in memory beside microthreads: the words that they have received by then are in memory."""
    yield pe.clock
    compute(pe, op, resolved)  # type: ignore[arg-type]
    _finish_operation(pe, operands, resolved, options)
    return True


def _perform_in_steps(
    pe: PeState,
    op: DsdOp,
    operands: tuple[Any, ...],
    resolved: tuple[Any, ...],
    options: dict[str, Any],
    loc: Location,
) -> Generator[Any, None, bool]:
    """Run a synchronous operation on the fabric or a FIFO."""
    pe.clock += COSTS.dsd_start[pe.wide]
    yield max(pe.clock, pe.events.now)
    keys = _claim_queues(pe, resolved, options, loc)
    complete = yield from stream_operation(pe, op, resolved, options, sync=True)  # type: ignore[arg-type]
    _release_queues(pe, keys)
    pe.clock = pe.operation_end = max(pe.clock, pe.events.now)
    _finish_operation(pe, operands, resolved, options)
    if type(resolved[0]) is Fabout:
        _clear_source(pe, op, resolved)
    return complete


def launch(pe: PeState, op: DsdOp, operands: tuple[Any, ...], options: dict[str, Any], loc: Location) -> None:
    """Run an asynchronous operation as a microthread.

    What it activates or unblocks at its end is an option of the operation, or, if a register was loaded for
    asynchronous operations, of that load alone (the vendor's page on DSDs).
    """
    resolved = _resolve_operands(pe, operands, options, loc)
    if _STREAMING_OPERANDS.isdisjoint(map(type, resolved)):
        raise CslFault("asynchronous DSD operations must have at least one fabric operand", location=loc)
    pe.clock += COSTS.launch
    merged = _merge_options(pe, operands, options)
    claimed = merged if pe.wide else {"ut_id": _select_microthread(pe, resolved), **merged}
    keys = _claim_queues(pe, resolved, claimed, loc)

    def done() -> None:
        _release_queues(pe, keys)
        _finish_operation(pe, operands, resolved, merged)
        if type(resolved[0]) is Fabout:
            _clear_source(pe, op, resolved)

    begin(pe, f"@{op.name}", stream_operation(pe, op, resolved, merged), done, loc)  # type: ignore[arg-type]


def _merge_options(pe: PeState, operands: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The options of an asynchronous operation with those of the registers that it uses."""
    merged = dict(options)
    if Dsr not in map(type, operands):
        return merged
    loaded = [pe.dsrs[o].options for o in operands if type(o) is Dsr]
    if any([one.get("async") for one in loaded]):
        merged = {name: value for name, value in options.items() if name not in ("activate", "unblock")}
    for one in loaded:
        if one:
            merged = {**one, **merged}
    return merged


def drop(pe: PeState, dsd: Any, options: dict[str, Any], loc: Location) -> None:
    """`@dfilt`: a microthread that drops words of a queue until it has seen enough control words."""
    resolved = _resolve_operands(pe, (dsd,), options, loc)
    pe.clock += COSTS.launch
    keys = _claim_queues(pe, resolved, {"ut_id": _select_microthread(pe, resolved), **options}, loc)
    pe.control_ended_colors.add(resolved[0].color)

    def done() -> None:
        _release_queues(pe, keys)
        _finish_operation(pe, (), resolved, options)

    begin(pe, "@dfilt", drop_wavelets(pe, resolved[0]), done, loc)


def _select_microthread(pe: PeState, operands: tuple[Any, ...]) -> int | None:
    """The microthread of an operation on WSE-2: that of the output queue, else that of the first input queue."""
    queues = [o.queue for o in operands if type(o) is Fabout] + [o.queue for o in operands if type(o) is Fabin]
    return None if pe.wide or not queues or queues[0] < 0 else queues[0]


def _claim_queues(
    pe: PeState, operands: tuple[Any, ...], options: dict[str, Any], loc: Location
) -> list[tuple[str, int]]:
    """Claim the queues and the microthread of an operation; each serves one operation at a time."""
    inputs = [o for o in operands if type(o) is Fabin]
    keys: list[tuple[str, int]] = [("in", o.color) for o in inputs]
    for o in operands:
        if type(o) is Fabout:
            keys.append(("out", o.queue))
            if not pe.wide:
                pe.fabric.use_queue(o.color, o.queue)
    if options.get("ut_id") is not None:
        keys.append(("microthread", options["ut_id"]))
    busy = pe.busy
    if busy and not busy.keys().isdisjoint(keys):
        key = next(key for key in keys if key in busy)
        what = {"in": "the input queue of color", "out": "output queue"}.get(key[0], key[0])
        raise CslFault(f"{what} {key[1]} is in use by the operation at {busy[key]}", location=loc)
    for key in keys:
        busy[key] = loc
    for o in inputs:
        if o.transform or "on_control" in options:
            pe.control_ended_colors.add(o.color)
    return keys


def _release_queues(pe: PeState, keys: list[tuple[str, int]]) -> None:
    for key in keys:
        del pe.busy[key]
        if key[0] == "in":
            pe.control_ended_colors.discard(key[1])


def _clear_source(pe: PeState, op: DsdOp, found: tuple[Any, ...]) -> None:
    """Set a source to zero if the fabric DSD requests it; a single source is that source."""
    if found[0].cleared < 0:
        return
    which = min(found[0].cleared, len(found) - 2)
    source, dtype = found[1 + which], op.sources[which].dtype
    if type(source) in (Mem1d, Mem4d):
        write_elements(source, dtype, 0, operation_length(found), np.zeros(1, dtype))


def _finish_operation(pe: PeState, operands: Sequence[Any], found: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Finish an operation: save addresses, activate and unblock tasks."""
    if Dsr in map(type, operands):
        _save_addresses([pe.dsrs[o] for o in operands if type(o) is Dsr and pe.dsrs[o].save], found)
    if not options:
        wake(pe)
        return
    if options.get("ended") and options["on_control"]:
        options = options["on_control"]
    if "activate" in options:
        activate(pe, options["activate"])
    if "unblock" in options:
        unblock(pe, options["unblock"])
    wake(pe)


def _save_addresses(saved: list[DsrContents], found: tuple[Any, ...]) -> None:
    """Advance the memory DSDs of registers by the elements of an operation."""
    for contents in saved:
        d: Any = contents.dsd
        if type(d) in (Mem1d, Mem4d):
            steps = operation_length(found) * d.stride if type(d) is Mem1d else d.extents[0] * d.strides[0]
            contents.dsd = increment_dsd_offset(d, steps * d.array.dtype.itemsize)


def map_function(
    pe: PeState, function: Any, shape: Any, args: tuple[Any, ...], options: dict[str, Any], loc: Location
) -> Microthread:
    """`@map`: call a function for each element; the result goes to the last operand."""
    kinds, result = shape
    args = _resolve_operands(pe, args, options, loc)
    inputs, target = (args, None) if result is None else (args[:-1], args[-1])
    count = min(o.extent for o in args if hasattr(o, "extent"))
    at_once = result is None and len(inputs) == 1 and map_products(pe, function, inputs[0], count)
    sources = [] if at_once else [_make_element_reader(pe, o, k, count) for o, k in zip(inputs, kinds, strict=True)]
    keys = _claim_queues(pe, args, options, loc)
    sender = WaveletSender(pe, target, result.dtype, count) if type(target) is Fabout else None  # type: ignore[arg-type]
    pe.clock += COSTS.dsd_start[pe.wide]
    ready = _STREAMING_OPERANDS.isdisjoint(map(type, inputs))
    for i in range(0 if at_once else count):
        values = [take(i) for take in sources] if ready else (yield from _await_elements(pe, sources, i))
        result_value = function(*values)
        if isinstance(result_value, GeneratorType):
            result_value = yield from result_value
        pe.clock += COSTS.map_call
        if result is not None:
            yield from _store_result(pe, sender or target, result, i, result_value)
    _release_queues(pe, keys)
    _finish_operation(pe, (), args, options)


_NOT_READY = object()


def _await_elements(pe: PeState, sources: list[Any], i: int) -> Generator[Any, None, list[Any]]:
    """Element `i` of each operand, when it has arrived."""
    values = []
    for take in sources:
        value = take(i)
        while isinstance(value, tuple) and len(value) == 2 and value[0] is _NOT_READY:
            yield max(pe.clock, pe.events.now)
            value = take(i)
            if isinstance(value, tuple) and value[:1] == (_NOT_READY,):
                yield value[1]
                value = take(i)
        values.append(value)
    return values


def _make_element_reader(pe: Any, o: Any, type_: t.CslType | None, count: int) -> Any:
    """A function that returns element `i` of an operand, or (_NOT_READY, condition to wait for)."""
    if type_ is None:
        return lambda i: o
    dtype = type_.dtype
    if type(o) is Mem1d:
        view = view_vector(o, dtype, 0, count)
        at = (lambda i: 0) if o.stride == 0 else (lambda i: i)
        return (lambda i: view[at(i)]) if dtype.kind in "fV" else (lambda i: view.item(at(i)))
    source = open_source(pe, o, dtype, count)

    def take(i: int) -> Any:
        if not source.ready(1):
            return (_NOT_READY, source.wait(1))
        element = np.atleast_1d(source.read(i, 1))
        return element[0] if dtype.kind in "fV" else element.item(0)

    return take


def _store_result(pe: Any, target: Any, type_: t.CslType, i: int, found: Any) -> Microthread:
    """Store one result."""
    if type(target) is Pointer:
        put(target.array, target.index, found)
    elif type(target) is Mem1d:
        view_vector(target, type_.dtype, i, 1)[0] = found
    elif type(target) is WaveletSender:
        yield max(pe.clock, pe.events.now)
        rest = target.send(np.array([found], type_.dtype))
        if rest is not None:
            yield from rest
    else:
        raise CslFault("the result of '@map' must go to memory, the fabric or a pointer")

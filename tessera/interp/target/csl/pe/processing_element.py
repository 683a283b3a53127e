"""Processing element (PE): the state of a PE with the operations that generated code, its router and the host call."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tessera.interp.target.csl.fabric.routing import RouterRegisters
from tessera.interp.target.csl.pe import dsd_issue, scheduler
from tessera.interp.target.csl.pe.lockstep_execution import LockstepGroup
from tessera.interp.target.csl.pe.pe_state import EventQueue, PeState, QueueId
from tessera.interp.target.csl.pe.program import PeProgram, ValueInstantiation, allocate_global
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.compilation_unit import BoundTask
from tessera.interp.target.csl.sema.functions import FunctionValue
from tessera.interp.target.csl.sema.values import ComptimeValue, GlobalVariable, NativeFunction
from tessera.interp.target.csl.text.diagnostics import CslFault

_GLOBAL = re.compile(r"[RG](\d+)_?$")


# Exported symbols and memory. Each access first executes the deferred memory steps.


class ExportedFunction(NamedTuple):
    """An exported function on a PE."""

    name: str
    run: Callable[..., Any]
    params: tuple[t.CslType, ...]


def get_export(pe: PeState, name: str) -> Any:
    """The present value of an exported symbol: a `Pointer` or an `ExportedFunction`."""
    if pe.pending:
        scheduler.settle(pe)
    readers = pe.program.readers
    if name not in readers:
        readers[name] = _make_reader(pe.program, name)
    return readers[name](pe)


def _make_reader(program: PeProgram, name: str) -> Callable[[PeState], Any]:
    """A function that reads an exported symbol on a PE."""
    symbol = program.exports[name]
    if isinstance(symbol.type, t.CslFunctionType):
        params = tuple(p for p in symbol.type.params if p is not None)
        if not isinstance(symbol.const, FunctionValue):
            return lambda pe: ExportedFunction(name, _instantiate(pe, symbol.const), params)
        python = program.unit.compile_function(symbol.const).name
        return lambda pe: ExportedFunction(name, pe.space[python], params)
    if symbol.known:
        return lambda pe: _instantiate(pe, symbol.const)
    match = _GLOBAL.match(symbol.code)
    assert match is not None
    number = int(match.group(1))
    if program.unit.globals[number].addressed:
        return lambda pe: pe.space[f"G{number}"][0]
    return lambda pe: pe.space[f"v{number}"]


def _instantiate(pe: PeState, const: Any) -> Any:
    return ValueInstantiation(pe, pe.arrays, pe.space)(const)


def get_memory(pe: PeState, variable: Any) -> np.ndarray[Any, Any]:
    """The array of a `GlobalVariable`, or of the `ComptimeValue` of a library's variable."""
    declared = variable.data if isinstance(variable, ComptimeValue) else variable
    assert isinstance(declared, GlobalVariable)
    scheduler.settle(pe)
    return pe.space[f"G{declared.number}"]


def get_variable(pe: PeState, name: str) -> np.ndarray[Any, Any]:
    """The array of a global variable of the top-level file.

    Raises:
        KeyError: there is no variable of that name.
    """
    scheduler.settle(pe)
    for g in pe.program.unit.globals:
        if g.name == name:
            scalar = f"v{g.number}"
            return np.array([pe.space[scalar]]) if scalar in pe.space else pe.space[f"G{g.number}"]
    raise KeyError(name)


# Queue flushes and teardowns.


def handle_teardown(pe: PeState, color: int) -> None:
    """Call the teardown handler of a color, if it has one."""
    _call_handlers(pe, [pe.program.tables.teardown.get(color)])


def flush(pe: PeState, side: str, number: int) -> None:
    """`@queue_flush`: calls the queue's handler, if it has one, as soon as the queue is empty.

    The vendor's page says that the teardown task runs then; a public program for WSE-3 flushes queues without handlers.
    """
    if (side, number) not in pe.program.tables.emptied and "memcpy" in pe.state:
        note = f"{side}put queue {number} is flushed but has no '@set_empty_queue_handler'"
        pe.state["memcpy"].notes.append(note)
    pe.fabric.when_empty(side, _get_queue_color(pe, side, number), lambda: _finish_flush(pe, (side, number)))


def _get_queue_color(pe: PeState, side: str, number: int) -> int:
    colors = pe.in_colors if side == "in" else pe.out_colors
    if number not in colors:
        raise CslFault(f"{side}put queue {number} is not initialized")
    return colors[number]


def _finish_flush(pe: PeState, queue: QueueId) -> None:
    pe.flushed[queue] = None
    _call_handlers(pe, [])


def _call_handlers(pe: PeState, names: list[str | None]) -> None:
    """Run the teardown task: the handlers `names`, and those of all flushed queues that did not leave the flush."""
    names += [pe.program.tables.emptied.get(queue) for queue in pe.flushed]
    for name in names:
        if name is not None:
            pe.calls.append((name, pe.space[name], ()))
            scheduler.wake(pe)


def leave_flush(pe: PeState, side: str, number: int) -> None:
    """`queue_flush.exit()`: the handler is no longer called."""
    pe.flushed.pop((side, number), None)


def rebind_queue(pe: PeState, side: str, number: int, color: int) -> None:
    """Give a queue another color.

    Raises:
        CslFault: the queue is not empty.
    """
    before = _get_queue_color(pe, side, number)
    empty = not pe.fabric.get_queue(before).words if side == "in" else pe.fabric.output_empty(before)
    if not empty:
        raise CslFault(f"{side}put queue {number} is given color {color} while it holds wavelets of color {before}")
    if side == "out":
        pe.out_colors[number] = color
        return
    pe.in_colors[number] = color
    pe.number_queues()
    if before in pe.data and pe.data[before].number == number:
        pe.data[color] = pe.data.pop(before)
    pe.ready_colors[color] = None
    scheduler.wake(pe)


def _list_data_tasks(pe: PeState) -> dict[int, BoundTask]:
    """The data tasks by color: their id on WSE-2, the color of the input queue of that number on WSE-3.

    The task of a queue that is not initialized never runs. In the language of an early SDK a wavelet also starts a task
    without parameters.
    """
    kinds = ("data", "local") if pe.program.unit.options.early else ("data",)
    tasks = {number: task for (kind, number), task in pe.program.tables.tasks.items() if kind in kinds}
    if not pe.wide:
        return tasks
    return {pe.in_colors[number]: task for number, task in tasks.items() if number in pe.in_colors}


def overrun(pe: PeState) -> None:
    """Raise the fault of a loop that runs past the limit of cycles."""
    raise CslFault(f"still running after the limit of {pe.limit:,} cycles in this loop")


def make_native_call(pe: PeState, function: NativeFunction) -> Callable[..., Any]:
    """A library's function as the program calls it."""
    return partial(function.run, pe)


class Pe(PeState):
    """A PE with its loaded program; `events.run` raises faults of the program as `CslFault`."""

    __slots__ = ()

    def __init__(
        self,
        program: PeProgram,
        x: int,
        y: int,
        events: EventQueue,
        fabric: Any = None,
        lockstep_group: LockstepGroup | None = None,
    ) -> None:
        super().__init__(program, x, y, events, fabric, lockstep_group)
        self.registers = RouterRegisters(self)
        globals_ = program.unit.globals
        self.arrays = [allocate_global(g) for g in globals_] if lockstep_group is None else lockstep_group.join(self)
        self.numbers = {id(array): number for number, array in enumerate(self.arrays)}
        self.space = program.namespace(self, self.arrays)
        self.data = _list_data_tasks(self)
        self.dispatch = partial(scheduler.dispatch, self)

    # Called by generated code; a task recorder has operations of the same names.
    activate, block, unblock = scheduler.activate, scheduler.block, scheduler.unblock
    launch, perform, drop, map = dsd_issue.launch, dsd_issue.perform, dsd_issue.drop, dsd_issue.map_function
    load_dsr, move_dsr = dsd_issue.load_dsr, dsd_issue.move_dsr
    flush, overrun = flush, overrun
    native = make_native_call

    # Called by the router and the queues.
    receive_wavelet, resume_senders = scheduler.receive_wavelet, scheduler.resume_senders
    handle_teardown = handle_teardown

    # Called by the simulation and the host.
    boot, start, notify = scheduler.boot, scheduler.start, scheduler.notify
    get_export, get_variable = get_export, get_variable

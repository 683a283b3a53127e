"""Task recorder: symbolic execution of a task, which yields a trace that holds for every PE where its guards hold."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.core.errors import TesseraError
from tessera.interp.target.csl.pe.dsd_operations import count_cycles, count_parts, operation_length, read_elements
from tessera.interp.target.csl.pe.dsd_table import DsdOp
from tessera.interp.target.csl.pe.product_loops import Offsets, plan_products
from tessera.interp.target.csl.pe.program import wrap
from tessera.interp.target.csl.pe.task_trace import (
    SCALAR_VARIABLE,
    RecordedEffect,
    ScalarSymbol,
    SymbolicMemory,
    TaskRecord,
    UnrecordableTask,
    ValueIndex,
    VectorSymbol,
    compute_value,
    concretise,
    contains_kind,
    fits_64_bits,
    load_cell,
    load_input,
    run_dsd_operation,
    run_product_loop,
    store_cell,
)
from tessera.interp.target.csl.sema.builtins import bits
from tessera.interp.target.csl.sema.values import GlobalVariable, Mem1d, Mem4d, NativeFunction, Pointer

if TYPE_CHECKING:
    from tessera.interp.target.csl.pe.program import PeProgram

MAX_STEPS = 20_000
MAX_GUARDS = 48
PROGRAM_FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class TaskRecorder:
    """Takes the place of a PE of `program` while its compiled code runs symbolically: `pe` in generated code."""

    limit = math.inf  # of cycles
    registers = None  # an access cannot be recorded

    def __init__(self, program: PeProgram) -> None:
        self.program, self.wide = program, int(program.unit.options.arch == "wse3")
        self.fifos: list[Any] = [None] * len(program.tables.fifos)
        self.cells = [_make_symbolic_memory(self, g) for g in program.unit.globals]
        self.begin()
        self.space = program.namespace(self, self.cells)
        self.space |= {"compute": self.compute, "bits": self.bits, "wrap": self.wrap}
        self.space["accumulate_products"] = self.accumulate_products
        for name, data in program.unit.constants.items():
            if isinstance(data, type):
                self.space[name] = self.make_converter(data)

    def begin(self) -> None:
        """Discard the previous record."""
        self.clock, self.record = 0, TaskRecord()
        self.given: dict[str, Any] = {}

    def run(self, name: str, given: dict[str, Any]) -> TaskRecord:
        """Record a task. `given` are the scalar variables of one PE by name, and the task's arguments.

        Raises:
            UnrecordableTask: the task cannot be recorded; `record.guards` state for which PEs.
        """
        self.begin()
        self.given = given
        symbols = {variable: self._make_symbol(variable, value) for variable, value in given.items()}
        args = [symbols.pop(variable) for variable in given if not SCALAR_VARIABLE.match(variable)]
        self.space.update(symbols)
        try:
            self.space[name](*args)
        except (TesseraError, *PROGRAM_FAULTS) as error:  # the PE itself raises and reports the same error
            raise UnrecordableTask(str(error)) from error
        self.record.cycles = self.clock
        for variable, before in symbols.items():
            after = self.space[variable]
            if after is not before:
                if isinstance(after, VectorSymbol):
                    raise UnrecordableTask("a scalar variable receives a value from memory")
                self.record.results[variable] = after
        return self.record

    def _make_symbol(self, name: str, value: Any) -> Any:
        """The symbol of a variable."""
        if isinstance(value, int):
            return ScalarSymbol(self, name)
        return self.add_input(ScalarSymbol(self, name)) if isinstance(value, np.floating) else value

    def add_guard(self, text: str) -> Any:
        """The value of an expression at the recorded PE; adds a guard for this value."""
        guards = dict(self.record.guards)
        if text not in guards:
            if len(self.record.guards) >= MAX_GUARDS:
                raise UnrecordableTask("the task has too many guards")
            guards[text] = eval(text, {}, self.given)
            self.record.guards.append((text, guards[text]))
        return guards[text]

    def native(self, function: NativeFunction) -> Callable[..., Any]:
        """A library's function as the program calls it."""

        def call(*args: Any) -> Any:
            if function.whole is not None and any(isinstance(a, VectorSymbol) for a in args):
                return self.calculate(function.whole, *args)
            if function.deferrable and not any(isinstance(a, VectorSymbol) for a in args):
                self._record_effect(function.run, *args)
                return None
            if function.whole is not None:
                return function.run(None, *args)
            raise UnrecordableTask(f"{function.name}() must run on the PE")

        return call

    def _record_effect(self, call: Callable[..., Any], *args: Any) -> None:
        """Record a call on the PE."""
        frame = sys._getframe(1)
        while frame.f_code.co_filename != self.program.code.co_filename and frame.f_back is not None:
            frame = frame.f_back
        if contains_kind(args, VectorSymbol):
            raise UnrecordableTask("a call has an argument from memory")
        self.record.effects.append(RecordedEffect(self.clock, call, args, frame.f_lineno))
        self.clock = 0

    def activate(self, number: Any) -> None:
        """`@activate`."""
        self._record_effect(_activate, number)

    def launch(self, op: DsdOp, operands: tuple[Any, ...], options: dict[str, Any], loc: Any) -> None:
        """Record an asynchronous operation."""
        self._record_effect(_launch, op, operands, options, loc)

    def block(self, number: Any) -> None:
        """`@block`."""
        self._record_effect(_block, number)

    def unblock(self, number: Any) -> None:
        """`@unblock`."""
        self._record_effect(_unblock, number)

    def _add_step(self, *step: Any) -> None:
        if len(self.record.work.steps) >= MAX_STEPS:
            raise UnrecordableTask("the task has too many steps")
        self.record.work.steps.append(step)
        self.record.operations += 1

    def _add_value(self, whole: bool) -> VectorSymbol:
        self.record.work.count += 1
        return VectorSymbol(self, self.record.work.count - 1, whole)

    def _make_step_operand(self, value: Any) -> Any:
        """A number as an operand of a step."""
        if isinstance(value, (float, np.generic)):
            self.record.work.floats.append(np.asarray(value).tobytes())
        return ValueIndex(value.number) if isinstance(value, VectorSymbol) else value

    def add_input(self, value: Any) -> Any:
        """A scalar variable as an input of memory steps."""
        if not isinstance(value, ScalarSymbol):
            return value
        value_symbol = self._add_value(not isinstance(self.given.get(value.text), np.floating))
        self.record.inputs.append(value.text)
        position = len(self.record.inputs) - 1
        self._add_step(load_input, value_symbol.number, position)
        return value_symbol

    def load(self, cells: SymbolicMemory, index: int) -> VectorSymbol:
        """Record the load of one cell."""
        key, kind = self._touch_memory(cells), cells.dtype.kind
        value_symbol = self._add_value(kind in "iub")
        self._add_step(load_cell, value_symbol.number, key, index)
        return value_symbol

    def store(self, cells: SymbolicMemory, index: int, value: Any) -> None:
        """Record the store of one cell."""
        key, value = self._touch_memory(cells), self.add_input(value)
        self.record.work.written.add(cells.number)
        if not isinstance(value, (VectorSymbol, int, float, np.generic)):
            raise UnrecordableTask("a cell stores a non-number")
        self._add_step(store_cell, key, index, self._make_step_operand(value))

    def calculate(self, function: Callable[..., Any], *args: Any) -> VectorSymbol:
        """Record a computation on numbers."""
        operands = tuple(self.add_input(a) for a in args)
        is_integer = all(a.whole if isinstance(a, VectorSymbol) else isinstance(a, int) for a in operands)
        if is_integer and not fits_64_bits(function, operands):
            raise UnrecordableTask("an integer operation may exceed 64 bits")
        result = self._add_value(is_integer)
        self._add_step(compute_value, result.number, function, tuple([self._make_step_operand(a) for a in operands]))
        return result

    def _touch_memory(self, cells: SymbolicMemory) -> tuple[int, Any]:
        is_global = isinstance(cells, SymbolicMemory) and cells.itemsize == self.cells[cells.number].itemsize
        if not is_global or cells.dtype.names or (cells.dtype.kind in "iu" and cells.itemsize > 4):
            raise UnrecordableTask("an access to memory that is not a global variable of numbers")
        self.record.work.memory.add((cells.number, cells.dtype))
        return cells.number, cells.dtype

    def make_converter(self, kind: type) -> Callable[[Any], Any]:
        """A recording conversion to a float type."""

        def convert(value: Any) -> Any:
            if not isinstance(value, (VectorSymbol, ScalarSymbol)):
                return kind(value)
            return self.calculate(_convert_values, value, kind)

        return convert

    def wrap(self, value: Any, width: int, signed: bool) -> Any:
        """An integer modulo 2 to the width."""
        if isinstance(value, int):
            return wrap(value, width, signed)
        half = 1 << (width - 1) if signed else 0
        return ((value + half) & ((1 << width) - 1)) - half

    def bits(self, data: Any, source: np.dtype[Any], target: np.dtype[Any], whole: bool) -> Any:
        """`@bitcast`."""
        if not isinstance(data, (VectorSymbol, ScalarSymbol)):
            return bits(data, source, target, whole)
        if whole or max(source.itemsize, target.itemsize) > 4:
            raise UnrecordableTask("a bit cast of more than one number")
        wide = np.dtype(np.int64) if target.kind in "iu" else target
        result = self.calculate(_reinterpret_values, data, source, target, wide)
        result.whole = target.kind in "iu"
        return result

    def compute(self, pe: Any, op: DsdOp, operands: tuple[Any, ...]) -> None:
        """Record an operation on memory operands."""
        resolved = tuple([concretise(o) for o in operands])
        count = operation_length(resolved)
        self.clock += count_cycles(op, resolved, self.wide)
        step_operands = [
            self._resolve_operand(o, x.dtype, count) for o, x in zip(resolved, (op.result, *op.sources), strict=True)
        ]
        self.record.work.written.add(step_operands[0].array[0])
        self._add_step(run_dsd_operation, op, tuple(step_operands))

    def accumulate_products(
        self, pe: Any, op: DsdOp, dest: Any, dest_offsets: Offsets, vector: Any, vector_offsets: Offsets, cells: Any,
        indices: list[int] | None, cycles: int,
    ) -> bool:  # fmt: skip
        """Record a loop of products, if its iterations may be computed at once."""
        operands = [concretise(dest), concretise(vector)]
        if not indices or any([type(d) is not Mem1d for d in operands]):
            return False
        memory = [operands[0].array, operands[1].array, cells]
        if any([not isinstance(cells, SymbolicMemory) or cells.dtype.kind != "f" for cells in memory]):
            return False
        if memory[0].number in (memory[1].number, cells.number):
            return False
        positions = [int(index) for index in indices]
        steps = [[int(x) for x in o] if isinstance(o, list) else int(o) for o in (dest_offsets, vector_offsets)]
        loop = plan_products(op, operands[0], steps[0], operands[1], steps[1], cells, positions, cycles, self.wide)
        if loop is None:
            return False
        self.clock += loop.cycles
        self.record.work.written.add(memory[0].number)
        keys = tuple([self._touch_memory(one) for one in memory])
        self._add_step(run_product_loop, loop, keys)
        self.record.operations += len(positions) - 1
        return True

    def _resolve_operand(self, o: Any, dtype: np.dtype[Any], count: int) -> Any:
        """An operand with the key of its memory; faults where the PE would."""
        if isinstance(o, (Mem1d, Mem4d)):
            self._touch_memory(o.array)
            cells = o.array
            if cells.dtype != dtype:
                if isinstance(o, Mem1d):
                    o = o._replace(stride=o.stride * count_parts(cells, dtype))
                cells = cells.view(dtype)
                self._touch_memory(cells)
            read_elements(o._replace(array=_make_blank_cells(dtype, len(cells))), dtype, 0, count)
            return o._replace(array=(cells.number, dtype))
        if isinstance(o, Pointer):
            self._touch_memory(o.array)
            if not 0 <= o.index < len(o.array):
                raise UnrecordableTask("a pointer out of bounds")
            return Pointer((o.array.number, o.array.dtype), o.index)
        return self._make_step_operand(self.add_input(o))


@lru_cache(maxsize=64)
def _make_blank_cells(dtype: np.dtype[Any], count: int) -> np.ndarray[Any, Any]:
    """A zero-stride array of a variable's length, to check a descriptor's bounds."""
    return np.lib.stride_tricks.as_strided(np.zeros(1, dtype), (count,), (0,))


def _convert_values(x: Any, kind: type) -> Any:
    return np.asarray(x).astype(kind)


def _reinterpret_values(x: Any, source: np.dtype[Any], target: np.dtype[Any], wide: np.dtype[Any]) -> Any:
    return np.asarray(x).astype(source).view(target).astype(wide)


def _make_symbolic_memory(recorder: TaskRecorder, g: GlobalVariable) -> Any:
    return SymbolicMemory(recorder, g.number, g.type.dtype, g.count)


def _activate(pe: Any, number: int) -> None:
    pe.activate(number)


def _launch(pe: Any, op: DsdOp, operands: tuple[Any, ...], options: dict[str, Any], loc: Any) -> None:
    pe.launch(op, operands, options, loc)


def _block(pe: Any, number: int) -> None:
    pe.block(number)


def _unblock(pe: Any, number: int) -> None:
    pe.unblock(number)

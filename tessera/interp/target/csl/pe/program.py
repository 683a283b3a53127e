"""PE program: the generated Python source, the run-time functions that it calls, and its namespace on each PE.

Generated code refers to the functions of `NAMES` by their `__name__`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from types import CodeType, GeneratorType
from typing import Any

import numpy as np

from tessera.core.errors import UNKNOWN, Location
from tessera.interp.target.csl.pe.dsd_operations import compute
from tessera.interp.target.csl.pe.product_loops import accumulate_products
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.builtins import bits
from tessera.interp.target.csl.sema.compilation_unit import PE_MEMORY, CompilationUnit, ComptimeTables
from tessera.interp.target.csl.sema.context import ExprValue
from tessera.interp.target.csl.sema.functions import FunctionInstance, FunctionValue
from tessera.interp.target.csl.sema.operators import idiv, irem
from tessera.interp.target.csl.sema.product_loops import find_register_products
from tessera.interp.target.csl.sema.values import (
    DSD_UPDATES,
    REGISTERS,
    Circular,
    ComptimeValue,
    Fabin,
    Fabout,
    FifoRef,
    GlobalCast,
    GlobalVariable,
    Mem1d,
    Mem4d,
    NativeFunction,
    Pointer,
)
from tessera.interp.target.csl.text.diagnostics import CslFault, fail

# The run-time functions of generated code: arithmetic, memory access, descriptors.


def wrap(value: int, width: int, signed: bool) -> int:
    """An integer modulo 2 to the width."""
    value &= (1 << width) - 1
    return value - (1 << width) if signed and value >> (width - 1) else value


def below(index: int) -> int:
    """Raise the fault of a negative index."""
    raise CslFault(f"index {index} is out of bounds")


def above(index: int) -> int:
    """A pointer's index, which must not be negative."""
    return index if index >= 0 else below(index)


def check_index(index: int, count: int) -> int:
    """An index of one dimension."""
    if 0 <= index < count:
        return index
    raise CslFault(f"index {index} is out of bounds for dimension of length {count}")


def window(array: Any, start: int, count: int) -> Any:
    """A block of an array."""
    if start < 0 or start + count > len(array):
        raise CslFault(f"elements {start} to {start + count - 1} are outside of an array of {len(array)}")
    return array[start : start + count]


def put(array: Any, index: int, value: Any) -> None:
    """Store one value; tuples stay one object in object arrays."""
    if array.dtype != object:
        array[index] = value
        return
    cell = np.empty(1, object)
    cell[0] = value
    array[index : index + 1] = cell


def full(count: int, value: Any, dtype: Any) -> Any:
    """An array of one value."""
    array = np.empty(count, dtype)
    array.fill(value)
    return array


def unreachable() -> None:
    """Raise the fault of a failed `@assert`."""
    raise CslFault("assertion failed")


def valueless() -> None:
    """Raise the fault of a labelled block that ends without the value that its other ways out give."""
    raise CslFault("the block ends without a value", suggestion="end it with a 'break' that gives one")


def invoke(function: Any, *args: Any) -> Generator[Any, Any, Any]:
    """Call a function pointer; the function may be a generator."""
    if not callable(function):
        raise CslFault("call through an uninitialized function pointer")
    result = function(*args)
    if isinstance(result, GeneratorType):
        result = yield from result
    return result


def recast(p: Pointer, dtype: Any) -> Pointer:
    """A pointer to cells of another type; a partial last cell is out of bounds."""
    size, array = p.array.dtype.itemsize, p.array
    whole_count = len(array) * size // dtype.itemsize * dtype.itemsize // size
    return Pointer(
        (array if whole_count == len(array) else array[:whole_count]).view(dtype), p.index * size // dtype.itemsize
    )


def offset_pointer(p: Pointer, count: int) -> Pointer:
    """A pointer moved by elements."""
    return Pointer(p[0], p[1] + count)


NAMES: dict[str, Any] = {
    f.__name__: f
    for f in (
        *(wrap, below, above, check_index, window, put, full, unreachable, valueless, invoke, recast, offset_pointer),
        *(accumulate_products, bits, idiv, irem, compute, Pointer, Mem1d, Mem4d, Circular, Fabin, Fabout),
    )
} | {"zeros": np.zeros, "fmod": np.fmod, **DSD_UPDATES}


# Compiled programs: Python source, the objects it names, and their instances on each PE.


BOOT_FUNCTION = "boot_"  # the function that loads registers before a run
_SCALAR_ACCESS = re.compile(r"\b([RW])(\d+)_")


@lru_cache(maxsize=64)
def _compile_source(source: str, file: str) -> CodeType:
    """The code of a generated source, which the programs of many PEs have in common."""
    return compile(source, file, "exec")  # type: ignore[no-any-return]


class PeProgram:
    """One compiled program (source and params), shared by all PEs that run it."""

    def __init__(self, unit: CompilationUnit, path: str) -> None:
        self.unit, self.path = unit, path
        for g in unit.globals:  # the list grows while functions that values refer to are compiled
            unit.resolve(g.initial)
        self.tables: ComptimeTables = unit.tables
        self.memory_used = unit.memory_used
        if self.memory_used > PE_MEMORY:
            largest = max(unit.globals, key=lambda g: g.type.size)
            fail(
                largest.loc,
                f"PE memory exceeded: {self.memory_used} bytes needed, {PE_MEMORY} bytes available",
                suggestion=f"reduce '{largest.name}', the largest variable, of {largest.type.size} bytes",
            )
        self.exports = {name: o for name, (o, _) in self.tables.exports.items()}
        self.readers: dict[str, Callable[[Any], Any]] = {}  # what reads an exported symbol on a PE
        self.symbol_names = unit.symbols
        self.queues_in, self.queues_out = self.tables.queues_in, self.tables.queues_out
        self.colors, self.tasks = self.tables.colors, self.tables.tasks
        self.places: list[Location] = []
        instances = list(unit.instances.values())
        self.source = self._assemble(instances)
        # Functions that only accumulate a product of registers and a number.
        self.register_products = find_register_products(
            (one.name, one.arguments, [line.text for line in one.lines]) for one in instances
        )
        self.code = _compile_source(self.source, f"<csl {path}>")
        # The Python of each function, by its name there.
        self.functions = {c.co_name: c for c in self.code.co_consts if isinstance(c, CodeType)}
        self.task_ids = {id(task.value): task.number for task in self.tasks.values()}
        unbound = next((v for key, v in unit.references.items() if key not in self.task_ids), None)
        if unbound is not None:
            fail(unbound.decl.loc, f"task '{unbound.decl.name}' is activated but bound to no ID")

    @property
    def memory(self) -> dict[str, int]:
        """The size of each variable in bytes."""
        return {f"{g.name}#{g.number}": g.type.size for g in self.unit.globals}

    def _assemble(self, instances: list[FunctionInstance]) -> str:
        lines: list[str] = []
        self.places = [UNKNOWN]
        for instance in instances:
            self._loose: set[str] = set()
            text = [" " * line.depth + _SCALAR_ACCESS.sub(self._cell, line.text) for line in instance.lines]
            loose = sorted(self._loose)
            head = [f"def {instance.name}({instance.arguments}):"]
            head += [f" global {', '.join(loose)}"] if loose else []
            lines += [*head, *text, *([] if text else [" pass"])]
            self.places += [instance.value.decl.loc] * len(head)
            self.places += [line.loc for line in instance.lines] or [instance.value.decl.loc]
        loaded = self.tables.preloads
        lines += [f"def {BOOT_FUNCTION}():", *(f" {text}" for text, _ in loaded), " return"]
        self.places += [UNKNOWN, *(loc for _, loc in loaded), UNKNOWN]
        return "\n".join(lines) + "\n"

    def _cell(self, match: re.Match[str]) -> str:
        variable = self.unit.globals[int(match.group(2))]
        if not variable.addressed:
            name = f"v{variable.number}"
            self._loose.add(name)
            return name
        read = match.group(1) == "R" and variable.type.dtype.kind not in "fOV"
        return f"G{variable.number}.item(0)" if read else f"G{variable.number}[0]"

    def place(self, line: int) -> Location:
        """The CSL location of a line of the generated Python."""
        return self.places[line] if 0 <= line < len(self.places) else UNKNOWN

    def namespace(self, pe: Any, arrays: list[Any]) -> dict[str, Any]:
        """The globals of the generated Python for one PE: its memory, constants and functions."""
        space: dict[str, Any] = {**NAMES, "pe": pe, "task_id": self._task_id}
        move = ValueInstantiation(pe, arrays, space)
        for name, data in self.unit.constants.items():
            space[name] = move(data)
        exec(self.code, space)  # the functions of this program
        for g, array in zip(self.unit.globals, arrays, strict=True):
            if not (g.addressed or g.type.aggregate):
                space[f"v{g.number}"] = move(g.initial)
            elif isinstance(array, np.ndarray) and array.dtype == object:
                for i, item in enumerate(g.initial if isinstance(g.initial, np.ndarray) else [g.initial]):
                    put(array, i, move(item))
            space[f"G{g.number}"] = array
        return space

    def task_number(self, given: Any) -> int | None:
        """The id of a task given as an id or as a function."""
        return self._task_id(id(given)) if isinstance(given, FunctionValue) else given

    def _task_id(self, key: int) -> int:
        return self.task_ids[key]


def allocate_global(g: GlobalVariable) -> np.ndarray[Any, Any]:
    if isinstance(g.initial, np.ndarray):
        return g.initial.copy()
    array = np.zeros(1, g.type.dtype)
    if g.type.dtype != object:
        array[0] = g.initial
    return array


class ValueInstantiation:
    """Converts comptime values to the values of one PE: globals become its arrays, FIFOs its FIFOs."""

    def __init__(self, pe: Any, arrays: list[Any], space: dict[str, Any]) -> None:
        self.pe, self.arrays, self.space = pe, arrays, space

    def __call__(self, data: Any) -> Any:
        move = INSTANTIATIONS.get(type(data))
        return data if move is None else move(self, data)

    def array(self, data: Any) -> Any:
        """The array of a global, or a comptime array itself."""
        if isinstance(data, GlobalVariable):
            return self.arrays[data.number]
        if data is REGISTERS:
            return self.pe.registers
        return self.array(data.array).view(data.dtype) if isinstance(data, GlobalCast) else data

    def function(self, value: FunctionValue) -> Callable[..., Any]:
        """The Python function of a function value."""
        return self.space[self.pe.program.unit.compile_function(value).name]


def _instantiate_objects(move: ValueInstantiation, data: np.ndarray[Any, Any]) -> Any:
    if data.dtype != object:
        return data
    objects = np.empty(len(data), object)
    for i, item in enumerate(data):
        put(objects, i, move(item))
    return objects


INSTANTIATIONS: dict[type, Callable[[ValueInstantiation, Any], Any]] = {
    GlobalVariable: ValueInstantiation.array,
    GlobalCast: ValueInstantiation.array,
    Pointer: lambda move, p: Pointer(move.array(p.array), p.index),
    Mem1d: lambda move, d: d._replace(array=move.array(d.array)),
    Mem4d: lambda move, d: d._replace(array=move.array(d.array)),
    Circular: lambda move, d: d._replace(array=move.array(d.array)),
    FifoRef: lambda move, d: move.pe.fifos[d.number],
    NativeFunction: lambda move, n: move.pe.native(n),
    FunctionValue: ValueInstantiation.function,
    ComptimeValue: lambda move, v: move(v.data),
    dict: lambda move, d: {n: move(v) for n, v in d.items()},
    np.ndarray: _instantiate_objects,
}


def export_type(o: ExprValue) -> t.CslType:
    """The type of an exported operand."""
    return o.type

"""A compiled PE program: Python source, the objects it names, and what each PE makes of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.errors import UNKNOWN, Location
from tessera.interp.target.csl import support
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import fail
from tessera.interp.target.csl.sema.functions import FunctionValue, Instance
from tessera.interp.target.csl.sema.operand import Operand
from tessera.interp.target.csl.sema.tables import MEMORY, Tables
from tessera.interp.target.csl.sema.unit import Unit
from tessera.interp.target.csl.values import (
    Cast,
    Circular,
    FifoRef,
    Global,
    Mem1d,
    Mem4d,
    NativeFunction,
    Pointer,
    Value,
)

if TYPE_CHECKING:
    pass

BOOT = "boot_"  # the function that loads registers before a run
_CELL = re.compile(r"\b([RW])(\d+)_")


class Program:
    """One compiled (source, params): shared by all PEs that run it."""

    def __init__(self, unit: Unit, path: str) -> None:
        self.unit, self.path = unit, path
        for g in unit.globals:  # grows while functions that values refer to are compiled
            unit.resolve(g.initial)
        self.tables: Tables = unit.tables
        self.memory_used = unit.memory_used
        if self.memory_used > MEMORY:
            largest = max(unit.globals, key=lambda g: g.type.size)
            fail(
                largest.loc,
                f"PE memory overflow: the program needs {self.memory_used} bytes of {MEMORY}",
                suggestion=f"'{largest.name}' alone takes {largest.type.size} bytes",
            )
        self.exports = {name: o for name, (o, _) in self.tables.exports.items()}
        self.symbol_names = unit.symbols
        self.queues_in, self.queues_out = self.tables.queues_in, self.tables.queues_out
        self.colors, self.tasks = self.tables.colors, self.tables.tasks
        self.places: list[Location] = []
        self.source = self._assemble(list(unit.instances.values()))
        self.code: CodeType = compile(self.source, f"<csl {path}>", "exec")
        # The Python of each function, by its name there.
        self.functions = {c.co_name: c for c in self.code.co_consts if isinstance(c, CodeType)}
        self.task_ids = {id(task.value): task.number for task in self.tasks.values()}
        unbound = next((v for key, v in unit.references.items() if key not in self.task_ids), None)
        if unbound is not None:
            fail(unbound.decl.loc, f"task '{unbound.decl.name}' is activated but bound to no ID")

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of each variable."""
        return {f"{g.name}#{g.number}": g.type.size for g in self.unit.globals}

    def _assemble(self, instances: list[Instance]) -> str:
        lines: list[str] = []
        self.places = [UNKNOWN]
        for instance in instances:
            text = [" " * line.depth + _CELL.sub(self._cell, line.text) for line in instance.lines]
            written = sorted({m.group(2) for line in instance.lines for m in _CELL.finditer(line.text)})
            loose = [f"v{n}" for n in written if not self._addressed(int(n))]
            head = [f"def {instance.name}({instance.arguments}):"]
            head += [f" global {', '.join(loose)}"] if loose else []
            lines += [*head, *text, *([] if text else [" pass"])]
            self.places += [instance.value.decl.loc] * len(head)
            self.places += [line.loc for line in instance.lines] or [instance.value.decl.loc]
        loaded = self.tables.loaded
        lines += [f"def {BOOT}():", *(f" {text}" for text, _ in loaded), " return"]
        self.places += [UNKNOWN, *(loc for _, loc in loaded), UNKNOWN]
        return "\n".join(lines) + "\n"

    def _addressed(self, number: int) -> bool:
        return self.unit.globals[number].addressed

    def _cell(self, match: re.Match[str]) -> str:
        found = self.unit.globals[int(match.group(2))]
        if not found.addressed:
            return f"v{found.number}"
        read = match.group(1) == "R" and found.type.dtype.kind not in "fOV"
        return f"G{found.number}.item(0)" if read else f"G{found.number}[0]"

    def place(self, line: int) -> Location:
        """The CSL of a line of the generated Python."""
        return self.places[line] if 0 <= line < len(self.places) else UNKNOWN

    def namespace(self, pe: Any, arrays: list[Any]) -> dict[str, Any]:
        """The globals of the generated Python for one PE: its memory, its constants, its functions."""
        space: dict[str, Any] = {**support.NAMES, "pe": pe, "task_id": self._task_id}
        move = Mover(pe, arrays, space)
        for name, data in self.unit.constants.items():
            space[name] = move(data)
        exec(self.code, space)  # the functions of this program
        for g, array in zip(self.unit.globals, arrays, strict=True):
            if not (g.addressed or g.type.aggregate):
                space[f"v{g.number}"] = move(g.initial)
            elif isinstance(array, np.ndarray) and array.dtype == object:
                for i, item in enumerate(g.initial if isinstance(g.initial, np.ndarray) else [g.initial]):
                    support.put(array, i, move(item))
            space[f"G{g.number}"] = array
        return space

    def task_number(self, given: Any) -> int | None:
        """The id of a task that is given as an id or by its name."""
        return self._task_id(id(given)) if isinstance(given, FunctionValue) else given

    def _task_id(self, key: int) -> int:
        return self.task_ids[key]


def allocated(g: Global) -> np.ndarray[Any, Any]:
    if isinstance(g.initial, np.ndarray):
        return g.initial.copy()
    array = np.zeros(1, g.type.dtype)
    if g.type.dtype != object:
        array[0] = g.initial
    return array


class Mover:
    """Turns comptime values into the values of one PE: globals become its arrays, FIFOs its FIFOs."""

    def __init__(self, pe: Any, arrays: list[Any], space: dict[str, Any]) -> None:
        self.pe, self.arrays, self.space = pe, arrays, space

    def __call__(self, data: Any) -> Any:
        move = MOVES.get(type(data))
        return data if move is None else move(self, data)

    def array(self, data: Any) -> Any:
        """The array of a global, or a comptime array itself."""
        if isinstance(data, Global):
            return self.arrays[data.number]
        return self.array(data.array).view(data.dtype) if isinstance(data, Cast) else data

    def function(self, value: FunctionValue) -> Callable[..., Any]:
        """The Python function of a function value."""
        return self.space[self.pe.program.unit.function(value).name]


def _objects(move: Mover, data: np.ndarray[Any, Any]) -> Any:
    if data.dtype != object:
        return data
    found = np.empty(len(data), object)
    for i, item in enumerate(data):
        support.put(found, i, move(item))
    return found


MOVES: dict[type, Callable[[Mover, Any], Any]] = {
    Global: Mover.array,
    Cast: Mover.array,
    Pointer: lambda move, p: Pointer(move.array(p.array), p.index),
    Mem1d: lambda move, d: d._replace(array=move.array(d.array)),
    Mem4d: lambda move, d: d._replace(array=move.array(d.array)),
    Circular: lambda move, d: d._replace(array=move.array(d.array)),
    FifoRef: lambda move, d: move.pe.fifos[d.number],
    NativeFunction: lambda move, n: move.pe.native(n),
    FunctionValue: Mover.function,
    Value: lambda move, v: move(v.data),
    dict: lambda move, d: {n: move(v) for n, v in d.items()},
    np.ndarray: _objects,
}


def export_type(o: Operand) -> t.Type:
    """The type under which a program exports something."""
    return o.type

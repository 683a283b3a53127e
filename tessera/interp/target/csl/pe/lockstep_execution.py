"""Lockstep execution (SIMD across PEs): PEs of one program replay recorded traces of their tasks on memory that is
stored side by side.

A recorded task takes effect at each PE at its own cycle: its clock, activations, launches and scalar variables. Its
memory steps are deferred, and run for all PEs that wait for the same steps as soon as one of them needs its memory:
before a fabric operation continues, before a task that is not recorded, before a copy of the host. Values, cycles and
order of events are those of sequential execution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tessera.interp.target.csl.pe.program import PeProgram, allocate_global
from tessera.interp.target.csl.pe.task_recorder import TaskRecorder
from tessera.interp.target.csl.pe.task_trace import (
    SCALAR_VARIABLE,
    LockstepFrame,
    MemoryKey,
    MemorySteps,
    ScalarSymbol,
    SymbolicMemory,
    TaskRecord,
    UnrecordableTask,
    contains_kind,
    map_items,
)

if TYPE_CHECKING:
    from tessera.interp.target.csl.pe.pe_state import PeState

MIN_PES = 24  # PEs from which recording pays off
MIN_STEPS = 6  # operations on memory from which recording pays off
MAX_LOOKUPS = 24  # lookups after which a task that never matches is no longer looked up
MAX_FAILURES = 4  # failed recordings after which a task is no longer recorded
GENERATOR_FLAG = 0x20  # the code flag of a generator
PLAIN_TYPES = (int, str, np.generic, type(None))


class GuardBranch:
    """A guard: an expression whose value may differ between PEs, and the next guard or record for each value."""

    def __init__(self, text: str, ask: Callable[..., Any]) -> None:
        self.text, self.ask = text, ask
        self.branches: dict[Any, Any] = {}


class RecordMatch(NamedTuple):
    """A record that applies to a PE: the inputs of its memory steps, and the resulting scalar variables."""

    record: CompiledRecord
    values: list[Any]
    inputs: tuple[Any, ...]
    results: list[tuple[str, Any]]


class CompiledRecord:
    """A record whose expressions are compiled to functions of the task's variables."""

    def __init__(self, record: TaskRecord, names: list[str], work: MemorySteps) -> None:
        self.work, self.cycles = work, record.cycles
        self.inputs = compile_expression(f"({', '.join(record.inputs)},)" if record.inputs else "()", names)
        self.results = [(name, _make_factory(value, names)) for name, value in record.results.items()]
        self.effects = [(e.cycles, e.call, _make_factory(e.args, names), e.line) for e in record.effects]

    def make_match(self, pe: PeState, values: list[Any]) -> RecordMatch:
        """The record for one PE with these variables."""
        results = [(name, make(pe, values)) for name, make in self.results]
        return RecordMatch(self, values, self.inputs(*values), results)


ValueFactory = Callable[["PeState", list[Any]], Any]


def _make_factory(value: Any, names: list[str]) -> ValueFactory:
    """A function that computes a value of a record for one PE and its variables."""
    if isinstance(value, ScalarSymbol):
        ask = compile_expression(value.text, names)
        return lambda pe, values: ask(*values)
    if isinstance(value, SymbolicMemory):
        return lambda pe, values: find_memory(pe, value)
    if not contains_kind(value, (ScalarSymbol, SymbolicMemory)):
        return lambda pe, values: value
    if isinstance(value, dict):
        of_names = {name: _make_factory(item, names) for name, item in value.items()}
        return lambda pe, values: {name: make(pe, values) for name, make in of_names.items()}
    makers = [_make_factory(item, names) for item in value]
    kind = type(value)
    if kind is tuple:
        return lambda pe, values: tuple([make(pe, values) for make in makers])
    return lambda pe, values: tuple.__new__(kind, [make(pe, values) for make in makers])  # a descriptor or a pointer


def compile_expression(text: str, names: list[str]) -> Callable[..., Any]:
    """An expression as a function of the variables."""
    return eval(f"lambda {', '.join(names)}: {text}", {})  # type: ignore[no-any-return]


def find_memory(pe: PeState, cells: SymbolicMemory) -> np.ndarray[Any, Any]:
    """The memory of one PE."""
    array = pe.space[f"G{cells.number}"]
    return array if array.dtype == cells.dtype else array.view(cells.dtype)


class TaskHistory:
    """One task of a program: the variables it may read, and its records."""

    def __init__(self, group: LockstepGroup, name: str, code: CodeType) -> None:
        self.lockstep_group, self.name = group, name
        self.loose = sorted(group.find_variables(name))
        self.names = [*self.loose, *(f"a{i}" for i in range(code.co_argcount))]
        self.open = not code.co_flags & GENERATOR_FLAG
        self.asked = self.recorded = self.reused = self.failed = 0
        self.branches: dict[Any, Any] = {}

    def find(self, pe: PeState, args: tuple[Any, ...]) -> RecordMatch | None:
        """The record that matches the present state of a PE, recorded now if worthwhile; None: the PE executes the task
        itself.
        """
        values = [*map(pe.space.__getitem__, self.loose), *args]
        key = tuple([self.lockstep_group.make_key(pe, value) for value in values])
        try:
            node: Any = self.branches.get(key)
            while type(node) is GuardBranch:
                node = node.branches.get(node.ask(*values))
            if node is None:
                node = (
                    self._record_task(pe, key, values)
                    if self.recorded < 16 or self.reused > 2 * self.recorded
                    else False
                )
            match = node and node.make_match(pe, values)
        except (ArithmeticError, ValueError):  # the PE itself will report the division by zero
            return None
        self.asked += 1
        self.reused += bool(match)
        self.open = self.open and (self.reused > 0 or self.asked < MAX_LOOKUPS)
        return match or None

    def _record_task(self, pe: PeState, key: tuple[Any, ...], values: list[Any]) -> Any:
        """Record the task for the present state of a PE; False if it cannot be recorded."""
        recorder, compiled = self.lockstep_group.recorder, None
        self.recorded += 1
        recorder.begin()
        try:
            variables = {
                name: self.lockstep_group.make_symbolic(pe, value)
                for name, value in zip(self.names, values, strict=True)
            }
            record = recorder.run(self.name, variables)
            if record.operations >= MIN_STEPS:
                compiled = CompiledRecord(record, self.names, self.lockstep_group.share_steps(record.work))
        except UnrecordableTask:
            self.failed += 1
            self.open = self.failed < MAX_FAILURES
        branches, step = self.branches, key
        for text, seen in recorder.record.guards:
            fork = branches.setdefault(step, GuardBranch(text, compile_expression(text, self.names)))
            branches, step = fork.branches, seen
        branches[step] = compiled or False
        return compiled or False


class LockstepGroup:
    """The PEs of one program: their memory, the records of their tasks, and deferred memory steps."""

    def __init__(self, program: PeProgram, count: int) -> None:
        self.program = program
        self.pes: list[PeState] = []
        self.memory = [_replicate_memory(allocate_global(g), count) for g in program.unit.globals]
        self._recorder: TaskRecorder | None = None
        self.histories: dict[str, TaskHistory] = {}
        self.works: dict[Any, MemorySteps] = {}

    def join(self, pe: PeState) -> list[np.ndarray[Any, Any]]:
        """Add a PE; returns its memory."""
        row = len(self.pes)
        self.pes.append(pe)
        return [
            allocate_global(g) if memory is None else memory[row]
            for g, memory in zip(self.program.unit.globals, self.memory, strict=True)
        ]

    @property
    def recorder(self) -> TaskRecorder:
        """The recorder of the program's tasks."""
        if self._recorder is None:
            self._recorder = TaskRecorder(self.program)
        return self._recorder

    def find_variables(self, name: str) -> set[str]:
        """The scalar variables that a function or its callees may use."""
        variables: set[str] = set()
        open_, seen = [name], {name}
        while open_:
            used = set(self.program.functions[open_.pop()].co_names)
            variables |= {n for n in used if SCALAR_VARIABLE.match(n)}
            calls = {n for n in used if n in self.program.functions} - seen
            seen |= calls
            open_ += calls
        return variables

    def record(self, pe: PeState, function: Any, args: tuple[Any, ...]) -> RecordMatch | None:
        """The record of a task that matches a PE."""
        code = getattr(function, "__code__", None)
        if code is None:
            return None
        history = self.histories.get(code.co_name)
        if history is not None and not history.open:
            return None
        if code.co_filename != self.program.code.co_filename:
            return None
        if history is None:
            history = self.histories[code.co_name] = TaskHistory(self, code.co_name, code)
        return history.find(pe, args) if history.open else None

    def make_key(self, pe: PeState, value: Any) -> Any:
        """The part of a value that must be equal in PEs that share a record: the type of a number, the whole of other
        values.
        """
        kind = type(value)
        if kind is int or kind is np.float32 or isinstance(value, (int, np.floating)):
            return kind
        return map_items(value, lambda item: _comparison_key(pe, item))

    def make_symbolic(self, pe: PeState, value: Any) -> Any:
        """The value with symbols in place of the PE's memory.

        Raises:
            UnrecordableTask: the value holds an object that only this PE has.
        """
        if isinstance(value, np.ndarray) and id(value) in pe.numbers:
            return self.recorder.cells[pe.numbers[id(value)]]
        if not isinstance(value, (*PLAIN_TYPES, tuple)):
            raise UnrecordableTask("a variable holds an object of one PE")
        return map_items(value, lambda item: self.make_symbolic(pe, item))

    def share_steps(self, work: MemorySteps) -> MemorySteps:
        """The memory steps object that records with equal steps share."""
        return self.works.setdefault(work.key, work)

    def settle(self, pe: PeState) -> None:
        """Execute the deferred memory steps of a PE, together with equal steps of other PEs."""
        while pe.pending:
            work = pe.pending[0][0]
            rows, inputs = [], []
            for row, other in enumerate(self.pes):
                if other.pending and other.pending[0][0] is work:
                    rows.append(row)
                    inputs.append(other.pending.popleft()[1])
            self._execute(work, rows, inputs)

    def _execute(self, work: MemorySteps, rows: list[int], inputs: list[tuple[Any, ...]]) -> None:
        columns_of: dict[int, np.ndarray[Any, Any]] = {}
        which: Any = slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] + 1 == len(rows) else rows
        for number in sorted({number for number, _ in work.memory}):
            columns_of[number] = np.ascontiguousarray(self.memory[number][which].T)
        arrays: dict[MemoryKey, np.ndarray[Any, Any]] = {key: columns_of[key[0]].view(key[1]) for key in work.memory}
        columns = [_make_row(list(column)) for column in zip(*inputs, strict=True)]
        work.run(LockstepFrame(arrays, columns, work.count))
        for number in work.written:
            self.memory[number][which] = columns_of[number].T


def _comparison_key(pe: PeState, item: Any) -> Any:
    """A key of a descriptor or pointer that is equal for two PEs if it has the same meaning."""
    if isinstance(item, np.ndarray):
        return "memory", pe.numbers.get(id(item), id(item))
    if isinstance(item, np.generic):
        return item.tobytes()  # distinguishes zeros of both signs
    return item if isinstance(item, PLAIN_TYPES) else map_items(item, lambda part: _comparison_key(pe, part))


def _make_row(column: list[Any]) -> np.ndarray[Any, Any]:
    row = np.array(column)
    return (row.astype(np.int64) if row.dtype.kind in "iub" else row)[None, :]


def _replicate_memory(array: np.ndarray[Any, Any], count: int) -> Any:
    """The memory of a variable for `count` PEs; None for a variable that holds objects."""
    return None if array.dtype == object else np.repeat(array[None, :], count, 0)


def form_lockstep_groups(programs: Iterator[PeProgram]) -> dict[int, LockstepGroup]:
    """The lockstep groups of a layout, by the program's id: programs that at least `MIN_PES` PEs run."""
    counts: dict[int, tuple[PeProgram, int]] = {}
    for program in programs:
        counts[id(program)] = (program, counts.get(id(program), (program, 0))[1] + 1)
    return {key: LockstepGroup(program, n) for key, (program, n) in counts.items() if n >= MIN_PES}

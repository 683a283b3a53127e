"""Program of a processing element: its arrays, their reuse over time, its tasks and statements, and its fault codes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tessera.codegen.csl.text.dsd import (
    CSL_TYPES,
    MAX_DSD_STRIDE,
    PeArray,
    PeArrayView,
    coalesce_axes,
    count_elements,
    find_move_builtin,
    format_dsd,
    make_row_major_strides,
    offset_element,
    replace_axes,
    spell_type,
    widen_index_literal,
)
from tessera.codegen.csl.text.routes import FabricChannel
from tessera.codegen.diagnostics import describe_location
from tessera.core.errors import (
    DeadlockError,
    ExecutionError,
    Location,
    OutOfBoundsError,
    TesseraError,
    UnsupportedOpError,
)
from tessera.core.types import TensorType
from tessera.ir.core import Node, Value

# The functions of a program: the first, and tasks that go on when what is on its way has come.


ENTRY_FUNCTION = "compute"
# How many things a task can wait for: one activates it, the other takes its block away.
MAX_TASK_EVENTS = 2
# Identifiers of local tasks that both machines have, and the host's copies do not use. WSE-2 takes words of a color as
# a call of the task of that number.
LOCAL_TASK_IDS = (*range(8, 21), *range(24, 27))


@dataclass
class TaskFunction:
    """A function of the program; one that `awaits` two things is blocked until the second has come."""

    name: str
    lines: list[str] = field(default_factory=list)
    awaits: int = 0

    def called(self) -> str:
        """What lets the task go on: the first of the things it waits for activates it, the second unblocks it."""
        self.awaits += 1
        assert self.awaits <= MAX_TASK_EVENTS
        return "activate" if self.awaits == 1 else "unblock"

    def done(self) -> str:
        """What an asynchronous operation says that the task waits for."""
        return f".{{ .async = true, .{self.called()} = {self.name}_id }}"

    def text(self) -> str:
        """The function."""
        head = f"fn {self.name}() void" if self.name == ENTRY_FUNCTION else f"task {self.name}() void"
        block = [f"  @block({self.name}_id);"] if self.awaits == MAX_TASK_EVENTS else []
        return "\n".join([f"{head} {{", *block, *self.lines, "}", ""])

    def binding(self) -> list[str]:
        """What binds it as a task, when the program begins."""
        block = [f"  @block({self.name}_id);"] if self.awaits == MAX_TASK_EVENTS else []
        return [f"  @bind_local_task({self.name}, {self.name}_id);", *block]


def assign_task_ids(tasks: Sequence[TaskFunction], colors: Collection[int]) -> dict[str, int]:
    """The identifiers of tasks, by name; none is a color of the program. Some lack one where there are too few."""
    free = (number for number in LOCAL_TASK_IDS if number not in colors)
    return {part.name: number for part, number in zip(tasks, free, strict=False)}


def format_task_ids(numbers: Mapping[str, int]) -> str:
    """What names the identifiers of tasks."""
    return "".join(f"const {n}_id: local_task_id = @get_local_task_id({number});\n" for n, number in numbers.items())


# A program of an element under construction: its arrays, which values share over time, and its statements.


# What the memory of an element holds, and what of it arrays may fill: code and the stack need the rest.
PE_MEMORY_BYTES, ARRAY_MEMORY_BYTES = 48 * 1024, 40 * 1024


@dataclass
class CslEmitter:
    """The text of one program, which every element of the mesh runs, and where its values lie."""

    grid: tuple[int, int]
    wide: bool = False  # whether it is of a WSE-3, whose operations take more elements a cycle
    fuses: bool = True  # whether chains of pointwise ops become one loop
    saves_memory: bool = False  # whether room is worth more than cycles
    uses_broadcast_routes: bool = (
        True  # whether elements in turn tell all along an axis through the last; else neighbours hand on
    )
    buffers: list[PeArray] = field(default_factory=list)
    values: dict[Value, PeArrayView] = field(default_factory=dict)
    symbols: dict[Value, PeArray] = field(default_factory=dict)  # what the host copies in and out
    exported: dict[Value, str] = field(default_factory=dict)  # and by which names
    functions: dict[str, str] = field(default_factory=dict)  # helpers, by name
    faults: list[dict[str, Any]] = field(default_factory=list)  # what may go wrong, for the host
    constants: dict[str, str] = field(default_factory=dict)  # names of descriptors, by their texts
    channels: dict[str, FabricChannel] = field(default_factory=dict)  # on which it talks, by name
    spare: list[PeArray] = field(default_factory=list)
    reference_counts: dict[PeArray, int] = field(default_factory=dict)
    names: Iterator[int] = field(default_factory=itertools.count)
    programs: tuple[tuple[str, int], ...] = ()  # of a kernel: the place along each axis of its launch, and the size
    index_type: str = "i32"  # the type of numbers that count places: of 64 bits where a kernel may count further
    uses_index_type: bool = False  # whether an expression counts places, for which 32 bits do
    deferred_nodes: dict[Value, Node] = field(default_factory=dict)  # what is computed inside the loop of what needs it
    params: frozenset[Value] = frozenset()  # of the region that is emitted
    last_used_values: frozenset[Value] = frozenset()  # what its present node uses last
    parts: list[TaskFunction] = field(
        default_factory=lambda: [TaskFunction(ENTRY_FUNCTION)]
    )  # the functions, of which the last is written
    pending_task: TaskFunction | None = None  # the next, where something is on its way
    completion_tasks: dict[str, TaskFunction] = field(default_factory=dict)  # tasks that end operations, by name
    pinned_views: list[PeArrayView] = field(default_factory=list)  # from where something is on its way
    receive_targets: dict[Value, PeArrayView] = field(
        default_factory=dict
    )  # where what a loop's pass begins to receive is to lie
    variables: list[str] = field(default_factory=list)  # that outlive a function
    depth: int = 1
    comment: str = ""  # the source line named last

    def declare(self, ref: Value, shape: Sequence[int]) -> PeArray:
        """An array for a tensor that the host copies."""
        buffer = PeArray(self.export(ref), CSL_TYPES[ref.type.dtype], max(count_elements(shape), 1))
        self.buffers.append(buffer)
        self.symbols[ref] = buffer
        return buffer

    def export(self, ref: Value) -> str:
        """The name under which the host knows a tensor."""
        name = f"host_{ref.hint}"
        self.exported[ref] = name if name not in self.exported.values() else f"{name}_{next(self.names)}"
        return self.exported[ref]

    def export_in_place(self, ref: Value, view: PeArrayView) -> bool:
        """Let the host copy a tensor from where a value lies, if that is an array of its own."""
        buffer = view.buffer
        if buffer is None or buffer in self.symbols.values() or not view.contiguous or buffer.size != max(view.size, 1):
            return False
        self.export(ref)
        self.symbols[ref] = buffer  # its room is never given to another value
        return True

    def channel(self, channel: FabricChannel) -> str:
        """The name of a channel, which the program then has."""
        self.channels.setdefault(channel.name, channel)
        return channel.name

    def allocate_for(self, type: TensorType) -> PeArrayView:
        """Room for a value: an array that nothing needs any more, or a new one."""
        shape, kind = tuple(map(int, type.shape)), spell_type(type)
        return self.allocate(shape, kind)

    def allocate(self, shape: tuple[int, ...], kind: str) -> PeArrayView:
        """Room for elements of a type."""
        size = max(count_elements(shape), 1)
        fitting = [b for b in self.spare if b.type == kind and b.size >= size]
        if fitting:
            buffer = min(fitting, key=lambda b: b.size)
            self.spare.remove(buffer)
        else:
            buffer = PeArray(f"t{next(self.names)}", kind, size)
            self.buffers.append(buffer)
        return PeArrayView(kind, shape, buffer, 0, make_row_major_strides(shape))

    def hold(self, value: Value, view: PeArrayView) -> None:
        """Say where a value lies."""
        self.values[value] = view
        if view.buffer is not None:
            self.reference_counts[view.buffer] = self.reference_counts.get(view.buffer, 0) + 1

    def drop(self, value: Value) -> None:
        """A value is needed no more."""
        view = self.values.pop(value, None)
        if view is not None and view.buffer is not None:
            self.reference_counts[view.buffer] -= 1
            if not self.reference_counts[view.buffer] and view.buffer not in self.symbols.values():
                self.spare.append(view.buffer)

    def reuse_or_copy(self, value: Value, x: PeArrayView, kind: str = "") -> PeArrayView:
        """Room for what replaces a value that lies as `x`, holding the same: its own where nothing else needs that."""
        # A parameter's room is also that of the result of its loop.
        holders = 2 if value in self.params else 1
        kind = kind or x.type
        own = x.buffer is not None and x.contiguous and x.type == kind and x.buffer not in self.symbols.values()
        if own and value in self.last_used_values and self.reference_counts.get(x.buffer) == holders:  # type: ignore[arg-type]
            return x
        out = self.allocate(x.shape, kind)
        self.copy(out, x)
        return out

    def pin(self, view: PeArrayView) -> None:
        """Keep room for as long as something is on its way from there."""
        if view.buffer is not None:
            self.reference_counts[view.buffer] = self.reference_counts.get(view.buffer, 0) + 1
            self.pinned_views.append(view)

    def unpin(self) -> None:
        """Nothing is on its way any more."""
        for view in self.pinned_views:
            assert view.buffer is not None
            self.reference_counts[view.buffer] -= 1
            if view.buffer not in self.symbols.values():
                self.release(view)
        self.pinned_views.clear()

    def release(self, view: PeArrayView) -> None:
        """Room that no value holds is free again."""
        if view.buffer is not None and not self.reference_counts.get(view.buffer):
            self.spare.append(view.buffer)

    def cast_to_index(self, name: str) -> str:
        """A loop's variable as a number that counts places."""
        return name if self.index_type == "i32" else f"@as({self.index_type}, {name})"

    def get_dsd(self, view: PeArrayView, shape: tuple[int, ...]) -> str | None:
        """The name of a view's descriptor (or the value of a literal); None where there is none."""
        text = format_dsd(replace(view, dynamic_offset=""), shape)
        if text is None or view.literal:
            return text
        name = self.constant(text, f"{view.buffer.name}_at")  # type: ignore[union-attr]
        if not view.dynamic_offset:
            return name
        moved = f"{name}_{next(self.names)}"
        self.add_line(f"const {moved} = @increment_dsd_offset({name}, {view.dynamic_offset}, {view.type});")
        return moved

    def constant(self, text: str, stem: str) -> str:
        """The name of a constant of the program, one for each text: descriptors that are known cost nothing to make."""
        return self.constants.setdefault(text, f"{stem}{len(self.constants)}")

    def get_pending_task(self) -> TaskFunction:
        """What goes on when the operations under way are done."""
        if self.pending_task is None:
            self.pending_task = TaskFunction(f"after{len(self.parts)}")
        return self.pending_task

    def add_completion_task(self, along: str) -> str:
        """The name of a task that waits for two things, and then lets what is awaited go on."""
        task = self.get_pending_task()
        return self.task(f"{task.name}_{along}", [f"@{task.called()}({task.name}_id);"], MAX_TASK_EVENTS)

    def task(self, name: str, statements: Sequence[str], awaits: int = 1) -> str:
        """The name of a task of some statements, which the program then has."""
        self.completion_tasks.setdefault(name, TaskFunction(name, [f"  {text}" for text in statements], awaits))
        return name

    def end_task(self) -> None:
        """End the function here; a task goes on when what is on its way has come."""
        assert self.pending_task is not None and self.depth == 1
        self.parts.append(self.pending_task)
        self.pending_task, self.comment = None, ""

    def add_line(self, text: str) -> None:
        """Add a statement."""
        self.parts[-1].lines.append("  " * self.depth + text)

    @contextmanager
    def inner(self, head: str) -> Iterator[None]:
        """Add a block of statements."""
        self.add_line(f"{head} {{")
        self.depth += 1
        yield
        self.depth -= 1
        self.add_line("}")

    def loop(self, views: Sequence[PeArrayView], statement: Callable[[list[str]], str]) -> None:
        """A statement for every element; it is given each view's element as an expression."""
        if not count_elements(views[0].shape):
            return
        shape, level = coalesce_axes(views)
        names = [f"at{next(self.names)}" for _ in shape]  # i8 would be a type
        for name, size in zip(names, shape, strict=True):
            self.add_line(f"for (@range(i16, {size})) |{name}| {{")
            self.depth += 1
        for line in statement([v.at(names) for v in level]).split("\n"):
            self.add_line(line)
        for _ in shape:
            self.depth -= 1
            self.add_line("}")

    def operation(self, builtin: str, views: Sequence[PeArrayView]) -> bool:
        """One operation on whole blocks, the destination first; False where descriptors cannot say it."""
        shape, level = coalesce_axes(views)
        found = [self.get_dsd(v, shape) for v in level]
        if None in found:
            return False
        if count_elements(shape):
            self.add_line(f"{builtin}({', '.join(map(str, found))});")
        return True

    def copy(self, target: PeArrayView, source: PeArrayView) -> None:
        """Copy a block."""
        if target == source:
            return
        source = widen_index_literal(target, source)
        move = find_move_builtin(target, source)
        if move and target.type == source.type and self.operation(move, [target, source]):
            return
        self.loop([target, source], lambda e: f"{e[0]} = {e[1]};")

    def move(self, target: PeArrayView, source: PeArrayView, to: str, start: str) -> None:
        """Copy a block to `to` elements on, from `start` elements on; both are texts, which only a run knows."""
        shape, (into, out) = coalesce_axes([target, widen_index_literal(target, source)])
        inner = (shape or (1,))[-1]
        rows = [replace_axes(v, (inner,), (*v.strides[-1:], 1)[:1]) for v in (into, out)]
        found = [v.literal or (self.get_dsd(v, (inner,)) if self._in_line(v) else None) for v in rows]
        outer = [f"at{next(self.names)}" for _ in shape[:-1]]
        for name, size in zip(outer, shape[:-1], strict=True):
            self.add_line(f"for (@range(i16, {size})) |{name}| {{")
            self.depth += 1
        steps = [self._steps(first, v, outer) for first, v in ((to, into), (start, out))]
        builtin = find_move_builtin(target, source)
        if None in found or builtin is None:
            self.loop(rows, lambda t: f"{offset_element(t[0], steps[0])} = {offset_element(t[1], steps[1])};")
        elif count_elements(target.shape):
            self.add_line(f"{builtin}({self._onward(into, found[0], steps[0])}, "
                     f"{self._onward(out, found[1], steps[1])});")  # fmt: skip
        for _ in outer:
            self.depth -= 1
            self.add_line("}")

    def _steps(self, first: str, view: PeArrayView, names: Sequence[str]) -> str:
        """How far on an element of outer axes is, as a text."""
        strides = () if view.literal else view.strides
        counted = [f"@as({self.index_type}, {n})" if first else n for n in names]
        terms = [f"{n} * {s}" for n, s in zip(counted, strides, strict=False) if s]
        return " + ".join([first, *terms] if first else terms)

    def _in_line(self, view: PeArrayView) -> bool:
        return not view.strides or abs(view.strides[0]) <= MAX_DSD_STRIDE

    def _onward(self, view: PeArrayView, text: str | None, steps: str) -> str:
        """A descriptor some elements on."""
        if view.literal or not steps:
            return str(text)
        return f"@increment_dsd_offset({text}, @as(i16, {steps}), {view.type})"

    def plain(self, view: PeArrayView) -> PeArrayView:
        """A view whose elements lie one after another: itself, or a copy."""
        if view.contiguous:
            return view
        made = self.allocate(view.shape, view.type)
        self.copy(made, view)
        return made


def make_unsupported_error(node: Node, why: str) -> UnsupportedOpError:
    """The error for what cannot be emitted."""
    return UnsupportedOpError(
        f"{node.op.name} cannot be emitted for csl: {why}", location=node.loc,
        suggestion="run this on another target, or in the interpreter",
    )  # fmt: skip


# What goes wrong on an element while it runs: it keeps the number of the place, and the host raises what is there.


FAULT_SYMBOL = "fault"
FAULT_ERRORS: Mapping[str, Callable[..., TesseraError]] = {
    "bounds": OutOfBoundsError,
    "assert": ExecutionError,
    "deadlock": DeadlockError,
}
# The first place is kept; places count from 1.
FAULT_HELPER = f"""fn fail(place: i32) void {{
  if ({FAULT_SYMBOL}[0] == 0) {FAULT_SYMBOL}[0] = place;
}}"""


def add_fault(element: CslEmitter, node: Node, kind: str, text: str, expected: str) -> str:
    """The statement that says that something went wrong at a node."""
    element.functions["fail"] = FAULT_HELPER
    place = describe_location(node.loc)
    element.faults.append({"kind": kind, "text": text, "expected": expected, "place": place})
    return f"fail({len(element.faults)});"


def emit_fault_return(element: CslEmitter, statement: str) -> None:
    """Say what went wrong, and go no further."""
    element.add_line(statement)
    element.add_line("sys_mod.unblock_cmd_stream();")
    element.add_line("return;")


def make_fault_error(faults: Sequence[Mapping[str, Any]], number: int, row: int, column: int) -> TesseraError:
    """The error for what an element kept."""
    found = faults[number - 1]
    return FAULT_ERRORS[found["kind"]](
        found["text"], location=Location(*found["place"]), expected=found["expected"],
        received=f"otherwise on the element in row {row} and column {column}",
    )  # fmt: skip

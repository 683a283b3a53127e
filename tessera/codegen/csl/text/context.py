"""CSL context: the data of one PE program under construction, on which the emission functions act."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tessera.codegen.csl.text.dsd import PeArray, PeArrayView
from tessera.codegen.csl.text.routes import FabricChannel
from tessera.ir.core import Node, Value

ENTRY_FUNCTION = "compute"
MAX_TASK_EVENTS = 2  # events that a task can wait for: one activates it, the other unblocks it


@dataclass
class TaskFunction:
    """A function or task of the program. A task that awaits two events starts blocked; the second event unblocks it."""

    name: str
    lines: list[str] = field(default_factory=list)
    awaits: int = 0

    def add_event(self) -> str:
        """Add an event that the task waits for; returns how it continues the task: "activate" or "unblock"."""
        self.awaits += 1
        assert self.awaits <= MAX_TASK_EVENTS
        return "activate" if self.awaits == 1 else "unblock"

    def format_async_options(self) -> str:
        """The options of an asynchronous DSD operation whose completion the task waits for."""
        return f".{{ .async = true, .{self.add_event()} = {self.name}_id }}"

    def format_function(self) -> str:
        """The text of the function. A task with two events blocks itself again for its next activation."""
        head = f"fn {self.name}() void" if self.name == ENTRY_FUNCTION else f"task {self.name}() void"
        block = [f"  @block({self.name}_id);"] if self.awaits == MAX_TASK_EVENTS else []
        return "\n".join([f"{head} {{", *block, *self.lines, "}", ""])

    def format_binding(self) -> list[str]:
        """The comptime statements that bind the task to its ID."""
        block = [f"  @block({self.name}_id);"] if self.awaits == MAX_TASK_EVENTS else []
        return [f"  @bind_local_task({self.name}, {self.name}_id);", *block]


@dataclass
class CslContext:
    """The data of one program, which every PE of the grid runs."""

    grid: tuple[int, int]
    is_wse3: bool = False  # whether the target is WSE-3, whose DSD operations process more elements per cycle
    fuses: bool = True  # whether pointwise ops are fused into one loop
    saves_memory: bool = False  # whether to prefer less memory to fewer cycles
    uses_broadcast_routes: bool = True  # whether to use broadcast routes; otherwise neighbours forward in a chain
    buffers: list[PeArray] = field(default_factory=list)
    values: dict[Value, PeArrayView] = field(default_factory=dict)
    symbols: dict[Value, PeArray] = field(default_factory=dict)  # the arrays that the host copies
    exported: dict[Value, str] = field(default_factory=dict)  # their exported names
    functions: dict[str, str] = field(default_factory=dict)  # helper functions, by name
    faults: list[dict[str, Any]] = field(default_factory=list)  # the runtime errors that the host can report
    constants: dict[str, str] = field(default_factory=dict)  # names of DSD constants, by their text
    channels: dict[str, FabricChannel] = field(default_factory=dict)  # fabric channels, by name
    free_arrays: list[PeArray] = field(default_factory=list)
    reference_counts: dict[PeArray, int] = field(default_factory=dict)
    names: Iterator[int] = field(default_factory=itertools.count)
    programs: tuple[tuple[str, int], ...] = ()  # of a kernel launch: program index and grid size along each axis
    index_type: str = "i32"  # the type of index arithmetic; i64 where a kernel's indices may exceed 32 bits
    uses_index_type: bool = False  # whether the present expression is index arithmetic
    deferred_nodes: dict[Value, Node] = field(default_factory=dict)  # nodes that are fused into the loop of their user
    params: frozenset[Value] = frozenset()  # parameters of the present block
    last_used_values: frozenset[Value] = frozenset()  # values whose last use is the present node
    task_functions: list[TaskFunction] = field(
        default_factory=lambda: [TaskFunction(ENTRY_FUNCTION)]
    )  # the functions; statements go to the last one
    pending_task: TaskFunction | None = None  # the task that continues after asynchronous operations in progress
    completion_tasks: dict[str, TaskFunction] = field(default_factory=dict)  # tasks that complete operations, by name
    pinned_views: list[PeArrayView] = field(default_factory=list)  # sources of asynchronous sends in progress
    receive_targets: dict[Value, PeArrayView] = field(
        default_factory=dict
    )  # destinations of the receives that the present loop iteration starts
    variables: list[str] = field(default_factory=list)  # global variables that several tasks use
    depth: int = 1  # the indentation
    comment: str = ""  # the last emitted source comment

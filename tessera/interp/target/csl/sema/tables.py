"""The options of a compilation, and what comptime blocks set up."""

from __future__ import annotations

from dataclasses import dataclass, field

from tessera.errors import Location
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.sema.functions import FunctionValue
from tessera.interp.target.csl.sema.operand import Operand
from tessera.interp.target.csl.values import ColorConfig

MEMORY = 48 * 1024


@dataclass(frozen=True)
class Options:
    """What the command line says: architecture, language version, fabric, search path."""

    arch: str = "wse2"
    sdk: str = "1.4"
    fabric_dims: tuple[int, int] | None = None
    fabric_offsets: tuple[int, int] | None = None
    import_paths: tuple[str, ...] = ()
    fp16_format: str = "f16"
    max_inlined_iterations: int = 50


@dataclass
class Task:
    """A function bound to a task id."""

    number: int
    kind: str
    name: str
    params: tuple[t.Type, ...]
    title: str
    loc: Location
    value: FunctionValue


@dataclass
class Tables:
    """What comptime blocks set up on a PE."""

    tasks: dict[tuple[str, int], Task] = field(default_factory=dict)
    queues_in: dict[int, int] = field(default_factory=dict)
    queues_out: dict[int, int] = field(default_factory=dict)
    exports: dict[str, tuple[Operand, Location]] = field(default_factory=dict)
    colors: dict[int, ColorConfig] = field(default_factory=dict)
    fifos: list[tuple[int, int | None, int | None]] = field(default_factory=list)
    activated: list[int] = field(default_factory=list)
    loaded: list[tuple[str, Location]] = field(default_factory=list)  # the code of registers loaded before a run
    blocked: set[int] = field(default_factory=set)
    blocked_colors: set[int] = field(default_factory=set)
    teardown: dict[int, str] = field(default_factory=dict)
    filters: dict[int, Location] = field(default_factory=dict)  # the colors whose filters are asked for by number
    emptied: dict[tuple[str, int], str] = field(default_factory=dict)  # handlers by side ("in", "out") and queue

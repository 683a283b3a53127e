"""Compiling a program: the layout file, then the program of each PE."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tessera.errors import ArgumentError, FileError, Location
from tessera.interp.target.csl import libraries
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import fail
from tessera.interp.target.csl.program import Program
from tessera.interp.target.csl.sema import (
    assignment,
    control,
    conversions,
    declare,
    dsd,
    dsr,
    literals,
    loops,
    machine,
    mapping,
    placement,
    reflection,
    tasks,
    vectors,
)
from tessera.interp.target.csl.sema.operand import Operand
from tessera.interp.target.csl.sema.tables import Options
from tessera.interp.target.csl.sema.unit import Unit
from tessera.interp.target.csl.values import ColorConfig, Value, frozen

# Their import fills the tables of meanings, builtins and libraries.
REGISTERED = (
    *(assignment, control, conversions, declare, dsd, dsr, literals, loops, machine, mapping, placement),
    *(reflection, tasks, vectors, libraries),
)

FLOATS = ("f16", "bf16")  # the vendor's third 16-bit format, cb16, has no published definition


class Export(NamedTuple):
    """A name that the host sees."""

    name: str
    id: int
    kind: str
    type: t.Type
    mutable: bool
    loc: Location


class Tile(NamedTuple):
    """What one PE runs."""

    program: Program
    params: dict[str, Value]


FRAMES = 8000


@dataclass
class Layout:
    """A compiled program: a rectangle of PEs with their programs, colors and exports."""

    width: int
    height: int
    arch: str
    sdk: str
    fabric_dims: tuple[int, int] | None
    fabric_offsets: tuple[int, int] | None
    tiles: dict[tuple[int, int], Tile] = field(default_factory=dict)
    colors: dict[tuple[int, int], dict[int, ColorConfig]] = field(default_factory=dict)
    exports: dict[str, Export] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    params: dict[str, int] = field(default_factory=dict)
    printed: tuple[str, ...] = ()  # what `@comptime_print` said


class Builder:
    """What the layout block sets up."""

    def __init__(self) -> None:
        self.size = (0, 0)
        self.code: dict[tuple[int, int], tuple[Path, dict[str, Value], Location]] = {}
        self.colors: dict[tuple[int, int], dict[int, ColorConfig]] = {}
        self.exports: dict[str, Export] = {}

    def set_rectangle(self, unit: Unit, width: int, height: int, loc: Location) -> None:
        """`@set_rectangle`."""
        options = unit.options
        if options.fabric_dims is not None:
            dims, at = options.fabric_dims, options.fabric_offsets or (0, 0)
            if at[0] + width > dims[0] or at[1] + height > dims[1]:
                fail(loc, f"rectangle of {width} x {height} PEs at {at} does not fit into a fabric of {dims}")
        self.size = unit.rectangle = (width, height)

    def set_tile_code(self, place: tuple[int, int], path: Path, params: dict[str, Value], loc: Location) -> None:
        """`@set_tile_code`."""
        if place in self.code:
            fail(loc, f"code for PE {place} has already been set")
        self.code[place] = (path, params, loc)

    def set_color_config(self, place: tuple[int, int], color: int, config: ColorConfig) -> None:
        """`@set_color_config`."""
        colors = self.colors.setdefault(place, {})
        if color in colors:
            fail(config.loc, "config for this color has already been set")
        colors[color] = config

    def export_name(self, name: str, type_: t.Type, mutable: bool | None, loc: Location) -> None:
        """`@export_name`."""
        if name in self.exports:
            fail(loc, f"name '{name}' has already been declared")
        kind = "function" if isinstance(type_, t.Fn) else "data"
        self.exports[name] = Export(name, len(self.exports), kind, type_, bool(mutable), loc)


def compile_program(
    path: str | Path,
    params: Mapping[str, int] | None = None,
    arch: str = "wse2",
    sdk: str = "1.4",
    fabric_dims: tuple[int, int] | None = None,
    fabric_offsets: tuple[int, int] | None = None,
    colors: Mapping[str, int] | None = None,
    import_paths: Sequence[str] = (),
    fp16_format: str = "f16",
    max_inlined_iterations: int = 50,
    memcpy: bool = False,
    channels: int = 0,
) -> Layout:
    """Compile the layout at `path` and the program of each of its PEs.

    `params` and `colors` give its params, as on the command line of `cslc`; `arch` is "wse2" or "wse3", `sdk` the
    language, "1.4" or "2.10"; `import_paths` are searched for modules in angle brackets; `fp16_format` is what
    `@fp16()` names, "f16" or "bf16"; `memcpy` and `channels` change nothing in a simulation. Raises
    `CslError` and `ParseError` at file:line:column, `FileError` for no file or no folder.

    >>> from tempfile import mkdtemp
    >>> folder = Path(mkdtemp())
    >>> _ = (folder / "pe.csl").write_text("export var a: [2]f32;")
    >>> _ = (folder / "layout.csl").write_text('layout { @set_rectangle(2, 1); @set_tile_code(0, 0, "pe.csl"); }')
    >>> layout = compile_program(folder / "layout.csl")
    >>> layout.width, list(layout.tiles), layout.tiles[0, 0].program.memory_used
    (2, [(0, 0)], 8)
    """
    source = Path(path).resolve()
    if not source.is_file():
        raise FileError(f"no such file: {path}")
    choices = {"arch": (arch, ("wse2", "wse3")), "sdk": (sdk, ("1.4", "2.10")), "fp16_format": (fp16_format, FLOATS)}
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise ArgumentError(f"unknown {name}", expected=" or ".join(allowed), received=value)
    paths = tuple(map(str, import_paths))
    missing = next((folder for folder in paths if not Path(folder).is_dir()), None)
    if missing is not None:
        raise FileError(f"no such folder on the import path: {missing}")
    searched = (*paths, str(source.parent))  # modules deep in folders name others from the top
    options = Options(arch, sdk, fabric_dims, fabric_offsets, searched, fp16_format, max_inlined_iterations)
    with _deep():
        return _compile(source, options, dict(params or {}), colors or {})


@contextmanager
def _deep() -> Iterator[None]:
    """Room for the nested calls that evaluation at compile time may make: some Python frames for each."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, FRAMES))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def _compile(source: Path, options: Options, params: dict[str, int], colors: Mapping[str, int]) -> Layout:
    builder = Builder()
    unit = Unit(options, layout=builder)
    given = {n: Value(t.COMPTIME_INT, v) for n, v in params.items()}
    given |= {n: Value(t.COLOR, v) for n, v in colors.items()}
    with np.errstate(all="ignore"):
        unit.start(source, given)
        return _assemble(builder, unit, options, params)


def _assemble(builder: Builder, unit: Unit, options: Options, params: dict[str, int]) -> Layout:
    root = unit.root
    assert root is not None
    if not builder.size[0]:
        fail(root.loc, "the layout never calls '@set_rectangle'")
    layout = Layout(*builder.size, options.arch, options.sdk, options.fabric_dims, options.fabric_offsets)
    layout.exports, layout.params = builder.exports, params
    programs: dict[Any, Program] = {}
    sources = {root.file.path, *unit.sources}
    for place, (path, values, _) in sorted(builder.code.items()):
        key = (path, frozen(values))
        program = programs.get(key) or tile_program(path, values, options, builder, place)
        sources |= set(program.unit.sources)
        if not program.unit.placed:
            programs[key] = program
        layout.tiles[place] = Tile(program, values)
        layout.colors[place] = merged(builder.colors.get(place, {}), program.colors)
        _check_filters(program, layout.colors[place])
    layout.sources = tuple(sorted(sources))
    units = {id(u): u for u in (unit, *(tile.program.unit for tile in layout.tiles.values()))}
    layout.printed = tuple(line for u in units.values() for line in u.state.get("printed", ()))
    return layout


def tile_program(
    path: Path, params: dict[str, Value], options: Options, builder: Builder, place: tuple[int, int]
) -> Program:
    """The program of a PE, with its exports checked against the layout's names."""
    unit = Unit(options, builder.size)
    unit.place = place
    unit.symbols = tuple(builder.exports)
    unit.tensors = tuple(name for name, e in builder.exports.items() if isinstance(e.type, t.Pointee))
    unit.start(path, params)
    _check_exports(unit, builder)
    return Program(unit, str(path))


def _check_exports(unit: Unit, builder: Builder) -> None:
    for name, (o, loc) in unit.tables.exports.items():
        declared = builder.exports.get(name)
        if declared is None:
            if unit.exported_by_keyword(name):
                continue
            fail(loc, f"name '{name}' was not declared during layout evaluation")
        _check_export(declared, o, loc)


def _check_export(declared: Export, o: Operand, loc: Location) -> None:
    a, b = declared.type, o.type
    if not isinstance(a, (t.Pointee, t.Fn)):  # a number, which is exported through its address
        a = t.Pointee("", a)
    if isinstance(a, t.Pointee) and isinstance(b, t.Pointee):
        mine = b.element.element if isinstance(b.element, t.Array) and not b.many else b.element
        if a.element != mine:
            fail(loc, f"exported symbol type mismatch: expected type '{a}', got: '{b}'")
        if declared.mutable and b.const:
            fail(loc, f"mutability mismatch: '{declared.name}' was declared mutable")
    elif a != b:
        fail(loc, f"exported symbol type mismatch: expected type '{a}', got: '{b}'")


def _check_filters(program: Program, colors: dict[int, ColorConfig]) -> None:
    """Whether the filters that the program asks for are there."""
    for color, loc in program.tables.filters.items():
        if color not in colors or colors[color].filter is None:
            fail(loc, f"no filter is set for color {color}")


def merged(layout: dict[int, ColorConfig], local: dict[int, ColorConfig]) -> dict[int, ColorConfig]:
    """The colors of a PE: set by the layout, or by its own program, not both."""
    both = next((c for c in local if c in layout), None)
    if both is not None:
        fail(local[both].loc, "config for this color has already been set")
    return {**layout, **local}


__all__ = ["Export", "Layout", "Tile", "compile_program"]

"""Compiler driver: the layout file, then the program of each PE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tessera.core.errors import ArgumentError, FileError, Location
from tessera.interp.target.csl.libraries import hardware_builtins, standard
from tessera.interp.target.csl.pe.pe_state import without_collection
from tessera.interp.target.csl.pe.program import PeProgram
from tessera.interp.target.csl.sema import (
    access,
    builtins,
    control_flow,
    declarations,
    dsd_builtins,
    dsd_descriptors,
    early_builtins,
    layout_builtins,
    task_builtins,
)
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.compilation_unit import LANGUAGE_VERSIONS, CompilationUnit, CslOptions
from tessera.interp.target.csl.sema.context import ExprValue
from tessera.interp.target.csl.sema.values import ColorConfig, ComptimeValue
from tessera.interp.target.csl.text.diagnostics import fail, name_compile_errors
from tessera.interp.target.tokens import deep_nesting

# These modules register rules, builtins and libraries on import.
REGISTERED = (
    *(
        declarations,
        control_flow,
        builtins,
        declarations,
        dsd_builtins,
        dsd_builtins,
        access,
        control_flow,
        hardware_builtins,
        dsd_builtins,
        layout_builtins,
    ),
    *(builtins, task_builtins, early_builtins, dsd_descriptors, standard),
)

FP16_FORMATS = ("f16", "bf16")  # the vendor's third 16-bit format, cb16, has no public definition


class ExportedName(NamedTuple):
    """A name that is visible to the host."""

    name: str
    id: int
    kind: str
    type: t.CslType
    mutable: bool
    loc: Location


class PlacedProgram(NamedTuple):
    """The program of one PE."""

    program: PeProgram
    params: dict[str, ComptimeValue]


@dataclass
class CompiledLayout:
    """A compiled program: a rectangle of PEs with their programs, colors and exports."""

    width: int
    height: int
    arch: str
    sdk: str
    fabric_dims: tuple[int, int] | None
    fabric_offsets: tuple[int, int] | None
    tiles: dict[tuple[int, int], PlacedProgram] = field(default_factory=dict)
    colors: dict[tuple[int, int], dict[int, ColorConfig]] = field(default_factory=dict)
    exports: dict[str, ExportedName] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    params: dict[str, int] = field(default_factory=dict)
    printed: tuple[str, ...] = ()  # the output of `@comptime_print`


class LayoutBuilder:
    """The state that the layout block sets up."""

    def __init__(self) -> None:
        self.size = (0, 0)
        self.code: dict[tuple[int, int], tuple[Path, dict[str, ComptimeValue], Location]] = {}
        self.colors: dict[tuple[int, int], dict[int, ColorConfig]] = {}
        self.exports: dict[str, ExportedName] = {}

    def set_rectangle(self, unit: CompilationUnit, width: int, height: int, loc: Location) -> None:
        """`@set_rectangle`."""
        options = unit.options
        if options.fabric_dims is not None:
            dims, at = options.fabric_dims, options.fabric_offsets or (0, 0)
            if at[0] + width > dims[0] or at[1] + height > dims[1]:
                fail(loc, f"rectangle of {width} x {height} PEs at {at} does not fit into a fabric of {dims}")
        self.size = unit.rectangle = (width, height)

    def set_tile_code(
        self, place: tuple[int, int], path: Path, params: dict[str, ComptimeValue], loc: Location
    ) -> None:
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

    def export_name(self, name: str, type_: t.CslType, mutable: bool | None, loc: Location) -> None:
        """`@export_name`."""
        if name in self.exports:
            fail(loc, f"name '{name}' has already been declared")
        kind = "function" if isinstance(type_, t.CslFunctionType) else "data"
        self.exports[name] = ExportedName(name, len(self.exports), kind, type_, bool(mutable), loc)


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
    confined: bool = False,
) -> CompiledLayout:
    """Compile the layout at `path` and the program of each of its PEs.

    `params` and `colors` set params as on the command line of `cslc`; `arch` is "wse2" or "wse3", `sdk` the language
    version, "0.6" to "1.4" or "2.10"; `import_paths` are searched for modules in angle brackets; `fp16_format` is the
    format of `@fp16()`, "f16" or "bf16"; `memcpy` and `channels` have no effect on a simulation. A `confined` program,
    such as one of an artifact, reads no file outside the layout's folder and the libraries.

    Raises:
        CslError, ParseError: the program is wrong, at file:line:column. FileError: no such file or folder.

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
    choices = {
        "arch": (arch, ("wse2", "wse3")),
        "sdk": (sdk, LANGUAGE_VERSIONS),
        "fp16_format": (fp16_format, FP16_FORMATS),
    }
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise ArgumentError(f"unknown {name}", expected=" or ".join(allowed), received=value)
    paths = tuple(map(str, import_paths))
    missing = next((folder for folder in paths if not Path(folder).is_dir()), None)
    if missing is not None:
        raise FileError(f"no such folder on the import path: {missing}")
    searched = (*paths, str(source.parent))  # modules in subfolders import others from the root folder
    options = CslOptions(arch, sdk, fabric_dims, fabric_offsets, searched, fp16_format, max_inlined_iterations,
                         source.parent if confined else None)  # fmt: skip
    # Comptime calls take several Python frames each.
    with deep_nesting(lambda: Location(str(source), 1)), name_compile_errors(str(source)):
        return _compile_layout(source, options, dict(params or {}), colors or {})


def _compile_layout(
    source: Path, options: CslOptions, params: dict[str, int], colors: Mapping[str, int]
) -> CompiledLayout:
    builder = LayoutBuilder()
    unit = CompilationUnit(options, layout=builder)
    values = {n: ComptimeValue(t.COMPTIME_INT, v) for n, v in params.items()}
    values |= {n: ComptimeValue(t.COLOR, v) for n, v in colors.items()}
    with np.errstate(all="ignore"), without_collection():
        unit.start(source, values)
        return _assemble_layout(builder, unit, options, params)


def _assemble_layout(
    builder: LayoutBuilder, unit: CompilationUnit, options: CslOptions, params: dict[str, int]
) -> CompiledLayout:
    root = unit.root
    assert root is not None
    if not builder.size[0]:
        fail(root.loc, "the layout never calls '@set_rectangle'")
    layout = CompiledLayout(*builder.size, options.arch, options.sdk, options.fabric_dims, options.fabric_offsets)
    layout.exports, layout.params = builder.exports, params
    programs: dict[Path, list[PeProgram]] = {}
    sources = {root.file.path, *unit.sources}
    for place, (path, values, _) in sorted(builder.code.items()):
        shared = programs.setdefault(path, [])
        program = next((p for p in shared if p.unit.serves(values)), None)
        if program is None:
            program = compile_tile_program(path, values, options, builder, place)
            shared.append(program)
        sources |= set(program.unit.sources)
        layout.tiles[place] = PlacedProgram(program, values)
        layout.colors[place] = merge_color_configs(builder.colors.get(place, {}), program.colors)
        _check_filters(program, layout.colors[place])
    layout.sources = tuple(sorted(sources))
    units = {id(u): u for u in (unit, *(tile.program.unit for tile in layout.tiles.values()))}
    layout.printed = tuple(line for u in units.values() for line in u.state.get("printed", ()))
    return layout


def compile_tile_program(
    path: Path, params: dict[str, ComptimeValue], options: CslOptions, builder: LayoutBuilder, place: tuple[int, int]
) -> PeProgram:
    """The program of a PE, with its exports checked against the layout's names."""
    unit = CompilationUnit(options, builder.size)
    unit.place = place
    unit.symbols = tuple(builder.exports)
    unit.tensors = tuple(name for name, e in builder.exports.items() if isinstance(e.type, t.CslPointer))
    unit.start(path, params)
    _check_exports(unit, builder)
    return PeProgram(unit, str(path))


def _check_exports(unit: CompilationUnit, builder: LayoutBuilder) -> None:
    for name, (o, loc) in unit.tables.exports.items():
        declared = builder.exports.get(name)
        if declared is None:
            if unit.exported_by_keyword(name):
                continue
            fail(loc, f"name '{name}' was not declared during layout evaluation")
        _check_export(declared, o, loc)


def _check_export(declared: ExportedName, o: ExprValue, loc: Location) -> None:
    a, b = declared.type, o.type
    if not isinstance(a, (t.CslPointer, t.CslFunctionType)):  # a scalar is exported by its address
        a = t.CslPointer("", a)
    if isinstance(a, t.CslPointer) and isinstance(b, t.CslPointer):
        mine = b.element.element if isinstance(b.element, t.CslArray) and not b.many else b.element
        if a.element not in (mine, b.element):
            fail(loc, f"exported symbol type mismatch: expected type '{a}', got: '{b}'")
        if declared.mutable and b.const:
            fail(loc, f"mutability mismatch: '{declared.name}' was declared mutable")
    elif a != b:
        fail(loc, f"exported symbol type mismatch: expected type '{a}', got: '{b}'")


def _check_filters(program: PeProgram, colors: dict[int, ColorConfig]) -> None:
    """Check that the layout sets the filters that the program configures."""
    for color, loc in program.tables.filters.items():
        if color not in colors or colors[color].filter is None:
            fail(loc, f"no filter is set for color {color}")


def merge_color_configs(layout: dict[int, ColorConfig], local: dict[int, ColorConfig]) -> dict[int, ColorConfig]:
    """The color configurations of a PE, each from the layout or from its own program."""
    both = next((c for c in local if c in layout), None)
    if both is not None:
        fail(local[both].loc, "config for this color has already been set")
    return {**layout, **local}


__all__ = ["ExportedName", "CompiledLayout", "PlacedProgram", "compile_program"]

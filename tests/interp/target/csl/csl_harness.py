"""Test harness: compiles and runs CSL text on one PE without a fabric."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from tessera.core.errors import TesseraError
from tessera.interp.target.csl import parse
from tessera.interp.target.csl.compiler import CompiledLayout, compile_program
from tessera.interp.target.csl.pe.pe_state import EventQueue
from tessera.interp.target.csl.pe.processing_element import Pe
from tessera.interp.target.csl.sema import compilation_unit
from tessera.interp.target.csl.sema.compilation_unit import LANGUAGE_VERSIONS
from tessera.interp.target.csl.simulation import Simulation

compilation_unit.MAX_COMPTIME_ITERATIONS = 1 << 14  # a loop without an end fails soon
PROGRAMS = Path(__file__).parent / "programs"
LAYOUT = 'layout { @set_rectangle(1, 1); @set_tile_code(0, 0, "pe.csl"); %s }\n'

LOOP = "@set_color_config(0, 0, @get_color(1), .{ .routes = .{ .rx = .{ RAMP }, .tx = .{ RAMP } } });"
HEAD = """
const c = @get_color(1); const iq = @get_input_queue(2); const oq = @get_output_queue(3);
const wse3 = @is_arch("wse3");
const id = if (wse3) @get_data_task_id(iq) else @get_data_task_id(c);
const t8 = @get_local_task_id(8); const t9 = @get_local_task_id(9);
export var out: [8]f32; var a = [4]f32 { 1.0, 2.0, 3.0, 4.0 };
export var order: [8]i16; export var n: i16 = 0;
const va = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{4} -> a[i] });
const vo = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{4} -> out[i] });
const tx = @get_dsd(fabout_dsd, .{ .fabric_color = c, .extent = 4, .output_queue = oq });
const rx = @get_dsd(fabin_dsd, .{ .fabric_color = c, .extent = 4, .input_queue = iq });
fn note(x: i16) void { order[n] = x; n += 1; }
comptime { @initialize_queue(iq, .{ .color = c }); @initialize_queue(oq, .{ .color = c }); }
"""


def build(folder: Path, text: str, names: str = "", **options) -> CompiledLayout:
    """A 1 x 1 program whose PE runs `text`; `names` are statements of the layout block."""
    (folder / "layout.csl").write_text(LAYOUT % names)
    (folder / "pe.csl").write_text(text)
    return compile_program(folder / "layout.csl", **options)


def make_pe(layout: CompiledLayout, fabric=None) -> Pe:
    """The PE of a 1 x 1 program."""
    return Pe(layout.tiles[0, 0].program, 0, 0, EventQueue(), fabric)


def run(folder: Path, text: str, function: str = "main", *args, **options) -> Pe:
    """Call `export fn main` of `text`, and run until the PE is idle."""
    pe = make_pe(build(folder, text, **options))
    pe.boot()
    pe.start(pe.get_export(function), args)
    pe.events.run()
    return pe


def sections(name: str) -> list[tuple[str, str]]:
    """The programs of a file, each under a line `//== title`."""
    parts = (PROGRAMS / name).read_text().split("//== ")[1:]
    return [(part.split("\n", 1)[0].strip(), part.split("\n", 1)[1]) for part in parts]


def expected(text: str) -> tuple[int, str]:
    """The line and the message of the comment `//! message`."""
    for number, line in enumerate(text.splitlines(), 1):
        if "//! " in line:
            return number, line.split("//! ", 1)[1].strip()
    raise AssertionError("the program names no error")


def simulate(folder, text, arch="wse2", seed=None, **options) -> Pe:
    """The PE of a program after `main`; its color 1 loops back to it (HEAD declares DSDs for that)."""
    layout = build(folder, HEAD + text, LOOP, arch=arch, **options)
    simulation = Simulation(layout, seed=seed, limit=10**6)
    simulation.boot()
    pe = simulation.pes[0, 0]
    if "main" in pe.program.exports:
        pe.start(pe.get_export("main"))
    simulation.events.run()
    return pe


NAMES = '@export_name("floats", [*]f32, true);'


def _refuse(folder: Path, title: str, text: str) -> None:
    build(folder, text, NAMES, arch="wse3" if "wse3" in title else "wse2")


def _refuse_layout(folder: Path, title: str, text: str) -> None:
    (folder / "pe.csl").write_text("")
    (folder / "layout.csl").write_text(text)
    compile_program(folder / "layout.csl", fabric_dims=(8, 3), fabric_offsets=(4, 1))


def _run_files(folder: Path, title: str, text: str) -> None:
    for part in text.split("//-- ")[1:]:
        name, _, content = part.partition("\n")
        (folder / name).write_text(content.split("//! ")[0])
    sdk = next((version for version in LANGUAGE_VERSIONS if f"SDK {version}" in title), "1.4")
    arch = "wse2" if "wse2" in title else "wse3"
    layout = compile_program(folder / "layout.csl", arch=arch, sdk=sdk, fabric_dims=(11, 5), fabric_offsets=(4, 1))
    simulation = Simulation(layout)
    simulation.boot()
    if "copy" in title:
        simulation.wait(simulation.copy_in("a", {(0, 0): np.zeros(7, np.uint32)}))
    simulation.wait(simulation.launch("f"))


# How the programs of each file reach their error.
ERRORS: dict[str, Callable[[Path, str, str], object]] = {
    **{f"lang_errors{part}.csl": _refuse for part in ("", "_values", "_dsd", "_program")},
    "lang_errors_layout.csl": _refuse_layout,
    "lang_syntax.csl": lambda folder, title, text: parse(text.rstrip("\n")),
    "lang_programs.csl": _run_files,
    "lang_faults.csl": lambda folder, title, text: simulate(folder, text, "wse2" if "wse2" in title else "wse3"),
}


def cases(*names: str) -> list[tuple[str, str]]:
    """The file and title of each program in these files."""
    return [(name, title) for name in names for title, _ in sections(name)]


@cache
def outcome(name: str, title: str) -> tuple[TesseraError, int, str]:
    """The error of a program of these files, with the expected line and message."""
    text = dict(sections(name))[title]
    with TemporaryDirectory() as folder:
        try:
            ERRORS[name](Path(folder), title, text)
        except TesseraError as error:
            return error, *expected(text)
    raise AssertionError(f"{name}: {title}: nothing was refused")

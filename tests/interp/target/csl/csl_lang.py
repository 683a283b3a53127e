"""Compiles and runs CSL given as text, on one PE without a fabric."""

from pathlib import Path

from tessera.interp.target.csl.events import Events
from tessera.interp.target.csl.layout import Layout, compile_program
from tessera.interp.target.csl.pe import Pe
from tessera.interp.target.csl.simulation import Simulation

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


def build(folder: Path, text: str, names: str = "", **options) -> Layout:
    """A 1 x 1 program whose PE runs `text`; `names` are statements of the layout block."""
    (folder / "layout.csl").write_text(LAYOUT % names)
    (folder / "pe.csl").write_text(text)
    return compile_program(folder / "layout.csl", **options)


def element(layout: Layout, fabric=None) -> Pe:
    """The PE of a 1 x 1 program."""
    return Pe(layout.tiles[0, 0].program, 0, 0, Events(), fabric)


def run(folder: Path, text: str, function: str = "main", *args, **options) -> Pe:
    """Call `export fn main` of `text` and run until nothing is left to do."""
    pe = element(build(folder, text, **options))
    pe.boot()
    pe.start(pe.exported(function), args)
    pe.events.run()
    return pe


def sections(name: str) -> list[tuple[str, str]]:
    """The programs of a file, each under a line `//== title`."""
    parts = (PROGRAMS / name).read_text().split("//== ")[1:]
    return [(part.split("\n", 1)[0].strip(), part.split("\n", 1)[1]) for part in parts]


def expected(text: str) -> tuple[int, str]:
    """Where `//! message` stands: the line and the message."""
    for number, line in enumerate(text.splitlines(), 1):
        if "//! " in line:
            return number, line.split("//! ", 1)[1].strip()
    raise AssertionError("the program names no error")


def simulate(folder, text, arch="wse2", seed=None, **options) -> Pe:
    """The PE of a program after `main`; its color 1 loops back to it (HEAD names descriptors for that)."""
    layout = build(folder, HEAD + text, LOOP, arch=arch, **options)
    simulation = Simulation(layout, seed=seed)
    simulation.boot()
    pe = simulation.pes[0, 0]
    if "main" in pe.program.exports:
        pe.start(pe.exported("main"))
    simulation.events.run()
    return pe

"""Compiles and runs CSL given as text, on one PE without a fabric."""

from pathlib import Path

from tessera.interp.target.csl.events import Events
from tessera.interp.target.csl.layout import Layout, compile_program
from tessera.interp.target.csl.pe import Pe

PROGRAMS = Path(__file__).parent / "programs"
LAYOUT = 'layout { @set_rectangle(1, 1); @set_tile_code(0, 0, "pe.csl"); %s }\n'


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

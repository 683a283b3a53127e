"""The files of a program: the element's code, the layout, and the commands that build and run it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tessera.codegen.csl.element import ROOM, Element
from tessera.codegen.csl.exchange import DIRECTIONS, PLACE, SPREAD, Direction
from tessera.codegen.csl.views import Buffer
from tessera.errors import ResourceError

HEAD = "// Made by Tessera from {name}: {what}.\n"
# What the host copies is moved by words, so that an odd number of 16-bit elements needs one more.
FABRIC = (7, 2)


def program(name: str, element: Element) -> str:
    """pe_program.csl: what every element runs."""
    used = [DIRECTIONS[d] for d in DIRECTIONS if d in element.directions]
    parts = [
        HEAD.format(name=name, what="the program of every element"),
        "param memcpy_params;\nparam pe_row: i16;\nparam pe_column: i16;\n",
        _half(element),
        "const row: i32 = @as(i32, pe_row);\nconst column: i32 = @as(i32, pe_column);\n",
        'const sys_mod = @import_module("<memcpy/memcpy>", memcpy_params);\nconst math = @import_module("<math>");\n',
        *(_ends(d) for d in used),
        *(_spread_ends(axis) for axis in sorted(element.spreads)),
        "".join(f"var {b.name} = @zeros([{max(b.size, 1)}]{b.type});\n" for b in element.buffers),
        "".join(f"var {n}_ptr: [*]{b.type} = &{b.name};\n" for n, b in _symbols(element)),
        *(f"{text}\n" for text in element.functions.values()),
        "fn compute() void {\n" + "\n".join(element.lines) + "\n  sys_mod.unblock_cmd_stream();\n}\n",
        _comptime(element, used),
    ]
    return "\n".join(part for part in parts if part)


def _symbols(element: Element) -> list[tuple[str, Buffer]]:
    """The arrays that the host copies, by the names it knows."""
    return [(element.exported[ref], buffer) for ref, buffer in element.symbols.items()]


def _half(element: Element) -> str:
    """The name of the 16-bit float that the program is compiled for, where it needs one."""
    return "const half = @fp16();\n" if any(b.type == "half" for b in element.buffers) else ""


def _ends(way: Direction) -> str:
    """An element's two ends of a direction: the color it sends on is that of its place, even or odd."""
    place = "pe_column" if way.axis else "pe_row"
    first = 2 * way.number
    return (
        f"const send_{way.name} = @get_color(@as(u16, {first} + {place} % 2));\n"
        f"const from_{way.name} = @get_color(@as(u16, {first} + ({place} + 1) % 2));\n"
        f"const out_{way.name} = @get_output_queue({way.number + 2});\n"
        f"const in_{way.name} = @get_input_queue({way.number + 2});\n"
    )


def _spread_ends(axis: int) -> str:
    """The color on which the last element along an axis tells all others."""
    name, (color, queue) = f"spread_{PLACE[axis]}", SPREAD[axis]
    return (
        f"const {name} = @get_color({color});\n"
        # WSE-2 has fewer queues for output, but one serves several colors there.
        f'const out_{name} = @get_output_queue(if (@is_arch("wse3")) {queue} else {queue - 4});\n'
        f"const in_{name} = @get_input_queue({queue});\n"
    )


def _comptime(element: Element, used: Sequence[Direction]) -> str:
    lines = []
    for way in used:
        lines += [f"    @initialize_queue(out_{way.name}, .{{ .color = send_{way.name} }});"]
        lines += [f"    @initialize_queue(in_{way.name}, .{{ .color = from_{way.name} }});"]
    for axis in sorted(element.spreads):
        name = f"spread_{PLACE[axis]}"
        lines += [f"    @initialize_queue({end}_{name}, .{{ .color = {name} }});" for end in ("out", "in")]
    queues = ['  if (@is_arch("wse3")) {', *lines, "  }"] if lines else []
    exports = [f'  @export_symbol({n}_ptr, "{n}");' for n, _ in _symbols(element)]
    return "\n".join(["comptime {", *queues, *exports, "  @export_symbol(compute);", "}", ""])


def layout(name: str, element: Element) -> str:
    """layout.csl: the rectangle, who talks to whom, and what the host sees."""
    rows, columns = element.grid
    routes = [line for d in DIRECTIONS if d in element.directions for line in _routes(DIRECTIONS[d], (rows, columns))]
    routes += [line for axis in sorted(element.spreads) for line in _spread_routes(axis, (rows, columns))]
    lines = [
        HEAD.format(name=name, what=f"{rows} rows and {columns} columns of elements"),
        f'const memcpy = @import_module("<memcpy/get_params>", .{{ .width = {columns}, .height = {rows} }});\n',
        _half(element),
        "layout {",
        f"  @set_rectangle({columns}, {rows});",
        f"  for (@range(i16, {columns})) |x| {{",
        f"    for (@range(i16, {rows})) |y| {{",
        '      @set_tile_code(x, y, "pe_program.csl", .{',
        "        .memcpy_params = memcpy.get_params(x), .pe_row = y, .pe_column = x,",
        "      });",
        *routes,
        "    }",
        "  }",
        *(f'  @export_name("{n}", [*]{b.type}, true);' for n, b in _symbols(element)),
        '  @export_name("compute", fn()void);',
        "}",
    ]
    return "\n".join(line for line in lines if line) + "\n"


def _routes(way: Direction, grid: tuple[int, int]) -> list[str]:
    """The routes of a direction: from the ramp to the neighbour, and from the neighbour to the ramp."""
    place, last, first = ("x" if way.axis else "y"), grid[way.axis] - 1, 2 * way.number
    sends, takes = (f"{place} < {last}", f"{place} > 0") if way.step > 0 else (f"{place} > 0", f"{place} < {last}")
    here, there = way.name.upper(), way.opposite.upper()
    color = f"@get_color(@as(u16, {first} + {place} % 2))"
    other = f"@get_color(@as(u16, {first} + ({place} + 1) % 2))"
    return [
        f"      if ({sends}) {{",
        f"        @set_color_config(x, y, {color}, .{{ .routes = .{{ .rx = .{{RAMP}}, .tx = .{{{here}}} }} }});",
        "      }",
        f"      if ({takes}) {{",
        f"        @set_color_config(x, y, {other}, .{{ .routes = .{{ .rx = .{{{there}}}, .tx = .{{RAMP}} }} }});",
        "      }",
    ]


def _spread_routes(axis: int, grid: tuple[int, int]) -> list[str]:
    """The route by which the last along an axis tells the others: each router hands words down and on."""
    place, last, color = ("x" if axis else "y"), grid[axis] - 1, f"@get_color({SPREAD[axis][0]})"
    back, ahead = ("WEST", "EAST") if axis else ("NORTH", "SOUTH")
    ends = [
        (f"if ({place} == {last})", "RAMP", back), (f"else if ({place} == 0)", ahead, "RAMP"),
        ("else", ahead, f"RAMP, {back}"),
    ]  # fmt: skip
    lines = []
    for where, rx, tx in ends:
        config = f"@set_color_config(x, y, {color}, .{{ .routes = .{{ .rx = .{{{rx}}}, .tx = .{{{tx}}} }} }});"
        lines += [f"      {where} {{", f"        {config}", "      }"]
    return lines


def commands(arch: str, grid: tuple[int, int], bfloat: bool) -> str:
    """The shell commands that build and run the program with the vendor's tools, or with the simulator's."""
    return (
        "#!/usr/bin/env bash\nset -e\ncslc "
        + " ".join(compile_options(arch, grid, bfloat))
        + " -o out\n"
        + ("cs_python run.py --name out\n")
    )


def compile_options(arch: str, grid: tuple[int, int], bfloat: bool) -> list[str]:
    """The options of the compiler."""
    dims = f"--fabric-dims={grid[1] + FABRIC[0]},{grid[0] + FABRIC[1]}"
    wanted = [f"--arch={arch}", "./layout.csl", dims, "--fabric-offsets=4,1", "--memcpy", "--channels=1"]
    return [*wanted, "--fp16-format=bf16"] if bfloat else wanted


def check_room(element: Element, location: Any) -> None:
    """Refuse a program whose arrays do not fit an element's memory.

    Raises:
        ResourceError: they do not; says how many bytes there are and which are the largest.
    """
    total = sum(b.bytes for b in element.buffers)
    if total <= ROOM:
        return
    largest = sorted(element.buffers, key=lambda b: -b.bytes)[:3]
    listed = ", ".join(f"{_told(b)}" for b in largest)
    raise ResourceError(
        f"an element needs {total / 1024:.0f} KB of the {ROOM // 1024} KB that 48 KB of memory leave beside code",
        location=location,
        expected=f"at most {ROOM} bytes of arrays on each element",
        received=f"{total} bytes; the largest are {listed}",
        suggestion=f"use a grid of more than {element.grid[0]}x{element.grid[1]} elements",
    )


def _told(buffer: Buffer) -> str:
    return f"{buffer.name} ({buffer.bytes} bytes)"

"""The files of a program: the element's code, the layout, and the commands that build and run it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from tessera.codegen.csl.channels import QUEUES, Route, queued
from tessera.codegen.csl.element import ROOM, Element
from tessera.codegen.csl.faults import SYMBOL
from tessera.codegen.csl.parts import Part, identifiers, numbered
from tessera.codegen.csl.views import Buffer
from tessera.errors import ResourceError

SIMULATOR = "the simulator (no machine here)"  # where programs run, in the words that commands show
HEAD = "// Made by Tessera from {name}: {what}.\n"
# What the host copies is moved by words, so that an odd number of 16-bit elements needs one more.
FABRIC = (7, 2)


def program(name: str, element: Element) -> str:
    """pe_program.csl: what every element runs."""
    parts = [
        HEAD.format(name=name, what="the program of every element"),
        "param memcpy_params;\nparam pe_row: i16;\nparam pe_column: i16;\n",
        _half(element),
        "const row: i32 = @as(i32, pe_row);\nconst column: i32 = @as(i32, pe_column);\n",
        'const sys_mod = @import_module("<memcpy/memcpy>", memcpy_params);\nconst math = @import_module("<math>");\n',
        *(c.ends(queues) for c, queues in queued(element.channels.values()).items()),
        identifiers(_numbers(element)),
        "".join(f"var {b.name} = @zeros([{max(b.size, 1)}]{b.type});\n" for b in element.buffers),
        "".join(f"var {b.words}: [*]i32 = @ptrcast([*]i32, &{b.name});\n" for b in element.buffers if b.type == "i64"),
        _faults(element),
        "".join(f"var {text};\n" for text in element.variables),
        "".join(f"var {n}_ptr: [*]{_word(b)} = {_address(b)};\n" for n, b in _symbols(element)),
        "".join(f"const {name} = {text};\n" for text, name in element.constants.items()),
        *(f"{text}\n" for text in element.functions.values()),
        *(part.text() for part in (*element.parts, *element.gates.values())),
        _comptime(element),
    ]
    return "\n".join(part for part in parts if part)


def _symbols(element: Element) -> list[tuple[str, Buffer]]:
    """The arrays that the host copies, by the names it knows."""
    return [(element.exported[ref], buffer) for ref, buffer in element.symbols.items()]


def _word(buffer: Buffer) -> str:
    """The type by which the host copies an array: it knows none of 64 bits."""
    return "i32" if buffer.type == "i64" else buffer.type


def _address(buffer: Buffer) -> str:
    return f"@ptrcast([*]i32, &{buffer.name})" if buffer.type == "i64" else f"&{buffer.name}"


def _tasks(element: Element) -> list[Part]:
    return [*element.parts[1:], *element.gates.values()]


def _numbers(element: Element) -> dict[str, int]:
    return numbered(_tasks(element), [color for c in element.channels.values() for color in c.colors])


def _faults(element: Element) -> str:
    """Where an element keeps what went wrong, where something can."""
    if not element.faults:
        return ""
    return f"var {SYMBOL} = @zeros([1]i32);\nvar {SYMBOL}_ptr: [*]i32 = &{SYMBOL};\n"


def _exported(element: Element) -> list[tuple[str, str]]:
    """The names that the host knows, with the types of their words."""
    return [(n, _word(b)) for n, b in _symbols(element)] + ([(SYMBOL, "i32")] if element.faults else [])


def _half(element: Element) -> str:
    """The name of the 16-bit float that the program is compiled for, where it needs one."""
    return "const half = @fp16();\n" if any(b.type == "half" for b in element.buffers) else ""


def _comptime(element: Element) -> str:
    ends = [(end, color, c) for c in element.channels for end, color in (("out", "send"), ("in", "from"))]
    lines = [f"    @initialize_queue({end}_{c}, .{{ .color = {color}_{c} }});" for end, color, c in ends]
    queues = ['  if (@is_arch("wse3")) {', *lines, "  }"] if lines else []
    exports = [f'  @export_symbol({n}_ptr, "{n}");' for n, _ in _exported(element)]
    tasks = [line for part in _tasks(element) for line in part.binding()]
    return "\n".join(["comptime {", *queues, *tasks, *exports, "  @export_symbol(compute);", "}", ""])


def layout(name: str, element: Element) -> str:
    """layout.csl: the rectangle, who talks to whom, and what the host sees."""
    rows, columns = element.grid
    routes = [
        line
        for c in element.channels.values()
        for route in c.routes(element.grid[c.axis] - 1)
        for line in _route(route)
    ]
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
        *(f'  @export_name("{n}", [*]{word}, true);' for n, word in _exported(element)),
        '  @export_name("compute", fn()void);',
        "}",
    ]
    return "\n".join(line for line in lines if line) + "\n"


def _route(route: Route) -> list[str]:
    config = f"@set_color_config(x, y, {route.color}, {route.config});"
    return [f"      if ({route.where}) {{", f"        {config}", "      }"]


def sources(files: dict[str, str], comments: bool) -> dict[str, str]:
    """CSL files, with their comments or without."""
    return files if comments else {name: "\n".join(line for line, _ in _bare(text)) for name, text in files.items()}


def _bare(text: str) -> Iterator[tuple[str, int]]:
    """The lines of a text without comments (no string of ours holds two slashes), with their numbers."""
    for number, line in enumerate(text.split("\n"), 1):
        code, slashes, _ = line.partition("//")
        if code.strip() or not slashes:
            yield code.rstrip(), number


def origins(text: str, comments: bool) -> dict[str, str]:
    """The source of each line of the program, which the comment above it names; with comments or without."""
    known, source = {}, ""
    inside = False
    for number, line in enumerate(text.split("\n"), 1):
        inside = (inside or line.startswith(("fn compute()", "task "))) and line != "}"
        source = line.strip()[3:] if line.strip().startswith("// ") else source
        known[number] = source if inside else ""
    numbers = {number: number for number in known} if comments else {n: i for i, (_, n) in enumerate(_bare(text), 1)}
    return {str(numbers[n]): place for n, place in known.items() if place and n in numbers}


def commands(arch: str, grid: tuple[int, int], bfloat: bool, address: str = "") -> str:
    """The shell commands that build and run the program with the vendor's tools, or with the simulator's."""
    where = f" --cmaddr {shlex.quote(address)}" if address else ""
    return (
        "#!/usr/bin/env bash\nset -e\ncslc "
        + " ".join(compile_options(arch, grid, bfloat))
        + " -o out\n"
        + f"cs_python run.py --name out{where}\n"
    )


def compile_options(arch: str, grid: tuple[int, int], bfloat: bool) -> list[str]:
    """The options of the compiler."""
    dims = f"--fabric-dims={grid[1] + FABRIC[0]},{grid[0] + FABRIC[1]}"
    wanted = [f"--arch={arch}", "./layout.csl", dims, "--fabric-offsets=4,1", "--memcpy", "--channels=1"]
    return [*wanted, "--fp16-format=bf16"] if bfloat else wanted


def check_channels(element: Element, location: Any) -> None:
    """Refuse a program that talks on more channels than there are queues.

    Raises:
        ResourceError: it does.
    """
    if len(element.channels) > len(QUEUES):
        raise ResourceError(
            f"an element needs {len(element.channels)} queues of the {len(QUEUES)} there are",
            location=location, received=", ".join(element.channels),
        )  # fmt: skip


def used(element: Element) -> int:
    """The bytes of an element's arrays."""
    return sum(b.bytes for b in element.buffers)


def fits(element: Element) -> bool:
    """Whether a program has the memory and the queues it needs."""
    return (
        used(element) <= ROOM
        and len(element.channels) <= len(QUEUES)
        and len(_numbers(element)) == len(_tasks(element))
    )


def check_room(element: Element, location: Any) -> None:
    """Refuse a program whose arrays do not fit an element's memory.

    Raises:
        ResourceError: they do not; says how many bytes there are and which are the largest.
    """
    total = used(element)
    if total <= ROOM:
        return
    largest = sorted(element.buffers, key=lambda b: -b.bytes)[:3]
    listed = ", ".join(f"{_told(b)}" for b in largest)
    raise ResourceError(
        f"an element needs {total / 1024:.0f} KB of the {ROOM // 1024} KB that 48 KB of memory leave beside code",
        location=location,
        expected=f"at most {ROOM} bytes of arrays on each element",
        received=f"{total} bytes; the largest are {listed}",
        suggestion="an element runs a kernel on all of its arrays; a function of whole tensors is cut into pieces"
        if element.programs
        else f"use a grid of more than {element.grid[0]}x{element.grid[1]} elements",
    )


def _told(buffer: Buffer) -> str:
    return f"{buffer.name} ({buffer.bytes} bytes)"

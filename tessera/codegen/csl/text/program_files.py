"""Program files: pe_program.csl, layout.csl, and the commands that build and run the program."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from tessera.codegen.csl.text.dsd import PeArray
from tessera.codegen.csl.text.pe_program import (
    ARRAY_MEMORY_BYTES,
    FAULT_SYMBOL,
    CslEmitter,
    TaskFunction,
    assign_task_ids,
    format_task_ids,
)
from tessera.codegen.csl.text.routes import INPUT_QUEUES, FabricRoute, assign_queues
from tessera.core.errors import ResourceError

SIMULATOR = "the simulator (no machine here)"  # where programs run, in the words that commands show
FILE_HEADER = "// Made by Tessera from {name}: {what}.\n"
# What the host copies is moved by words, so that an odd number of 16-bit elements needs one more.
FABRIC_MARGIN = (7, 2)


def format_program(name: str, element: CslEmitter) -> str:
    """pe_program.csl: what every element runs."""
    parts = [
        FILE_HEADER.format(name=name, what="the program of every element"),
        "param memcpy_params;\nparam pe_row: i16;\nparam pe_column: i16;\n",
        _declare_half(element),
        "const row: i32 = @as(i32, pe_row);\nconst column: i32 = @as(i32, pe_column);\n",
        'const sys_mod = @import_module("<memcpy/memcpy>", memcpy_params);\nconst math = @import_module("<math>");\n',
        *(c.ends(queues) for c, queues in assign_queues(element.channels.values()).items()),
        format_task_ids(_assign_ids(element)),
        "".join(f"var {b.name} = @zeros([{max(b.size, 1)}]{b.type});\n" for b in element.buffers),
        "".join(f"var {b.words}: [*]i32 = @ptrcast([*]i32, &{b.name});\n" for b in element.buffers if b.type == "i64"),
        _declare_fault_code(element),
        "".join(f"var {text};\n" for text in element.variables),
        "".join(
            f"var {n}_ptr: [*]{_find_host_word_type(b)} = {_format_address(b)};\n"
            for n, b in _list_host_symbols(element)
        ),
        "".join(f"const {name} = {text};\n" for text, name in element.constants.items()),
        *(f"{text}\n" for text in element.functions.values()),
        *(part.text() for part in (*element.parts, *element.completion_tasks.values())),
        _format_comptime(element),
    ]
    return "\n".join(part for part in parts if part)


def _list_host_symbols(element: CslEmitter) -> list[tuple[str, PeArray]]:
    """The arrays that the host copies, by the names it knows."""
    return [(element.exported[ref], buffer) for ref, buffer in element.symbols.items()]


def _find_host_word_type(buffer: PeArray) -> str:
    """The type by which the host copies an array: it knows none of 64 bits."""
    return "i32" if buffer.type == "i64" else buffer.type


def _format_address(buffer: PeArray) -> str:
    return f"@ptrcast([*]i32, &{buffer.name})" if buffer.type == "i64" else f"&{buffer.name}"


def _list_tasks(element: CslEmitter) -> list[TaskFunction]:
    return [*element.parts[1:], *element.completion_tasks.values()]


def _assign_ids(element: CslEmitter) -> dict[str, int]:
    return assign_task_ids(_list_tasks(element), [color for c in element.channels.values() for color in c.colors])


def _declare_fault_code(element: CslEmitter) -> str:
    """Where an element keeps what went wrong, where something can."""
    if not element.faults:
        return ""
    return f"var {FAULT_SYMBOL} = @zeros([1]i32);\nvar {FAULT_SYMBOL}_ptr: [*]i32 = &{FAULT_SYMBOL};\n"


def _list_exports(element: CslEmitter) -> list[tuple[str, str]]:
    """The names that the host knows, with the types of their words."""
    return [(n, _find_host_word_type(b)) for n, b in _list_host_symbols(element)] + (
        [(FAULT_SYMBOL, "i32")] if element.faults else []
    )


def _declare_half(element: CslEmitter) -> str:
    """The name of the 16-bit float that the program is compiled for, where it needs one."""
    return "const half = @fp16();\n" if any(b.type == "half" for b in element.buffers) else ""


def _format_comptime(element: CslEmitter) -> str:
    ends = [(end, color, c) for c in element.channels for end, color in (("out", "send"), ("in", "from"))]
    lines = [f"    @initialize_queue({end}_{c}, .{{ .color = {color}_{c} }});" for end, color, c in ends]
    queues = ['  if (@is_arch("wse3")) {', *lines, "  }"] if lines else []
    exports = [f'  @export_symbol({n}_ptr, "{n}");' for n, _ in _list_exports(element)]
    tasks = [line for part in _list_tasks(element) for line in part.binding()]
    return "\n".join(["comptime {", *queues, *tasks, *exports, "  @export_symbol(compute);", "}", ""])


def format_layout(name: str, element: CslEmitter) -> str:
    """layout.csl: the rectangle, who talks to whom, and what the host sees."""
    rows, columns = element.grid
    routes = [
        line
        for c in element.channels.values()
        for route in c.routes(element.grid[c.axis] - 1)
        for line in _format_route(route)
    ]
    lines = [
        FILE_HEADER.format(name=name, what=f"{rows} rows and {columns} columns of elements"),
        f'const memcpy = @import_module("<memcpy/get_params>", .{{ .width = {columns}, .height = {rows} }});\n',
        _declare_half(element),
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
        *(f'  @export_name("{n}", [*]{word}, true);' for n, word in _list_exports(element)),
        '  @export_name("compute", fn()void);',
        "}",
    ]
    return "\n".join(line for line in lines if line) + "\n"


def _format_route(route: FabricRoute) -> list[str]:
    config = f"@set_color_config(x, y, {route.color}, {route.config});"
    return [f"      if ({route.where}) {{", f"        {config}", "      }"]


def finish_sources(files: dict[str, str], comments: bool) -> dict[str, str]:
    """CSL files, with their comments or without."""
    return (
        files
        if comments
        else {name: "\n".join(line for line, _ in _strip_comments(text)) for name, text in files.items()}
    )


def _strip_comments(text: str) -> Iterator[tuple[str, int]]:
    """The lines of a text without comments (no string of ours holds two slashes), with their numbers."""
    for number, line in enumerate(text.split("\n"), 1):
        code, slashes, _ = line.partition("//")
        if code.strip() or not slashes:
            yield code.rstrip(), number


def map_source_lines(text: str, comments: bool) -> dict[str, str]:
    """The source of each line of the program, which the comment above it names; with comments or without."""
    known, source = {}, ""
    inside = False
    for number, line in enumerate(text.split("\n"), 1):
        inside = (inside or line.startswith(("fn compute()", "task "))) and line != "}"
        source = line.strip()[3:] if line.strip().startswith("// ") else source
        known[number] = source if inside else ""
    numbers = (
        {number: number for number in known}
        if comments
        else {n: i for i, (_, n) in enumerate(_strip_comments(text), 1)}
    )
    return {str(numbers[n]): place for n, place in known.items() if place and n in numbers}


def format_commands(arch: str, grid: tuple[int, int], bfloat: bool, address: str = "") -> str:
    """The shell commands that build and run the program with the vendor's tools, or with the simulator's."""
    where = f" --cmaddr {shlex.quote(address)}" if address else ""
    return (
        "#!/usr/bin/env bash\nset -e\ncslc "
        + " ".join(make_compile_options(arch, grid, bfloat))
        + " -o out\n"
        + f"cs_python run.py --name out{where}\n"
    )


def make_compile_options(arch: str, grid: tuple[int, int], bfloat: bool) -> list[str]:
    """The options of the compiler."""
    dims = f"--fabric-dims={grid[1] + FABRIC_MARGIN[0]},{grid[0] + FABRIC_MARGIN[1]}"
    wanted = [f"--arch={arch}", "./layout.csl", dims, "--fabric-offsets=4,1", "--memcpy", "--channels=1"]
    return [*wanted, "--fp16-format=bf16"] if bfloat else wanted


def check_channels(element: CslEmitter, location: Any) -> None:
    """Refuse a program that talks on more channels than there are queues.

    Raises:
        ResourceError: it does.
    """
    if len(element.channels) > len(INPUT_QUEUES):
        raise ResourceError(
            f"an element needs {len(element.channels)} queues of the {len(INPUT_QUEUES)} there are",
            location=location, received=", ".join(element.channels),
        )  # fmt: skip


def count_array_bytes(element: CslEmitter) -> int:
    """The bytes of an element's arrays."""
    return sum(b.bytes for b in element.buffers)


def fits_resources(element: CslEmitter) -> bool:
    """Whether a program has the memory and the queues it needs."""
    return (
        count_array_bytes(element) <= ARRAY_MEMORY_BYTES
        and len(element.channels) <= len(INPUT_QUEUES)
        and len(_assign_ids(element)) == len(_list_tasks(element))
    )


def check_memory(element: CslEmitter, location: Any) -> None:
    """Refuse a program whose arrays do not fit an element's memory.

    Raises:
        ResourceError: they do not; says how many bytes there are and which are the largest.
    """
    total = count_array_bytes(element)
    if total <= ARRAY_MEMORY_BYTES:
        return
    largest = sorted(element.buffers, key=lambda b: -b.bytes)[:3]
    listed = ", ".join(f"{_describe_array(b)}" for b in largest)
    raise ResourceError(
        f"an element needs {total / 1024:.0f} KB of the {ARRAY_MEMORY_BYTES // 1024} KB that 48 KB of memory leave "
        "beside code",
        location=location,
        expected=f"at most {ARRAY_MEMORY_BYTES} bytes of arrays on each element",
        received=f"{total} bytes; the largest are {listed}",
        suggestion="an element runs a kernel on all of its arrays; a function of whole tensors is cut into pieces"
        if element.programs
        else f"use a grid of more than {element.grid[0]}x{element.grid[1]} elements",
    )


def _describe_array(buffer: PeArray) -> str:
    return f"{buffer.name} ({buffer.bytes} bytes)"

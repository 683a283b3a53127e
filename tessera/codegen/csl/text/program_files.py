"""Program files: pe_program.csl with its tasks, layout.csl, and the commands that build and run the program."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tessera.codegen.csl.text.context import MAX_TASK_EVENTS, CslContext, TaskFunction
from tessera.codegen.csl.text.dsd import LONG_TYPES, PeArray
from tessera.codegen.csl.text.memory_allocation import ARRAY_MEMORY_BYTES
from tessera.codegen.csl.text.routes import INPUT_QUEUES, FabricRoute, assign_queues
from tessera.codegen.csl.text.statements import FAULT_SYMBOL
from tessera.core.errors import ResourceError

# Tasks: the program's continuation after asynchronous operations, completion tasks, and task IDs.


# Local task IDs that exist on both architectures and that the memcpy library does not use. On WSE-2 a wavelet of a
# color activates the data task with the ID of that color.
LOCAL_TASK_IDS = (*range(8, 21), *range(24, 27))


def assign_task_ids(tasks: Sequence[TaskFunction], colors: Collection[int]) -> dict[str, int]:
    """IDs of tasks, by name, none equal to a color of the program. Tasks beyond the available IDs get none."""
    free = (number for number in LOCAL_TASK_IDS if number not in colors)
    return {task.name: number for task, number in zip(tasks, free, strict=False)}


def format_task_ids(numbers: Mapping[str, int]) -> str:
    """The declarations of task IDs."""
    return "".join(f"const {n}_id: local_task_id = @get_local_task_id({number});\n" for n, number in numbers.items())


def get_pending_task(ctx: CslContext) -> TaskFunction:
    """The task that continues when the asynchronous operations in progress are complete."""
    if ctx.pending_task is None:
        ctx.pending_task = TaskFunction(f"after{len(ctx.task_functions)}")
    return ctx.pending_task


def add_completion_task(ctx: CslContext, along: str) -> str:
    """Add a task that waits for two events and then signals one event to the pending task; returns its name."""
    task = get_pending_task(ctx)
    return add_task(ctx, f"{task.name}_{along}", [f"@{task.add_event()}({task.name}_id);"], MAX_TASK_EVENTS)


def add_task(ctx: CslContext, name: str, statements: Sequence[str], awaits: int = 1) -> str:
    """Add a task; returns its name."""
    ctx.completion_tasks.setdefault(name, TaskFunction(name, [f"  {text}" for text in statements], awaits))
    return name


def end_task(ctx: CslContext) -> None:
    """End the present function; the pending task continues when the asynchronous operations are complete."""
    assert ctx.pending_task is not None and ctx.depth == 1
    ctx.task_functions.append(ctx.pending_task)
    ctx.pending_task, ctx.comment = None, ""


# Program files: pe_program.csl, layout.csl, and the commands that build and run the program.


SIMULATOR = "the simulator (no machine here)"  # where programs run, as commands print it
FILE_HEADER = "// Made by Tessera from {name}: {what}.\n"
# Columns and rows of the fabric that memcpy needs around the program.
FABRIC_MARGIN = (7, 2)


def format_program(name: str, ctx: CslContext) -> str:
    """pe_program.csl: the program of every PE."""
    head = [
        FILE_HEADER.format(name=name, what="the program of every element"),
        "param memcpy_params;\nparam pe_row: i16;\nparam pe_column: i16;\n",
    ]
    parts = [
        "const row: i32 = @as(i32, pe_row);\nconst column: i32 = @as(i32, pe_column);\n",
        'const sys_mod = @import_module("<memcpy/memcpy>", memcpy_params);\nconst math = @import_module("<math>");\n',
        *(c.format_declarations(queues) for c, queues in assign_queues(ctx.channels.values()).items()),
        format_task_ids(_assign_ids(ctx)),
        "".join(f"var {b.name} = @zeros([{max(b.size, 1)}]{b.type});\n" for b in ctx.buffers),
        "".join(f"var {b.words}: [*]i32 = @ptrcast([*]i32, &{b.name});\n" for b in ctx.buffers if b.type in LONG_TYPES),
        _declare_fault_code(ctx),
        "".join(f"var {text};\n" for text in ctx.variables),
        "".join(
            f"var {n}_ptr: [*]{_find_host_word_type(b)} = {_format_address(b)};\n" for n, b in _list_host_symbols(ctx)
        ),
        "".join(f"const {name} = {text};\n" for text, name in ctx.constants.items()),
        *(f"{text}\n" for text in ctx.functions.values()),
        *(part.format_function() for part in (*ctx.task_functions, *ctx.completion_tasks.values())),
        _format_comptime(ctx),
    ]
    return "\n".join(part for part in (*head, _declare_half(parts), *parts) if part)


def _list_host_symbols(ctx: CslContext) -> list[tuple[str, PeArray]]:
    """The arrays that the host copies, by exported name."""
    return [(ctx.exported[ref], buffer) for ref, buffer in ctx.symbols.items()]


def _find_host_word_type(buffer: PeArray) -> str:
    """The type with which the host copies an array: memcpy has no 64-bit type."""
    return "i32" if buffer.type in LONG_TYPES else buffer.type


def _format_address(buffer: PeArray) -> str:
    return f"@ptrcast([*]i32, &{buffer.name})" if buffer.type in LONG_TYPES else f"&{buffer.name}"


def _list_tasks(ctx: CslContext) -> list[TaskFunction]:
    return [*ctx.task_functions[1:], *ctx.completion_tasks.values()]


def _assign_ids(ctx: CslContext) -> dict[str, int]:
    return assign_task_ids(_list_tasks(ctx), [color for c in ctx.channels.values() for color in c.colors])


def _declare_fault_code(ctx: CslContext) -> str:
    """The variable for the fault number of a PE, if the program can fault."""
    if not ctx.faults:
        return ""
    return f"var {FAULT_SYMBOL} = @zeros([1]i32);\nvar {FAULT_SYMBOL}_ptr: [*]i32 = &{FAULT_SYMBOL};\n"


def _list_exports(ctx: CslContext) -> list[tuple[str, str]]:
    """The exported names with their word types."""
    return [(n, _find_host_word_type(b)) for n, b in _list_host_symbols(ctx)] + (
        [(FAULT_SYMBOL, "i32")] if ctx.faults else []
    )


def _declare_half(parts: Iterable[str]) -> str:
    """The declaration of the 16-bit float type, if some text uses it: of an array, or of a number in an expression."""
    return "const half = @fp16();\n" if any(re.search(r"\bhalf\b", part) for part in parts) else ""


def _format_comptime(ctx: CslContext) -> str:
    queue_ends = [(side, color, c) for c in ctx.channels for side, color in (("out", "send"), ("in", "from"))]
    lines = [f"    @initialize_queue({side}_{c}, .{{ .color = {color}_{c} }});" for side, color, c in queue_ends]
    queues = ['  if (@is_arch("wse3")) {', *lines, "  }"] if lines else []
    exports = [f'  @export_symbol({n}_ptr, "{n}");' for n, _ in _list_exports(ctx)]
    tasks = [line for part in _list_tasks(ctx) for line in part.format_binding()]
    return "\n".join(["comptime {", *queues, *tasks, *exports, "  @export_symbol(compute);", "}", ""])


def format_layout(name: str, ctx: CslContext) -> str:
    """layout.csl: the rectangle, the routes and the exported names."""
    rows, columns = ctx.grid
    routes = [
        line for c in ctx.channels.values() for route in c.routes(ctx.grid[c.axis] - 1) for line in _format_route(route)
    ]
    lines = [
        FILE_HEADER.format(name=name, what=f"{rows} rows and {columns} columns of elements"),
        f'const memcpy = @import_module("<memcpy/get_params>", .{{ .width = {columns}, .height = {rows} }});\n',
        _declare_half(word for _, word in _list_exports(ctx)),
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
        *(f'  @export_name("{n}", [*]{word}, true);' for n, word in _list_exports(ctx)),
        '  @export_name("compute", fn()void);',
        "}",
    ]
    return "\n".join(line for line in lines if line) + "\n"


def _format_route(route: FabricRoute) -> list[str]:
    config = f"@set_color_config(x, y, {route.color}, {route.config});"
    return [f"      if ({route.where}) {{", f"        {config}", "      }"]


def finish_sources(files: dict[str, str], comments: bool) -> dict[str, str]:
    """The CSL files with or without comments."""
    return (
        files
        if comments
        else {name: "\n".join(line for line, _ in _strip_comments(text)) for name, text in files.items()}
    )


def _strip_comments(text: str) -> Iterator[tuple[str, int]]:
    """The lines of a text without comments, with their numbers. Strings in the text never contain two slashes."""
    for number, line in enumerate(text.split("\n"), 1):
        code, slashes, _ = line.partition("//")
        if code.strip() or not slashes:
            yield code.rstrip(), number


def map_source_lines(text: str, comments: bool) -> dict[str, str]:
    """The source of each line of the program, from the comment above it."""
    sources, source = {}, ""
    inside = False
    for number, line in enumerate(text.split("\n"), 1):
        inside = (inside or line.startswith(("fn compute()", "task "))) and line != "}"
        source = line.strip()[3:] if line.strip().startswith("// ") else source
        sources[number] = source if inside else ""
    numbers = (
        {number: number for number in sources}
        if comments
        else {n: i for i, (_, n) in enumerate(_strip_comments(text), 1)}
    )
    return {str(numbers[n]): place for n, place in sources.items() if place and n in numbers}


def format_commands(arch: str, grid: tuple[int, int], bfloat: bool, address: str = "") -> str:
    """The shell commands that build and run the program with the vendor's tools or with the simulator's."""
    where = f" --cmaddr {shlex.quote(address)}" if address else ""
    return (
        "#!/usr/bin/env bash\nset -e\ncslc "
        + " ".join(make_compile_options(arch, grid, bfloat))
        + " -o out\n"
        + f"cs_python run.py --name out{where}\n"
    )


def make_compile_options(arch: str, grid: tuple[int, int], bfloat: bool) -> list[str]:
    """The options of cslc."""
    dims = f"--fabric-dims={grid[1] + FABRIC_MARGIN[0]},{grid[0] + FABRIC_MARGIN[1]}"
    options = [f"--arch={arch}", "./layout.csl", dims, "--fabric-offsets=4,1", "--memcpy", "--channels=1"]
    return [*options, "--fp16-format=bf16"] if bfloat else options


def check_channels(ctx: CslContext, location: Any) -> None:
    """Check that the program has no more channels than a PE has queues.

    Raises:
        ResourceError: it has more.
    """
    if len(ctx.channels) > len(INPUT_QUEUES):
        raise ResourceError(
            f"fabric queues exceeded: {len(ctx.channels)} queues needed, {len(INPUT_QUEUES)} available",
            location=location, received=", ".join(ctx.channels),
        )  # fmt: skip


def count_array_bytes(ctx: CslContext) -> int:
    """The size of a PE's arrays in bytes."""
    return sum(b.bytes for b in ctx.buffers)


def fits_resources(ctx: CslContext) -> bool:
    """Whether the program fits the memory, queues and task IDs of a PE."""
    return (
        count_array_bytes(ctx) <= ARRAY_MEMORY_BYTES
        and len(ctx.channels) <= len(INPUT_QUEUES)
        and len(_assign_ids(ctx)) == len(_list_tasks(ctx))
    )


def check_memory(ctx: CslContext, location: Any) -> None:
    """Check that the arrays of the program fit the memory of a PE.

    Raises:
        ResourceError: they do not; names the largest arrays.
    """
    total = count_array_bytes(ctx)
    if total <= ARRAY_MEMORY_BYTES:
        return
    largest = sorted(ctx.buffers, key=lambda b: -b.bytes)[:3]
    listed = ", ".join(f"{_describe_array(b)}" for b in largest)
    raise ResourceError(
        f"processing-element memory exceeded: {total / 1024:.0f} KB of arrays needed, "
        f"{ARRAY_MEMORY_BYTES // 1024} KB available",
        location=location,
        expected=f"at most {ARRAY_MEMORY_BYTES} bytes of arrays on each PE",
        received=f"{total} bytes; the largest arrays are {listed}",
        suggestion="use more PEs: a launch is cut over the grid where its programs write apart (docs/csl.md)"
        if ctx.programs
        else f"use a grid of more than {ctx.grid[0]}x{ctx.grid[1]} PEs",
    )


def _describe_array(buffer: PeArray) -> str:
    return f"{buffer.name} ({buffer.bytes} bytes)"

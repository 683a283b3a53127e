"""Sections of an inspection: the text of a level, a pass or a target file, each line with its source location."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tessera.codegen.contract import get_backend, list_target_passes
from tessera.compiler.schedules import ScheduledKernel
from tessera.core.device import INTERP
from tessera.core.errors import UNKNOWN, Location
from tessera.ir.core import Block, Module, Node, structural_hash
from tessera.ir.levels import KERNEL_OP
from tessera.ir.printer import LineOwner, iterate_lines
from tessera.runtime import driver
from tessera.runtime.program import PreparedProgram


@dataclass(frozen=True)
class SectionLine:
    """A line of text, the source location that it came from, and what it shows of the IR."""

    text: str
    location: Location = UNKNOWN
    owner: LineOwner = field(default=None, repr=False)


@dataclass(frozen=True)
class PageSection:
    """A module or a file: its name, level, lines, and the structural hash ("" for a file)."""

    name: str
    level: str
    lines: tuple[SectionLine, ...]
    digest: str = ""
    module: Module | None = field(default=None, repr=False)


def iterate_modules(program: PreparedProgram, target: str, options: Mapping[str, Any]) -> Iterator[tuple[str, Module]]:
    """Yield the module after each pass of the lowering and of the generator, with the name of the pass."""
    if program.top == "graph":
        plan = driver.find_plan(target, program.choice)
        for name, module in driver.iterate_passes(program.levels["graph"].main, plan):
            yield name, module
    else:
        module = program.levels["tile"]
        yield "kernel", module
    if target == INTERP:
        return
    for each in list_target_passes(target, module, options):
        module = each.run(module)
        yield each.name, module


def make_module_section(name: str, module: Module) -> PageSection:
    """A module as a section; locations are beside the lines, not in their text.

    A kernel of the Schedule level has its schedule above it, a line for each dim.
    """
    lines: list[SectionLine] = []
    seen: set[Node] = set()
    for text, owner in iterate_lines(module, locations=False):
        if isinstance(owner, Node) and owner.op.name == KERNEL_OP and owner not in seen:
            seen.add(owner)
            indent = " " * (len(text) - len(text.lstrip()))
            lines += [SectionLine(f"{indent}// {row}", owner.loc) for row in describe_schedule(owner)]
        lines.append(SectionLine(text, _locate(owner), owner))
    return PageSection(name, module.level, tuple(lines), structural_hash(module), module)


def describe_schedule(kernel: Node) -> list[str]:
    """What a kernel of the Schedule level computes and how it is cut: its counts, its programs, then each dim.

    Counts of open sizes are those of the sizes that the lowering assumes.
    """
    known, chosen = ScheduledKernel(kernel), kernel.attrs.get("schedule") or {}
    tile, loop = chosen.get("tile") or (), chosen.get("loop") or ()
    head = f"{known.name}: {known.count_flops():,} operations on {known.count_memory_bytes():,} bytes"
    programs, known_sizes = 1, all(isinstance(extent, int) for _, extent, _ in known.dims)
    rows = []
    for i, ((name, extent, kind), size) in enumerate(zip(known.dims, known.extents, strict=True)):
        step = int(tile[i]) if tile else 0
        walked = kind == "reduce" or i in loop
        count = -(-size // step) if step else 1
        programs *= 1 if walked else count
        cut = "steps of a loop" if walked else "tiles"
        part = f"in {cut} of {step}" if not isinstance(extent, int) else f"in {count:,} {cut} of {step}"
        rows.append(f"  {name} = {extent} {kind}" + (f", {part if count > 1 else 'whole'}" if tile else ""))
    if not tile:
        head += "; no tiles yet"
    elif known_sizes:
        head += f"; {programs:,} program{'s' if programs != 1 else ''}"
    rest = ", ".join(f"{k} = {v}" for k, v in chosen.items() if k not in ("tile", "loop"))
    return [head + (f"; {rest}" if rest else ""), *rows]


def _locate(owner: LineOwner) -> Location:
    return UNKNOWN if owner is None or isinstance(owner, Block) else owner.loc


def list_pass_sections(program: PreparedProgram, target: str, options: Mapping[str, Any]) -> list[PageSection]:
    """The module after each pass; passes that changed nothing are left out."""
    found: list[PageSection] = []
    for name, module in iterate_modules(program, target, options):
        section = make_module_section(name, module)
        if not found or (section.digest, section.level) != (found[-1].digest, found[-1].level):
            found.append(section)
    return found


def list_level_sections(levels: Mapping[str, Module], target: str, options: Mapping[str, Any]) -> Iterator[PageSection]:
    """The levels of a program, then the files that the generator emits."""
    for level, module in levels.items():
        yield make_module_section(level, module)
    if target == INTERP:
        return
    for name, content in sorted(get_backend(target).emit(levels["tile"], options).files.items()):
        text = content if isinstance(content, str) else content.decode(errors="replace")
        yield PageSection(name, "target", tuple(locate_target_lines(name, text)))


# Target text: each format tells the source locations of its lines in a way of its own.


LLVM_LOCATION = re.compile(r"^!(\d+) = !DILocation\(line: (\d+), column: (\d+), scope: !(\d+)\)")
LLVM_SCOPE = re.compile(r"^!(\d+) = distinct !DISubprogram\(.*?file: !(\d+), line: (\d+)")
LLVM_FILE = re.compile(r'^!(\d+) = !DIFile\(filename: "(.*)", directory: "(.*)"\)')
LLVM_USE = re.compile(r",? !dbg !(\d+)")
PTX_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"(.*?)"')
PTX_LOCATION = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)")
CSL_LOCATION = re.compile(r"^\s*// (.+?):(\d+)(?::(\d+))?$")


def locate_target_lines(name: str, text: str) -> Iterator[SectionLine]:
    """The lines of a target file; a format that is not known has no locations."""
    reader = _READERS.get(name.rpartition(".")[2])
    lines = text.splitlines()
    return iter(reader(lines)) if reader else (SectionLine(line) for line in lines)


def _read_ptx(lines: list[str]) -> Iterator[SectionLine]:
    """PTX: a `.loc` applies to the lines after it, up to the end of the function."""
    files: dict[str, str] = {}
    here = UNKNOWN
    for line in lines:
        if found := PTX_FILE.match(line):
            files[found[1]] = found[2]
        elif found := PTX_LOCATION.match(line):
            here = Location(files.get(found[1], "?"), int(found[2]), int(found[3]))
        elif line.startswith("}") or ".entry" in line or ".func" in line:
            here = UNKNOWN
        yield SectionLine(line, here if line.strip() else UNKNOWN)


def _read_llvm(lines: list[str]) -> Iterator[SectionLine]:
    """LLVM IR: `!dbg !N` names a DILocation, whose scope names the file."""
    files = {m[1]: f"{m[3]}/{m[2]}" for line in lines if (m := LLVM_FILE.match(line))}
    scopes = {m[1]: (files.get(m[2], "?"), int(m[3])) for line in lines if (m := LLVM_SCOPE.match(line))}
    places = {n: Location(file, line) for n, (file, line) in scopes.items()}
    for line in lines:
        if found := LLVM_LOCATION.match(line):
            places[found[1]] = Location(scopes.get(found[4], ("?", 0))[0], int(found[2]), int(found[3]))
    for line in lines:
        used = LLVM_USE.search(line)
        yield SectionLine(LLVM_USE.sub("", line), places.get(used[1], UNKNOWN) if used else UNKNOWN)


def _read_csl(lines: list[str]) -> Iterator[SectionLine]:
    """CSL: a comment with a location applies to the lines after it, up to the end of the function."""
    here = UNKNOWN
    for line in lines:
        if found := CSL_LOCATION.match(line):
            here = Location(found[1], int(found[2]), int(found[3] or 0))
        elif line.startswith("}"):
            here = UNKNOWN
        yield SectionLine(line, here)


_READERS: dict[str, Callable[[list[str]], Iterator[SectionLine]]] = {
    "ptx": _read_ptx,
    "ll": _read_llvm,
    "csl": _read_csl,
}


def number_nodes(module: Module) -> dict[Node, int]:
    """Each node of a module, numbered in the order of the text."""
    return {node: number for number, node in enumerate(n for f in module.functions for n in f.body.walk())}

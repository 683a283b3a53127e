"""`tessera inspect`: the IR of each level, coloured, with the source line each op came from."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.highlighter import RegexHighlighter
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table
from rich.theme import Theme

from tessera.codegen.artifact import MANIFEST, read_artifact
from tessera.codegen.contract import get_backend
from tessera.core.device import find_generator_name
from tessera.core.errors import ArgumentError, read_source_line
from tessera.core.io import check_writable, write_file
from tessera.core.types import TensorType, as_dtype
from tessera.ir.core import Module, structural_hash
from tessera.ir.printer import print_module
from tessera.lower.lowering_plan import check_values
from tessera.runtime.bundle_files import is_bundle_path, read_bundle_file
from tessera.runtime.loading import get_parameter_shape
from tessera.runtime.program import PreparedProgram, make_level_error
from tessera.tools.cli.entry_points import describe_configuration, find_entry_point, make_inputs, prepare_program
from tessera.tools.inspector import make_page
from tessera.tools.inspector.sections import iterate_modules

LOCATION_PATTERN = re.compile(r' loc\((?:"to \d+"\()?"(?P<file>[^"]*)":(?P<line>\d+):\d+\)?\)')
UNKNOWN_LOCATION_PATTERN = re.compile(r" loc\(unknown\)")


class IrHighlighter(RegexHighlighter):
    """The parts of MLIR's generic form."""

    base_style = "ir."
    highlights = [
        r'(?P<op>"[a-z_]+\.[A-Za-z_0-9]+")',
        r"(?P<value>%[A-Za-z0-9_]+)",
        r"(?P<type>(tensor|!tile\.ref)<[^ ]*>|\b[iuf]+\d+\b|\bbf16\b)",
        r"(?P<comment>//.*)",
    ]


MAX_LINES = 20_000  # of a text on a page


THEME = Theme({"ir.op": "bold cyan", "ir.value": "green", "ir.type": "magenta", "ir.comment": "dim"})


@check_values(False)  # a wrong pass of the user is shown, or blamed, not refused
def main(options: argparse.Namespace) -> int:
    """Print the levels, or the module after every pass; of a bundle what it holds."""
    if is_bundle_path(options.entry):
        return _inspect_bundle(options)
    if (Path(options.entry) / MANIFEST).is_file():
        return _inspect_artifact(options)
    target = find_generator_name(options.target)
    entry = find_entry_point(options.entry, options.size)
    _check_page_options(options)
    program = prepare_program(entry, make_inputs(entry, options.seed, options.input), target, options.tune)
    if tuned := describe_configuration(entry, program):
        print(f"configuration: {tuned}", file=sys.stderr)  # what programs read on stdout is the IR alone
    arch = {"arch": options.arch} if options.arch else {}
    if options.html:
        return _write_page(program, target, arch, options)
    levels = list(dict.fromkeys([*program.levels, "target"]))
    if options.level not in (None, *levels):
        raise make_level_error(program, options.level)
    sections = list((_pass_sections if options.pass_by_pass else _level_sections)(program, target, arch))
    chosen = [s for s in sections if options.level in (None, s[1])]
    if options.json:
        print(
            json.dumps({name: {"level": level, "text": text, "hash": h} for name, level, text, h in chosen}, indent=1)
        )
    elif options.plain:  # what IR parsers read: the target's own text only where it is asked for
        print("\n".join(text for _, level, text, _ in chosen if options.level or level != "target"))
    else:
        _show(chosen)
    return 0


def _check_page_options(options: argparse.Namespace) -> None:
    if not options.html:
        for name, given in (("--no-values", options.no_values), ("--max-lines", options.max_lines is not None)):
            if given:
                raise ArgumentError(f"{name} is for a page", expected="--html FILE with it")
        return
    check_writable(options.html)
    for name, given in (("--level", options.level), ("--pass-by-pass", options.pass_by_pass), ("--json", options.json),
                        ("--plain", options.plain)):  # fmt: skip
        if given:
            raise ArgumentError(f"--html is written without {name}", suggestion="the page has all levels and passes")
    if options.max_lines is not None and options.max_lines < 1:
        raise ArgumentError("--max-lines is no number of lines", expected="at least 1", received=options.max_lines)


def _write_page(program: PreparedProgram, target: str, arch: Mapping[str, Any], options: argparse.Namespace) -> int:
    """Write the page, and print its size and the limits that it reached."""
    page = make_page(program, target, arch, options.max_lines or MAX_LINES, values=not options.no_values)
    text = page.html.encode()
    write_file(options.html, lambda handle: handle.write(text))
    print(f"{options.html}: {len(text):,} bytes")
    for note in page.notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


def _inspect_artifact(options: argparse.Namespace) -> int:
    """Print what an artifact takes, and which of its programs serves which sizes; nothing in it is executed."""
    for name, given in (
        ("--level", options.level),
        ("--pass-by-pass", options.pass_by_pass),
        ("--plain", options.plain),
        ("--html", options.html),
    ):
        if given:
            raise ArgumentError(f"an artifact is inspected without {name}", suggestion="inspect the file of its source")
    manifest = read_artifact(options.entry).manifest
    interface, plan = manifest["interface"], manifest.get("plan", {})
    variants = manifest.get("variants", [])
    if options.json:
        shown = {"target": manifest["target"], "interface": interface, "sizes": plan.get("sizes", []),
                 "constraints": plan.get("constraints", []), "variants": [v["when"] for v in variants]}  # fmt: skip
        print(json.dumps(shown, indent=1, sort_keys=True))
        return 0
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"[bold]{escape(interface['entry'])}[/] for {escape(manifest['target'])}")
    for each in interface["parameters"]:
        kind = TensorType(get_parameter_shape(each), as_dtype(each["dtype"]))
        console.print(f"  {each['name']}: {kind}{', stored' if each['stored'] else ''}", markup=False)
    lines = interface.get("lines", {})
    for text in plan.get("constraints", []):
        console.print(f"  requires {text}{f', as {lines[text]} has it' if text in lines else ''}", markup=False)
    for number, each in enumerate(variants, 1):
        console.print(f"  variant {number}, for {' and '.join(each['when']) or 'all sizes'}", markup=False)
    return 0


def _inspect_bundle(options: argparse.Namespace) -> int:
    """List the variants and the metadata of a bundle, checked; nothing in it is executed."""
    index = read_bundle_file(options.entry, lambda index: ()).index
    if options.json:
        print(json.dumps(index, indent=1, sort_keys=True))
        return 0
    console, table = Console(soft_wrap=True), Table("variant", "target", "bytes", "measured", box=None)
    for name, variant in sorted(index["variants"].items()):
        size = sum(index["members"][m]["bytes"] for m in set(variant["files"].values()))
        measured = variant["performance"].get("median_ms")
        table.add_row(name, variant["target"], f"{size:,}", "" if measured is None else f"{measured} ms")
    console.print(f"[bold]{escape(index['entry'])}[/], written by tessera {escape(str(index.get('written_by')))}")
    console.print(table)
    console.print(f"requires {index['requirements']['memory']:,} bytes of memory")
    console.print(f"metadata: {json.dumps(index['metadata'], sort_keys=True)}", markup=False)
    return 0


IrSection = tuple[str, str, str, str]  # name, level, text, hash


def _section(name: str, module: Module) -> IrSection:
    return name, module.level, print_module(module), structural_hash(module)


def _level_sections(program: PreparedProgram, target: str, options: Mapping[str, Any]) -> Iterator[IrSection]:
    for level, module in program.levels.items():
        yield _section(level, module)
    for name, content in sorted(get_backend(target).emit(program.levels["tile"], options).files.items()):
        text = content if isinstance(content, str) else content.decode(errors="replace")
        yield f"target: {name}", "target", text, ""


def _pass_sections(program: PreparedProgram, target: str, options: Mapping[str, Any]) -> Iterator[IrSection]:
    """The module after each pass of the lowering and of the generator that changed it."""
    before = ""
    for name, module in iterate_modules(program, target, options):
        section = _section(f"after {name}", module)
        if section[3] != before:
            yield section
        before = section[3]


def _show(sections: list[IrSection]) -> None:
    console = Console(theme=THEME, highlighter=IrHighlighter(), soft_wrap=True)
    for name, level, text, digest in sections:
        console.print(Rule(f"{name}  {digest[:12]}", align="left"))
        for line in annotate_with_source(text) if level != "target" else text.splitlines():
            console.print(line, markup=False)


def annotate_with_source(text: str) -> Iterator[str]:
    """IR lines with each location replaced by the source line it names, shown where it changes."""
    last = None
    for line in text.splitlines():
        place = LOCATION_PATTERN.search(line)
        bare = UNKNOWN_LOCATION_PATTERN.sub("", LOCATION_PATTERN.sub("", line))
        if place:
            here = (place["file"], int(place["line"]))
            if here != last:
                source = read_source_line(*here).strip()
                indent = " " * (len(line) - len(line.lstrip()))
                yield f"{indent}// {here[0].rsplit('/', 1)[-1]}:{here[1]}: {source}"
            last = here
        yield bare

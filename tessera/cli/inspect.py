"""`tessera inspect`: the IR of each level, coloured, with the source line each op came from."""

from __future__ import annotations

import argparse
import json
import linecache
import re
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.highlighter import RegexHighlighter
from rich.rule import Rule
from rich.theme import Theme

from tessera import driver
from tessera.cli.entries import configuration, find, inputs_of, program_of
from tessera.codegen.registry import backend
from tessera.device import generator_of
from tessera.ir.core import Module, structural_hash
from tessera.ir.printer import print_module
from tessera.program import Program

PLACE = re.compile(r' loc\((?:"to \d+"\()?"(?P<file>[^"]*)":(?P<line>\d+):\d+\)?\)')
UNPLACED = re.compile(r" loc\(unknown\)")


class Highlighter(RegexHighlighter):
    """The parts of MLIR's generic form."""

    base_style = "ir."
    highlights = [
        r'(?P<op>"[a-z_]+\.[A-Za-z_0-9]+")',
        r"(?P<value>%[A-Za-z0-9_]+)",
        r"(?P<type>(tensor|!tile\.ref)<[^ ]*>|\b[iuf]+\d+\b|\bbf16\b)",
        r"(?P<comment>//.*)",
    ]


THEME = Theme({"ir.op": "bold cyan", "ir.value": "green", "ir.type": "magenta", "ir.comment": "dim"})


def main(options: argparse.Namespace) -> int:
    """Print the levels, or the module after every pass."""
    target = generator_of(options.target)
    entry = find(options.entry)
    program = program_of(entry, inputs_of(entry, options.seed), target, options.tune)
    if tuned := configuration(entry, program):
        print(f"configuration: {tuned}", file=sys.stderr)  # what programs read on stdout is the IR alone
    sections = list(_passes(program, target) if options.pass_by_pass else _levels(program, target))
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


Section = tuple[str, str, str, str]  # name, level, text, hash


def _section(name: str, module: Module) -> Section:
    return name, module.level, print_module(module), structural_hash(module)


def _levels(program: Program, target: str) -> Iterator[Section]:
    for level, module in program.levels.items():
        yield _section(level, module)
    for name, content in sorted(backend(target).emit(program.levels["tile"], {}).files.items()):
        text = content if isinstance(content, str) else content.decode(errors="replace")
        yield f"target: {name}", "target", text, ""


def _passes(program: Program, target: str) -> Iterator[Section]:
    if program.top != "graph":
        yield from _levels(program, target)
        return
    before = ""
    for name, module in driver.lowering(program.levels["graph"].main, driver.plan_for(target)):
        section = _section(f"after {name}", module)
        if section[3] != before:
            yield section
        before = section[3]


def _show(sections: list[Section]) -> None:
    console = Console(theme=THEME, highlighter=Highlighter(), soft_wrap=True)
    for name, level, text, digest in sections:
        console.print(Rule(f"{name}  {digest[:12]}", align="left"))
        for line in annotated(text) if level != "target" else text.splitlines():
            console.print(line, markup=False)


def annotated(text: str) -> Iterator[str]:
    """IR lines with each location replaced by the source line it names, shown where it changes."""
    last = None
    for line in text.splitlines():
        place = PLACE.search(line)
        bare = UNPLACED.sub("", PLACE.sub("", line))
        if place:
            here = (place["file"], int(place["line"]))
            if here != last:
                source = linecache.getline(*here).strip()
                indent = " " * (len(line) - len(line.lstrip()))
                yield f"{indent}// {here[0].rsplit('/', 1)[-1]}:{here[1]}: {source}"
            last = here
        yield bare

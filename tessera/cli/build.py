"""`tessera build`: compile an entry point into an artifact folder."""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from tessera.artifacts import build_program
from tessera.cli.entries import configuration, find, inputs_of, program_of
from tessera.device import generator_of
from tessera.lower.flow import taken
from tessera.lower.hosted import hosted


def main(options: argparse.Namespace) -> int:
    """Build what the command line names."""
    console = Console()
    target = generator_of(options.target) + (f":{options.grid}" if options.grid else "")
    entry = find(options.entry)
    start = time.perf_counter()
    with console.status(f"building {entry.name} for {target}"):
        weights = entry.example.weights if entry.example else ()
        options_of = {"arch": options.arch} if options.arch else {}
        program = program_of(entry, inputs_of(entry, options.seed), target, options.tune, options_of)
        folder = build_program(program, options.output, target, weights, options_of)
    size = sum(f.stat().st_size for f in Path(folder).rglob("*") if f.is_file())
    console.print(
        f"built [bold]{entry.name}[/] for {target} in {time.perf_counter() - start:.2f} s: {escape(str(folder))}"
    )
    command = f"tessera run {shlex.quote(str(folder))}"
    console.print(f"  {size:,} bytes; run it with: {escape(command)}", soft_wrap=True)
    if chosen := configuration(entry, program):
        console.print(f"  configuration: {chosen}", highlight=False, soft_wrap=True)
    for node in hosted(program.levels["tile"]):
        line = f"  runs on the host, by NumPy: {node.attrs['op']} at {node.loc}"
        console.print(line, highlight=False, soft_wrap=True)
    for node in taken(program.levels["tile"]):
        line = f"  taken by the host, what is inside runs on {target}: {node.op.name} at {node.loc}"
        console.print(line, highlight=False, soft_wrap=True)
    return 0

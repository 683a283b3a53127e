"""`tessera build`: compile an entry point into an artifact folder."""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from tessera.codegen.contract import get_backend
from tessera.core.device import find_generator_name
from tessera.core.progress import operation
from tessera.lower.graph_to_schedule.host_ops import find_host_calls, find_host_control_flow
from tessera.runtime.artifacts import build_program
from tessera.tools.cli.entry_points import (
    describe_configuration,
    find_entry_point,
    make_inputs,
    parse_dynamic,
    prepare_program,
)


def main(options: argparse.Namespace) -> int:
    """Build the entry point that the command line names."""
    console = Console()
    target = find_generator_name(options.target) + (f":{options.grid}" if options.grid else "")
    entry = find_entry_point(options.entry, options.size)
    dynamic, start = parse_dynamic(options.dynamic), time.perf_counter()
    with operation(f"building {entry.name} for {target}"):
        weights = entry.example.weights if entry.example else ()
        options_of = {"arch": options.arch} if options.arch else {}
        program = prepare_program(
            entry, make_inputs(entry, options.seed), target, options.tune, options_of, dynamic=dynamic
        )
        folder = build_program(program, options.output, target, weights, options_of)
    size = sum(f.stat().st_size for f in Path(folder).rglob("*") if f.is_file())
    console.print(
        f"built [bold]{entry.name}[/] for {target} in {time.perf_counter() - start:.2f} s: {escape(str(folder))}"
    )
    command = f"tessera run {shlex.quote(str(folder))}"
    console.print(f"  {size:,} bytes; run it with: {escape(command)}", soft_wrap=True)
    if chosen := describe_configuration(entry, program):
        console.print(f"  configuration: {chosen}", highlight=False, soft_wrap=True)
    for function in program.levels["tile"].functions[1:]:
        lockstep, group = get_backend(target).capabilities.lockstep, int(function.attrs.get("group", 1))
        if group > 1 and group % lockstep:
            line = (
                f"  advice: groups of {function.name} have {group} tiles, one thread each; {lockstep} run in lockstep"
            )
            console.print(f"{line}: launch a multiple of {lockstep}", highlight=False, soft_wrap=True)
    for node in find_host_calls(program.levels["tile"]):
        line = f"  runs on the host, by NumPy: {node.attrs['op']} at {node.loc}"
        console.print(line, highlight=False, soft_wrap=True)
    for node in find_host_control_flow(program.levels["tile"]):
        line = f"  taken by the host, what is inside runs on {target}: {node.op.name} at {node.loc}"
        console.print(line, highlight=False, soft_wrap=True)
    return 0

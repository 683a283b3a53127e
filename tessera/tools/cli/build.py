"""`tessera build`: compile an entry point into an artifact folder, or into a bundle for several targets and sizes."""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from tessera.codegen.contract import get_backend
from tessera.core.device import find_generator_name
from tessera.core.errors import ArgumentError, FileError
from tessera.core.progress import operation
from tessera.deploy.standalone import standalone
from tessera.lower.graph_to_schedule.host_ops import find_host_calls, find_host_control_flow
from tessera.runtime.artifacts import build_program
from tessera.runtime.bundle_files import SUFFIX
from tessera.runtime.bundles import bundle
from tessera.runtime.program import PreparedProgram
from tessera.runtime.size_variants import prepare_variants
from tessera.tools.cli.entry_points import (
    describe_configuration,
    find_entry_point,
    make_inputs,
    parse_dynamic,
    prepare_program,
)


def main(options: argparse.Namespace) -> int:
    """Build the entry point that the command line names."""
    targets = [_configure_target(find_generator_name(t), options.grid) for t in options.target or ["llvm"]]
    is_bundle = options.output.endswith(SUFFIX) and not options.standalone
    _check_options(options, targets, is_bundle)
    if is_bundle:
        return _build_bundle(options, targets)
    if options.standalone:
        return _build_standalone(options, targets[0])
    return _build_folder(options, targets[0])


def _configure_target(target: str, grid: str | None) -> str:
    """The target with the grid of `--grid`.

    Raises:
        ArgumentError: the target is for no mesh, or has a grid already, or this is none.
    """
    if grid is None:
        get_backend(target)  # an unknown name is an error of the command line
        return target
    if ":" in target or not hasattr(get_backend(target), "configured"):
        raise ArgumentError(
            "--grid is for a mesh target" + (", which has a grid already" if ":" in target else ""),
            expected="--target csl --grid 4x4", received=f"--target {target} --grid {grid}",
        )  # fmt: skip
    get_backend(f"{target}:{grid}")
    return f"{target}:{grid}"


def _check_options(options: argparse.Namespace, targets: list[str], is_bundle: bool) -> None:
    """Refuse options of another kind of output."""
    for_bundles = {
        "a second --target": targets[1:], "--batch-size": options.batch_size, "--metadata": options.metadata,
        "--measure": options.measure,
    }  # fmt: skip
    for name, given in for_bundles.items():
        if given and not is_bundle:
            raise ArgumentError(f"{name} is for a bundle", expected=f"-o NAME{SUFFIX}", received=f"-o {options.output}")
    if options.variant and (is_bundle or options.standalone):
        raise ArgumentError("--variant is for an artifact", expected="-o FOLDER", received=f"-o {options.output}")
    if options.machine and not options.standalone:
        raise ArgumentError("--machine is for a standalone program", expected="--standalone with it")


def _build_folder(options: argparse.Namespace, target: str) -> int:
    """Build the entry point for a target into an artifact folder."""
    console = Console()
    entry = find_entry_point(options.entry, options.size)
    dynamic, start = parse_dynamic(options.dynamic), time.perf_counter()
    with operation(f"building {entry.name} for {target}"):
        weights = entry.example.weights if entry.example else ()
        options_of = {"arch": options.arch} if options.arch else {}
        arguments = make_inputs(entry, options.seed)
        make = functools.partial(prepare_program, entry, arguments, target, options.tune, options_of, dynamic=dynamic)
        program, variants = _prepare(make, options)
        folder = build_program(program, options.output, target, weights, options_of, variants)
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


def _prepare(
    make: Callable[..., PreparedProgram], options: argparse.Namespace
) -> tuple[PreparedProgram, list[PreparedProgram]]:
    """The program and its variants for symbolic sizes."""
    if not options.dynamic and not options.variant:
        return make(), []
    return prepare_variants(lambda variant: make(variant=variant), options.variant)


def _build_bundle(options: argparse.Namespace, targets: list[str]) -> int:
    """Build the entry point for all targets and batch sizes into one file."""
    entry = find_entry_point(options.entry, options.size)
    arguments, example = make_inputs(entry, options.seed), entry.example
    args, named = ((), arguments) if isinstance(arguments, dict) else (arguments, {})
    metadata, start = _read_metadata(options.metadata), time.perf_counter()
    with operation(f"building {entry.name} for {', '.join(targets)}"):
        made = bundle(
            entry.function, *args, targets=targets, batch_sizes=options.batch_size, arch=options.arch,
            weights=example.weights if example else (), grid=example.grid if example else None,
            group=example.group if example else None, tune=options.tune, dynamic=parse_dynamic(options.dynamic),
            **named,
        )  # fmt: skip
        if options.measure:
            made = made.measure()
        path = made.save(options.output, metadata)
    console, seconds = Console(), time.perf_counter() - start
    console.print(f"built [bold]{made.entry}[/] in {seconds:.2f} s: {escape(str(path))}", soft_wrap=True)
    console.print(f"  {path.stat().st_size:,} bytes, variants {', '.join(made.variants)}", soft_wrap=True)
    console.print(f"  run it with: {escape(f'tessera run {shlex.quote(str(path))}')}", soft_wrap=True)
    return 0


def _build_standalone(options: argparse.Namespace, target: str) -> int:
    """Build the entry point as a folder with a C library."""
    entry = find_entry_point(options.entry, options.size)
    arguments, example = make_inputs(entry, options.seed), entry.example
    args, named = ((), arguments) if isinstance(arguments, dict) else (arguments, {})
    start = time.perf_counter()
    with operation(f"building {entry.name} for {target}"):
        made = standalone(
            entry.function, *args, out=options.output, target=target, machine=options.machine or options.arch,
            weights=example.weights if example else (), grid=example.grid if example else None,
            group=example.group if example else None, dynamic=parse_dynamic(options.dynamic), **named,
        )  # fmt: skip
    console, seconds = Console(), time.perf_counter() - start
    console.print(f"built [bold]{made.name}[/] for {target} in {seconds:.2f} s: {escape(str(made.folder))}")
    if made.library is not None:
        console.print(f"  {escape(str(made.library))}, {made.library.stat().st_size:,} bytes", soft_wrap=True)
    files = ", ".join(sorted(f.name for f in made.folder.iterdir()))
    console.print(f"  files: {escape(files)}", soft_wrap=True)
    return 0


def _read_metadata(path: str | None) -> dict[str, Any] | None:
    """The JSON object in a file.

    Raises:
        FileError: there is none.
    """
    if path is None:
        return None
    try:
        found = json.loads(Path(path).read_text())
    except OSError as error:
        raise FileError(
            f"{path} cannot be read: {error.strerror or error}", expected="a file with a JSON object"
        ) from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is no JSON file", received=str(error)) from None
    if not isinstance(found, dict):
        raise FileError(f"{path} holds no JSON object", received=type(found).__name__)
    return found

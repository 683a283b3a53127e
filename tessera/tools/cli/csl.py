"""`tessera csl`: run a CSL program in the simulator, check one, or name the folder of the host tools."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tessera.core.errors import ArgumentError, FileError
from tessera.core.io import check_writable
from tessera.interp.target.csl import host_tools_folder
from tessera.interp.target.csl.cost_model import VARIABLE
from tessera.interp.target.csl.host import cslc

ARCHES = ("wse2", "wse3")


def main(options: argparse.Namespace) -> int:
    """Run the action and return the exit status."""
    return ACTIONS[options.action](options)


def _tools(options: argparse.Namespace) -> int:
    print(host_tools_folder())
    return 0


def _run(options: argparse.Namespace) -> int:
    """Execute the folder's own script with the simulator's tools first on PATH."""
    folder = Path(_path(options, "a folder with commands_wse2.sh, commands_wse3.sh or run.py"))
    if not folder.is_dir():
        raise FileError(f"there is no folder {folder}")
    command, environment = _find_run_command(folder, options.arch), _environment(options)
    status = subprocess.run(command, cwd=folder, env=environment, check=False).returncode
    if options.range:
        return status or _print_range(folder, command, environment)
    return _compare_orders(folder, command, environment, status, options.orders) if options.orders else status


def _compare_orders(folder: Path, command: list[str], environment: dict[str, str], status: int, count: int) -> int:
    """Run a program in other orders of its tasks and events, and print those that end otherwise."""
    statuses = {"the default order": status}
    for seed in range(1, count + 1):
        other = {**environment, "TESSERA_CSL_SEED": str(seed)}
        done = subprocess.run(command, cwd=folder, env=other, check=False, capture_output=True)
        statuses[f"--seed {seed}"] = done.returncode
    for name, found in statuses.items():
        print(f"{name}: {'passes' if found == 0 else f'ends with status {found}'}")
    if len({found == 0 for found in statuses.values()}) == 2:
        print("the result depends on the order of tasks and events: look for a race or a task that starves another")
    return max(statuses.values(), key=abs)


def _print_range(folder: Path, command: list[str], environment: dict[str, str]) -> int:
    """Run a program with both ends of the cost model, and print the cycles of each launch between them."""
    counts: list[list[tuple[str, int]]] = []
    for costs in ("low", "{}", "high"):
        with tempfile.TemporaryDirectory() as place:
            trace = Path(place) / "trace.json"
            other = {**environment, VARIABLE: costs, "TESSERA_CSL_TRACE": str(trace)}
            done = subprocess.run(command, cwd=folder, env=other, check=False, capture_output=True, text=True)
            if done.returncode or not trace.is_file():
                print(f"the program does not end with the costs {costs!r}: {done.stderr[-500:]}", file=sys.stderr)
                return done.returncode or 1
            launches = json.loads(trace.read_text())["otherData"]["launches"]
        counts.append([(one["name"], one["end"] - one["start"]) for one in launches])
    for row in zip(*counts, strict=True):
        cycles = [count for _, count in row]
        print(f"{row[0][0]}: {cycles[1]:,} cycles ({min(cycles):,} to {max(cycles):,})")
    return 0


def _find_run_command(folder: Path, arch: str | None) -> list[str]:
    """Find the command that runs a folder: its script for the architecture, or its run.py."""
    for name in [arch] if arch else ARCHES:
        if (folder / f"commands_{name}.sh").is_file():
            return ["bash", f"./commands_{name}.sh"]
    if arch is None and (folder / "run.py").is_file():
        return ["cs_python", "run.py"]
    wanted = f"commands_{arch}.sh" if arch else "commands_wse2.sh, commands_wse3.sh or run.py"
    raise FileError(f"{folder} has no {wanted}", expected="a folder laid out like the vendor's examples")


def _environment(options: argparse.Namespace) -> dict[str, str]:
    path = f"{host_tools_folder()}{os.pathsep}{os.environ.get('PATH', '')}"
    found = {"TESSERA_PYTHON": sys.executable, **os.environ, "PATH": path}
    numbers = {"SEED": options.seed, "LIMIT": options.limit, "SDK": options.sdk}
    numbers["PLAIN"] = 1 if options.plain else None
    files = {"PICTURE": options.picture, "TRACE": options.trace}
    texts = {name: str(value) for name, value in numbers.items() if value is not None}
    texts |= {name: str(check_writable(value).resolve()) for name, value in files.items() if value is not None}
    return found | {f"TESSERA_CSL_{name}": text for name, text in texts.items()}


def _check(options: argparse.Namespace) -> int:
    """Compile a layout and print the result."""
    given = Path(_path(options, "a layout file"))
    words = [str(given / "layout.csl" if given.is_dir() else given), "--arch", options.arch or "wse2"]
    words += ["--sdk", options.sdk] if options.sdk else []
    words += [word for pair in options.param for word in ("--params", pair)]
    words += [word for folder in options.import_path for word in ("--import-path", folder)]
    layout = cslc.compile_settings(cslc.collect_settings(cslc.make_parser().parse_args(words)))
    for line in layout.printed:
        print(line)
    programs = {id(tile.program): tile.program for tile in layout.tiles.values()}.values()
    most = max((program.memory_used for program in programs), default=0)
    print(f"{options.path}: {layout.width} x {layout.height} PEs, {len(programs)} programs, up to {most} bytes on a PE")
    return 0


def _path(options: argparse.Namespace, what: str) -> str:
    if not options.path:
        raise ArgumentError(f"tessera csl {options.action} needs {what}")
    return options.path


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {"run": _run, "check": _check, "tools": _tools}

"""A Tile module as PTX text, and what its entry function does as a launch plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.codegen.launch import launch_plan, overlapping
from tessera.codegen.ptx.entry import Entry
from tessera.codegen.ptx.function import SHARED_LIMIT, emit_function
from tessera.codegen.ptx.memory import VECTOR_BYTES
from tessera.codegen.ptx.room import SHARED
from tessera.codegen.ptx.text import Files
from tessera.errors import ResourceError
from tessera.ir.core import Function, Module, Node
from tessera.ops import host

VERSION = {"sm_80": (7, 8), "sm_90a": (8, 0)}
PROGRAMS = (1 << 31) - 1  # of a launch: as many as the first axis of a grid has places


@dataclass(frozen=True)
class Emission:
    """The text of a module and its launch plan."""

    text: str
    plan: dict[str, Any]


def emit_module(module: Module, arch: str, debug: bool) -> Emission:
    """Every tile function that the entry launches.

    Raises:
        UnsupportedOpError: an op has no emission; it names the op, the target and the line.
        ResourceError: a function needs more shared memory than a block has.
    """
    files = Files() if debug else None
    launches = [n for n in module.main.body.walk() if n.op is host.launch]
    together = overlapping(module)
    entries: dict[str, Entry] = {}
    plan = launch_plan(module, {})
    for function in module.functions[1:]:
        grids = _grids(launches, function)
        aligned = _alignments(plan, function)
        entry = emit_function(function, files, grids, function.name not in together, aligned, arch)
        _check_shared(function.name, entry, arch, function.loc)
        entries[function.name] = entry
    plan["entries"] = {name: e.described() for name, e in entries.items()}
    for each, node in zip(plan["launches"], launches, strict=True):
        each["rank"] = len(_grids(launches, module.function(node.attrs["kernel"]))[0])
    return Emission("\n".join(_text(arch, files, list(entries.values()))) + "\n", plan)


def _alignments(plan: Mapping[str, Any], function: Function) -> list[int]:
    """Of how many bytes each parameter's address is a multiple: less than a vector's where slices begin anywhere."""
    args = [each["args"] for each in plan["launches"] if each["kernel"] == function.name]
    moves = [[n for given in args for _, n in given[i].get("moves", ())] for i in range(len(function.params))]
    return [math.gcd(VECTOR_BYTES, *counts) for counts in moves]


def _text(arch: str, files: Files | None, entries: Sequence[Entry]) -> list[str]:
    major, minor = max(VERSION[arch], *(entry.isa for entry in entries)) if entries else VERSION[arch]
    head = ["// Tessera: PTX", f".version {major}.{minor}", f".target {arch}", ".address_size 64", ""]
    named = [*files.text(), ""] if files is not None else []
    shared = [f".extern .shared .align 1024 .b8 {SHARED}[];", ""]
    return [*head, *named, *shared, *(line for entry in entries for line in entry.lines)]


def _check_shared(name: str, entry: Entry, arch: str, loc: Any) -> None:
    if entry.shared > SHARED_LIMIT[arch]:
        raise ResourceError(
            f"{name} needs {entry.shared:,} bytes of shared memory", location=loc,
            expected=f"at most {SHARED_LIMIT[arch]:,} on {arch}", received=f"{entry.shared:,}",
            suggestion="smaller tiles, or fewer stages",
        )  # fmt: skip


def _grids(launches: Sequence[Node], function: Function) -> list[tuple[int, ...]]:
    """The grids that a function is launched over, all of as many axes: those that one lacks have one program."""
    grids = [_grid(n) for n in launches if n.attrs["kernel"] == function.name]
    rank = max(map(len, grids), default=1)
    return [(*g, *(1,) * (rank - len(g))) for g in grids]


def _grid(node: Node) -> tuple[int, ...]:
    grid = tuple(int(n) for n in node.attrs["grid"])
    if math.prod(grid) > PROGRAMS:
        raise ResourceError(
            f"a grid of {math.prod(grid):,} programs", location=node.loc, expected=f"at most {PROGRAMS:,} on a GPU",
            received=f"{math.prod(grid):,}", suggestion="fewer programs that do more each, in a loop",
        )  # fmt: skip
    return grid or (1,)

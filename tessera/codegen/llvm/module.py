"""A Tile module as LLVM text, and what its entry function does as a launch plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tessera.codegen.grouped import ungroup
from tessera.codegen.launch import launch_plan, overlapping
from tessera.codegen.llvm import inline, math, meeting, report  # noqa: F401  (they fill tables)
from tessera.codegen.llvm.function import Options, emit_function
from tessera.codegen.llvm.library import Library, declarations
from tessera.codegen.llvm.program import GRID_RANK
from tessera.codegen.llvm.text import Debug
from tessera.errors import UnsupportedOpError
from tessera.ir.core import Module, Node
from tessera.ops import host
from tessera.ops.tile import meets


@dataclass(frozen=True)
class Emission:
    """The text of a module and its launch plan."""

    text: str
    plan: dict[str, Any]


def emit_module(module: Module, options: Options) -> Emission:
    """Every tile function that the entry launches, with the functions they need.

    Raises:
        UnsupportedOpError: an op has no emission; it names the op, the target and the line.
    """
    module = ungroup(module)
    library, debug = Library(), Debug() if options.debug else None
    lines, scratch = _functions(module, library, debug, options)
    lines += library.text()
    lines += math.definitions(lines)
    head = ["; Tessera: LLVM", f'source_filename = "{module.main.name}"', ""]
    head += [f"@{report.CONTEXT} = global i64 0", ""] if library.sites else []
    met = [f.name for f in module.functions[1:] if meets(f.body)]
    head += [f"@{meeting.CONTEXT} = global i64 0", ""] if met else []
    tail = [*declarations(lines), "", _attributes(options.vector_bytes * 8)]
    text = "\n".join([*head, *lines, *tail, *(debug.text() if debug else ())]) + "\n"
    return Emission(
        text, {**launch_plan(module, scratch), "reports": library.sites, **({"meeting": met} if met else {})}
    )


def _functions(
    module: Module, library: Library, debug: Debug | None, options: Options
) -> tuple[list[str], dict[str, int]]:
    """The text of every tile function, and the scratch memory each needs."""
    launches = [n for n in module.main.body.walk() if n.op is host.launch]
    shared = overlapping(module)
    lines: list[str] = []
    scratch: dict[str, int] = {}
    for function in module.functions[1:]:
        grids = [_grid(n) for n in launches if n.attrs["kernel"] == function.name]
        # Memory that others write while a program runs is not its own, as `noalias` would say.
        apart = function.name not in shared and not meets(function.body)
        emitted = emit_function(function, library, debug, options, _largest(grids), apart)
        lines += emitted.lines
        scratch[function.name] = emitted.scratch
    return lines, scratch


def _attributes(bits: int) -> str:
    """Without these LLVM splits the widest vectors on processors that prefer narrower ones."""
    return f'attributes #0 = {{ nounwind "min-legal-vector-width"="{bits}" "prefer-vector-width"="{bits}" }}'


def _grid(node: Node) -> tuple[int, ...]:
    grid = tuple(node.attrs["grid"])
    if len(grid) > GRID_RANK:
        raise UnsupportedOpError(
            f"the target llvm has grids of {GRID_RANK} axes, this one has {len(grid)}", location=node.loc
        )
    return (*(int(n) for n in grid), 1, 1, 1)[:GRID_RANK]


def _largest(grids: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    return tuple(max(sizes) for sizes in zip(*grids, strict=True)) if grids else None

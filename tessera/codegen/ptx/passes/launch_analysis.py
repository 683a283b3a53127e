"""Launch analysis: records how a tile function is launched (grids, aliasing, alignment) as function attributes.

The first pass of the pipeline: its result is a module of the level `ptx`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tessera.codegen.host_plan import build_host_plan, find_aliased_kernels
from tessera.codegen.ptx.ops import LEVEL, set_facts
from tessera.codegen.ptx.table.scalars.conversion import has_policies
from tessera.codegen.ptx.text.memref import VECTOR_BYTES
from tessera.codegen.symbolic_plan import parse_size
from tessera.core.errors import ResourceError
from tessera.core.symbolic_dim import Size, find_size_divisor, proves_less
from tessera.ir.core import Function, Module, Node
from tessera.ops.dialects import host

MAX_PROGRAMS = (1 << 31) - 1  # of a launch: the limit of a grid's first axis


def analyse_launches(module: Module, arch: str) -> Module:
    """The module with the facts of each tile function's launches, for an architecture.

    Raises:
        ResourceError: a grid has more programs than a launch may have.
    """
    launches = [n for n in module.main.body.walk() if n.op is host.launch]
    aliased, plan = find_aliased_kernels(module), build_host_plan(module, {})
    functions = [
        _record_launches(f, arch, list_launch_grids(launches, f), f.name not in aliased, plan)
        for f in module.functions[1:]
    ]
    return module.replace(module.main, *functions, level=LEVEL)


def _record_launches(
    function: Function, arch: str, grids: Sequence[tuple[Size, ...]], noalias: bool, plan: Mapping[str, Any]
) -> Function:
    alignments = tuple(_parameter_alignments(plan, function))
    special = {"rounding": True} if has_policies(function) else {}
    return set_facts(function, arch=arch, grids=tuple(grids), noalias=noalias, alignments=alignments, **special)


def _parameter_alignments(plan: Mapping[str, Any], function: Function) -> list[int]:
    """For each parameter a number of bytes that divides its address: a vector's, or less where a slice moves it."""
    args = [each["args"] for each in plan["launches"] if each["kernel"] == function.name]
    moves = [[n for given in args for _, n in given[i].get("moves", ())] for i in range(len(function.params))]
    return [math.gcd(VECTOR_BYTES, *(find_size_divisor(parse_size(n), VECTOR_BYTES) for n in c)) for c in moves]


def list_launch_grids(launches: Sequence[Node], function: Function) -> list[tuple[Size, ...]]:
    """The grids that a function is launched over, all of one rank: an axis that one lacks has one program."""
    grids = [_launch_grid(n) for n in launches if n.attrs["kernel"] == function.name]
    rank = max(map(len, grids), default=1)
    return [(*g, *(1,) * (rank - len(g))) for g in grids]


def _launch_grid(node: Node) -> tuple[Size, ...]:
    grid = tuple(node.attrs["grid"])
    if proves_less(MAX_PROGRAMS, math.prod(grid)):
        raise ResourceError(
            f"a grid of {math.prod(grid):,} programs", location=node.loc, expected=f"at most {MAX_PROGRAMS:,} on a GPU",
            received=f"{math.prod(grid):,}", suggestion="fewer programs that do more each, in a loop",
        )  # fmt: skip
    return grid or (1,)

"""Initialised outputs: which outputs that kernels read hold elements of this program when they are first read.

The others must hold zeros before the first launch. An output is initialised where the first launch that touches it
stores every one of its elements and reads none, as the copy before updates in place does. Whether it stores all is
computed: the starts of a store, for every program of the grid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tessera.codegen.contract import static_shape
from tessera.codegen.host_plan import build_host_plan, find_touched_parameters
from tessera.ir.core import Function, Module, Node, Value
from tessera.ops.dialects import host, tile
from tessera.ops.tensor import basic

MAX_PROGRAMS = 1 << 18  # of a launch whose starts are computed


def plan_launches(module: Module, scratch: Mapping[str, int]) -> dict[str, Any]:
    """The host plan (`build_host_plan`), whose `read` leaves out the outputs that need no zeros."""
    plan = build_host_plan(module, scratch)
    touched = any(plan["params"][i]["role"] == "output" for i in plan["read"])
    return {**plan, "read": _find_read_parameters(module, plan)} if touched else plan


def _find_read_parameters(module: Module, plan: Mapping[str, Any]) -> list[int]:
    """The parameters of a plan that are read, without the outputs that launches before have written as a whole."""
    params = module.main.params
    outputs = {i for i in plan["read"] if plan["params"][i]["role"] == "output"}
    return [i for i in plan["read"] if i not in outputs or not _is_initialised(module, params[i])]


def _is_initialised(module: Module, output: Value) -> bool:
    """Whether the first launch that touches an output writes it as a whole."""
    same = {output}
    for node in module.main.body.nodes:
        if node.op is host.view and node.args[0] in same:
            same.add(node.out)
        elif same.intersection(node.args) or node.regions:
            return node.op is host.launch and _initialises(module.function(node.attrs["kernel"]), node, same)
    return False


def _initialises(function: Function, launch: Node, same: set[Value]) -> bool:
    """Whether a launch writes all of a memory, which one of its arguments is, and reads nothing of it."""
    places = [i for i, v in enumerate(launch.args) if v in same]
    if len(places) != 1 or places[0] in find_touched_parameters(function, "read"):
        return False
    ref, sizes = function.params[places[0]], (*launch.attrs["grid"], *launch.args[places[0]].type.shape)  # type: ignore[union-attr]
    if not all(isinstance(n, int) for n in sizes) or math.prod(launch.attrs["grid"]) > MAX_PROGRAMS:
        return False
    stores = [n for n in function.body.nodes if n.op is tile.store and n.args[0] is ref]
    return any(_covers(function, store, launch.attrs["grid"]) for store in stores)


def _covers(function: Function, store: Node, grid: tuple[int, ...]) -> bool:
    """Whether the programs of a grid store to all blocks of a memory; a store with a mask is taken for one of less."""
    ref, value, *starts = store.args
    if len(starts) > ref.type.rank:  # type: ignore[union-attr]
        return False
    numbers = _compute_scalars(function, grid)
    found, counts = np.zeros(math.prod(grid), np.int64), 1
    for start, block, size in zip(starts, static_shape(value.type), static_shape(ref.type), strict=True):
        if start not in numbers:
            return False
        number, rest = np.divmod(numbers[start], block)
        count = -(-size // block)
        if np.any(rest) or np.any((number < 0) | (number >= count)):
            return False
        found, counts = found * count + number, counts * count
    return len(np.unique(found)) == counts


def _compute_scalars(function: Function, grid: tuple[int, ...]) -> dict[Value, np.ndarray]:
    """The integers at the top of a tile function that follow from the program's number, for every program of a grid."""
    ids = np.indices(grid, np.int64).reshape(len(grid), -1)
    found: dict[Value, np.ndarray] = {}
    for node in function.body.nodes:
        if node.op is tile.program_id and node.attrs["axis"] < len(grid):
            found[node.out] = ids[node.attrs["axis"]]
        elif node.op is basic.full and not node.attrs["shape"] and node.out.type.dtype.is_integer:  # type: ignore[union-attr]
            found[node.out] = np.asarray(node.attrs["value"], np.int64)
        elif node.op.pointwise and node.args and all(v in found for v in node.args) and not node.attrs:
            found[node.out] = np.asarray(node.op.ref(*(found[v] for v in node.args)))
    return found

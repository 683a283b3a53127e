"""Kernel launches: a processing element has all arrays, and runs all programs of a launch one after another.

A kernel with groups is first ungrouped: one program then computes each op for all tiles of a group before the next op.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

from tessera.codegen.csl.table.blocks import emit, emit_block
from tessera.codegen.csl.table.memory import declare_param
from tessera.codegen.csl.text.pe_program import CslEmitter, add_fault, emit_fault_return
from tessera.codegen.grouped import vectorise_groups
from tessera.codegen.grouped.diagnostics import report_op
from tessera.core.errors import UnsupportedOpError
from tessera.ir.core import Function, Module, Value
from tessera.ops.dialects.tile import uses_grid_barrier

# Users' kernels: each element of the mesh has all arrays, and runs all programs of the launch one after another.


def is_kernel(module: Module) -> bool:
    """Whether a module launches a function that was not laid out on a mesh."""
    return "mesh" not in module.functions[1].attrs


def emit_kernel(module: Module, element: CslEmitter) -> None:
    """Emit the launch of a kernel.

    Raises:
        UnsupportedOpError: programs wait for one another, or the host does more than one launch.
    """
    (launch, *more), function = module.main.body.nodes, module.functions[1]
    if more or launch.op.name != "host.launch" or tuple(launch.args) != tuple(module.main.params):
        raise _make_launch_error(function, "the host does more than one launch")
    if uses_grid_barrier(function.body) and math.prod(map(int, launch.attrs["grid"])) > 1:
        raise _make_launch_error(function, "its programs wait for one another, and an element runs one at a time")
    for param in function.params:
        element.hold(param, declare_param(element, param))
    grid = tuple(int(n) for n in launch.attrs["grid"])
    names = [f"program{axis}" if n > 1 else "0" for axis, n in enumerate(grid)]
    element.index_type = "i64"
    element.programs = tuple((element.cast_to_index(name), n) for name, n in zip(names, grid, strict=True))
    with ExitStack() as loops:
        for name, n in zip(names, grid, strict=True):
            if n != 1:
                loops.enter_context(element.inner(f"for (@range(i32, {n})) |{name}|"))
        emit_block(element, function.body)


def make_kernel_plan(function: Function, element: CslEmitter, outputs: int) -> dict[str, Any]:
    """What the host must know: all arrays go to all elements, and those that were written come back."""
    written = {n.args[0] for n in function.body.walk() if "write" in n.op.effects}
    entries = [_describe_array(element, p) for p in function.params]
    given = len(entries) - outputs  # the last come back alone, others that are written where they came from
    back = [{**e, "into": i} for i, (e, p) in enumerate(zip(entries, function.params, strict=True)) if p in written]
    found = entries[given:] + [e for e in back if e["into"] < given]
    return {
        "grid": list(element.grid),
        "inputs": entries[:given],
        "outputs": found,
        "faults": element.faults,
        "given": list(range(given)),
    }


def _describe_array(element: CslEmitter, param: Value) -> dict[str, Any]:
    shape = [int(n) for n in param.type.shape]
    return {
        "name": param.hint,
        "symbol": element.exported[param],
        "shape": shape,
        "dtype": param.type.dtype.numpy.name,
        "bytes": element.symbols[param].bytes // element.symbols[param].size,
        "split": [-1] * len(shape),
        "piece": shape,
    }


def _make_launch_error(function: Function, why: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"{function.name} cannot be emitted for csl: {why}", location=function.loc,
        suggestion="write it as a function of whole tensors under @ts.jit, or run it on another target",
    )  # fmt: skip


# Groups of tiles on an element: one program does each op for all of them before the next begins.


REPORT_EXPECTATIONS = {
    "assert": "a condition that holds for every element of every program",
    "deadlock": "as many arrivals, and bytes, as the phase of an mbarrier takes",
}


def ungroup_kernels(module: Module) -> Module:
    """A kernel whose groups are one program each: their tiles are the leading axis of every block that differs."""
    return vectorise_groups(module) if is_kernel(module) else module


@emit(report_op)
def _(element, node, *operands):
    kind, text = node.attrs["kind"], node.attrs["text"]
    if kind not in REPORT_EXPECTATIONS:
        raise UnsupportedOpError(
            "tile.print cannot be emitted for csl: an element has nowhere to print to", location=node.loc,
            suggestion="run this on another target, or in the interpreter",
        )  # fmt: skip
    said = f"assertion failed: {text}".removesuffix(": ") if kind == "assert" else text
    emit_fault_return(element, add_fault(element, node, kind, said, REPORT_EXPECTATIONS[kind]))

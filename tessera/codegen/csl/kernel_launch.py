"""Kernel launches: one PE holds all arrays and runs all programs of a launch in sequence.

A kernel with groups is ungrouped first: one program then executes each op for all tiles of a group before the next op.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

from tessera.codegen.csl.table.blocks import emit, emit_block
from tessera.codegen.csl.table.memory import declare_param
from tessera.codegen.csl.table.refusals import REFUSED
from tessera.codegen.csl.text.context import CslContext
from tessera.codegen.csl.text.faults import add_fault, emit_fault_return
from tessera.codegen.csl.text.memory_allocation import bind_value
from tessera.codegen.csl.text.statements import cast_to_index, open_block
from tessera.codegen.grouped import vectorise_groups
from tessera.codegen.grouped.diagnostics import report_op
from tessera.core.errors import UnsupportedOpError
from tessera.ir.core import Function, Module, Value
from tessera.ops.dialects import tile


def is_kernel(module: Module) -> bool:
    """Whether a module launches a kernel, a function that has no mesh layout."""
    return "mesh" not in module.functions[1].attrs


def emit_kernel(module: Module, ctx: CslContext) -> None:
    """Emit the launch of a kernel.

    Raises:
        UnsupportedOpError: the programs synchronise with each other, or the host does more than one launch.
    """
    (launch, *more), function = module.main.body.nodes, module.functions[1]
    if more or launch.op.name != "host.launch" or tuple(launch.args) != tuple(module.main.params):
        raise _make_launch_error(function, "the host does more than one launch")
    if tile.uses_grid_barrier(function.body) and math.prod(map(int, launch.attrs["grid"])) > 1:
        raise _make_launch_error(function, "its programs synchronise with each other, and a PE runs them in sequence")
    for param in function.params:
        bind_value(ctx, param, declare_param(ctx, param))
    grid = tuple(int(n) for n in launch.attrs["grid"])
    names = [f"program{axis}" if n > 1 else "0" for axis, n in enumerate(grid)]
    ctx.index_type = "i64"
    ctx.programs = tuple((cast_to_index(ctx, name), n) for name, n in zip(names, grid, strict=True))
    with ExitStack() as loops:
        for name, n in zip(names, grid, strict=True):
            if n != 1:
                loops.enter_context(open_block(ctx, f"for (@range(i32, {n})) |{name}|"))
        emit_block(ctx, function.body)


def make_kernel_plan(function: Function, ctx: CslContext, outputs: int) -> dict[str, Any]:
    """The host plan of a kernel: every PE receives all arrays, and the host copies the written ones back."""
    written = {n.args[0] for n in function.body.walk() if "write" in n.op.effects}
    entries = [_describe_array(ctx, p) for p in function.params]
    input_count = len(entries) - outputs  # outputs are returned; other written arrays are copied back to their inputs
    back = [{**e, "into": i} for i, (e, p) in enumerate(zip(entries, function.params, strict=True)) if p in written]
    outputs_ = entries[input_count:] + [e for e in back if e["into"] < input_count]
    return {
        "grid": list(ctx.grid),
        "inputs": entries[:input_count],
        "outputs": outputs_,
        "faults": ctx.faults,
        "given": list(range(input_count)),
    }


def _describe_array(ctx: CslContext, param: Value) -> dict[str, Any]:
    shape = [int(n) for n in param.type.shape]
    return {
        "name": param.hint,
        "symbol": ctx.exported[param],
        "shape": shape,
        "dtype": param.type.dtype.numpy.name,
        "bytes": ctx.symbols[param].bytes // ctx.symbols[param].size,
        "split": [-1] * len(shape),
        "piece": shape,
    }


def _make_launch_error(function: Function, why: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"{function.name} cannot be emitted for csl: {why}", location=function.loc,
        suggestion="write it as a function of whole tensors with @ts.jit, or run it on another target",
    )  # fmt: skip


# Groups of tiles.

REPORT_EXPECTATIONS = {
    "assert": "a condition that is true for every element in every program",
    "deadlock": "the arrivals and bytes that the mbarrier phase needs",
}


def ungroup_kernels(module: Module) -> Module:
    """Rewrite a kernel with groups into one program per group; a new leading axis of each varying block indexes its
    tiles.
    """
    return vectorise_groups(module) if is_kernel(module) else module


@emit(report_op)
def _(ctx, node, *operands):
    kind, text = node.attrs["kind"], node.attrs["text"]
    if kind not in REPORT_EXPECTATIONS:
        raise UnsupportedOpError(
            f"the target csl cannot emit tile.print: {REFUSED[tile.print_]}", location=node.loc,
            suggestion="run this on another target, or in the interpreter",
        )  # fmt: skip
    said = f"assertion failed: {text}".removesuffix(": ") if kind == "assert" else text
    emit_fault_return(ctx, add_fault(ctx, node, kind, said, REPORT_EXPECTATIONS[kind]))

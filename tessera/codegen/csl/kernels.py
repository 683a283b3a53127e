"""Users' kernels: each element of the mesh has all arrays, and runs all programs of the launch one after another."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

from tessera.codegen.csl.blocks import statements
from tessera.codegen.csl.element import Element
from tessera.codegen.csl.memory import declared
from tessera.errors import UnsupportedOpError
from tessera.ir.core import Function, Module, Value
from tessera.ops.tile import meets


def is_kernel(module: Module) -> bool:
    """Whether a module launches a function that was not laid out on a mesh."""
    return "mesh" not in module.functions[1].attrs


def emit_kernel(module: Module, element: Element) -> None:
    """Emit the launch of a kernel.

    Raises:
        UnsupportedOpError: programs wait for one another, or the host does more than one launch.
    """
    (launch, *more), function = module.main.body.nodes, module.functions[1]
    if more or launch.op.name != "host.launch" or tuple(launch.args) != tuple(module.main.params):
        raise _refused(function, "the host does more than one launch")
    if meets(function.body) and math.prod(map(int, launch.attrs["grid"])) > 1:
        raise _refused(function, "its programs wait for one another, and an element runs one at a time")
    for param in function.params:
        element.hold(param, declared(element, param))
    grid = tuple(int(n) for n in launch.attrs["grid"])
    names = [f"program{axis}" if n > 1 else "0" for axis, n in enumerate(grid)]
    element.counting = "i64"
    element.programs = tuple((element.counted(name), n) for name, n in zip(names, grid, strict=True))
    with ExitStack() as loops:
        for name, n in zip(names, grid, strict=True):
            if n != 1:
                loops.enter_context(element.inner(f"for (@range(i32, {n})) |{name}|"))
        statements(element, function.body)


def kernel_plan(function: Function, element: Element, outputs: int) -> dict[str, Any]:
    """What the host must know: all arrays go to all elements, and those that were written come back."""
    written = {n.args[0] for n in function.body.walk() if "write" in n.op.effects}
    entries = [_entry(element, p) for p in function.params]
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


def _entry(element: Element, param: Value) -> dict[str, Any]:
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


def _refused(function: Function, why: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"{function.name} cannot be emitted for csl: {why}", location=function.loc,
        suggestion="write it as a function of whole tensors under @ts.jit, or run it on another target",
    )  # fmt: skip

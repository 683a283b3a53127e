"""Host dialect: buffers, launches and control flow of a program's entry at the Schedule and Tile levels, in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tessera.core.errors import Location, ShapeError
from tessera.core.types import DType, Policy, RefType, f32
from tessera.ir.builder import Builder
from tessera.ir.core import Attrs, Block, Function, Module, Node, Value
from tessera.ir.rules import STORAGE, op
from tessera.ops.dialects.control_flow import refuse_direct_call


def _infer_alloc(*, shape: tuple, dtype: DType | Policy, offset: int) -> RefType:
    if isinstance(dtype, Policy):
        return RefType(tuple(shape), dtype.storage, policy=dtype)
    return RefType(tuple(shape), dtype)


@op(infer=_infer_alloc, coerce=refuse_direct_call, numerics=STORAGE, dialect="host", effects=("memory",))
def alloc(*, shape: tuple, dtype: DType | Policy = f32, offset: int = -1):
    """A buffer at byte `offset` of the workspace; -1 before memory is planned. A policy as `dtype` is the buffer's."""


def _infer_view(ref: RefType, *, shape: tuple) -> RefType:
    if math.prod(shape) != math.prod(ref.shape):
        raise ShapeError(f"a view of shape {shape} does not fit {ref}")
    return RefType(tuple(shape), ref.dtype, ref.space, ref.policy)


@op(infer=_infer_view, coerce=refuse_direct_call, numerics=STORAGE, dialect="host")
def view(ref, *, shape: tuple):
    """The same memory in row-major order with another shape."""


@op(
    infer=lambda *refs, kernel, grid: None,
    coerce=refuse_direct_call,
    numerics=STORAGE,
    dialect="host",
    effects=("memory",),
)
def launch(*args: Any, kernel: str, grid: tuple):
    """Run the tile function called `kernel` once for each point of `grid`."""


@op(
    infer=lambda *refs, op, operands, attrs: None,
    coerce=refuse_direct_call,
    numerics=STORAGE,
    dialect="host",
    effects=("memory",),
)
def call(*refs: Any, op: str, operands: int, attrs: Any):
    """Run the tensor op called `op` on the host with NumPy, from the first `operands` buffers into the others."""


@op(
    infer=lambda *refs, op, operands, attrs: None,
    coerce=refuse_direct_call,
    numerics=STORAGE,
    dialect="host",
    effects=("memory",),
)
def start(*refs: Any, op: str, operands: int, attrs: Any):
    """Start the collective called `op` from the first `operands` buffers into the others (asynchronous).

    Until `host.wait` on the same buffers nothing writes the operands, and nothing touches the results.
    """


@op(infer=lambda *refs: None, coerce=refuse_direct_call, numerics=STORAGE, dialect="host", effects=("memory",))
def wait(*refs: Any):
    """Wait for the collective that `host.start` started on these buffers: its results are there afterwards."""


def _infer_at(ref: RefType, index: Any) -> RefType:
    if not ref.shape:
        raise ShapeError(f"{ref} has no axis to take a slice of")
    return RefType(tuple(ref.shape[1:]), ref.dtype, ref.space, ref.policy)


@op(infer=_infer_at, coerce=refuse_direct_call, numerics=STORAGE, dialect="host")
def at(ref, index):
    """The memory of one slice along the first axis."""


@op(
    infer=lambda *, first, step, count: None,
    coerce=refuse_direct_call,
    numerics=STORAGE,
    dialect="host",
    effects=("memory",),
)
def loop(*, first: int, step: int, count: int):
    """Run the region `count` times on the host, with the indices `first`, `first + step`, and so on."""


@op(
    infer=lambda ref: None,
    coerce=refuse_direct_call,
    numerics=STORAGE,
    dialect="host",
    effects=("memory",),
    name="while",
)
def while_(ref):
    """Run the first region on the host; while the bool in `ref` then holds, run the second and the first again."""


@op(infer=lambda ref: None, coerce=refuse_direct_call, numerics=STORAGE, dialect="host", effects=("memory",), name="if")
def if_(ref):
    """Run the first region on the host if the bool in `ref` holds, else the second."""


# Modules of one launch.


def make_launch_module(function: Function, outputs: int) -> Module:
    """The Tile module that launches a tile function once; its last `outputs` parameters are results."""
    builder = Builder()
    params = [Value(p.type, p.hint) for p in function.params]
    builder.add(launch, params, {"kernel": function.name, "grid": function.attrs["grid"]}, loc=function.loc)
    name = "main" if function.name != "main" else "entry"
    main = Function(name, builder.block(params, ()), Attrs({"outputs": outputs}), function.loc)
    return Module("tile", (main, function))


def launched_function(node: Node) -> Function:
    """The tile function of a launch at the Graph level."""
    return make_launched_function(node.attrs, node.regions[0], node.loc)


def make_launched_function(attrs: Mapping[str, Any], body: Block, loc: Location) -> Function:
    """The tile function that a launch at the Graph level with these attributes and this region runs."""
    return Function(attrs["kernel"], body, Attrs({**attrs["attrs"], "grid": attrs["grid"]}), loc)


def launch_on_copies(
    function: Function, written: Sequence[int], arrays: Sequence[Any], run: Callable[[Module, list[Any]], list[Any]]
) -> list[Any]:
    """The memories with the numbers `written` after a launch on arrays, which do not change.

    `run(module, arrays)` runs the launch's module in place, and returns the memories that no array fills.
    """
    held = [np.array(a) if i in written else np.ascontiguousarray(a) for i, a in enumerate(arrays)]
    shaped = [a.reshape(p.type.shape) for a, p in zip(held, function.params, strict=False)]  # a scalar has rank 0
    memories = [*shaped, *run(make_launch_module(function, len(function.params) - len(arrays)), shaped)]
    return [memories[i] for i in written]

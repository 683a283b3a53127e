"""One kernel for one kind of arguments: its source read once, with shapes and constants known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from tessera.errors import ResourceError, UnsupportedOpError
from tessera.evaluate import expand
from tessera.ir.builder import Builder
from tessera.ir.core import Attrs, Function, Module, Node, Value
from tessera.kernel import (  # noqa: F401 - fills the table of statements
    branches,
    defaults,
    lines,
    loops,
    place,
    results,
    statements,
    withs,
)
from tessera.kernel.frame import Frame, Outer, unchanged
from tessera.kernel.prune import prune
from tessera.kernel.signature import Parameters, names_of
from tessera.kernel.source import Source, read
from tessera.kernel.subscript import whole
from tessera.kernel.trace import TRACE, KernelBuilder, Trace
from tessera.numerics.context import suspended
from tessera.ops import host, tile
from tessera.passes.stochastic import stochastic
from tessera.shapes import Dim
from tessera.tensor import Tensor
from tessera.types import SHARED, RefType, Type


@dataclass(frozen=True)
class Specialized:
    """A compiled kernel, and the outer names it depends on with what they held."""

    module: Module
    guards: list[tuple[Any, str, Any]]

    def unchanged(self) -> bool:
        """Whether the outer names still hold what they held."""
        return unchanged(self.guards)


@dataclass(frozen=True)
class Request:
    """What to compile a kernel for."""

    types: Mapping[str, Type]
    constants: Mapping[str, Any]
    grid: tuple[int, ...]
    group: int = 1
    tile_shape: tuple[int, ...] = ()
    shared_memory: int = 0
    stages: int | None = None  # of a pipeline that a target makes of a loop; None: as it likes
    cluster: int | None = None  # programs that share what they fetch, where a target has such; None: as it likes


def specialize(function: FunctionType, parameters: Parameters, request: Request) -> Specialized:
    """A Tile module for these arguments and this launch.

    Raises:
        TesseraError: the kernel cannot be compiled; the error names the line of the kernel.
    """
    frame, values, outputs = _read(function, parameters, request)
    if lines.stepped(frame.trace):
        with lines.marked():
            frame, values, outputs = _read(function, parameters, request)
    body = prune(frame.trace.builder.block([*values, *outputs], ()))
    asked = {"stages": request.stages, "cluster": request.cluster}
    hints = {name: value for name, value in asked.items() if value is not None}
    attrs = Attrs({"group": request.group, "grid": request.grid, **hints})
    compiled = stochastic(expand(Function(function.__name__, body, attrs, frame.source.place)))
    _check(compiled, request)
    return Specialized(_module(compiled, len(outputs)), _distinct(frame.trace.guards))


def _read(
    function: FunctionType, parameters: Parameters, request: Request
) -> tuple[Frame, list[Value], Sequence[Value]]:
    """The kernel's body read once: its frame, which holds the trace, its parameters and its outputs."""
    frame, values = _opened(function, parameters, request)
    token = TRACE.set(frame.trace)
    try:
        with frame.trace.builder.active(), suspended(None):  # a kernel's types are its own
            statements.run(frame, frame.source.body)
            outputs = results.store(frame, parameters)
    finally:
        TRACE.reset(token)
    return frame, values, outputs


def _opened(function: FunctionType, parameters: Parameters, request: Request) -> tuple[Frame, list[Value]]:
    """The frame in which the kernel's body is read, and the parameters of the tile function."""
    source = read(function)
    trace = Trace(KernelBuilder(), request.grid, request.group, tile_shape=request.tile_shape)
    sizes = parameters.sizes(request.types)
    trace.constants = {**sizes, **request.constants}
    trace.axes = _axes(source, parameters, request)
    values = [Value(type, name) for name, type in request.types.items()]
    names = {**trace.constants, **{v.hint: _argument(v, parameters) for v in values}}
    return Frame(trace, source, names, Outer(function, trace)), values


def _axes(source: Source, parameters: Parameters, request: Request) -> tuple[str, ...]:
    """The dim that each axis of the grid walks: those of the tensor that the launch is about."""
    tensor = defaults.walked(source.body, request.types)
    dims = names_of(parameters.annotations.get(tensor)) if tensor else ()
    if not any(isinstance(d, Dim) for d in dims):
        return ()
    return tuple(str(d) for d in dims[: len(request.grid)])


def _argument(value: Value, parameters: Parameters) -> Any:
    if not isinstance(value.type, RefType):
        return Tensor(value)
    return whole(place.Memory(value, value.hint, names_of(parameters.annotations.get(value.hint))))


def _check(function: Function, request: Request) -> None:
    for node in function.body.walk():
        if node.op.name in _NOT_ON_BLOCKS:
            raise UnsupportedOpError(
                f"{node.op.__name__} does not exist on blocks of values", location=node.loc,
                expected="a part of memory: A[i : i + n]", suggestion=_NOT_ON_BLOCKS[node.op.name],
            )  # fmt: skip
    _check_memory(function, request)


_NOT_ON_BLOCKS = {
    "ts.slice": "load the part you need from memory",
    "ts.gather": "load with a block of indices: A[rows]",
    "ts.concatenate": "store the parts one beside the other",
    "ts.pad": 'tile.load(..., edge="clip") reads zeros outside',
}


def _check_memory(function: Function, request: Request) -> None:
    buffers = [n for n in function.body.walk() if n.op is tile.alloc and n.attrs["space"] == SHARED]
    used = sum(map(_bytes, buffers))
    if request.shared_memory and used > request.shared_memory:
        raise ResourceError(
            "the kernel's shared buffers are too large", location=function.loc,
            expected=f"at most {request.shared_memory} bytes (shared_memory)", received=f"{used} bytes",
        )  # fmt: skip


def _bytes(node: Node) -> int:
    shape = [int(n) for n in node.attrs["shape"]]
    rows = [*shape[:-1], shape[-1] + node.attrs["padding"]] if shape else []
    return math.prod(rows) * node.attrs["dtype"].bits // 8


def _module(function: Function, outputs: int) -> Module:
    """The tile function with an entry that launches it."""
    builder = Builder()
    params = [Value(p.type, p.hint) for p in function.params]
    launch = {"kernel": function.name, "grid": function.attrs["grid"]}
    builder.add(host.launch, params, launch, loc=function.loc)
    name = "main" if function.name != "main" else "entry"
    main = Function(name, builder.block(params, ()), Attrs({"outputs": outputs}), function.loc)
    return Module("tile", (main, function))


def _distinct(guards: Sequence[tuple[Any, str, Any]]) -> list[tuple[Any, str, Any]]:
    found = {(id(getattr(scope, "module", scope)), name): (scope, name, held) for scope, name, held in guards}
    return list(found.values())

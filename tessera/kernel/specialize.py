"""One kernel for one kind of arguments: its source read once, with shapes and constants known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from tessera.errors import DTypeError, ResourceError, TesseraError, UnsupportedOpError, UnsupportedSyntaxError
from tessera.evaluate import expand
from tessera.ir.builder import Builder
from tessera.ir.core import Attrs, Block, Function, Module, Value
from tessera.kernel import branches, defaults, ids, loops, place, statements
from tessera.kernel.frame import Frame, Outer
from tessera.kernel.prune import prune
from tessera.kernel.signature import Parameters, names_of
from tessera.kernel.source import Source, read
from tessera.kernel.subscript import whole
from tessera.kernel.trace import TRACE, KernelBuilder, Trace, is_number
from tessera.ops import control, elementwise, host, tile
from tessera.ops.basic import full
from tessera.shapes import Dim
from tessera.tensor import Tensor
from tessera.types import SHARED, DType, RefType, Type, as_dtype

assert branches.statement is loops.statement  # both fill the table of statements


@dataclass(frozen=True)
class Specialized:
    """A compiled kernel, and the outer names it depends on with what they held."""

    module: Module
    guards: list[tuple[Any, str, Any]]


@dataclass(frozen=True)
class Request:
    """What to compile a kernel for."""

    types: Mapping[str, Type]
    constants: Mapping[str, Any]
    grid: tuple[int, ...]
    group: int = 1
    tile_shape: tuple[int, ...] = ()
    shared_memory: int = 0


def specialize(function: FunctionType, parameters: Parameters, request: Request) -> Specialized:
    """A Tile module for these arguments and this launch.

    Raises:
        TesseraError: the kernel cannot be compiled; the error names the line of the kernel.
    """
    source = read(function)
    trace = Trace(KernelBuilder(), request.grid, request.group, tile_shape=request.tile_shape)
    sizes = parameters.sizes(request.types)
    trace.constants = {**sizes, **request.constants}
    trace.axes = _axes(source, parameters, request)
    values = {name: Value(type, name) for name, type in request.types.items()}
    names = {**sizes, **request.constants, **{n: _argument(v, parameters) for n, v in values.items()}}
    frame = Frame(trace, source, names, Outer(function, trace))
    token = TRACE.set(trace)
    try:
        with trace.builder.active():
            statements.run(frame, source.body)
            outputs = _store(frame, parameters)
    finally:
        TRACE.reset(token)
    body = trace.builder.block([*values.values(), *outputs], ())
    attrs = {"group": request.group, "grid": request.grid}
    compiled = Function(function.__name__, prune(body), Attrs(attrs), source.place)
    compiled = expand(compiled)
    _check(compiled, request)
    return Specialized(_module(compiled, len(outputs)), _distinct(trace.guards))


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


def _store(frame: Frame, parameters: Parameters) -> list[Value]:
    """What the kernel returns, written to one more parameter for each value by the first tile of each group."""
    if frame.result is None:
        return []
    results = frame.result if isinstance(frame.result, tuple) else (frame.result,)
    grid = () if frame.trace.grid == (1,) * len(frame.trace.grid) else frame.trace.grid
    builder, outputs = frame.trace.builder, []
    try:
        tensors = [_result(r, parameters) for r in results]
    except TesseraError as error:
        raise error.at(frame.returned or frame.source.place) from None
    with builder.region() as nodes:
        for number, tensor in enumerate(tensors):
            shape = (*grid, *tensor.shape)
            output = Value(RefType(shape, tensor.dtype), "out" if len(tensors) == 1 else f"out{number}")
            starts = tuple(ids.program_id(a) for a in range(len(grid))) + (0,) * tensor.ndim
            lengths = (1,) * len(grid) + tuple(int(s) for s in tensor.shape)  # type: ignore[arg-type]
            memory = place.Memory(output, output.hint)
            place.View(memory, starts, lengths, frozenset(range(len(grid)))).store(tensor)
            outputs.append(output)
    if frame.trace.group == 1:
        for node in nodes:
            builder.append(node)
        return outputs
    first = elementwise.equal(ids.local_id(), 0)
    builder.add(control.if_, [first.data], types=(), regions=(Block((), tuple(nodes), ()), Block((), (), ())))
    return outputs


def _result(value: Any, parameters: Parameters) -> Tensor:
    want = parameters.result if isinstance(parameters.result, DType) else None
    if is_number(value):
        return full(shape=(), value=value, dtype=want or as_dtype(type(value)))
    if not isinstance(value, Tensor):
        what = type(value).__name__
        raise UnsupportedSyntaxError(f"a kernel cannot return a {what}", expected="a block, a scalar or a tuple")
    if want is not None and value.dtype != want:
        raise DTypeError(
            f"{parameters.name} returns another element type than it says", expected=str(want),
            received=str(value.type), suggestion=f"return tile.cast(value, ts.{want})",
        )  # fmt: skip
    return value


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
    buffers = [n.out.type for n in function.body.walk() if n.op is tile.alloc and n.attrs["space"] == SHARED]
    used = sum(map(_bytes, buffers))
    if request.shared_memory and used > request.shared_memory:
        raise ResourceError(
            "the kernel's shared buffers are too large", location=function.loc,
            expected=f"at most {request.shared_memory} bytes (shared_memory)", received=f"{used} bytes",
        )  # fmt: skip


def _bytes(type: Any) -> int:
    return math.prod(type.shape) * type.dtype.bits // 8


def _module(function: Function, outputs: int) -> Module:
    """The tile function with an entry that launches it."""
    builder = Builder()
    params = [Value(p.type, p.hint) for p in function.params]
    launch = {"kernel": function.name, "grid": function.attrs["grid"]}
    builder.add(host.launch, params, launch, loc=function.loc)
    main = Function("main", builder.block(params, ()), Attrs({"outputs": outputs}), function.loc)
    return Module("tile", (main, function))


def _distinct(guards: Sequence[tuple[Any, str, Any]]) -> list[tuple[Any, str, Any]]:
    found = {(id(getattr(scope, "module", scope)), name): (scope, name, held) for scope, name, held in guards}
    return list(found.values())

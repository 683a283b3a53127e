"""Specialisation: traces a kernel for given argument types, constants and launch, and returns a Tile module."""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from tessera.core.errors import (
    DTypeError,
    ResourceError,
    ShapeError,
    TesseraError,
    UnsupportedOpError,
    UnsupportedSyntaxError,
)
from tessera.core.shapes import bind_shapes
from tessera.core.symbolic_dim import Dim, Size, ceil_divide
from tessera.core.types import SHARED, DType, RefType, TensorType, Type, as_dtype
from tessera.frontend.kernel import memref  # noqa: F401 - fills the table of statements
from tessera.frontend.kernel.memref import MemRef, MemRefView, view_whole
from tessera.frontend.kernel.python_ast import control_flow as python_ast_control_flow  # noqa: F401 - fills the table of statements
from tessera.frontend.kernel.python_ast import scope, statements  # noqa: F401 - fills the table of statements
from tessera.frontend.kernel.python_ast.scope import KernelFrame, OuterScope, guards_hold
from tessera.frontend.kernel.python_ast.source import FunctionSource, read_source
from tessera.frontend.kernel.signature import KernelParameters, find_dim_names
from tessera.frontend.kernel.tile_api import ids
from tessera.frontend.kernel.tile_api.ids import GRID_IDS, GROUP_IDS, THREAD_IDS, WARP_SIZE
from tessera.frontend.kernel.trace import CURRENT_TRACE, KernelBuilder, TraceState, is_number
from tessera.ir.builder import override_numerics
from tessera.ir.core import Attrs, Block, Function, Module, Node, Value
from tessera.ir.rewrite import eliminate_dead_nodes, expand_composites
from tessera.ir.tensor import Tensor
from tessera.lower.passes.stochastic_rounding import expand_stochastic_rounding
from tessera.ops.dialects import control_flow, host, tile
from tessera.ops.tensor import elementwise
from tessera.ops.tensor.basic import full

# The launch of a kernel that is called without one.
#
# - A kernel that asks for its place in a group (`local_id`, `group_size`, `thread_id`, `warp_id`, `warp`) runs as one
#   group of 32 · num_warps tiles.
# - With `tile_shape` the grid covers the leading axes of a tensor in blocks of that shape: the last tensor
#   parameter (the one written), or the first where the kernel returns a value.
# - A kernel that asks for its place in the grid runs once for each element of that tensor's first axis.
# - Any other kernel runs once.
# - Launched with a grid alone, a kernel that asks for threads, lanes or warps has groups of 32 · num_warps tiles.
#
# Only the kernel's own lines are searched for such questions, not the functions it calls.


@functools.lru_cache(maxsize=1024)  # each launch of a kernel asks
def find_mentioned_names(body: tuple[ast.stmt, ...]) -> frozenset[str]:
    """Every name and attribute that statements mention."""
    walked = [n for s in body for n in ast.walk(s)]
    attributes = {n.attr for n in walked if isinstance(n, ast.Attribute)}
    return frozenset(attributes | {n.id for n in walked if isinstance(n, ast.Name)})


def returns_value(body: Iterable[ast.stmt]) -> bool:
    """Whether statements hand back a value."""
    return any(isinstance(n, ast.Return) and n.value is not None for s in body for n in ast.walk(s))


def find_grid_tensor(body: Sequence[ast.stmt], types: Mapping[str, Type]) -> str | None:
    """The tensor whose axes the grid walks."""
    refs = [name for name, type in types.items() if isinstance(type, RefType)]
    if not refs:
        return None
    return refs[0] if returns_value(body) else refs[-1]


# What a kernel names whose programs each have a block of whole rows: the last axis of the grid walks the rows.
ROW_BLOCK_IDS = frozenset({"row_index", "range_n"})


def names_rows(body: Sequence[ast.stmt], mentioned: frozenset[str]) -> bool:
    """Whether the blocks of a kernel are rows: it names them, or loads with `rows=`."""
    keywords = {n.arg for s in body for n in ast.walk(s) if isinstance(n, ast.keyword)}
    return bool(mentioned & ROW_BLOCK_IDS) or "rows" in keywords


def choose_launch(
    body: tuple[ast.stmt, ...], types: Mapping[str, Type], tile_shape: tuple[int, ...], num_warps: int
) -> tuple[tuple[Size, ...], int]:
    """The grid and the group size.

    The grid walks the blocks of the tensor that the launch is about: along each axis of a block, or for blocks of rows
    along the rows and the axes before them.
    """
    mentioned = find_mentioned_names(body)
    group = num_warps * WARP_SIZE if mentioned & GROUP_IDS else 1
    tensor = find_grid_tensor(body, types)
    if tensor is None:
        return (1,), group
    if not tile_shape and (group > 1 or not mentioned & GRID_IDS):
        return (1,), group
    sizes = types[tensor].shape
    if tile_shape and len(sizes) > 2 and names_rows(body, mentioned):
        return (*sizes[:-2], ceil_divide(sizes[-2], tile_shape[0])), group
    blocks = [ceil_divide(size, tile) for size, tile in zip(sizes, tile_shape or (1,), strict=False)]
    return tuple(blocks) or (1,), group


def choose_thread_count(body: tuple[ast.stmt, ...], num_warps: int) -> int:
    """The group size of a launch that gives a grid alone: all threads of a program that asks for threads or warps."""
    return num_warps * WARP_SIZE if find_mentioned_names(body) & THREAD_IDS else 1


def has_observable_effect(node: Node) -> bool:
    """Whether a node has an effect, or reads; an allocation that nothing uses has none."""
    inner = (n for r in node.regions for n in r.walk())
    return node.op is not tile.alloc and any(n.op.effects for n in (node, *inner))


def store_results(frame: KernelFrame, parameters: KernelParameters) -> list[Value]:
    """What the kernel returns, written to one more parameter for each value by the first tile of each group."""
    if frame.result is None:
        return []
    results = frame.result if isinstance(frame.result, tuple) else (frame.result,)
    try:
        tensors = [_as_result(r, parameters) for r in results]
        _check_declared_block(tensors, frame.trace.grid, parameters)
    except TesseraError as error:
        raise error.at(frame.returned or frame.source.place) from None
    builder = frame.trace.builder
    with builder.region() as nodes:
        names = [f"out{n}" for n in range(len(tensors))] if len(tensors) > 1 else ["out"]
        outputs = [_add_output(frame.trace.grid, t, n) for t, n in zip(tensors, names, strict=True)]
    if frame.trace.group == 1:
        for node in nodes:
            builder.append(node)
        return outputs
    first = elementwise.equal(ids.local_id(), 0)
    builder.add(control_flow.if_, [first.data], types=(), regions=(Block((), tuple(nodes), ()), Block((), (), ())))
    return outputs


def _add_output(grid: tuple[Size, ...], tensor: Tensor, name: str) -> Value:
    """A block stored at this program's place in a new parameter: an array of the grid's shape, then the block's."""
    lead = () if all(n == 1 for n in grid) else grid
    shape = tuple(int(s) for s in tensor.shape)  # type: ignore[arg-type]
    output = Value(RefType((*lead, *shape), tensor.dtype), name)
    starts = tuple(ids.program_id(a) for a in range(len(lead))) + (0,) * len(shape)
    place = MemRefView(MemRef(output, name), starts, (1,) * len(lead) + shape, frozenset(range(len(lead))))
    place.store(tensor)
    return output


def _as_result(value: Any, parameters: KernelParameters) -> Tensor:
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


def _check_declared_block(results: Sequence[Tensor], grid: tuple[Size, ...], parameters: KernelParameters) -> None:
    """Check a result against a declared tensor: the block of one program, or the results of all programs.

    Raises:
        ShapeError, DTypeError: it is neither.
    """
    want = parameters.result
    if not isinstance(want, TensorType) or len(results) != 1:
        return
    (result,) = results
    whole = tuple(n for n in grid if n != 1) + tuple(result.shape)
    misfits = [bind_shapes([(want.shape, shape)], {}) for shape in (result.shape, whole)]
    if None not in misfits:
        raise ShapeError(
            f"{parameters.name} does not return what it says: {misfits[0].problem}",  # type: ignore[union-attr]
            expected=str(want), received=str(result.type), suggestion="change the result, or the return annotation",
        )  # fmt: skip
    if want.dtype != result.dtype:
        raise DTypeError(
            f"{parameters.name} returns another element type than it says", expected=str(want.dtype),
            received=str(result.type), suggestion=f"return tile.cast(value, ts.{want.dtype})",
        )  # fmt: skip


@dataclass(frozen=True)
class SpecialisedKernel:
    """A compiled kernel, and the outer names it depends on with what they held."""

    module: Module
    guards: list[tuple[Any, str, Any]]

    def unchanged(self) -> bool:
        """Whether the outer names still hold what they held."""
        return guards_hold(self.guards)


@dataclass(frozen=True)
class SpecialisationRequest:
    """What to compile a kernel for."""

    types: Mapping[str, Type]
    constants: Mapping[str, Any]
    grid: tuple[Size, ...]
    group: int = 1
    tile_shape: tuple[int, ...] = ()
    shared_memory: int = 0
    stages: int | None = None  # of a software-pipelined loop; None: the target's choice
    cluster: int | None = None  # programs that multicast common operands; None: the target's choice


def specialise(
    function: FunctionType, parameters: KernelParameters, request: SpecialisationRequest
) -> SpecialisedKernel:
    """A Tile module for these arguments and this launch.

    Raises:
        TesseraError: the kernel cannot be compiled; the error names the line of the kernel.
    """
    frame, values, outputs = _trace_body(function, parameters, request)
    if scope.needs_marks(frame.trace):
        with scope.compile_with_marks():
            frame, values, outputs = _trace_body(function, parameters, request)
    body = eliminate_dead_nodes(frame.trace.builder.block([*values, *outputs], ()), has_observable_effect)
    asked = {"stages": request.stages, "cluster": request.cluster}
    hints = {name: value for name, value in asked.items() if value is not None}
    attrs = Attrs({"group": request.group, "grid": request.grid, **hints})
    compiled = expand_stochastic_rounding(
        expand_composites(Function(function.__name__, body, attrs, frame.source.place))
    )
    _check_function(compiled, request)
    return SpecialisedKernel(host.make_launch_module(compiled, len(outputs)), _deduplicate_guards(frame.trace.guards))


def _trace_body(
    function: FunctionType, parameters: KernelParameters, request: SpecialisationRequest
) -> tuple[KernelFrame, list[Value], Sequence[Value]]:
    """The kernel's body read once: its frame, which holds the trace, its parameters and its outputs."""
    frame, values = _open_frame(function, parameters, request)
    token = CURRENT_TRACE.set(frame.trace)
    try:
        with frame.trace.builder.active(), override_numerics(None):  # a kernel's types are its own
            statements.run_statements(frame, frame.source.body)
            outputs = store_results(frame, parameters)
    finally:
        CURRENT_TRACE.reset(token)
    return frame, values, outputs


def _open_frame(
    function: FunctionType, parameters: KernelParameters, request: SpecialisationRequest
) -> tuple[KernelFrame, list[Value]]:
    """The frame in which the kernel's body is read, and the parameters of the tile function."""
    source = read_source(function)
    trace = TraceState(KernelBuilder(), request.grid, request.group, tile_shape=request.tile_shape)
    sizes = parameters.sizes(request.types)
    trace.constants = {**sizes, **request.constants}
    trace.axes = _find_grid_dims(source, parameters, request)
    values = [Value(type, name) for name, type in request.types.items()]
    names = {**trace.constants, **{v.hint: _bind_argument(v, parameters) for v in values}}
    return KernelFrame(trace, source, names, OuterScope(function, trace)), values


def _find_grid_dims(
    source: FunctionSource, parameters: KernelParameters, request: SpecialisationRequest
) -> tuple[str, ...]:
    """The dim that each axis of the grid walks: those of the tensor that the launch is about."""
    tensor = find_grid_tensor(source.body, request.types)
    dims = find_dim_names(parameters.annotations.get(tensor)) if tensor else ()
    if not any(isinstance(d, Dim) for d in dims):
        return ()
    return tuple(str(d) for d in dims[: len(request.grid)])


def _bind_argument(value: Value, parameters: KernelParameters) -> Any:
    if not isinstance(value.type, RefType):
        return Tensor(value)
    return view_whole(memref.MemRef(value, value.hint, find_dim_names(parameters.annotations.get(value.hint))))


def _check_function(function: Function, request: SpecialisationRequest) -> None:
    for node in function.body.walk():
        if node.op.name in _UNSUPPORTED_ON_BLOCKS:
            raise UnsupportedOpError(
                f"{node.op.__name__} does not exist on blocks of values", location=node.loc,
                expected="a part of memory: A[i : i + n]", suggestion=_UNSUPPORTED_ON_BLOCKS[node.op.name],
            )  # fmt: skip
    _check_shared_memory(function, request)


_UNSUPPORTED_ON_BLOCKS = {
    "ts.slice": "load the part you need from memory",
    "ts.gather": "load with a block of indices: A[rows]",
    "ts.concatenate": "store the parts one beside the other",
    "ts.pad": 'tile.load(..., edge="clip") reads zeros outside',
}


def _check_shared_memory(function: Function, request: SpecialisationRequest) -> None:
    buffers = [n for n in function.body.walk() if n.op is tile.alloc and n.attrs["space"] == SHARED]
    used = sum(map(_allocation_bytes, buffers))
    if request.shared_memory and used > request.shared_memory:
        raise ResourceError(
            "the kernel's shared buffers are too large", location=function.loc,
            expected=f"at most {request.shared_memory} bytes (shared_memory)", received=f"{used} bytes",
        )  # fmt: skip


def _allocation_bytes(node: Node) -> int:
    shape = [int(n) for n in node.attrs["shape"]]
    rows = [*shape[:-1], shape[-1] + node.attrs["padding"]] if shape else []
    return math.prod(rows) * node.attrs["dtype"].bits // 8


def _deduplicate_guards(guards: Sequence[tuple[Any, str, Any]]) -> list[tuple[Any, str, Any]]:
    found = {(id(getattr(holder, "module", holder)), name): (holder, name, held) for holder, name, held in guards}
    return list(found.values())

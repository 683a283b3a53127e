"""Module emitter: a Tile module as LLVM IR and a host plan.

A tile function becomes `@k`, one program, `@k.range`, a range of them, and `@k.task`, which reads its parameters from a
table:

    void @k(<params>, i64 pid0, pid1, pid2, grid0, grid1, grid2, ptr scratch)
    void @k.range(<params>, i64 begin, i64 end, i64 grid0, grid1, grid2, ptr scratch)
    void @k.task(ptr slots, i64 begin, i64 end, ptr scratch)

A ref is a pointer, a scalar is itself. Programs are numbered in row-major order: the last grid axis varies fastest.
`slots` holds 8 bytes for each parameter (scalars in the first bytes) and then the three grid sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.codegen.grouped import vectorise_groups
from tessera.codegen.host_plan import build_host_plan, find_aliased_kernels
from tessera.codegen.llvm.table import (
    control_flow,  # noqa: F401  (their rows fill `visit`)
    loop_fusion,  # noqa: F401  (they fill tables)
    math_functions,  # noqa: F401  (they fill tables)
    matmul,  # noqa: F401  (their rows fill `visit`)
    memory_ops,  # noqa: F401  (their rows fill `visit`)
    program_ops,  # noqa: F401  (their rows fill `visit`)  # noqa: F401  (they fill tables)
    reductions,  # noqa: F401  (their rows fill `visit`)
)
from tessera.codegen.llvm.table.program_ops import GRID_RANK
from tessera.codegen.llvm.text.builder import DebugMetadata, LlvmBuilder
from tessera.codegen.llvm.text.kernel_emitter import FunctionLibrary, LlvmKernelEmitter, declare_externals
from tessera.codegen.llvm.text.memory import StridedMemRef, row_major_strides
from tessera.codegen.llvm.text.types import get_register_type
from tessera.core.errors import UnsupportedOpError
from tessera.core.types import RefType, bool_
from tessera.ir.core import Function, Module, Node, Value
from tessera.ops.dialects import host
from tessera.ops.dialects.tile import uses_grid_barrier

# A tile function as text: `@k` runs one program, `@k.range` a range of them, `@k.task` one from a table.
#
#     void @k(<params>, i64 pid0, pid1, pid2, grid0, grid1, grid2, ptr scratch)
#     void @k.range(<params>, i64 begin, i64 end, i64 grid0, grid1, grid2, ptr scratch)
#     void @k.task(ptr slots, i64 begin, i64 end, ptr scratch)
#
# A ref is a pointer, a scalar is itself. Programs are numbered in row-major order: the last grid axis
# varies fastest, as elements of an array do. `slots` holds 8 bytes for each parameter (scalars
# in the first bytes) and then the three grid sizes.


PROGRAM_ID_NAMES = ("%pid0", "%pid1", "%pid2")
GRID_SIZE_NAMES = ("%grid0", "%grid1", "%grid2")


@dataclass(frozen=True)
class EmittedFunction:
    """The text of a tile function, and the bytes of scratch memory that one program needs."""

    lines: tuple[str, ...]
    scratch: int


@dataclass(frozen=True)
class LlvmOptions:
    """What the text depends on besides the module: the vector width, and whether lines name their source."""

    vector_bytes: int
    debug: bool = True


def emit_function(
    function: Function,
    library: FunctionLibrary,
    debug: DebugMetadata | None,
    options: LlvmOptions,
    grid: Sequence[int] | None,
    apart: bool,
) -> EmittedFunction:
    """A tile function; `apart` says that no two refs that are written or read lie in the same memory."""
    scope = debug.subprogram(function.name, function.loc) if debug is not None else 0
    text = LlvmBuilder(debug, scope)
    text.place(function.loc)
    kernel = LlvmKernelEmitter(function, text, library, options.vector_bytes, grid, apart)
    names = [f"%a{i}" for i in range(len(function.params))]
    for v, name in zip(function.params, names, strict=True):
        _bind_parameter(kernel, v, name)
    kernel.run(function.body)
    text.line("ret void")
    room, offsets = kernel.scratch.place()
    suffix = f" !dbg !{scope}" if debug is not None else ""
    params = _format_parameters(function, names, apart)
    arguments = _format_list(params, PROGRAM_ID_NAMES, GRID_SIZE_NAMES)
    head = f"define void @{function.name}({arguments}, ptr noalias %scratch) #0{suffix} {{"
    buffers = [f"  {name} = getelementptr i8, ptr %scratch, i64 {offset}" for name, offset in offsets]
    body = [head, "entry:", *buffers, *text.flat(), "}", ""]
    return EmittedFunction(
        (*body, *_emit_range_function(function, params), *_emit_task_function(function, names)), room
    )


def _bind_parameter(kernel: LlvmKernelEmitter, v: Value, name: str) -> None:
    if not isinstance(v.type, RefType):
        kernel.scalars[v] = name
        return
    if not all(isinstance(n, int) for n in v.type.shape):
        raise UnsupportedOpError(
            f"the target llvm needs sizes that are known, {v.type} has symbols", location=kernel.function.loc
        )
    shape = tuple(int(n) for n in v.type.shape)
    kernel.memories[v] = StridedMemRef(v.type.dtype, name, shape, row_major_strides(shape))


def _format_parameters(function: Function, names: Sequence[str], apart: bool) -> list[str]:
    kinds = [
        _get_parameter_type(v) + (" noalias" if apart and isinstance(v.type, RefType) else "") for v in function.params
    ]
    return [f"{kind} {name}" for kind, name in zip(kinds, names, strict=True)]


def _get_parameter_type(v: Value) -> str:
    return "ptr" if isinstance(v.type, RefType) else str(get_register_type(v.type.dtype))


def _format_list(params: Sequence[str], *integers: Sequence[str]) -> str:
    return ", ".join([*params, *(f"i64 {name}" for names in integers for name in names)])


def _emit_range_function(function: Function, params: Sequence[str]) -> Iterator[str]:
    """The loop over programs."""
    plain = [p.replace(" noalias", "") for p in params]
    ends = ("%begin", "%end")
    arguments = _format_list(params, ends, GRID_SIZE_NAMES)
    yield f"define void @{function.name}.range({arguments}, ptr noalias %scratch) #0 {{"
    yield "entry:"
    yield "  %some = icmp slt i64 %begin, %end"
    yield "  br i1 %some, label %loop, label %done"
    yield "loop:"
    yield "  %n = phi i64 [ %begin, %entry ], [ %next, %loop ]"
    yield "  %pid2 = urem i64 %n, %grid2"
    yield "  %rest = udiv i64 %n, %grid2"
    yield "  %pid1 = urem i64 %rest, %grid1"
    yield "  %pid0 = udiv i64 %rest, %grid1"
    yield f"  call void @{function.name}({_format_list(plain, PROGRAM_ID_NAMES, GRID_SIZE_NAMES)}, ptr %scratch)"
    yield "  %next = add i64 %n, 1"
    yield "  %more = icmp slt i64 %next, %end"
    yield "  br i1 %more, label %loop, label %done"
    yield "done:"
    yield "  ret void"
    yield "}"
    yield ""


def _emit_task_function(function: Function, names: Sequence[str]) -> Iterator[str]:
    """The same with the parameters in memory, so that every kernel is called in one way."""
    yield f"define void @{function.name}.task(ptr %slots, i64 %begin, i64 %end, ptr %scratch) #0 {{"
    yield "entry:"
    params = []
    for place, (v, name) in enumerate(zip(function.params, names, strict=True)):
        yield f"  {name}.p = getelementptr i64, ptr %slots, i64 {place}"
        kind = "i8" if v.type.dtype == bool_ and _get_parameter_type(v) == "i1" else _get_parameter_type(v)
        yield f"  {name}.v = load {kind}, ptr {name}.p, align 8"
        held = _get_parameter_type(v)
        yield f"  {name} = {'trunc i8' if kind != held else f'bitcast {kind}'} {name}.v to {held}"
        params.append(f"{_get_parameter_type(v)} {name}")
    for place, name in enumerate(GRID_SIZE_NAMES):
        yield f"  {name}.p = getelementptr i64, ptr %slots, i64 {len(names) + place}"
        yield f"  {name} = load i64, ptr {name}.p, align 8"
    arguments = _format_list(params, ("%begin", "%end"), GRID_SIZE_NAMES)
    yield f"  call void @{function.name}.range({arguments}, ptr %scratch)"
    yield "  ret void"
    yield "}"
    yield ""


# A Tile module as LLVM text, and what its entry function does as a launch plan.


@dataclass(frozen=True)
class EmittedModule:
    """The text of a module and its launch plan."""

    text: str
    plan: dict[str, Any]


def emit_module(module: Module, options: LlvmOptions) -> EmittedModule:
    """Every tile function that the entry launches, with the functions they need.

    Raises:
        UnsupportedOpError: an op has no emission; it names the op, the target and the line.
    """
    module = vectorise_groups(module)
    library, debug = FunctionLibrary(), DebugMetadata() if options.debug else None
    lines, scratch = _emit_functions(module, library, debug, options)
    lines += library.text()
    lines += math_functions.define_called_functions(lines)
    head = ["; Tessera: LLVM", f'source_filename = "{module.main.name}"', ""]
    head += [f"@{program_ops.REPORT_CONTEXT} = global i64 0", ""] if library.sites else []
    met = [f.name for f in module.functions[1:] if uses_grid_barrier(f.body)]
    head += [f"@{program_ops.BARRIER_CONTEXT} = global i64 0", ""] if met else []
    tail = [*declare_externals(lines), "", _format_attributes(options.vector_bytes * 8)]
    text = "\n".join([*head, *lines, *tail, *(debug.text() if debug else ())]) + "\n"
    return EmittedModule(
        text, {**build_host_plan(module, scratch), "reports": library.sites, **({"meeting": met} if met else {})}
    )


def _emit_functions(
    module: Module, library: FunctionLibrary, debug: DebugMetadata | None, options: LlvmOptions
) -> tuple[list[str], dict[str, int]]:
    """The text of every tile function, and the scratch memory each needs."""
    launches = [n for n in module.main.body.walk() if n.op is host.launch]
    shared = find_aliased_kernels(module)
    lines: list[str] = []
    scratch: dict[str, int] = {}
    for function in module.functions[1:]:
        grids = [_pad_grid(n) for n in launches if n.attrs["kernel"] == function.name]
        # Memory that others write while a program runs is not its own, as `noalias` would say.
        apart = function.name not in shared and not uses_grid_barrier(function.body)
        emitted = emit_function(function, library, debug, options, _find_largest_grid(grids), apart)
        lines += emitted.lines
        scratch[function.name] = emitted.scratch
    return lines, scratch


def _format_attributes(bits: int) -> str:
    """Without these LLVM splits the widest vectors on processors that prefer narrower ones."""
    return f'attributes #0 = {{ nounwind "min-legal-vector-width"="{bits}" "prefer-vector-width"="{bits}" }}'


def _pad_grid(node: Node) -> tuple[int, ...]:
    grid = tuple(node.attrs["grid"])
    if len(grid) > GRID_RANK:
        raise UnsupportedOpError(
            f"the target llvm has grids of {GRID_RANK} axes, this one has {len(grid)}", location=node.loc
        )
    return (*(int(n) for n in grid), 1, 1, 1)[:GRID_RANK]


def _find_largest_grid(grids: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    return tuple(max(sizes) for sizes in zip(*grids, strict=True)) if grids else None

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

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.codegen.host_plan import build_host_plan, find_aliased_parameters
from tessera.codegen.llvm.table import (
    control_flow,  # noqa: F401  (their rows fill `visit`)
    loop_fusion,  # noqa: F401  (they fill tables)
    matmul,  # noqa: F401  (their rows fill `visit`)
    program_ops,  # noqa: F401  (their rows fill `visit`)  # noqa: F401  (they fill tables)
    reductions,  # noqa: F401  (their rows fill `visit`)
    scalar_functions,  # noqa: F401  (they fill tables)
)
from tessera.codegen.llvm.table.program_ops import GRID_RANK
from tessera.codegen.llvm.text import protocol
from tessera.codegen.llvm.text.builder import DebugMetadata, LlvmBuilder, get_register_type
from tessera.codegen.llvm.text.kernel_context import FunctionLibrary, LlvmKernelContext, name_size_parameter
from tessera.codegen.llvm.text.kernel_emitter import emit_block
from tessera.codegen.llvm.text.memory import StridedMemRef, make_row_major_strides
from tessera.core.errors import UnsupportedOpError
from tessera.core.symbolic_dim import Size, find_size_bounds
from tessera.core.types import RefType, bool_
from tessera.ir.core import Function, Module, Node, Value, find_size_names
from tessera.ops.dialects import host
from tessera.ops.dialects.tile import uses_grid_barrier

PROGRAM_ID_NAMES = ("%pid0", "%pid1", "%pid2")
GRID_SIZE_NAMES = ("%grid0", "%grid1", "%grid2")


@dataclass(frozen=True)
class EmittedFunction:
    """The text of a tile function, and the bytes of scratch memory of one program."""

    lines: tuple[str, ...]
    scratch: int


@dataclass(frozen=True)
class LlvmOptions:
    """Options that change the text.

    The vector width, whether lines have debug locations, and whether products of bf16 and of 8-bit integers multiply
    pairs of elements.
    """

    vector_bytes: int
    debug: bool = True
    pair_products: bool = False


def emit_function(
    function: Function,
    library: FunctionLibrary,
    debug: DebugMetadata | None,
    options: LlvmOptions,
    grid: Sequence[float] | None,
    aliases: Mapping[tuple[int, int], bool] | None,
) -> EmittedFunction:
    """A tile function; `aliases` are the pairs of refs that share memory (`BufferisationPlan`)."""
    scope = debug.subprogram(function.name, function.loc) if debug is not None else 0
    text = LlvmBuilder(debug, scope)
    text.set_location(function.loc)
    kernel = LlvmKernelContext(function, text, library, options.vector_bytes, grid, aliases, options.pair_products)
    names = [f"%a{i}" for i in range(len(function.params))]
    for v, name in zip(function.params, names, strict=True):
        _bind_parameter(kernel, v, name)
    emit_block(kernel, function.body)
    text.line("ret void")
    scratch_bytes, offsets = kernel.scratch.assign_offsets()
    suffix = f" !dbg !{scope}" if debug is not None else ""
    sizes = [name_size_parameter(n) for n in find_size_names(function)]
    params = [*_format_parameters(function, names, noalias=aliases == {}), *(f"i64 {name}" for name in sizes)]
    arguments = _format_list(params, PROGRAM_ID_NAMES, GRID_SIZE_NAMES)
    head = f"define void @{function.name}({arguments}, ptr noalias %scratch) #0{suffix} {{"
    buffers = [f"  {name} = getelementptr i8, ptr %scratch, i64 {offset}" for name, offset in offsets]
    body = [head, "entry:", *buffers, *kernel.sizes.lines, *text.flatten(), "}", ""]
    return EmittedFunction(
        (*body, *_emit_range_function(function, params), *_emit_task_function(function, names, sizes)), scratch_bytes
    )


def _bind_parameter(kernel: LlvmKernelContext, v: Value, name: str) -> None:
    if not isinstance(v.type, RefType):
        kernel.scalars[v] = name
        return
    shape = tuple(v.type.shape)
    kernel.memrefs[v] = StridedMemRef(v.type.dtype, name, shape, make_row_major_strides(shape))


def _format_parameters(function: Function, names: Sequence[str], noalias: bool) -> list[str]:
    kinds = [
        _get_parameter_type(v) + (" noalias" if noalias and isinstance(v.type, RefType) else "")
        for v in function.params
    ]
    return [f"{memory_type} {name}" for memory_type, name in zip(kinds, names, strict=True)]


def _get_parameter_type(v: Value) -> str:
    return "ptr" if isinstance(v.type, RefType) else str(get_register_type(v.type.dtype))


def _format_list(params: Sequence[str], *integers: Sequence[str]) -> str:
    return ", ".join([*params, *(f"i64 {name}" for names in integers for name in names)])


def _emit_range_function(function: Function, params: Sequence[str]) -> Iterator[str]:
    """The function that loops over a range of programs, until the launch stops or an earlier program has failed."""
    plain = [p.replace(" noalias", "") for p in params]
    bounds = ("%begin", "%end")
    arguments = _format_list(params, bounds, GRID_SIZE_NAMES)
    yield f"define void @{function.name}.range({arguments}, ptr noalias %scratch) #0 {{"
    yield "entry:"
    yield "  %some = icmp slt i64 %begin, %end"
    yield "  br i1 %some, label %loop, label %done"
    yield "loop:"
    yield "  %n = phi i64 [ %begin, %entry ], [ %next, %latch ]"
    yield "  %pid2 = urem i64 %n, %grid2"
    yield "  %rest = udiv i64 %n, %grid2"
    yield "  %pid1 = urem i64 %rest, %grid1"
    yield "  %pid0 = udiv i64 %rest, %grid1"
    yield f"  call void @{function.name}({_format_list(plain, PROGRAM_ID_NAMES, GRID_SIZE_NAMES)}, ptr %scratch)"
    yield "  %next = add i64 %n, 1"
    yield f"  %word = load volatile i64, ptr @{protocol.FAILURE_WORD}, align 8"
    yield f"  %quiet = icmp eq i64 %word, {protocol.NO_FAILURE}"
    yield "  br i1 %quiet, label %latch, label %asked"
    yield "asked:"
    yield f"  call void @{protocol.POLL_FUNCTION}(ptr @{protocol.FAILURE_WORD})"
    yield f"  %after = load volatile i64, ptr @{protocol.FAILURE_WORD}, align 8"
    yield "  %number = add i64 %next, 1"
    yield f"  %key = shl i64 %number, {protocol.FAILURE_PROGRAM_BIT}"
    yield "  %stopped = icmp ult i64 %after, %key"
    yield "  br i1 %stopped, label %done, label %latch"
    yield "latch:"
    yield "  %more = icmp slt i64 %next, %end"
    yield "  br i1 %more, label %loop, label %done"
    yield "done:"
    yield "  ret void"
    yield "}"
    yield ""


def _emit_task_function(function: Function, names: Sequence[str], sizes: Sequence[str]) -> Iterator[str]:
    """The function that loads its parameters from memory, so that every kernel has the same signature."""
    yield f"define void @{function.name}.task(ptr %slots, i64 %begin, i64 %end, ptr %scratch) #0 {{"
    yield "entry:"
    params = []
    for slot, (v, name) in enumerate(zip(function.params, names, strict=True)):
        yield f"  {name}.p = getelementptr i64, ptr %slots, i64 {slot}"
        memory_type = "i8" if v.type.dtype == bool_ and _get_parameter_type(v) == "i1" else _get_parameter_type(v)
        yield f"  {name}.v = load {memory_type}, ptr {name}.p, align 8"
        register_type = _get_parameter_type(v)
        cast = "trunc i8" if memory_type != register_type else f"bitcast {memory_type}"
        yield f"  {name} = {cast} {name}.v to {register_type}"
        params.append(f"{_get_parameter_type(v)} {name}")
    for slot, name in enumerate([*sizes, *GRID_SIZE_NAMES], len(names)):
        yield f"  {name}.p = getelementptr i64, ptr %slots, i64 {slot}"
        yield f"  {name} = load i64, ptr {name}.p, align 8"
    params += [f"i64 {name}" for name in sizes]
    arguments = _format_list(params, ("%begin", "%end"), GRID_SIZE_NAMES)
    yield f"  call void @{function.name}.range({arguments}, ptr %scratch)"
    yield "  ret void"
    yield "}"
    yield ""


@dataclass(frozen=True)
class LlvmModuleText:
    """The text of a module and its launch plan."""

    text: str
    plan: dict[str, Any]


def emit_module(module: Module, options: LlvmOptions) -> LlvmModuleText:
    """Every tile function that the entry launches, its groups vectorised, with the functions they call.

    Raises:
        UnsupportedOpError: an op has no emission row; it names the op, the target and the line.
    """
    library, debug = FunctionLibrary(), DebugMetadata() if options.debug else None
    lines, scratch = _emit_functions(module, library, debug, options)
    lines += library.text()
    lines += scalar_functions.define_called_functions(lines)
    head = ["; Tessera: LLVM", f'source_filename = "{module.main.name}"', ""]
    head += [f"@{protocol.FAILURE_WORD} = global i64 {protocol.NO_FAILURE}", ""]
    head += [f"@{protocol.REPORT_CONTEXT} = global i64 0", ""] if library.sites else []
    cooperative = [f.name for f in module.functions[1:] if uses_grid_barrier(f.body)]
    head += [f"@{protocol.BARRIER_CONTEXT} = global i64 0", ""] if cooperative else []
    tail = [*declare_externals(lines), "", _format_attributes(options.vector_bytes * 8)]
    text = "\n".join([*head, *lines, *tail, *(debug.text() if debug else ())]) + "\n"
    return LlvmModuleText(
        text,
        {
            **build_host_plan(module, scratch),
            "reports": library.sites,
            **({"meeting": cooperative} if cooperative else {}),
        },
    )


def _emit_functions(
    module: Module, library: FunctionLibrary, debug: DebugMetadata | None, options: LlvmOptions
) -> tuple[list[str], dict[str, int]]:
    """The text of every tile function, and its bytes of scratch memory."""
    launches = [n for n in module.main.body.walk() if n.op is host.launch]
    aliased = find_aliased_parameters(module)
    lines: list[str] = []
    scratch: dict[str, int] = {}
    for function in module.functions[1:]:
        grids = [_pad_grid(n) for n in launches if n.attrs["kernel"] == function.name]
        # A grid barrier orders writes of other programs, which `noalias` would rule out.
        aliases = None if uses_grid_barrier(function.body) else aliased.get(function.name, {})
        emitted = emit_function(function, library, debug, options, _find_largest_grid(grids), aliases)
        lines += emitted.lines
        scratch[function.name] = emitted.scratch
    return lines, scratch


def _format_attributes(bits: int) -> str:
    """The function attributes; without them LLVM splits the widest vectors on processors that prefer narrower ones."""
    return f'attributes #0 = {{ nounwind "min-legal-vector-width"="{bits}" "prefer-vector-width"="{bits}" }}'


def _pad_grid(node: Node) -> tuple[Size, ...]:
    grid = tuple(node.attrs["grid"])
    if len(grid) > GRID_RANK:
        raise UnsupportedOpError(
            f"the target llvm has grids of at most {GRID_RANK} axes", location=node.loc, received=f"{len(grid)} axes"
        )
    return (*grid, 1, 1, 1)[:GRID_RANK]


def _find_largest_grid(grids: Sequence[tuple[Size, ...]]) -> tuple[float, ...] | None:
    """The most programs along each axis; infinite where nothing bounds a symbolic size."""
    return tuple(max(find_size_bounds(n)[1] for n in sizes) for sizes in zip(*grids, strict=True)) if grids else None


# Declarations of the functions that the text calls and does not define.

_DEFINE_PATTERN = re.compile(r"define .*?@(?P<name>[\w.]+)\(")
_CALL_PATTERN = re.compile(r"call (?P<result>[^@]*?) @(?P<name>[\w.]+)\((?P<args>.*)\)")


def declare_externals(lines: Iterable[str]) -> Iterator[str]:
    """A declaration for each intrinsic or C function that is called and not defined."""
    listed = list(lines)
    defined = {value["name"] for line in listed if (value := _DEFINE_PATTERN.match(line))}
    needed: dict[str, str] = {}
    for line in listed:
        call = _CALL_PATTERN.search(line) if " call " in line else None
        if call is not None and call["name"] not in defined:
            needed.setdefault(
                call["name"], f"declare {call['result']} @{call['name']}({_parse_argument_types(call['args'])})"
            )
    return (needed[name] for name in sorted(needed))


def _parse_argument_types(args: str) -> str:
    return ", ".join(_parse_type(each) for each in _split_arguments(args))


def _split_arguments(args: str) -> list[str]:
    """Arguments, split at the commas that are not within < > or ( )."""
    result, depth, start = [], 0, 0
    for place, char in enumerate(args):
        depth += (char in "<([") - (char in ">)]")
        if char == "," and depth == 0:
            result.append(args[start:place].strip())
            start = place + 1
    return [*result, args[start:].strip()] if args.strip() else []


def _parse_type(operand: str) -> str:
    return operand[: operand.index(">") + 1] if operand.startswith("<") else operand.split()[0]

"""A tile function as text: `@k` runs one program, `@k.range` a range of them, `@k.task` one from a table.

    void @k(<params>, i64 pid0, pid1, pid2, grid0, grid1, grid2, ptr scratch)
    void @k.range(<params>, i64 begin, i64 end, i64 grid0, grid1, grid2, ptr scratch)
    void @k.task(ptr slots, i64 begin, i64 end, ptr scratch)

A ref is a pointer, a scalar is itself. Programs are numbered in row-major order: the last grid axis
varies fastest, as elements of an array do. `slots` holds 8 bytes for each parameter (scalars
in the first bytes) and then the three grid sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tessera.codegen.llvm import control, dot, program, reduce, writes  # noqa: F401  (their rows fill `visit`)
from tessera.codegen.llvm.kernel import Kernel
from tessera.codegen.llvm.library import Library
from tessera.codegen.llvm.scratch import Memory, row_major
from tessera.codegen.llvm.text import Debug, Text
from tessera.codegen.llvm.types import register
from tessera.errors import UnsupportedOpError
from tessera.ir.core import Function, Value
from tessera.types import RefType, bool_

IDS = ("%pid0", "%pid1", "%pid2")
GRID = ("%grid0", "%grid1", "%grid2")


@dataclass(frozen=True)
class Emitted:
    """The text of a tile function, and the bytes of scratch memory that one program needs."""

    lines: tuple[str, ...]
    scratch: int


@dataclass(frozen=True)
class Options:
    """What the text depends on besides the module: the vector width, and whether lines name their source."""

    vector_bytes: int
    debug: bool = True


def emit_function(
    function: Function, library: Library, debug: Debug | None, options: Options, grid: Sequence[int] | None, apart: bool
) -> Emitted:
    """A tile function; `apart` says that no two refs that are written or read lie in the same memory."""
    scope = debug.subprogram(function.name, function.loc) if debug is not None else 0
    text = Text(debug, scope)
    text.place(function.loc)
    kernel = Kernel(function, text, library, options.vector_bytes, grid, apart)
    names = [f"%a{i}" for i in range(len(function.params))]
    for v, name in zip(function.params, names, strict=True):
        _bind(kernel, v, name)
    kernel.run(function.body)
    text.line("ret void")
    room, offsets = kernel.scratch.place()
    suffix = f" !dbg !{scope}" if debug is not None else ""
    params = _params(function, names, apart)
    head = f"define void @{function.name}({_list(params, IDS, GRID)}, ptr noalias %scratch) #0{suffix} {{"
    buffers = [f"  {name} = getelementptr i8, ptr %scratch, i64 {offset}" for name, offset in offsets]
    body = [head, "entry:", *buffers, *text.flat(), "}", ""]
    return Emitted((*body, *_range(function, params), *_task(function, names)), room)


def _bind(kernel: Kernel, v: Value, name: str) -> None:
    if not isinstance(v.type, RefType):
        kernel.scalars[v] = name
        return
    if not all(isinstance(n, int) for n in v.type.shape):
        raise UnsupportedOpError(
            f"the target llvm needs sizes that are known, {v.type} has symbols", location=kernel.function.loc
        )
    shape = tuple(int(n) for n in v.type.shape)
    kernel.memories[v] = Memory(v.type.dtype, name, shape, row_major(shape))


def _params(function: Function, names: Sequence[str], apart: bool) -> list[str]:
    kinds = [_kind(v) + (" noalias" if apart and isinstance(v.type, RefType) else "") for v in function.params]
    return [f"{kind} {name}" for kind, name in zip(kinds, names, strict=True)]


def _kind(v: Value) -> str:
    return "ptr" if isinstance(v.type, RefType) else str(register(v.type.dtype))


def _list(params: Sequence[str], *integers: Sequence[str]) -> str:
    return ", ".join([*params, *(f"i64 {name}" for names in integers for name in names)])


def _range(function: Function, params: Sequence[str]) -> Iterator[str]:
    """The loop over programs."""
    plain = [p.replace(" noalias", "") for p in params]
    ends = ("%begin", "%end")
    yield f"define void @{function.name}.range({_list(params, ends, GRID)}, ptr noalias %scratch) #0 {{"
    yield "entry:"
    yield "  %some = icmp slt i64 %begin, %end"
    yield "  br i1 %some, label %loop, label %done"
    yield "loop:"
    yield "  %n = phi i64 [ %begin, %entry ], [ %next, %loop ]"
    yield "  %pid2 = urem i64 %n, %grid2"
    yield "  %rest = udiv i64 %n, %grid2"
    yield "  %pid1 = urem i64 %rest, %grid1"
    yield "  %pid0 = udiv i64 %rest, %grid1"
    yield f"  call void @{function.name}({_list(plain, IDS, GRID)}, ptr %scratch)"
    yield "  %next = add i64 %n, 1"
    yield "  %more = icmp slt i64 %next, %end"
    yield "  br i1 %more, label %loop, label %done"
    yield "done:"
    yield "  ret void"
    yield "}"
    yield ""


def _task(function: Function, names: Sequence[str]) -> Iterator[str]:
    """The same with the parameters in memory, so that every kernel is called in one way."""
    yield f"define void @{function.name}.task(ptr %slots, i64 %begin, i64 %end, ptr %scratch) #0 {{"
    yield "entry:"
    params = []
    for place, (v, name) in enumerate(zip(function.params, names, strict=True)):
        yield f"  {name}.p = getelementptr i64, ptr %slots, i64 {place}"
        kind = "i8" if v.type.dtype == bool_ and _kind(v) == "i1" else _kind(v)
        yield f"  {name}.v = load {kind}, ptr {name}.p, align 8"
        yield f"  {name} = {'trunc i8' if kind != _kind(v) else f'bitcast {kind}'} {name}.v to {_kind(v)}"
        params.append(f"{_kind(v)} {name}")
    for place, name in enumerate(GRID):
        yield f"  {name}.p = getelementptr i64, ptr %slots, i64 {len(names) + place}"
        yield f"  {name} = load i64, ptr {name}.p, align 8"
    yield f"  call void @{function.name}.range({_list(params, ('%begin', '%end'), GRID)}, ptr %scratch)"
    yield "  ret void"
    yield "}"
    yield ""

"""Statements: lines, loops and DSD operations of the program, copies, and the stores of runtime faults for the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tessera.codegen.csl.text.context import CslContext
from tessera.codegen.csl.text.dsd import (
    MAX_DSD_STRIDE,
    PeArrayView,
    coalesce_axes,
    count_elements,
    find_move_builtin,
    format_dsd,
    offset_element,
    replace_axes,
    widen_index_literal,
)
from tessera.codegen.csl.text.memory_allocation import allocate_array, can_reuse
from tessera.codegen.csl.text.routes import FabricChannel
from tessera.codegen.diagnostics import describe_location
from tessera.core.errors import (
    DeadlockError,
    ExecutionError,
    Location,
    OutOfBoundsError,
    TesseraError,
    UnsupportedOpError,
)
from tessera.ir.core import Node, Value

# Statements: lines, blocks and loops of the program, DSD operations on whole arrays, and copies.


def add_line(ctx: CslContext, text: str) -> None:
    """Add a statement to the present function."""
    ctx.task_functions[-1].lines.append("  " * ctx.depth + text)


@contextmanager
def open_block(ctx: CslContext, head: str) -> Iterator[None]:
    """Add a statement with a block; the statements added in the context go into it."""
    add_line(ctx, f"{head} {{")
    ctx.depth += 1
    yield
    ctx.depth -= 1
    add_line(ctx, "}")


def add_constant(ctx: CslContext, text: str, stem: str) -> str:
    """Add a constant of the program, one for each text; returns its name. Constant DSDs cost no cycles."""
    return ctx.constants.setdefault(text, f"{stem}{len(ctx.constants)}")


def add_channel(ctx: CslContext, channel: FabricChannel) -> str:
    """Add a fabric channel to the program; returns its name."""
    ctx.channels.setdefault(channel.name, channel)
    return channel.name


def cast_to_index(ctx: CslContext, name: str) -> str:
    """A loop variable converted to the index type."""
    return name if ctx.index_type == "i32" else f"@as({ctx.index_type}, {name})"


def get_dsd(ctx: CslContext, view: PeArrayView, shape: tuple[int, ...]) -> str | None:
    """The name of a view's DSD, or the value of a literal; None if no DSD can describe the view."""
    text = format_dsd(replace(view, dynamic_offset=""), shape)
    if text is None or view.literal:
        return text
    name = add_constant(ctx, text, f"{view.buffer.name}_at")  # type: ignore[union-attr]
    if not view.dynamic_offset:
        return name
    moved = f"{name}_{next(ctx.names)}"
    add_line(ctx, f"const {moved} = @increment_dsd_offset({name}, {view.dynamic_offset}, {view.type});")
    return moved


def emit_loop(ctx: CslContext, views: Sequence[PeArrayView], statement: Callable[[list[str]], str]) -> None:
    """Emit a loop nest over views of one shape; `statement` maps the element expressions to the loop body."""
    if not count_elements(views[0].shape):
        return
    shape, level = coalesce_axes(views)
    names = [f"at{next(ctx.names)}" for _ in shape]  # i8 would be a type
    for name, size in zip(names, shape, strict=True):
        add_line(ctx, f"for (@range(i16, {size})) |{name}| {{")
        ctx.depth += 1
    for line in statement([v.at(names) for v in level]).split("\n"):
        add_line(ctx, line)
    _close_loops(ctx, len(shape))


def _close_loops(ctx: CslContext, count: int) -> None:
    for _ in range(count):
        ctx.depth -= 1
        add_line(ctx, "}")


def emit_dsd_operation(ctx: CslContext, builtin: str, views: Sequence[PeArrayView]) -> bool:
    """Emit one DSD operation, destination first; False if no DSD can describe one of the views."""
    shape, level = coalesce_axes(views)
    operands = [get_dsd(ctx, v, shape) for v in level]
    if None in operands:
        return False
    if count_elements(shape):
        add_line(ctx, f"{builtin}({', '.join(map(str, operands))});")
    return True


def emit_copy(ctx: CslContext, target: PeArrayView, source: PeArrayView) -> None:
    """Emit a copy: one DSD operation where possible, else a loop."""
    if target == source:
        return
    source = widen_index_literal(target, source)
    builtin = find_move_builtin(target, source)
    if builtin and target.type == source.type and emit_dsd_operation(ctx, builtin, [target, source]):
        return
    emit_loop(ctx, [target, source], lambda e: f"{e[0]} = {e[1]};")


def emit_move(ctx: CslContext, target: PeArrayView, source: PeArrayView, to: str, start: str) -> None:
    """Emit a copy with dynamic offsets: to `target` plus `to` elements, from `source` plus `start` elements."""
    shape, (into, out) = coalesce_axes([target, widen_index_literal(target, source)])
    inner = (shape or (1,))[-1]
    rows = [replace_axes(v, (inner,), (*v.strides[-1:], 1)[:1]) for v in (into, out)]
    dsds = [v.literal or (get_dsd(ctx, v, (inner,)) if _fits_dsd_stride(v) else None) for v in rows]
    outer = [f"at{next(ctx.names)}" for _ in shape[:-1]]
    for name, size in zip(outer, shape[:-1], strict=True):
        add_line(ctx, f"for (@range(i16, {size})) |{name}| {{")
        ctx.depth += 1
    offsets = [_format_offset(ctx, first, v, outer) for first, v in ((to, into), (start, out))]
    builtin = find_move_builtin(target, source)
    if None in dsds or builtin is None:
        emit_loop(ctx, rows, lambda t: f"{offset_element(t[0], offsets[0])} = {offset_element(t[1], offsets[1])};")
    elif count_elements(target.shape):
        operands = [_offset_dsd(v, dsd, offset) for v, dsd, offset in zip((into, out), dsds, offsets, strict=True)]
        add_line(ctx, f"{builtin}({', '.join(operands)});")
    _close_loops(ctx, len(outer))


def _format_offset(ctx: CslContext, first: str, view: PeArrayView, names: Sequence[str]) -> str:
    """The offset of an element: `first` plus the outer loop variables times their strides."""
    strides = () if view.literal else view.strides
    indices = [f"@as({ctx.index_type}, {n})" if first else n for n in names]
    terms = [f"{n} * {s}" for n, s in zip(indices, strides, strict=False) if s]
    return " + ".join([first, *terms] if first else terms)


def _fits_dsd_stride(view: PeArrayView) -> bool:
    return not view.strides or abs(view.strides[0]) <= MAX_DSD_STRIDE


def _offset_dsd(view: PeArrayView, text: str | None, offset: str) -> str:
    """A DSD moved by some elements."""
    if view.literal or not offset:
        return str(text)
    return f"@increment_dsd_offset({text}, @as(i16, {offset}), {view.type})"


def make_contiguous(ctx: CslContext, view: PeArrayView) -> PeArrayView:
    """A contiguous view of the same values: the view itself, or a copy."""
    if view.contiguous:
        return view
    copy = allocate_array(ctx, view.shape, view.type)
    emit_copy(ctx, copy, view)
    return copy


def reuse_or_copy(ctx: CslContext, value: Value, view: PeArrayView, element_type: str = "") -> PeArrayView:
    """An array that holds a value and may be overwritten: the value's own array where it is not used again, or a
    copy."""
    element_type = element_type or view.type
    if can_reuse(ctx, value, view, element_type):
        return view
    copy = allocate_array(ctx, view.shape, element_type)
    emit_copy(ctx, copy, view)
    return copy


# Runtime faults: a PE stores the number of its first fault, and the host raises the error of that number.


FAULT_SYMBOL = "fault"
FAULT_ERRORS: Mapping[str, Callable[..., TesseraError]] = {
    "bounds": OutOfBoundsError,
    "assert": ExecutionError,
    "deadlock": DeadlockError,
}
# Keeps the first fault; fault numbers start at 1.
FAULT_HELPER = f"""fn fail(place: i32) void {{
  if ({FAULT_SYMBOL}[0] == 0) {FAULT_SYMBOL}[0] = place;
}}"""


def make_unsupported_error(node: Node, reason: str) -> UnsupportedOpError:
    """The error for an op that has no CSL."""
    return UnsupportedOpError(
        f"{node.op.name} cannot be emitted for csl: {reason}", location=node.loc,
        suggestion="run this on another target, or in the interpreter",
    )  # fmt: skip


def add_fault(ctx: CslContext, node: Node, kind: str, text: str, expected: str) -> str:
    """Register a possible fault of a node; returns the statement that reports it."""
    ctx.functions["fail"] = FAULT_HELPER
    place = describe_location(node.loc)
    ctx.faults.append({"kind": kind, "text": text, "expected": expected, "place": place})
    return f"fail({len(ctx.faults)});"


def emit_fault_return(ctx: CslContext, statement: str) -> None:
    """Emit the report of a fault and the end of the program."""
    add_line(ctx, statement)
    add_line(ctx, "sys_mod.unblock_cmd_stream();")
    add_line(ctx, "return;")


def make_fault_error(faults: Sequence[Mapping[str, Any]], number: int, row: int, column: int) -> TesseraError:
    """The error for the fault number that a PE stored."""
    fault = faults[number - 1]
    return FAULT_ERRORS[fault["kind"]](
        fault["text"], location=Location(*fault["place"]), expected=fault["expected"],
        received=f"a violation on the PE in row {row} and column {column}",
    )  # fmt: skip

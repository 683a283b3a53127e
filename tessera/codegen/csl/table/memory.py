"""Kernel memory ops: a ref is an array of the element, and a block of it is a view with a dynamic offset.

An element runs a kernel's programs one after another: a copy is complete when it is issued, barriers within a program
have no one to wait for, and an atomic update is a plain one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from tessera.codegen.csl.table.blocks import emit
from tessera.codegen.csl.table.scalars import format_literal
from tessera.codegen.csl.text.dsd import (
    CSL_TYPES,
    PeArrayView,
    make_row_major_strides,
    offset_element,
    widen_index_literal,
)
from tessera.codegen.csl.text.pe_program import CslEmitter, make_unsupported_error
from tessera.core.shapes import broadcast
from tessera.ir.core import Node, Value
from tessera.ops.dialects import tile

CLIP = "clip"


def format_index(element: CslEmitter, view: PeArrayView) -> str:
    """A scalar as an index."""
    return view.literal or f"@as({element.index_type}, {view.at(())})"


def _format_offset(ref: PeArrayView, starts: Sequence[str]) -> str:
    """How many elements on a block begins; nothing where it begins with the array."""
    terms = [s if stride == 1 else f"{s} * {stride}" for s, stride in zip(starts, ref.strides, strict=True) if s != "0"]
    return " + ".join(terms)


@contextmanager
def loop_over_elements(element: CslEmitter, shape: Sequence[int]) -> Iterator[list[str]]:
    """A loop over a block; gives the names of its indices."""
    names = [f"at{next(element.names)}" if n != 1 else "0" for n in shape]
    loops = [(name, n) for name, n in zip(names, shape, strict=True) if n != 1]
    for name, n in loops:
        element.add_line(f"for (@range(i16, {n})) |{name}| {{")
        element.depth += 1
    yield names
    for _ in loops:
        element.depth -= 1
        element.add_line("}")


def _find_bounds_checks(
    element: CslEmitter, ref: PeArrayView, starts: Sequence[str], shape: Sequence[int], names: Sequence[str]
) -> list[str]:
    """What must hold for an element of a block to lie in the memory; nothing where it is known to."""
    found = []
    for start, size, length, name in zip(starts, ref.shape, shape, names, strict=True):
        if start.isdigit() and int(start) + length <= size:
            continue
        place = f"{start} + @as({element.index_type}, {name})"
        found.append(f"{place} < {size}")
        if "-" in start or "[" in start:
            found.append(f"{place} >= 0")
    return found


def _emit_guarded(element: CslEmitter, conditions: Sequence[str], then: str, otherwise: str = "") -> None:
    """A statement where all conditions hold, else another."""
    if not conditions:
        element.add_line(then)
        return
    # One inside the other: what lies outside is not even looked at.
    tail = f" else {{ {otherwise} }}" if otherwise else ""
    element.add_line(f"if ({' and '.join(f'({c})' for c in conditions)}) {{ {then} }}{tail}")


def _format_mask(mask: PeArrayView | None, shape: tuple[int, ...], names: Sequence[str]) -> list[str]:
    return [] if mask is None else [f"{mask.broadcast_axes(shape).at(names)} != 0"]


@emit(tile.load)
def _(element, node, ref, *rest):
    starts, out = [format_index(element, v) for v in rest[: len(ref.shape)]], element.allocate_for(node.out.type)
    mask, other = (*rest[len(ref.shape) :], None, None)[:2]
    region, place = replace(ref, shape=out.shape), _format_offset(ref, starts)
    bounded = (
        _find_bounds_checks(element, ref, starts, out.shape, ["0"] * len(starts)) if node.attrs["edge"] == CLIP else []
    )
    if mask is None and not bounded:
        element.move(out, region, "", place)
        return out
    zero = PeArrayView(out.type, out.shape, literal=format_literal(0, node.out.type.dtype))
    given = zero if other is None else other.broadcast_axes(out.shape)
    with loop_over_elements(element, out.shape) as names:
        conditions = _format_mask(mask, out.shape, names)
        conditions += _find_bounds_checks(element, ref, starts, out.shape, names) if bounded else []
        source = offset_element(region.at(names), place)
        _emit_guarded(element, conditions, f"{out.at(names)} = {source};", f"{out.at(names)} = {given.at(names)};")
    return out


@emit(tile.store)
def _(element, node, ref, value, *rest):
    value = widen_index_literal(ref, value)
    starts, mask = [format_index(element, v) for v in rest[: len(ref.shape)]], (*rest[len(ref.shape) :], None)[0]
    region, place = replace(ref, shape=value.shape), _format_offset(ref, starts)
    bounded = (
        _find_bounds_checks(element, ref, starts, value.shape, ["0"] * len(starts))
        if node.attrs["edge"] == CLIP
        else []
    )
    if mask is None and not bounded:
        element.move(region, value, place, "")
        return
    with loop_over_elements(element, value.shape) as names:
        conditions = _format_mask(mask, value.shape, names)
        conditions += _find_bounds_checks(element, ref, starts, value.shape, names) if bounded else []
        _emit_guarded(element, conditions, f"{offset_element(region.at(names), place)} = {value.at(names)};")


def _format_element(
    element: CslEmitter, ref: PeArrayView, indices: Sequence[PeArrayView], shape: tuple[int, ...], names: Sequence[str]
) -> str:
    """The element of a memory that blocks of indices name at one place."""
    texts = [f"@as({element.index_type}, {v.broadcast_axes(shape).at(names)})" for v in indices]
    return offset_element(PeArrayView(ref.type, (), ref.buffer, ref.offset, ()).at(()), _format_offset(ref, texts))


@emit(tile.gather)
def _(element, node, ref, *rest):
    rank, out = len(ref.shape), element.allocate_for(node.out.type)
    mask, other = (*rest[rank:], None, None)[:2]
    zero = PeArrayView(out.type, out.shape, literal=format_literal(0, node.out.type.dtype))
    given = zero if other is None else other.broadcast_axes(out.shape)
    with loop_over_elements(element, out.shape) as names:
        source = _format_element(element, ref, rest[:rank], out.shape, names)
        conditions = _format_mask(mask, out.shape, names)
        _emit_guarded(element, conditions, f"{out.at(names)} = {source};", f"{out.at(names)} = {given.at(names)};")
    return out


def _broadcast_shape(node: Node, first: int) -> tuple[int, ...]:
    """The shape of blocks of indices, and of what stands before them, put together."""
    return tuple(int(n) for n in broadcast(*(v.type.shape for v in node.args[first:])))


@emit(tile.scatter)
def _(element, node, ref, value, *rest):
    rank, shape = len(ref.shape), _broadcast_shape(node, 1)
    with loop_over_elements(element, shape) as names:
        target = _format_element(element, ref, rest[:rank], shape, names)
        mask = (*rest[rank:], None)[0]
        _emit_guarded(
            element,
            _format_mask(mask, shape, names),
            f"{target} = {widen_index_literal(ref, value).broadcast_axes(shape).at(names)};",
        )


ATOMIC_EXPRESSIONS = {
    "add": "{0} + {1}", "max": "if ({1} > {0} or {1} != {1}) {1} else {0}", "exchange": "{1}",
    "min": "if ({1} < {0} or {1} != {1}) {1} else {0}", "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}",
}  # fmt: skip


@emit(tile.atomic)
def _(element, node, ref, value, *rest):
    rank, out, old = len(ref.shape), element.allocate_for(node.out.type), f"old{next(element.names)}"
    if CSL_TYPES[node.out.type.dtype] == "i16" and node.out.type.dtype.bits < 16:
        raise make_unsupported_error(node, "updates are of 16 bits or more")
    with loop_over_elements(element, out.shape) as names:
        place = _format_element(element, ref, rest[:rank], out.shape, names)
        text = ATOMIC_EXPRESSIONS[node.attrs["kind"]].format(
            old, widen_index_literal(ref, value).broadcast_axes(out.shape).at(names)
        )
        mask = (*rest[rank:], None)[0]
        then = f"const {old}: {out.type} = {place}; {place} = {text}; {out.at(names)} = {old};"
        _emit_guarded(
            element,
            _format_mask(mask, out.shape, names),
            then,
            f"{out.at(names)} = {format_literal(0, node.out.type.dtype)};",
        )
    return out


@emit(tile.compare_exchange)
def _(element, node, ref, value, expected, *rest):
    rank, out, old = len(ref.shape), element.allocate_for(node.out.type), f"old{next(element.names)}"
    with loop_over_elements(element, out.shape) as names:
        place = _format_element(element, ref, rest[:rank], out.shape, names)
        given, wanted = (widen_index_literal(ref, v).broadcast_axes(out.shape).at(names) for v in (value, expected))
        mask = (*rest[rank:], None)[0]
        swap = f"if ({old} == {wanted}) {{ {place} = {given}; }}"
        then = f"const {old}: {out.type} = {place}; {swap} {out.at(names)} = {old};"
        _emit_guarded(
            element,
            _format_mask(mask, out.shape, names),
            then,
            f"{out.at(names)} = {format_literal(0, node.out.type.dtype)};",
        )
    return out


@emit(tile.alloc)
def _(element, node):
    shape, kind = tuple(map(int, node.out.type.shape)), CSL_TYPES[node.out.type.dtype]
    return element.allocate(shape, kind)


@emit(tile.async_copy)
def _(element, node, dst, src, *starts):
    here, texts = len(dst.shape), [format_index(element, v) for v in starts]
    rank = max(here, len(src.shape), len(node.attrs["shape"]))
    block = (1,) * (rank - len(node.attrs["shape"])) + tuple(node.attrs["shape"])
    target, source = (_align_ranks(v, block) for v in (dst, src))
    to, start = _format_offset(dst, texts[:here]), _format_offset(src, texts[here:])
    level = ["0"] * (rank - len(src.shape)) + texts[here:]
    bounded = _find_bounds_checks(element, source[1], level, block, ["0"] * rank) if node.attrs["edge"] == CLIP else []
    if not bounded:
        element.move(target[0], source[0], to, start)
        return
    with loop_over_elements(element, block) as names:
        into = offset_element(target[0].at(names), to)
        value, zero = offset_element(source[0].at(names), start), format_literal(0, node.types[0].dtype)
        _emit_guarded(
            element,
            _find_bounds_checks(element, source[1], level, block, names),
            f"{into} = {value};",
            f"{into} = {zero};",
        )


def _align_ranks(x: PeArrayView, block: tuple[int, ...]) -> tuple[PeArrayView, PeArrayView]:
    """A block's view of a memory of lower rank, and the memory with as many axes."""
    extra = len(block) - len(x.shape)
    strides = (*(0,) * extra, *x.strides)
    return replace(x, shape=block, strides=strides), replace(x, shape=(1,) * extra + x.shape, strides=strides)


# A grid barrier is emitted for a launch of one program alone.
@emit(tile.async_commit, tile.async_wait, tile.barrier, tile.grid_barrier)
def _(element, node):
    return None


def declare_param(element: CslEmitter, param: Value) -> PeArrayView:
    """The array of a kernel's parameter."""
    shape = tuple(int(n) for n in param.type.shape)
    buffer = element.declare(param, shape)
    return PeArrayView(buffer.type, shape, buffer, 0, make_row_major_strides(shape))

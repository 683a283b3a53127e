"""Kernels' reads and writes: a ref is an array of the element, and a block of it a view that begins where a run says.

An element runs a kernel's programs one after another: a copy is done when it is begun, barriers within a program have
nobody to wait for, and an atomic update is a plain one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from tessera.codegen.csl.blocks import emit
from tessera.codegen.csl.descriptors import fitting, onward
from tessera.codegen.csl.element import Element, unsupported
from tessera.codegen.csl.scalars import literal
from tessera.codegen.csl.views import SPELLING, View, row_major
from tessera.ir.core import Node, Value
from tessera.ops import tile
from tessera.shapes import broadcast

CLIP = "clip"


def index(element: Element, view: View) -> str:
    """A scalar as an index."""
    return view.literal or f"@as({element.counting}, {view.at(())})"


def _place(ref: View, starts: Sequence[str]) -> str:
    """How many elements on a block begins; nothing where it begins with the array."""
    terms = [s if stride == 1 else f"{s} * {stride}" for s, stride in zip(starts, ref.strides, strict=True) if s != "0"]
    return " + ".join(terms)


@contextmanager
def each(element: Element, shape: Sequence[int]) -> Iterator[list[str]]:
    """A loop over a block; gives the names of its indices."""
    names = [f"at{next(element.names)}" if n != 1 else "0" for n in shape]
    loops = [(name, n) for name, n in zip(names, shape, strict=True) if n != 1]
    for name, n in loops:
        element.say(f"for (@range(i16, {n})) |{name}| {{")
        element.depth += 1
    yield names
    for _ in loops:
        element.depth -= 1
        element.say("}")


def _inside(
    element: Element, ref: View, starts: Sequence[str], shape: Sequence[int], names: Sequence[str]
) -> list[str]:
    """What must hold for an element of a block to lie in the memory; nothing where it is known to."""
    found = []
    for start, size, length, name in zip(starts, ref.shape, shape, names, strict=True):
        if start.isdigit() and int(start) + length <= size:
            continue
        place = f"{start} + @as({element.counting}, {name})"
        found.append(f"{place} < {size}")
        if "-" in start or "[" in start:
            found.append(f"{place} >= 0")
    return found


def _when(element: Element, conditions: Sequence[str], then: str, otherwise: str = "") -> None:
    """A statement where all conditions hold, else another."""
    if not conditions:
        element.say(then)
        return
    # One inside the other: what lies outside is not even looked at.
    tail = f" else {{ {otherwise} }}" if otherwise else ""
    element.say(f"if ({' and '.join(f'({c})' for c in conditions)}) {{ {then} }}{tail}")


def _masked(mask: View | None, shape: tuple[int, ...], names: Sequence[str]) -> list[str]:
    return [] if mask is None else [f"{mask.repeated(shape).at(names)} != 0"]


@emit(tile.load)
def _(element, node, ref, *rest):
    starts, out = [index(element, v) for v in rest[: len(ref.shape)]], element.fresh(node.out.type)
    mask, other = (*rest[len(ref.shape) :], None, None)[:2]
    region, place = replace(ref, shape=out.shape), _place(ref, starts)
    bounded = _inside(element, ref, starts, out.shape, ["0"] * len(starts)) if node.attrs["edge"] == CLIP else []
    if mask is None and not bounded:
        element.move(out, region, "", place)
        return out
    zero = View(out.type, out.shape, literal=literal(0, node.out.type.dtype))
    given = zero if other is None else other.repeated(out.shape)
    with each(element, out.shape) as names:
        conditions = _masked(mask, out.shape, names)
        conditions += _inside(element, ref, starts, out.shape, names) if bounded else []
        source = onward(region.at(names), place)
        _when(element, conditions, f"{out.at(names)} = {source};", f"{out.at(names)} = {given.at(names)};")
    return out


@emit(tile.store)
def _(element, node, ref, value, *rest):
    value = fitting(ref, value)
    starts, mask = [index(element, v) for v in rest[: len(ref.shape)]], (*rest[len(ref.shape) :], None)[0]
    region, place = replace(ref, shape=value.shape), _place(ref, starts)
    bounded = _inside(element, ref, starts, value.shape, ["0"] * len(starts)) if node.attrs["edge"] == CLIP else []
    if mask is None and not bounded:
        element.move(region, value, place, "")
        return
    with each(element, value.shape) as names:
        conditions = _masked(mask, value.shape, names)
        conditions += _inside(element, ref, starts, value.shape, names) if bounded else []
        _when(element, conditions, f"{onward(region.at(names), place)} = {value.at(names)};")


def _cell(element: Element, ref: View, indices: Sequence[View], shape: tuple[int, ...], names: Sequence[str]) -> str:
    """The element of a memory that blocks of indices name at one place."""
    texts = [f"@as({element.counting}, {v.repeated(shape).at(names)})" for v in indices]
    return onward(View(ref.type, (), ref.buffer, ref.offset, ()).at(()), _place(ref, texts))


@emit(tile.gather)
def _(element, node, ref, *rest):
    rank, out = len(ref.shape), element.fresh(node.out.type)
    mask, other = (*rest[rank:], None, None)[:2]
    zero = View(out.type, out.shape, literal=literal(0, node.out.type.dtype))
    given = zero if other is None else other.repeated(out.shape)
    with each(element, out.shape) as names:
        source = _cell(element, ref, rest[:rank], out.shape, names)
        conditions = _masked(mask, out.shape, names)
        _when(element, conditions, f"{out.at(names)} = {source};", f"{out.at(names)} = {given.at(names)};")
    return out


def _shape(node: Node, first: int) -> tuple[int, ...]:
    """The shape of blocks of indices, and of what stands before them, put together."""
    return tuple(int(n) for n in broadcast(*(v.type.shape for v in node.args[first:])))


@emit(tile.scatter)
def _(element, node, ref, value, *rest):
    rank, shape = len(ref.shape), _shape(node, 1)
    with each(element, shape) as names:
        target = _cell(element, ref, rest[:rank], shape, names)
        mask = (*rest[rank:], None)[0]
        _when(element, _masked(mask, shape, names), f"{target} = {fitting(ref, value).repeated(shape).at(names)};")


UPDATES = {
    "add": "{0} + {1}", "max": "if ({1} > {0} or {1} != {1}) {1} else {0}", "exchange": "{1}",
    "min": "if ({1} < {0} or {1} != {1}) {1} else {0}", "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}",
}  # fmt: skip


@emit(tile.atomic)
def _(element, node, ref, value, *rest):
    rank, out, old = len(ref.shape), element.fresh(node.out.type), f"old{next(element.names)}"
    if SPELLING[node.out.type.dtype] == "i16" and node.out.type.dtype.bits < 16:
        raise unsupported(node, "updates are of 16 bits or more")
    with each(element, out.shape) as names:
        place = _cell(element, ref, rest[:rank], out.shape, names)
        text = UPDATES[node.attrs["kind"]].format(old, fitting(ref, value).repeated(out.shape).at(names))
        mask = (*rest[rank:], None)[0]
        then = f"const {old}: {out.type} = {place}; {place} = {text}; {out.at(names)} = {old};"
        _when(element, _masked(mask, out.shape, names), then, f"{out.at(names)} = {literal(0, node.out.type.dtype)};")
    return out


@emit(tile.compare_exchange)
def _(element, node, ref, value, expected, *rest):
    rank, out, old = len(ref.shape), element.fresh(node.out.type), f"old{next(element.names)}"
    with each(element, out.shape) as names:
        place = _cell(element, ref, rest[:rank], out.shape, names)
        given, wanted = (fitting(ref, v).repeated(out.shape).at(names) for v in (value, expected))
        mask = (*rest[rank:], None)[0]
        swap = f"if ({old} == {wanted}) {{ {place} = {given}; }}"
        then = f"const {old}: {out.type} = {place}; {swap} {out.at(names)} = {old};"
        _when(element, _masked(mask, out.shape, names), then, f"{out.at(names)} = {literal(0, node.out.type.dtype)};")
    return out


@emit(tile.alloc)
def _(element, node):
    shape, kind = tuple(map(int, node.out.type.shape)), SPELLING[node.out.type.dtype]
    return element.room(shape, kind)


@emit(tile.async_copy)
def _(element, node, dst, src, *starts):
    here, texts = len(dst.shape), [index(element, v) for v in starts]
    rank = max(here, len(src.shape), len(node.attrs["shape"]))
    block = (1,) * (rank - len(node.attrs["shape"])) + tuple(node.attrs["shape"])
    target, source = (_leveled(v, block) for v in (dst, src))
    to, start = _place(dst, texts[:here]), _place(src, texts[here:])
    level = ["0"] * (rank - len(src.shape)) + texts[here:]
    bounded = _inside(element, source[1], level, block, ["0"] * rank) if node.attrs["edge"] == CLIP else []
    if not bounded:
        element.move(target[0], source[0], to, start)
        return
    with each(element, block) as names:
        into = onward(target[0].at(names), to)
        value, zero = onward(source[0].at(names), start), literal(0, node.types[0].dtype)
        _when(element, _inside(element, source[1], level, block, names), f"{into} = {value};", f"{into} = {zero};")


def _leveled(x: View, block: tuple[int, ...]) -> tuple[View, View]:
    """A block's view of a memory of lower rank, and the memory with as many axes."""
    extra = len(block) - len(x.shape)
    strides = (*(0,) * extra, *x.strides)
    return replace(x, shape=block, strides=strides), replace(x, shape=(1,) * extra + x.shape, strides=strides)


# A grid barrier is emitted for a launch of one program alone.
@emit(tile.async_commit, tile.async_wait, tile.barrier, tile.grid_barrier)
def _(element, node):
    return None


def declared(element: Element, param: Value) -> View:
    """The array of a kernel's parameter."""
    shape = tuple(int(n) for n in param.type.shape)
    buffer = element.declare(param, shape)
    return View(buffer.type, shape, buffer, 0, row_major(shape))

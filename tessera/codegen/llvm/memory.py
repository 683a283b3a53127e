"""Reads and writes of one register's worth of elements: contiguous, strided, scattered, masked."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.codegen.llvm import convert
from tessera.codegen.llvm.lane import Body, Index, Kind, Lane, splat, steps
from tessera.codegen.llvm.scratch import Memory
from tessera.codegen.llvm.types import Vec, memory, register, size


@dataclass(frozen=True)
class Address:
    """Where elements lie: a scalar offset, plus `stride` times their number, plus a vector of offsets."""

    scalar: str
    stride: int
    vector: str = ""

    @property
    def uniform(self) -> bool:
        """Whether all are one place."""
        return self.stride == 0 and not self.vector


def address(body: Body, m: Memory, index: Index) -> Address:
    """The place of an index in a memory, in elements."""
    scalar, stride, vector = "0", 0, ""
    for lane, step in zip(index, m.strides, strict=True):
        if lane.kind is Kind.VARYING:
            vector = _vector_sum(body, vector, lane.name, step)
            continue
        stride += step if lane.kind is Kind.RAMP else 0
        scalar = body.text.add(scalar, body.text.mul(lane.name, step))
    return Address(scalar, stride, vector)


def _vector_sum(body: Body, total: str, name: str, step: int) -> str:
    t = Vec("i64", body.width)
    scaled = name if step == 1 else body.text.let(f"mul {t} {name}, {t.const(step)}", "o")
    return body.text.let(f"add {t} {total}, {scaled}", "o") if total else scaled


def load(body: Body, m: Memory, index: Index, mask: Lane | None = None, other: Lane | None = None) -> Lane:
    """The elements at an index; `other` (0 when not given) where the mask is false."""
    body.kernel.scratch.touch(m)
    lanes = [*index, *(x for x in (mask, other) if x is not None)]
    width = body.width_of(*lanes)
    with body.hoisted(*lanes):
        name = _load_masked(body, m, index, mask, other, width)
    return Lane(name, body.kind_of(*lanes))


def _load_masked(body: Body, m: Memory, index: Index, mask: Lane | None, other: Lane | None, width: int) -> str:
    raw = _load_raw(body, m, address(body, m, index), _mask(body, mask, width), width)
    found = decoded(body, m, raw, width)
    if mask is None or other is None:
        return found
    t = register(m.dtype, width)
    cond, rest = body.spread(mask, t.truth), body.spread(other, t)
    return body.text.let(f"select {t.truth} {cond}, {t} {found}, {t} {rest}")


def _mask(body: Body, mask: Lane | None, width: int) -> str | None:
    """The mask of a memory access, with the elements past the end of the axis left out."""
    own = None if mask is None else body.spread(mask, Vec("i1", width))
    end = body.mask if width > 1 else None
    if own is None or end is None:
        return own or end
    t = Vec("i1", width)
    return body.text.let(f"and {t} {own}, {end}", "m")


def _load_raw(body: Body, m: Memory, place: Address, mask: str | None, width: int) -> str:
    t = memory(m.dtype, width)
    if place.uniform and width > 1 and mask is body.mask:
        one = body.text.let(f"load {t.element}, ptr {pointer(body, m, place)}, align {size(m.dtype)}")
        return splat(body.text, t, one)
    if place.vector or place.stride != 1 and width > 1:
        return _gather(body, m, place, mask, t)
    at = pointer(body, m, place)
    if mask is None:
        return body.text.let(f"load {t}, ptr {at}, align {size(m.dtype)}")
    if width > 1:
        return body.text.let(
            f"call {t} @llvm.masked.load.{t.suffix}.p0(ptr {at}, i32 {size(m.dtype)}, "
            f"{t.truth} {mask}, {t} zeroinitializer)"
        )
    return _load_one(body, m, at, mask, t)


def _load_one(body: Body, m: Memory, at: str, mask: str, t: Vec) -> str:
    """A scalar behind a condition: reads the memory's first element instead, so that no branch is needed."""
    safe = body.text.let(f"select i1 {mask}, ptr {at}, ptr {m.base}", "p")
    raw = body.text.let(f"load {t}, ptr {safe}, align {size(m.dtype)}")
    return body.text.let(f"select i1 {mask}, {t} {raw}, {t} {t.const(0)}")


def pointer(body: Body, m: Memory, place: Address) -> str:
    """The address of the first element, in bytes."""
    if place.scalar == "0":
        return m.base
    return body.text.let(f"getelementptr {memory(m.dtype).element}, ptr {m.base}, i64 {place.scalar}", "p")


def _pointers(body: Body, m: Memory, place: Address) -> str:
    t = Vec("i64", body.width)
    base = pointer(body, m, Address(place.scalar, 0))
    offsets = steps(t, place.stride)
    if place.vector:
        offsets = body.text.let(f"add {t} {place.vector}, {offsets}", "o") if place.stride else place.vector
    return body.text.let(f"getelementptr {memory(m.dtype).element}, ptr {base}, {t} {offsets}", "p")


def _gather(body: Body, m: Memory, place: Address, mask: str | None, t: Vec) -> str:
    pointers = _pointers(body, m, place)
    which = mask or t.truth.const(1)
    return body.text.let(
        f"call {t} @llvm.masked.gather.{t.suffix}.v{t.width}p0({t.of('ptr')} {pointers}, i32 {size(m.dtype)}, "
        f"{t.truth} {which}, {t} zeroinitializer)"
    )


def decoded(body: Body, m: Memory, raw: str, width: int) -> str:
    """What was read, as a register."""
    if not convert.has_form(m.dtype):
        return raw
    d = body.text.name()
    body.text.lines(convert.decode(m.dtype, width, d, raw))
    return d


def store(body: Body, m: Memory, index: Index, value: Lane, mask: Lane | None = None) -> None:
    """Write elements at an index, where the mask holds."""
    body.kernel.scratch.touch(m)
    place = address(body, m, index)
    # Where many elements go to one place the last one stands: a scatter keeps that order.
    width = 1 if body.width_of(*index, value, *([mask] if mask else [])) == 1 else body.width
    raw = _encoded(body, m, value, width)
    which = _mask(body, mask, width)
    t = memory(m.dtype, width)
    if width > 1 and (place.vector or place.stride != 1):
        where, form = f"{t.of('ptr')} {_pointers(body, m, place)}", f"scatter.{t.suffix}.v{width}p0"
        body.text.line(_masked_write(form, t, raw, where, m, which or t.truth.const(1)))
        return
    at = pointer(body, m, place)
    if which is None:
        body.text.line(f"store {t} {raw}, ptr {at}, align {size(m.dtype)}")
    elif width > 1:
        body.text.line(_masked_write(f"store.{t.suffix}.p0", t, raw, f"ptr {at}", m, which))
    else:
        _store_one(body, m, at, raw, which, t)


def _masked_write(form: str, t: Vec, raw: str, where: str, m: Memory, mask: str) -> str:
    return f"call void @llvm.masked.{form}({t} {raw}, {where}, i32 {size(m.dtype)}, {t.truth} {mask})"


def _store_one(body: Body, m: Memory, at: str, raw: str, mask: str, t: Vec) -> None:
    """A scalar behind a condition, by a branch."""
    yes, done = body.text.new_label("then"), body.text.new_label("done")
    body.text.line(f"br i1 {mask}, label %{yes}, label %{done}")
    body.text.begin(yes)
    body.text.line(f"store {t} {raw}, ptr {at}, align {size(m.dtype)}")
    body.text.jump(done)


def _encoded(body: Body, m: Memory, value: Lane, width: int) -> str:
    t = register(m.dtype, width)
    name = body.spread(value, t)
    if not convert.has_form(m.dtype):
        return name
    d = body.text.name()
    body.text.lines(convert.encode(m.dtype, width, d, name))
    return d


def inside(body: Body, m: Memory, index: Index, axes: tuple[int, ...]) -> Lane | None:
    """Whether an index lies in the memory along some axes; None where there are none."""
    found: Lane | None = None
    for axis in axes:
        lane = index[axis]
        t = Vec("i64", body.width_of(lane))
        with body.hoisted(lane):
            # Unsigned: a negative index is a very large one.
            name = body.text.let(f"icmp ult {t} {body.spread(lane, t)}, {t.const(m.shape[axis])}", "m")
        found = both(body, found, Lane(name, body.kind_of(lane)))
    return found


def both(body: Body, a: Lane | None, b: Lane | None) -> Lane | None:
    """Where two masks hold; None is a mask that always holds."""
    if a is None or b is None:
        return a or b
    t = Vec("i1", body.width_of(a, b))
    left, right = body.spread(a, t), body.spread(b, t)
    with body.hoisted(a, b):
        name = body.text.let(f"and {t} {left}, {right}", "m")
    return Lane(name, body.kind_of(a, b))

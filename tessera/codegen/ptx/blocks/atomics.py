"""Atomic updates: an instruction where there is one, else a round of compare-and-swap."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from tessera.codegen.ptx.blocks.access import points, spread_to
from tessera.codegen.ptx.blocks.exchange import handed
from tessera.codegen.ptx.memory import Memory, Run
from tessera.codegen.ptx.scalars import words
from tessera.codegen.ptx.scalars.convert import rounded
from tessera.codegen.ptx.scalars.emit import Spot, emit
from tessera.codegen.ptx.scalars.words import in_register
from tessera.codegen.ptx.text import Text
from tessera.codegen.ptx.types import NARROW, register_class, size, word
from tessera.codegen.ptx.visit import visit
from tessera.ir.core import Node, Value
from tessera.ops import elementwise as e
from tessera.ops import tile
from tessera.types import DType, bool_, f32, f64, int32, int64, uint32, uint64

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel

WHOLE = {"and": "and.b", "or": "or.b", "xor": "xor.b", "exchange": "exch.b"}
INTEGERS = (int32, int64, uint32, uint64)
NATIVE: dict[tuple[str, DType], str] = {
    ("add", f32): "add.f32", ("add", f64): "add.f64", **{("add", d): f"add.u{d.bits}" for d in INTEGERS},
    **{(k, d): f"{k}.{word(d)}" for k in ("max", "min") for d in INTEGERS},
    **{(k, d): f"{w}{d.bits}" for k, w in WHOLE.items() for d in INTEGERS},
    ("exchange", f32): "exch.b32", ("exchange", f64): "exch.b64",
}  # fmt: skip
ROWS = {
    "add": e.add,
    "max": e.maximum,
    "min": e.minimum,
    "and": e.bitwise_and,
    "or": e.bitwise_or,
    "xor": e.bitwise_xor,
}
SUM_OF_BOOLS = e.bitwise_or
Change = Callable[[Text, str], str]


@visit(tile.atomic)
def _(kernel: Kernel, node: Node) -> None:
    ref, value, *rest = node.args
    kind, dtype = node.attrs["kind"], ref.type.dtype
    values = spread_to(kernel, value, kernel.layout(node.out))

    def update(m: Memory, run: Run, i: int) -> str:
        if m.space != "local" and (kind, dtype) in NATIVE:
            return _native(kernel.text, m, run, NATIVE[kind, dtype], dtype, values[i])

        def change(text: Text, old: str) -> str:
            if kind == "exchange":
                return values[i]
            op = SUM_OF_BOOLS if dtype == bool_ and kind == "add" else ROWS[kind]
            return emit.of(op)(Spot(text, _wide(dtype), dtype), old, values[i])

        return _looped(kernel.text, m, run, dtype, change)

    _each(kernel, node, rest, update)


@visit(tile.compare_exchange)
def _(kernel, node):
    ref, value, expected, *rest = node.args
    layout, dtype = kernel.layout(node.out), ref.type.dtype
    new, old = spread_to(kernel, value, layout), spread_to(kernel, expected, layout)

    def update(m: Memory, run: Run, i: int) -> str:
        if m.space != "local" and dtype in INTEGERS:
            return _native(kernel.text, m, run, f"cas.b{dtype.bits}", dtype, old[i], new[i])

        def change(text: Text, found: str) -> str:
            same = text.let(f"setp.eq.{word(dtype)}", "pred", found, old[i])
            return text.let(f"selp.{register_class(dtype)}", word(dtype), new[i], found, same)

        return _looped(kernel.text, m, run, dtype, change)

    _each(kernel, node, rest, update)


def _wide(dtype: DType) -> DType:
    return f32 if dtype in NARROW else dtype


def _each(kernel: Kernel, node: Node, rest: list, update: Callable[[Memory, Run, int], str]) -> None:  # type: ignore[type-arg]
    """Every element updated by one thread; what it finds is told to those that hold the same."""
    m, layout = kernel.memories[node.args[0]], kernel.layout(node.out)
    _by_halves(kernel, node.args[0])
    rank = len(m.shape)
    runs = points(kernel, m, rest[:rank], rest[rank] if rest[rank:] else None, layout, once=True)
    found = tuple(update(m, run, i) for i, run in enumerate(runs))
    if layout.spare and node.out in kernel.used:
        found = handed(kernel, m.dtype, found, layout, layout)
    kernel.values[node.out] = found


def _native(text: Text, m: Memory, run: Run, word_: str, dtype: DType, *operands: str) -> str:
    kind = register_class(dtype)
    given = [in_register(text, kind, x) for x in operands]
    plain = f"b{size(dtype) * 8}" if ".b" in word_ else kind
    given = [text.let(f"mov.{plain}", plain, x) for x in given] if plain != kind else given
    old = text.new(plain)
    if run.guards[0]:
        text.do(f"mov.{plain}", old, {"f32": "0f00000000", "f64": "0d0000000000000000"}.get(plain, 0))
    text.do(f"atom.{m.space}.{word_}", old, run.place, *given, guard=run.guards[0])
    return text.let(f"mov.{plain}", kind, old) if plain != kind else old


def _looped(text: Text, m: Memory, run: Run, dtype: DType, change: Change) -> str:
    """Read, change, and swap if nothing came in between; memory of the thread's own is simply written."""
    guard = run.guards[0]
    done = text.new_label("done")
    result = text.let(f"mov.{register_class(dtype)}", word(dtype), words.zero(register_class(dtype)))
    if guard:
        text.do(f"bra {done}", guard=text.let("not.pred", "pred", guard))
    bare = Run(run.first, 1, run.address, run.offset, ("",))
    if m.space == "local":
        (old,) = words.load(text, m.space, dtype, bare)
        words.store(text, m.space, dtype, bare, [change(text, old)])
        text.do(f"mov.{register_class(dtype)}", result, old)
    else:
        _swap(text, m, bare, dtype, change, result)
    text.label(done)
    return result


def _swap(text: Text, m: Memory, run: Run, dtype: DType, change: Change, result: str) -> None:
    bits, again = size(dtype) * 8, text.new_label("again")
    if bits < 32:
        _swap_half(text, m, run, dtype, change, result)
        return
    seen = text.let(f"ld.{m.space}.b{bits}", f"b{bits}", run.place)
    text.label(again)
    old = _from_bits(text, dtype, seen)
    new = _to_bits(text, dtype, change(text, old))
    found = text.let(f"atom.{m.space}.cas.b{bits}", f"b{bits}", run.place, seen, new)
    text.do(f"mov.{register_class(dtype)}", result, old)
    other = text.let(f"setp.ne.b{bits}", "pred", found, seen)
    text.do(f"mov.b{bits}", seen, found)
    text.do(f"bra {again}", guard=other)


def _from_bits(text: Text, dtype: DType, bits: str) -> str:
    return text.let(f"mov.{word(dtype)}", word(dtype), bits) if dtype.is_float else bits


def _to_bits(text: Text, dtype: DType, x: str) -> str:
    if not dtype.is_float:
        return x
    return text.let(f"mov.b{dtype.numpy.itemsize * 8}", f"b{dtype.numpy.itemsize * 8}", _narrowed(text, dtype, x))


def _narrowed(text: Text, dtype: DType, x: str) -> str:
    return rounded(text, dtype, x) if dtype in NARROW else x


def _swap_half(text: Text, m: Memory, run: Run, dtype: DType, change: Change, result: str) -> None:
    """The same for elements of one or two bytes, by the two bytes at an even address that hold them."""
    kind, again = register_class(dtype), text.new_label("again")
    place, shift = _half(text, run) if size(dtype) == 1 else (run.place, "")
    seen = text.let(f"ld.{m.space}.b16", "b16", place)
    text.label(again)
    both = text.let("cvt.u32.u16", "b32", seen)
    old = words.DECODE[dtype](text, text.let("shr.u32", "b32", both, shift) if shift else both, 0)
    new = words.encoded(text, dtype, [_narrowed(text, dtype, change(text, old))])[0]
    new = text.let("bfi.b32", "b32", new, both, shift, 8) if shift else words.in_register(text, "b32", new)
    found = text.let(f"atom.{m.space}.cas.b16", "b16", place, seen, text.let("cvt.u16.u32", "b16", new))
    text.do(f"mov.{kind}", result, old)
    other = text.let("setp.ne.s16", "pred", found, seen)
    text.do("mov.b16", seen, found)
    text.do(f"bra {again}", guard=other)


def _half(text: Text, run: Run) -> tuple[str, str]:
    """The even address below a byte's, as an operand, and how far up the byte lies from there, in bits."""
    address = text.let("add.s64", "b64", run.address, run.offset) if run.offset else run.address
    odd = text.let("and.b64", "b64", address, 1)
    even = text.let("sub.s64", "b64", address, odd)
    return f"[{even}]", text.let("shl.b32", "b32", text.let("cvt.u32.u64", "b32", odd), 3)


def _by_halves(kernel: Kernel, ref: Value) -> None:
    """Note a parameter whose last byte is swapped together with the one behind it."""
    m = kernel.memories[ref]
    if m.space == "global" and size(m.dtype) == 1 and math.prod(m.shape) % 2:
        kernel.halves.add(kernel.function.params.index(ref))

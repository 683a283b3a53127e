"""Atomic updates: an instruction where there is one, else a round of compare-and-swap."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tessera.codegen.ptx import words
from tessera.codegen.ptx.access import points, spread_to
from tessera.codegen.ptx.convert import rounded
from tessera.codegen.ptx.emit import Spot, emit
from tessera.codegen.ptx.exchange import handed
from tessera.codegen.ptx.memory import Memory, Run
from tessera.codegen.ptx.text import Text
from tessera.codegen.ptx.types import register_class, size, word
from tessera.codegen.ptx.visit import visit
from tessera.codegen.ptx.words import in_register
from tessera.errors import UnsupportedOpError
from tessera.ir.core import Node
from tessera.ops import elementwise as e
from tessera.ops import tile
from tessera.types import DType, bf16, f16, f32, f64, int32, int64

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel

WHOLE = {"and": "and.b", "or": "or.b", "xor": "xor.b", "exchange": "exch.b"}
NATIVE: dict[tuple[str, DType], str] = {
    **{("add", d): f"add.{w}" for d, w in ((f32, "f32"), (f64, "f64"), (int32, "u32"), (int64, "u64"))},
    **{(k, d): f"{k}.{word(d)}" for k in ("max", "min") for d in (int32, int64)},
    **{(k, d): f"{w}{d.bits}" for k, w in WHOLE.items() for d in (int32, int64)},
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
BY_BITS = {f32: "b32", f64: "b64"}
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
            return (
                values[i]
                if kind == "exchange"
                else emit.of(ROWS[kind])(Spot(text, _wide(dtype), dtype), old, values[i])
            )

        return _looped(kernel.text, m, run, dtype, change)

    _each(kernel, node, rest, update)


@visit(tile.compare_exchange)
def _(kernel, node):
    ref, value, expected, *rest = node.args
    layout, dtype = kernel.layout(node.out), ref.type.dtype
    new, old = spread_to(kernel, value, layout), spread_to(kernel, expected, layout)

    def update(m: Memory, run: Run, i: int) -> str:
        if m.space != "local" and dtype in (int32, int64):
            return _native(kernel.text, m, run, f"cas.b{dtype.bits}", dtype, old[i], new[i])

        def change(text: Text, found: str) -> str:
            same = text.let(f"setp.eq.{word(dtype)}", "pred", found, old[i])
            return text.let(f"selp.{register_class(dtype)}", word(dtype), new[i], found, same)

        return _looped(kernel.text, m, run, dtype, change)

    _each(kernel, node, rest, update)


def _wide(dtype: DType) -> DType:
    return f32 if dtype in (f16, bf16) else dtype


def _each(kernel: Kernel, node: Node, rest: list, update: Callable[[Memory, Run, int], str]) -> None:  # type: ignore[type-arg]
    """Every element updated by one thread; what it finds is told to those that hold the same."""
    m, layout = kernel.memories[node.args[0]], kernel.layout(node.out)
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
    if bits < 16:
        raise UnsupportedOpError(f"the target ptx has no atomic update of {dtype}", suggestion="use ts.int32 or ts.f32")
    seen = text.let(f"ld.{m.space}.b{bits}", f"b{bits}", run.place)
    text.label(again)
    old = _from_bits(text, dtype, seen)
    new = _to_bits(text, dtype, change(text, old))
    found = text.let(f"atom.{m.space}.cas.b{bits}", f"b{bits}", run.place, seen, new)
    text.do(f"mov.{register_class(dtype)}", result, old)
    other = text.let(f"setp.ne.{'b' if bits > 16 else 's'}{bits}", "pred", found, seen)
    text.do(f"mov.b{bits}", seen, found)
    text.do(f"bra {again}", guard=other)


def _from_bits(text: Text, dtype: DType, bits: str) -> str:
    if dtype in (f16, bf16):
        return words.DECODE[dtype](text, text.let("cvt.u32.u16", "b32", bits), 0)
    return text.let(f"mov.{BY_BITS[dtype]}", word(dtype), bits) if dtype in BY_BITS else bits


def _to_bits(text: Text, dtype: DType, x: str) -> str:
    if dtype in (f16, bf16):
        return text.let("cvt.u16.u32", "b16", words.ENCODE[dtype](text, rounded(text, dtype, x)))
    return text.let(f"mov.{BY_BITS[dtype]}", BY_BITS[dtype], x) if dtype in BY_BITS else x

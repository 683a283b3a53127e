"""Pair products: sums of two products of 16-bit elements in each 32-bit lane of a register, or of four of 8 bits.

    c + a.low · b.low + a.high · b.high        (vdpbf16ps of AVX512_BF16; vpmaddwd, or vpdpwssd with AVX512_VNNI)
    c + a.0 · b.0 + … + a.3 · b.3              (vpdpbusd of AVX512_VNNI: one operand is unsigned, the other signed)

A text defines each product in plain LLVM IR, so that it runs on every processor and in the emulator. Where the
processor has the instruction, the runtime replaces the definition (`select_instructions`). The instruction for bf16
takes subnormal operands and results as zero: it is used where there can be none (`find_least` in
`tessera/codegen/llvm/table/pair_operands.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

WIDTH = 16  # lanes
PAIR_PRODUCT = "ts.pair_product"  # begins the name of each function


@dataclass(frozen=True)
class PairProduct:
    """A product of pairs or quads, of floats or of integers, and the instruction of processors with a feature."""

    name: str
    element: str  # of the sum
    plain: tuple[str, ...]  # the product in LLVM IR that every processor has
    feature: str = ""  # of the processors that have an instruction
    instruction: tuple[str, ...] = ()
    declaration: str = ""
    parts: int = 2  # elements of a lane

    @property
    def unit(self) -> str:
        """The integer type of the bits of an element."""
        return f"i{32 // self.parts}"

    @property
    def function(self) -> str:
        """The name of the function."""
        return f"{PAIR_PRODUCT}.{self.name}.v{WIDTH}"

    def call(self, total: str, a: str, b: str) -> str:
        """A call of the function."""
        wide, pairs = f"<{WIDTH} x {self.element}>", f"<{WIDTH} x i32>"
        return f"call {wide} @{self.function}({wide} {total}, {pairs} {a}, {pairs} {b})"

    def define(self, body: tuple[str, ...]) -> list[str]:
        """The function with these instructions, the last of which defines %r."""
        wide, pairs = f"<{WIDTH} x {self.element}>", f"<{WIDTH} x i32>"
        head = f"define internal {wide} @{self.function}({wide} %c, {pairs} %a, {pairs} %b) alwaysinline #0 {{"
        return [head, "entry:", *(f"  {line}" for line in body), f"  ret {wide} %r", "}"]

    def text(self) -> list[str]:
        """The function in plain LLVM IR."""
        return self.define(self.plain)


_P, _F = f"<{WIDTH} x i32>", f"<{WIDTH} x float>"
_FLOATS = (
    *(f"%{x}.s = shl {_P} %{x}, splat (i32 16)" for x in "ab"),
    *(f"%{x}.low = bitcast {_P} %{x}.s to {_F}" for x in "ab"),
    *(f"%{x}.m = and {_P} %{x}, splat (i32 -65536)" for x in "ab"),
    *(f"%{x}.high = bitcast {_P} %{x}.m to {_F}" for x in "ab"),
    f"%t = call {_F} @llvm.fma.v{WIDTH}f32({_F} %a.low, {_F} %b.low, {_F} %c)",
    f"%r = call {_F} @llvm.fma.v{WIDTH}f32({_F} %a.high, {_F} %b.high, {_F} %t)",
)
_INTEGERS = (
    *(f"%{x}.s = shl {_P} %{x}, splat (i32 16)" for x in "ab"),
    *(f"%{x}.low = ashr {_P} %{x}.s, splat (i32 16)" for x in "ab"),
    *(f"%{x}.high = ashr {_P} %{x}, splat (i32 16)" for x in "ab"),
    f"%p = mul {_P} %a.low, %b.low",
    f"%q = mul {_P} %a.high, %b.high",
    f"%t = add {_P} %p, %q",
    f"%r = add {_P} %c, %t",
)


def _expand_bytes(signed: str) -> tuple[str, ...]:
    """Products of bytes, of which those of one operand are signed and those of the other unsigned."""
    lines, total = [], "%c"
    for n in range(4):
        for x in "ab":
            shift, place = ("ashr" if x == signed else "lshr"), f"splat (i32 {24 - 8 * n})"
            lines.append(f"%{x}.s{n} = shl {_P} %{x}, {place}")
            lines.append(f"%{x}.{n} = {shift} {_P} %{x}.s{n}, splat (i32 24)")
        lines.append(f"%p{n} = mul {_P} %a.{n}, %b.{n}")
        name = "%r" if n == 3 else f"%t{n}"
        lines.append(f"{name} = add {_P} {total}, %p{n}")
        total = name
    return tuple(lines)


def _define_bytes(name: str, unsigned: str, signed: str) -> PairProduct:
    """The product of quads with these operands unsigned and signed."""
    bytes_ = f"<{4 * WIDTH} x i8>"
    function = f"{_P} @llvm.x86.avx512.vpdpbusd.512"
    lines = (
        f"%x = bitcast {_P} %{unsigned} to {bytes_}",
        f"%y = bitcast {_P} %{signed} to {bytes_}",
        f"%r = call {function}({_P} %c, {bytes_} %x, {bytes_} %y)",
    )
    declaration = f"declare {function}({_P}, {bytes_}, {bytes_})"
    return PairProduct(name, "i32", _expand_bytes(signed), "avx512vnni", lines, declaration, 4)


EXACT_BF16 = PairProduct("exact.bf16", "float", _FLOATS)
BF16 = PairProduct(
    "bf16",
    "float",
    _FLOATS,
    "avx512bf16",
    (
        f"%x = bitcast {_P} %a to <{2 * WIDTH} x bfloat>",
        f"%y = bitcast {_P} %b to <{2 * WIDTH} x bfloat>",
        f"%r = call {_F} @llvm.x86.avx512bf16.dpbf16ps.512"
        f"({_F} %c, <{2 * WIDTH} x bfloat> %x, <{2 * WIDTH} x bfloat> %y)",
    ),
    f"declare {_F} @llvm.x86.avx512bf16.dpbf16ps.512({_F}, <{2 * WIDTH} x bfloat>, <{2 * WIDTH} x bfloat>)",
)
INT16 = PairProduct(
    "i16",
    "i32",
    _INTEGERS,
    "avx512bw",
    (
        f"%x = bitcast {_P} %a to <{2 * WIDTH} x i16>",
        f"%y = bitcast {_P} %b to <{2 * WIDTH} x i16>",
        f"%p = call {_P} @llvm.x86.avx512.pmaddw.d.512(<{2 * WIDTH} x i16> %x, <{2 * WIDTH} x i16> %y)",
        f"%r = add {_P} %c, %p",
    ),
    f"declare {_P} @llvm.x86.avx512.pmaddw.d.512(<{2 * WIDTH} x i16>, <{2 * WIDTH} x i16>)",
)
UINT8_INT8 = _define_bytes("u8.s8", "a", "b")
INT8_UINT8 = _define_bytes("s8.u8", "b", "a")
QUADS = (UINT8_INT8, INT8_UINT8)
NATIVE = (BF16, INT16, *QUADS)


def select_instructions(text: str, features: Collection[str]) -> str:
    """A text with the products that a processor has an instruction for as this instruction."""
    for product in NATIVE:
        plain = "\n".join(product.text())
        if product.feature in features and plain in text:
            known = product.declaration in text
            native = "\n".join([*product.define(product.instruction), *(() if known else (product.declaration,))])
            text = text.replace(plain, native)
    return text

"""Pair products: sums of two products of 16-bit elements in each lane of a register of 32-bit lanes.

    c + a.low · b.low + a.high · b.high        (vdpbf16ps of AVX512_BF16; vpmaddwd, or vpdpwssd with AVX512_VNNI)

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
    """A product of pairs, of floats or of integers, and the instruction of processors with a feature."""

    name: str
    element: str  # of the sum
    feature: str = ""  # of the processors that have an instruction
    instruction: tuple[str, ...] = ()
    declaration: str = ""

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
        return self.define(_FLOATS if self.element == "float" else _INTEGERS)


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

EXACT_BF16 = PairProduct("exact.bf16", "float")
BF16 = PairProduct(
    "bf16",
    "float",
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
    "avx512bw",
    (
        f"%x = bitcast {_P} %a to <{2 * WIDTH} x i16>",
        f"%y = bitcast {_P} %b to <{2 * WIDTH} x i16>",
        f"%p = call {_P} @llvm.x86.avx512.pmaddw.d.512(<{2 * WIDTH} x i16> %x, <{2 * WIDTH} x i16> %y)",
        f"%r = add {_P} %c, %p",
    ),
    f"declare {_P} @llvm.x86.avx512.pmaddw.d.512(<{2 * WIDTH} x i16>, <{2 * WIDTH} x i16>)",
)
NATIVE = (BF16, INT16)


def select_instructions(text: str, features: Collection[str]) -> str:
    """A text with the products that a processor has an instruction for as this instruction."""
    for product in NATIVE:
        plain = "\n".join(product.text())
        if product.feature in features and plain in text:
            native = "\n".join([*product.define(product.instruction), product.declaration])
            text = text.replace(plain, native)
    return text

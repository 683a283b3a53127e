"""Scaling by a power of two: the last step of exponential functions of f32, of which AVX-512 has an instruction.

A text defines it in plain LLVM IR, so that it runs on every processor and in the emulator. Where the processor has the
instruction, the runtime replaces the definition.
"""

from __future__ import annotations

WIDTH = 16  # lanes
FEATURE = "avx512f"
SCALE_BY_POWER = f"ts.scale_by_power.v{WIDTH}f32"
_F, _I = f"<{WIDTH} x float>", f"<{WIDTH} x i32>"
# 1.5 * 2^23 and its bits: %n is this and the exponent, an integer in the low bits of the mantissa.
ROUND_TO_INTEGER, ROUND_TO_INTEGER_BITS = "0x4168000000000000", 0x4B400000
_PLAIN = (
    f"%b = bitcast {_F} %n to {_I}",
    f"%i = sub {_I} %b, splat (i32 {ROUND_TO_INTEGER_BITS})",
    f"%h = ashr {_I} %i, splat (i32 1)",
    f"%l = sub {_I} %i, %h",
    *(f"%{x}.e = add {_I} %{x}, splat (i32 127)" for x in "hl"),
    *(f"%{x}.b = shl {_I} %{x}.e, splat (i32 23)" for x in "hl"),
    *(f"%{x}.f = bitcast {_I} %{x}.b to {_F}" for x in "hl"),
    f"%p.h = fmul {_F} %p, %h.f",  # in two steps, so that neither factor leaves the range of normal numbers
    f"%r = fmul {_F} %p.h, %l.f",
)
# Two to this power, times a number below 2, rounds to 0. The instruction needs 150 cycles for a result that underflows,
# as those of masked scores do, and a few for 2 to the power of minus infinity.
LEAST_POWER = -151
_INSTRUCTION = "@llvm.x86.avx512.mask.scalef.ps.512"
_NATIVE = (
    f"%f = fsub {_F} %n, splat (float {ROUND_TO_INTEGER})",
    f"%tiny = fcmp ole {_F} %f, splat (float {LEAST_POWER:.1f})",
    f"%g = select <{WIDTH} x i1> %tiny, {_F} splat (float 0xFFF0000000000000), {_F} %f",
    f"%r = call {_F} {_INSTRUCTION}({_F} %p, {_F} %g, {_F} zeroinitializer, i16 -1, i32 4)",
)
DECLARATION = f"declare {_F} {_INSTRUCTION}({_F}, {_F}, {_F}, i16, i32 immarg)"


def _define(body: tuple[str, ...]) -> list[str]:
    head = f"define internal {_F} @{SCALE_BY_POWER}({_F} %p, {_F} %n) alwaysinline #0 {{"
    return [head, "entry:", *(f"  {line}" for line in body), f"  ret {_F} %r", "}"]


DEFINITION = tuple(_define(_PLAIN))  # in plain LLVM IR: `%p` times 2 to the power of an integer, which `%n` encodes


NATIVE = (*_define(_NATIVE), DECLARATION)  # by the instruction, and what declares this

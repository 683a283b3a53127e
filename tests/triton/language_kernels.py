"""One kernel for each part of Triton's language: loads a row of 128 elements `x`, and stores a result."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

N = tl.constexpr(128)


@triton.jit
def sort(x, out):
    at = tl.arange(0, N)
    tl.store(out + at, tl.sort(tl.load(x + at), descending=True))


@triton.jit
def _affine(a, b, c, d):
    return a * c, b * c + d


@triton.jit
def recurrence(x, out):
    at = tl.arange(0, N)
    value = tl.load(x + at)
    _, state = tl.associative_scan((value * 0 + 0.5, value), 0, _affine)
    tl.store(out + at, state)


@triton.jit
def cumulative(x, out):
    at = tl.arange(0, N)
    tl.store(out + at, tl.cumsum(tl.load(x + at), reverse=True))


@triton.jit
def histogram(x, out):
    at = tl.arange(0, N)
    tl.store(out + tl.arange(0, 16), tl.histogram(tl.load(x + at), 16))


@triton.jit
def joined(x, out):
    at = tl.arange(0, N)
    value = tl.load(x + at)
    tl.store(out + tl.arange(0, 2 * N), tl.cat(value, -value, can_reorder=False))


@triton.jit
def interleaved(x, out):
    at = tl.arange(0, N)
    value = tl.load(x + at)
    tl.store(out + tl.arange(0, 2 * N), tl.interleave(value, -value))


@triton.jit
def gathered(x, out):
    at = tl.arange(0, N)
    tl.store(out + at, tl.gather(tl.load(x + at), (at * 37) % N, 0))


@triton.jit
def maximum(x, out):
    at = tl.arange(0, N)
    value, place = tl.max(tl.load(x + at), 0, return_indices=True)
    tl.store(out, value)
    tl.store(out + 1, place)


@triton.jit
def flipped(x, out):
    at = tl.arange(0, N)
    tl.store(out + at, tl.flip(tl.load(x + at)))


@triton.jit
def special_functions(x, out):
    at = tl.arange(0, N)
    value = tl.load(x + at)
    tl.store(out + at, libdevice.erf(value) + tl.exp2(tl.sigmoid(value)) + libdevice.cbrt(tl.math.rsqrt(value + 9)))


@triton.jit
def assembly(x, out):
    at = tl.arange(0, N)
    value = tl.inline_asm_elementwise(
        "xor.b32 $0, $1, $2;", "=r,r,r", [tl.load(x + at), (at % 50).to(tl.uint8)], tl.uint8, True, 4
    )
    tl.store(out + at, value)


@triton.jit
def atomics(x, out):
    at = tl.arange(0, N)
    value = tl.load(x + at)
    tl.atomic_add(out + at % 4, value)
    tl.atomic_max(out + 4 + at % 2, value)
    tl.atomic_min(out + 6 + at * 0, value)
    tl.atomic_or(out + 7 + at * 0, value)
    tl.atomic_xor(out + 8 + at % 3, value)


@triton.jit
def printing(x, out):
    at = tl.arange(0, N)
    value = tl.load(x + at)
    tl.device_print("value:", tl.sum(value))
    tl.store(out + at, value)


@triton.jit
def dot(a, b, c, M: tl.constexpr, K: tl.constexpr, precision: tl.constexpr):
    m, k = tl.arange(0, M), tl.arange(0, K)
    left, right = tl.load(a + m[:, None] * K + k), tl.load(b + k[:, None] * M + m)
    tl.store(c + m[:, None] * M + m, tl.dot(left, right, out_dtype=c.dtype.element_ty, input_precision=precision))


@triton.jit
def descriptors(source, target, M, K, stride, scale, BM: tl.constexpr, BK: tl.constexpr):
    for row in range(tl.program_id(0) * BM, M, BM * tl.num_programs(0)):
        for column in range(0, K, BK):
            target.store([row, column], source.load([row, column]) * scale)


@triton.jit
def device_descriptors(source, target, M, K, stride, scale, BM: tl.constexpr, BK: tl.constexpr):
    left = tl.make_tensor_descriptor(source, [M, K], [stride, 1], [BM, BK])
    right = tl.make_tensor_descriptor(target, [M, K], [stride, 1], [BM, BK])
    for row in range(tl.program_id(0) * BM, M, BM * tl.num_programs(0)):
        for column in range(0, K, BK):
            right.store([row, column], left.load([row, column]) * scale)

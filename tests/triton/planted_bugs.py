"""Kernels with one planted bug each, at the line that says `# bug`; a race names the other access's line too."""

import torch
import triton
import triton.language as tl

SIZE, BLOCK = 256, 128


@triton.jit
def load_without_mask(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at)  # bug
    tl.store(out + at, value, mask=at < n)


@triton.jit
def store_without_mask(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    tl.store(out + at, value)  # bug


@triton.jit
def wrong_stride(x, out, rows, cols, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + row * (cols + 1) + col, mask=col < cols)  # bug
    tl.store(out + row * cols + col, value, mask=col < cols)


@triton.jit
def index_past_the_bins(x, bins, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(bins + tl.load(x + at, mask=at < n), 1, mask=at < n)  # bug


@triton.jit
def accumulate_into_empty(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    old = tl.load(out + at)  # bug
    tl.store(out + at, old + tl.load(x + at))


@triton.jit
def copy(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)  # bug


@triton.jit
def sum_without_atomics(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    old = tl.load(out)  # other
    tl.store(out, old + tl.sum(tl.load(x + at)))  # bug


@triton.jit
def overlapping_programs(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * (BLOCK // 2) + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) * tl.program_id(0))  # bug, other


@triton.jit
def unlock_too_early(x, out, lock, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    total = tl.load(out + at) + tl.load(x + tl.program_id(0) * BLOCK + at)  # other
    tl.atomic_xchg(lock, 0)
    tl.store(out + at, total)  # bug


@triton.jit
def neighbour_without_barrier(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at)
    other = tl.inline_asm_elementwise(  # bug, other
        """{ .shared .align 4 .b32 buffer[128]; .reg .u32 %mine, %theirs;
             mov.u32 %mine, %tid.x; xor.b32 %theirs, %mine, 64; shl.b32 %mine, %mine, 2; shl.b32 %theirs, %theirs, 2;
             .reg .u32 %base; mov.u32 %base, buffer; add.u32 %mine, %mine, %base; add.u32 %theirs, %theirs, %base;
             st.shared.b32 [%mine], $1; ld.shared.b32 $0, [%theirs]; }""",
        "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(out + at, other)


@triton.jit
def shared_memory_never_written(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.inline_asm_elementwise(  # bug
        "{ .shared .align 4 .b32 buffer[4]; ld.shared.b32 $0, [buffer]; add.s32 $0, $0, $1; }",
        "=r,r", [tl.load(x + at)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(out + at, value)


@triton.jit
def copy_without_wait(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.inline_asm_elementwise(  # bug
        """{ .shared .align 16 .b32 buffer[128]; .reg .u32 %slot, %base; mov.u32 %slot, %tid.x; shl.b32 %slot, %slot, 2;
             mov.u32 %base, buffer; add.u32 %slot, %slot, %base; cp.async.ca.shared.global [%slot], [$1], 4;
             cp.async.commit_group; ld.shared.b32 $0, [%slot]; }""",
        "=r,l", [x + at], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(out + at, value)


@triton.jit
def untrue_alignment(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.max_contiguous(tl.multiple_of(at + n, [4]), [4])
    tl.store(out + at, tl.load(x + place))  # bug


@triton.jit
def barrier_of_half_the_threads(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.inline_asm_elementwise(  # bug
        """{ .reg .pred %p; .reg .u32 %t; mov.u32 %t, %tid.x; setp.lt.u32 %p, %t, 64;
             @%p bar.sync 1, 128; mov.b32 $0, $1; }""",
        "=r,r", [tl.load(x + at)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(out + at, value)


@triton.jit(debug=True)
def failing_assertion(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.device_assert(value < 200, "a value is too large")  # bug
    tl.store(out + at, value)


def floats(n=SIZE):
    return torch.arange(n, dtype=torch.float32)


def integers(n=SIZE):
    return torch.arange(n, dtype=torch.int32)


def launch_partial_copies():
    middle = torch.empty(SIZE)
    copy[(1,)](floats(), middle, SIZE, BLOCK=BLOCK)  # one program of two
    copy[(2,)](middle, torch.empty(SIZE), SIZE, BLOCK=BLOCK)


# By name: the error, and the launch.
BUGS = {
    "load_without_mask": ("OutOfBoundsError", lambda k: k[(2,)](floats(200), torch.empty(200), 200, BLOCK=BLOCK)),
    "store_without_mask": ("OutOfBoundsError", lambda k: k[(2,)](floats(200), torch.empty(200), 200, BLOCK=BLOCK)),
    "wrong_stride": ("OutOfBoundsError", lambda k: k[(4,)](floats(400), torch.empty(400), 4, 100, BLOCK=BLOCK)),
    "index_past_the_bins": ("OutOfBoundsError", lambda k: k[(2,)](integers(), integers(16), SIZE, BLOCK=BLOCK)),
    "accumulate_into_empty": ("UninitializedError", lambda k: k[(2,)](floats(), torch.empty(SIZE), SIZE, BLOCK=BLOCK)),
    "copy": ("UninitializedError", lambda k: launch_partial_copies()),
    "sum_without_atomics": ("RaceError", lambda k: k[(2,)](floats(), torch.zeros(1), SIZE, BLOCK=BLOCK)),
    "overlapping_programs": ("RaceError", lambda k: k[(3,)](floats(), torch.empty(SIZE), SIZE, BLOCK=BLOCK)),
    "unlock_too_early": ("RaceError", lambda k: k[(2,)](floats(), torch.zeros(BLOCK), integers(1), BLOCK=BLOCK)),
    "neighbour_without_barrier": ("RaceError", lambda k: k[(1,)](integers(), integers(), SIZE, BLOCK=BLOCK)),
    "shared_memory_never_written": ("UninitializedError", lambda k: k[(1,)](integers(), integers(), SIZE, BLOCK=BLOCK)),
    "copy_without_wait": ("AsyncCopyError", lambda k: k[(1,)](integers(), integers(), SIZE, BLOCK=BLOCK)),
    "untrue_alignment": ("OutOfBoundsError", lambda k: k[(1,)](floats(), floats(), 1, BLOCK=BLOCK, num_warps=1)),
    "barrier_of_half_the_threads": ("BarrierError", lambda k: k[(1,)](integers(), integers(), SIZE, BLOCK=BLOCK)),
    "failing_assertion": ("ExecutionError", lambda k: k[(1,)](2 * integers(), integers(), SIZE, BLOCK=BLOCK)),
}  # fmt: skip

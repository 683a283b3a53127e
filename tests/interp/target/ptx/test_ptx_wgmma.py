"""wgmma against NumPy: types, widths, layouts of shared memory, A in registers, scales."""

import ml_dtypes
import numpy as np
import pytest
from ptx_hopper_snippets import barrier, entry, load

from tessera.core.errors import OutOfBoundsError
from tessera.interp.target.ptx import PtxModule, TensorMap

DTYPES = {"f16": "f2", "bf16": ml_dtypes.bfloat16, "tf32": "f4", "e4m3": ml_dtypes.float8_e4m3fn}
DTYPES |= {"e5m2": ml_dtypes.float8_e5m2, "s8": "i1", "u8": "u1"}
CODES = {128: 1, 64: 2, 32: 3, 0: 0}


def random(shape, t, seed):
    rng = np.random.default_rng(seed)
    low = 0 if t == "u8" else -4
    return rng.integers(low, 5, shape).astype(DTYPES[t])


def descriptor(name, start, leading, stride, swizzle):
    """A register with a matrix descriptor: the start comes from a register, the rest is constant."""
    rest = CODES[swizzle] << 62 | stride >> 4 << 32 | leading >> 4 << 16
    return f"""add.u32 %t, %s, {start}; and.b32 %t, %t, 0x3FFFF; shr.u32 %t, %t, 4; cvt.u64.u32 {name}, %t;
    or.b64 {name}, {name}, {rest};"""


def stores(n, acc):
    """Each thread's accumulators to their places in a row-major result: the ISA's figure for D."""
    size = 2 if acc == "f16" else 4
    lines = [
        f"""shr.u32 %r0, %i, 5; and.b32 %r1, %i, 31; shr.u32 %r2, %r1, 2; and.b32 %r1, %r1, 3;
    mad.lo.u32 %r0, %r0, 16, %r2; mul.lo.u32 %r0, %r0, {n}; mad.lo.u32 %r0, %r1, 2, %r0;
    mad.wide.u32 %p2, %r0, {size}, %p2;"""
    ]
    if acc == "f16":
        places = [(i, (i % 2 * 8 * n + 8 * (i // 2)) * 2) for i in range(n // 4)]
    else:
        places = [(i, (i // 2 % 2 * 8 * n + 8 * (i // 4) + i % 2) * 4) for i in range(n // 2)]
    return "\n".join(lines + [f"st.global.b32 [%p2+{at}], %f{i};" for i, at in places])


def multiply(t, acc, n, steps, first, second, tail):
    """The instructions, and what surrounds them."""
    many = n // 4 if acc == "f16" else n // 2
    regs = "{" + ", ".join(f"%f{i}" for i in range(many)) + "}"
    depth = 32 // np.dtype(DTYPES[t]).itemsize
    lines = ["wgmma.fence.sync.aligned;"]
    for k in range(steps):
        a, b = first(k), second(k)
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{n}k{depth}.{acc}.{t}.{t} {regs}, {a}, {b}, {int(k > 0)}{tail};"
        )
    lines.append("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;")
    return "\n".join(lines) + stores(n, acc)


def tail_of(t, a_turned=0, b_turned=0, signs="1, 1"):
    return {"s8": "", "u8": ""}.get(t, f", {signs}" + (f", {a_turned}, {b_turned}" if t in ("f16", "bf16") else ""))


def run(text, maps, out, shared, **options):
    PtxModule(text).launch("k", block=128, args=[*maps, out], shared=shared, debug=True, **options)
    return out


CASES = [("bf16", "f32", 256, 128), ("f16", "f32", 64, 128), ("f16", "f16", 32, 128), ("tf32", "f32", 24, 128)]
CASES += [("e4m3", "f32", 128, 128), ("e5m2", "f32", 8, 128), ("s8", "s32", 96, 128), ("u8", "s32", 16, 64)]
CASES += [("bf16", "f32", 40, 64), ("bf16", "f32", 64, 32), ("tf32", "f32", 16, 64), ("e4m3", "f32", 16, 32)]


@pytest.mark.parametrize("t,acc,n,swizzle", CASES, ids=lambda v: str(v))
def test_rows_along_k(t, acc, n, swizzle):
    """Both matrices with K side by side, a whole row of the swizzle in several steps of 32 bytes."""
    depth = swizzle // np.dtype(DTYPES[t]).itemsize
    a, b = random((64, depth), t, 0), random((n, depth), t, 1)
    at = 64 * swizzle
    lines = barrier() + load([(0, 0, (0, 0)), (1, at, (0, 0))], (64 + n) * swizzle)
    for k in range(swizzle // 32):
        lines += descriptor(f"%d{2 * k}", 32 * k, 16, 8 * swizzle, swizzle)
        lines += descriptor(f"%d{2 * k + 1}", at + 32 * k, 16, 8 * swizzle, swizzle)
    lines += multiply(t, acc, n, swizzle // 32, lambda k: f"%d{2 * k}", lambda k: f"%d{2 * k + 1}", tail_of(t))
    out = np.zeros((64, n), {"f32": "f4", "f16": "f2", "s32": "i4"}[acc])
    maps = [TensorMap(a, (64, depth), swizzle), TensorMap(b, (n, depth), swizzle)]
    run(entry(["map", "map", "out"], lines), maps, out, 1024 + (64 + n) * swizzle)
    assert (out == (a.astype("f8") @ b.astype("f8").T).astype(out.dtype)).all()


@pytest.mark.parametrize("turned", ["a", "b", "ab"])
def test_columns_along_k(turned):
    """The other major: boxes of 64 columns by 64 of K; the next 64 columns lie a box further (leading offset)."""
    n, depth = 128, 64
    a, b = random((64, depth), "bf16", 0), random((n, depth), "bf16", 1)
    held = [np.ascontiguousarray(x.T) if w in turned else x for w, x in (("a", a), ("b", b))]
    boxes = [(0, 0, (0, 0))] + [(1, 8192 * (1 + j), (64 * j, 0) if "b" in turned else (0, 64 * j)) for j in range(2)]
    lines = barrier() + load(boxes, 3 * 8192)
    for k in range(4):
        lines += descriptor(f"%d{2 * k}", 2048 * k if "a" in turned else 32 * k, 8192, 1024, 128)
        lines += descriptor(f"%d{2 * k + 1}", 8192 + (2048 * k if "b" in turned else 32 * k), 8192, 1024, 128)
    tail = tail_of("bf16", int("a" in turned), int("b" in turned))
    lines += multiply("bf16", "f32", n, 4, lambda k: f"%d{2 * k}", lambda k: f"%d{2 * k + 1}", tail)
    out = np.zeros((64, n), "f4")
    run(entry(["map", "map", "out"], lines), [TensorMap(x, (64, 64), 128) for x in held], out, 1024 + 3 * 8192)
    assert (out == a.astype("f4") @ b.astype("f4").T).all()


def cores(x):
    """Blocks of 8 rows by 16 bytes, one after the other: the layout without swizzle."""
    raw = np.ascontiguousarray(x).view("u1").reshape(len(x) // 8, 8, -1, 16)
    return np.ascontiguousarray(raw.transpose(0, 2, 1, 3)).reshape(-1, 16)


def test_without_swizzle():
    a, b = random((64, 16), "f16", 0), random((32, 16), "f16", 1)
    blocks = np.concatenate([cores(a), cores(b)])
    lines = barrier() + load([(0, 0, (0, 0))], blocks.nbytes)
    lines += descriptor("%d0", 0, 128, 256, 0) + descriptor("%d1", 64 * 32, 128, 256, 0)
    lines += multiply("f16", "f32", 32, 1, lambda k: "%d0", lambda k: "%d1", tail_of("f16"))
    out = np.zeros((64, 32), "f4")
    map = TensorMap(blocks, (192, 16))
    run(entry(["map", "out", "out"], lines), [map, np.zeros(1)], out, 1024 + blocks.nbytes)
    assert (out == a.astype("f4") @ b.astype("f4").T).all()


def test_a_in_registers_and_signs():
    """A's fragment is that of mma.m16n8k16 for each warp's 16 rows; a product may be negated."""
    a, b = random((64, 16), "bf16", 0), random((16, 16), "bf16", 1)
    lane, warp = np.arange(128) % 32, np.arange(128) // 32
    rows, places = 16 * warp + lane // 4, 2 * (lane % 4)
    pairs = [np.stack([a[rows + 8 * (i % 2), places + 8 * (i // 2) + j] for j in (0, 1)], -1) for i in range(4)]
    held = np.ascontiguousarray(np.stack(pairs, 1)).reshape(128, 8)
    lines = "mad.wide.u32 %p1, %i, 16, %p1; ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%p1];" + barrier()
    lines += load([(0, 0, (0, 0))], 16 * 32) + descriptor("%d1", 0, 16, 256, 32)
    tail = ", -1, 1, 0"
    lines += multiply("bf16", "f32", 16, 1, lambda k: "{%r4, %r5, %r6, %r7}", lambda k: "%d1", tail)
    out = np.zeros((64, 16), "f4")
    run(entry(["map", "in", "out"], lines), [TensorMap(b, (16, 16), 32), held], out, 2048)
    assert (out == -(a.astype("f4") @ b.astype("f4").T)).all()


def test_a_descriptor_beyond_shared_memory():
    lines = descriptor("%d0", 4096, 16, 1024, 128)
    lines += multiply("bf16", "f32", 8, 1, lambda k: "%d0", lambda k: "%d0", tail_of("bf16"))
    with pytest.raises(OutOfBoundsError, match="beyond shared memory"):
        PtxModule(entry([], lines.split("shr.u32 %r0, %i, 5")[0])).launch("k", block=128, shared=4096)

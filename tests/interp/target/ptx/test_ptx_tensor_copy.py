"""Copies by tensor map: swizzles against the formula of the hardware's manual, edges, multicast, reductions."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx_hopper_snippets import STORE, barrier, entry, load

from tessera.core.errors import ArgumentError, AsyncCopyError
from tessera.interp.target.ptx import PtxModule, TensorMap

OUT = """mul.lo.u32 %r0, %i, 16; add.u32 %t, %s, %r0; mad.wide.u32 %p1, %i, 16, %p1;
ld.shared.v4.b32 {{%r1, %r2, %r3, %r4}}, [%t]; setp.lt.u32 %q1, %i, {n};
@%q1 st.global.v4.b32 [%p1], {{%r1, %r2, %r3, %r4}};"""


def tile(x, box, swizzle, at, **options):
    """What shared memory holds after a box was loaded."""
    map, out = TensorMap(x, box, swizzle, **options), np.zeros(box, x.dtype)
    text = entry(["map", "out"], barrier() + load([(0, 0, at)], out.nbytes) + OUT.format(n=out.nbytes // 16))
    block = max(out.nbytes // 16, 32)
    PtxModule(text).launch("k", block=block, args=[map, out], shared=16384)
    return out


@pytest.mark.parametrize("dtype", ["f2", "f4", "u1"])
def test_swizzle_128(dtype):
    """Chunk c of row r of 128 bytes lies at chunk c ^ (r % 8)."""
    width = 128 // np.dtype(dtype).itemsize
    x = np.arange(64 * 2 * width).astype(dtype).reshape(64, 2 * width)
    got = tile(x, (16, width), 128, (width, 8)).view("u1").reshape(16, 8, 16)
    want = np.ascontiguousarray(x[8:24, width:]).view("u1").reshape(16, 8, 16)
    for row in range(16):
        assert (got[row, np.arange(8) ^ row % 8] == want[row]).all()


@pytest.mark.parametrize("swizzle,chunks,shift", [(64, 4, 1), (32, 2, 2)])
def test_narrower_swizzles(swizzle, chunks, shift):
    """64 bytes: c ^ (r / 2 % 4); 32 bytes: c ^ (r / 4 % 2)."""
    x = np.arange(32 * swizzle, dtype="u2").reshape(32, -1)[:, : swizzle // 2].copy()
    got = tile(x, (32, swizzle // 2), swizzle, (0, 0)).view("u1").reshape(32, chunks, 16)
    want = x.view("u1").reshape(32, chunks, 16)
    for row in range(32):
        assert (got[row, np.arange(chunks) ^ (row >> shift) % chunks] == want[row]).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(-5, 10), st.integers(-20, 40), st.booleans())
def test_edges(x, y, nan):
    """Elements outside read as zero or NaN; columns of whole 16 bytes."""
    x *= 4
    array = np.arange(1, 1 + 24 * 32, dtype="f4").reshape(24, 32)
    got = tile(array, (8, 16), 0, (x, y), nan_fill=nan)
    want = np.full((128, 128), np.nan if nan else 0, "f4")
    want[40:64, 40:72] = array
    assert np.array_equal(got, want[40 + y : 48 + y, 40 + x : 56 + x], equal_nan=True)


@pytest.mark.parametrize("dtype,bits", [("f2", "7ff7"), ("f4", "7ff77ff7"), ("f8", "7ff77ff77ff77ff7")])
def test_the_nan_of_the_fill(dtype, bits):
    got = tile(np.ones((8, 16), dtype), (8, 8), 0, (0, 8), nan_fill=True)
    assert {f"{v:x}" for v in got.view(f"u{got.itemsize}").reshape(-1)} == {bits}


@pytest.mark.parametrize("dtype,x", [("f4", 2), ("f4", -1), ("f2", 4), ("u1", 8)])
def test_boxes_that_start_inside_16_bytes(dtype, x):
    """The hardware ends such a kernel: illegal instruction."""
    with pytest.raises(AsyncCopyError, match="not a multiple of 16"):
        tile(np.zeros((32, 64), dtype), (8, 16), 0, (x, 0))


def test_three_dimensions():
    x = np.arange(6 * 10 * 32, dtype="f2").reshape(6, 10, 32)
    assert (tile(x, (2, 4, 16), 0, (8, 3, 1)) == x[1:3, 3:7, 8:24]).all()


def store(x, y, op=STORE, coordinates="{4, 1}"):
    """A box of 8 by 8 from one array added or written to another, at column 4 and row 1."""
    lines = barrier() + load([(0, 0, (0, 0))], 8 * 8 * 4)
    lines += f"@%first {op.format(n=2)} [%m1, {coordinates}], [%s]; @%first cp.async.bulk.commit_group;"
    lines += "@%first cp.async.bulk.wait_group 0;"
    maps = [TensorMap(x, (8, 8)), TensorMap(y, (8, 8))]
    PtxModule(entry(["map", "map"], lines)).launch("k", block=32, args=maps, shared=2048, debug=True)


def test_store_leaves_out_what_lies_outside():
    x, y = np.arange(64, dtype="f4").reshape(8, 8), np.full((8, 8), -1, "f4")
    store(x, y)
    want = np.full((8, 8), -1, "f4")
    want[1:, 4:] = x[:7, :4]
    assert (y == want).all()
    with pytest.raises(AsyncCopyError, match="negative coordinates"):  # as above: an illegal instruction
        store(x, y, coordinates="{4, -1}")


@pytest.mark.parametrize("op,f", [("add", np.add), ("min", np.minimum), ("max", np.maximum)])
def test_reductions(op, f):
    rng = np.random.default_rng(0)
    x, y = rng.integers(-9, 9, (2, 8, 8)).astype("i4")
    want = y.copy()
    want[1:, 4:] = f(y[1:, 4:], x[:7, :4])
    store(x, y, f"cp.reduce.async.bulk.tensor.{{n}}d.global.shared::cta.{op}.tile.bulk_group")
    assert (y == want).all()


MULTICAST = """mov.u32 %r5, %cluster_ctarank; setp.eq.and.u32 %q1, %r5, 0, %first; mov.b16 %h, 3;
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
@%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 512;
@%q1 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
  [%s], [%m0, {0, 0}], [%bar], %h;
W: mbarrier.try_wait.parity.shared::cta.b64 %q0, [%bar], 0; @!%q0 bra W;
mov.u32 %r6, %ctaid.x; mad.wide.u32 %p1, %r6, 512, %p1;"""


def test_multicast_reaches_each_cta():
    x, out = np.arange(128, dtype="f4").reshape(8, 16), np.zeros((4, 8, 16), "f4")
    text = entry(
        ["map", "out"], ".reg .b16 %h;" + barrier() + MULTICAST + OUT.format(n=32), ".reqnctapercluster 2, 1, 1"
    )
    PtxModule(text).launch("k", grid=4, block=32, args=[TensorMap(x, (8, 16)), out], shared=2048, debug=True)
    assert (out == x).all()


BAD = [
    (dict(box=(8,)), "extent for each"),
    (dict(box=(8, 300)), "1 to 256"),
    (dict(box=(8, 3)), "multiple of 16 bytes"),
    (dict(box=(8, 128), swizzle=128), "no more than the swizzle"),
    (dict(box=(8, 8), swizzle=16), "unknown swizzle"),
]


@pytest.mark.parametrize("wrong,says", BAD)
def test_maps_the_hardware_would_not_take(wrong, says):
    with pytest.raises(ArgumentError, match=says):
        TensorMap(np.zeros((64, 256), ml_dtypes.bfloat16), **wrong)
    with pytest.raises(ArgumentError, match="strides"):
        TensorMap(np.zeros((8, 20), "u1"), (8, 16))


def test_what_is_no_map():
    text = entry(["map", "out"], barrier() + load([(0, 0, (0, 0))], 512))
    with pytest.raises(AsyncCopyError, match="not a tensor map"):
        PtxModule(text).launch("k", block=32, args=[bytes(128), np.zeros(1)], shared=2048)

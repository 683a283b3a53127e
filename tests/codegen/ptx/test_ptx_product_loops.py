"""Loops of products that copies feed, in all the forms they come in: sides turned around, deep blocks, any bounds."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ptxcheck import emit_checked

import tessera as ts
from tessera import tile
from tessera.codegen.ptx import BACKEND
from tessera.codegen.ptx.ops import gemm_mainloop
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE
from tessera.core.types import bf16, f16, f32, fp8_e4m3
from tessera.frontend.kernel import kernel
from tessera.runtime.program import prepare


@kernel
def product(a, b, out, rounds, *, BM: int, BN: int, BK: int, left: bool = False, right: bool = False):
    """`left` and `right` say which side is given turned around; the sum is over `rounds` of the shared axis."""
    m, n = tile.program_id(0) * BM, tile.program_id(1) * BN
    acc = tile.zeros((BM, BN), ts.f32)
    for k in tile.range(0, rounds, BK):
        if left:
            x = tile.load(a[k : k + BK, m : m + BM], edge="clip").T
        else:
            x = tile.load(a[m : m + BM, k : k + BK], edge="clip")
        if right:
            y = tile.load(b[n : n + BN, k : k + BK], edge="clip").T
        else:
            y = tile.load(b[k : k + BK, n : n + BN], edge="clip")
        acc += tile.dot(x, y)
    tile.store(out[m : m + BM, n : n + BN], tile.cast(acc, out.dtype), edge="clip")


def check(shape, block, dtype=bf16, rounds=None, out=f32, **turned):
    """A product on sm_90a against NumPy's in f64; its text."""
    m, n, k = shape
    random = np.random.default_rng(m + n)
    a, b = (random.standard_normal(s).astype(dtype.numpy) for s in ((m, k), (k, n)))
    sides = [np.ascontiguousarray(x.T) if turned.get(name) else x for x, name in ((a, "left"), (b, "right"))]
    out, ends = np.full((m, n), np.nan, out.numpy), k if rounds is None else rounds
    arguments = {
        "a": sides[0],
        "b": sides[1],
        "out": out,
        **dict(zip(("BM", "BN", "BK"), block, strict=True)),
        **turned,
    }
    grid = (-(-m // block[0]), -(-n // block[1]))
    module = prepare(product, {**arguments, "rounds": np.int64(ends)}, "ptx", grid).levels["tile"]
    artifact = emit_checked(module, "sm_90a")
    BACKEND.interpreter(artifact)([*sides, out, np.int64(ends)])
    seen = -(-ends // block[2]) * block[2]
    want = a[:, :seen].astype("f8") @ b[:seen].astype("f8")
    tolerance = 2.0**-11 if out.dtype != np.float32 else 2.0**-12 if dtype.bits == 8 else 1e-5
    assert np.abs(out - want).max() <= tolerance * max(np.abs(want).max(), 1e-30)
    return artifact.text(TEXT_FILE)


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("block", [(64, 128, 64), (128, 64, 64), (256, 64, 64)])
def test_a_left_side_that_is_given_turned_around(block, right):
    text = check((200, 136, 200), block, left=True, right=right)
    assert f", 1, 1, 1, 1, {int(not right)};" in text and "bulk.tensor" in text


@pytest.mark.parametrize("columns", [96, 160, 192, 224])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("right", [False, True])
def test_columns_that_are_no_power_of_two(columns, left, right):
    """Of two blocks, and a partial one; the stores of 16-bit results overlap within a block."""
    for dtype, out in ((bf16, f32), (f16, f16)):
        text = check((200, 2 * columns + 40, 136), (128, columns, 64), dtype, left=left, right=right, out=out)
        assert f"m64n{columns}k16" in text and "mma.sync" not in text
        assert ("bulk.tensor.2d.global" in text) == (out == f16)


def test_rows_that_are_no_units_of_columns_that_are_no_power_of_two():
    text = check((136, 203, 72), (128, 160, 64), f16, right=True, out=f16)
    assert "m64n160k16" in text and "bulk.tensor.2d.global" not in text


@pytest.mark.parametrize(
    ("depth", "dtype", "turned"),
    [(128, bf16, {}), (256, f16, {"right": True}), (128, bf16, {"left": True}), (256, fp8_e4m3, {"right": True})],
)
def test_deep_blocks_are_rounds_of_their_own(depth, dtype, turned):
    text = check((128, 136, 400), (64, 64, depth), dtype, **turned)
    assert "wgmma" in text and "bulk.tensor" in text


@pytest.mark.parametrize("rounds", [0, 1, 128, 130, 400])
def test_bounds_that_only_the_launch_knows(rounds):
    assert "wgmma" in check((64, 64, 400), (64, 64, 128), rounds=rounds)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    *[st.integers(1, 300)] * 3,
    st.booleans(),
    st.booleans(),
    st.sampled_from([64, 128, 192]),
    st.sampled_from([bf16, f16]),
)
def test_any_size(m, n, k, left, right, depth, dtype):
    check((m, n, k), (64, 64, depth), dtype, left=left, right=right)


@kernel
def ended(a, b, out, *, END: int, BK: int = 32):
    """The sum over the first `END` of the shared axis."""
    acc = tile.zeros((64, 64), ts.f32)
    for k in tile.range(0, END, BK):
        acc += tile.dot(tile.load(a[0:64, k : k + BK], edge="clip"), tile.load(b[k : k + BK, 0:64], edge="clip"))
    tile.store(out[0:64, 0:64], acc)


@pytest.mark.parametrize(
    ("end", "depth", "joined"), [(128, 32, True), (96, 32, False), (200, 32, True), (64, 16, True)]
)
def test_rounds_are_joined_where_that_reads_no_more(end, depth, joined):
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(s).astype(bf16.numpy) for s in ((64, 200), (200, 64)))
    given = {"a": a, "b": b, "out": np.zeros((64, 64), np.float32)}
    module = prepare(ended, {**given, "END": end, "BK": depth}, "ptx", (1,)).levels["tile"]
    artifact = emit_checked(module, "sm_90a")
    BACKEND.interpreter(artifact)(list(given.values()))
    assert np.abs(given["out"] - a[:, :end].astype("f8") @ b[:end].astype("f8")).max() < 1e-4
    assert ("wgmma" in artifact.text(TEXT_FILE)) == joined != ("cp.async.cg" in artifact.text(TEXT_FILE))


def test_sides_that_the_loop_does_not_walk_along_the_sum_are_not_cut():
    @kernel
    def apart(a, b, out, *, BK: int = 128):
        acc = tile.zeros((64, 64), ts.f32)
        for k in tile.range(0, a.shape[1], 64):  # blocks overlap
            acc += tile.dot(tile.load(a[0:64, k : k + BK], edge="clip"), tile.load(b[k : k + BK, 0:64], edge="clip"))
        tile.store(out[0:64, 0:64], acc)

    random = np.random.default_rng(0)
    a, b = (random.standard_normal(s).astype(bf16.numpy) for s in ((64, 256), (256, 64)))
    out = np.zeros((64, 64), np.float32)
    artifact = emit_checked(prepare(apart, {"a": a, "b": b, "out": out}, "ptx", (1,)).levels["tile"], "sm_90a")
    BACKEND.interpreter(artifact)([a, b, out])
    x, y = a.astype("f8"), b.astype("f8")
    want = sum(x[:, k : k + 128] @ y[k : k + 128] for k in range(0, 256, 64))
    assert "cp.async.c" in artifact.text(TEXT_FILE) and np.abs(out - want).max() < 1e-4


@kernel
def shifted(a, b, out, *, rows: int, columns: int):
    """The sum over 256 elements, from column `columns` of a on, and from row `rows` of b on."""
    first, acc = tile.program_id(0) * 64, tile.zeros((64, 64), ts.f32)
    for k in tile.range(0, 256, 64):
        left = tile.load(a[0:64, first + k + columns : first + k + columns + 64], edge="clip")
        acc += tile.dot(left, tile.load(b[first + k + rows : first + k + rows + 64, 0:64], edge="clip"))
    tile.store(out[0:64, 0:64], acc)


@pytest.mark.parametrize(("rows", "columns", "copied"), [(-3, 0, True), (5, 8, True), (0, 3, False)])
def test_a_tensor_map_begins_at_any_row_but_at_whole_units_of_columns(rows, columns, copied):
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(s).astype(bf16.numpy) for s in ((64, 256), (256, 64)))
    given = {"a": a, "b": b, "out": np.zeros((64, 64), np.float32)}
    module = prepare(shifted, {**given, "rows": rows, "columns": columns}, "ptx", (1,)).levels["tile"]
    artifact = emit_checked(module, "sm_90a")
    BACKEND.interpreter(artifact)(list(given.values()))
    met = np.array([k for k in range(256) if 0 <= k + rows < 256 and k + columns < 256])
    assert np.abs(given["out"] - a[:, met + columns].astype("f8") @ b[met + rows].astype("f8")).max() < 1e-4
    assert ("bulk.tensor" in artifact.text(TEXT_FILE)) == copied


def test_a_loop_that_begins_inside_a_unit_is_fed_by_threads():
    @kernel
    def late(a, b, out):
        acc = tile.zeros((64, 64), ts.f32)
        for k in tile.range(3, 131, 64):
            acc += tile.dot(tile.load(a[0:64, k : k + 64]), tile.load(b[k : k + 64, 0:64]))
        tile.store(out[0:64, 0:64], acc)

    random = np.random.default_rng(0)
    a, b = (random.standard_normal(s).astype(bf16.numpy) for s in ((64, 256), (256, 64)))
    out = np.zeros((64, 64), np.float32)
    artifact = emit_checked(prepare(late, {"a": a, "b": b, "out": out}, "ptx", (1,)).levels["tile"], "sm_90a")
    BACKEND.interpreter(artifact)([a, b, out])
    assert np.abs(out - a[:, 3:131].astype("f8") @ b[3:131].astype("f8")).max() < 1e-4
    assert "bulk.tensor" not in artifact.text(TEXT_FILE)


@kernel
def nested(a, b, out, *, columns: int):
    """As `shifted`, of two loops."""
    acc = tile.zeros((64, 64), ts.f32)
    for half in tile.range(0, 2, 1):
        for k in tile.range(0, 128, 64):
            first = half * 128 + k
            left = tile.load(a[0:64, first + columns : first + columns + 64], edge="clip")
            acc += tile.dot(left, tile.load(b[first : first + 64, 0:64], edge="clip"))
    tile.store(out[0:64, 0:64], acc)


@pytest.mark.parametrize(("columns", "copied"), [(16, True), (1, False)])
def test_blocks_of_a_nest_begin_at_whole_units_or_are_copied_by_threads(columns, copied):
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(s).astype(bf16.numpy) for s in ((64, 256), (256, 64)))
    given = {"a": a, "b": b, "out": np.zeros((64, 64), np.float32)}
    artifact = emit_checked(prepare(nested, {**given, "columns": columns}, "ptx", (1,)).levels["tile"], "sm_90a")
    BACKEND.interpreter(artifact)(list(given.values()))
    assert np.abs(given["out"] - a[:, columns:].astype("f8") @ b[:-columns].astype("f8")).max() < 1e-4
    assert ("bulk.tensor" in artifact.text(TEXT_FILE)) == copied


def test_what_a_turned_left_side_means():
    random = np.random.default_rng(0)
    a, b = random.standard_normal((30, 16)), random.standard_normal((30, 8))
    attrs = {"step": 8, "left": (-1, 0), "right": (-1, 0), "block": (16, 8, 8), "flipped": False, "turned": True}
    np.testing.assert_allclose(gemm_mainloop.ref(np.ones((16, 8)), a, b, 0, 30, 0, **attrs), 1 + a.T @ b)


def test_a_start_that_is_no_multiple_of_the_index():
    """Heads side by side are one contraction: a block begins at a quotient of the loop's index, which no map gives."""

    @kernel
    def merge(a, b, out, *, D: int = 64):
        m = tile.program_id(0) * 64
        acc = tile.zeros((64, 64), ts.f32)
        for k in tile.range(0, b.shape[0], D):
            acc += tile.dot(tile.load(a[k // D, m : m + 64, 0:D], edge="clip"), tile.load(b[k : k + D, 0:64]))
        tile.store(out[m : m + 64, 0:64], acc, edge="clip")

    random = np.random.default_rng(0)
    a, b = (random.standard_normal(s).astype(bf16.numpy) for s in ((3, 100, 64), (192, 64)))
    given = {"a": a, "b": b, "out": np.zeros((100, 64), np.float32)}
    artifact = emit_checked(prepare(merge, given, "ptx", (2,)).levels["tile"], "sm_90a")
    BACKEND.interpreter(artifact)(list(given.values()))
    want = a.transpose(1, 0, 2).reshape(100, 192).astype("f8") @ b.astype("f8")
    assert np.abs(given["out"] - want).max() < 1e-4

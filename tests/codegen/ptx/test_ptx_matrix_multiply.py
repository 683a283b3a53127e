"""Matrix products: by multiply-add, by mma.sync, and by wgmma with a TMA ring buffer."""

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ptxcheck import emit_checked

import tessera as ts
from tessera import tile
from tessera.codegen.contract import get_backend
from tessera.codegen.ptx import BACKEND
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE
from tessera.core.errors import ResourceError
from tessera.core.types import as_dtype, bf16, f16, f32, f64, fp8_e4m3, fp8_e5m2, int8, int32
from tessera.frontend.kernel import kernel
from tessera.runtime.program import prepare


@kernel
def product(a, b, out, *, BM: int, BN: int, BK: int, turned: bool = False):
    m, n = tile.program_id(0) * BM, tile.program_id(1) * BN
    acc = tile.zeros((BM, BN), a.type.accumulate)
    for k in tile.range(0, a.shape[1], BK):
        left = tile.load(a[m : m + BM, k : k + BK], edge="clip")
        if turned:
            right = tile.transpose(tile.load(b[n : n + BN, k : k + BK], edge="clip"))
        else:
            right = tile.load(b[k : k + BK, n : n + BN], edge="clip")
        acc += tile.dot(left, right)
    tile.store(out[m : m + BM, n : n + BN], tile.cast(acc, out.dtype), edge="clip")


@kernel
def gated(a, b, bias, out, *, BM: int = 128, BN: int = 64, BK: int = 64):
    m, n, g = tile.program_id(0) * BM, tile.program_id(1) * BN, tile.program_id(2)
    acc = tile.zeros((BM, BN), ts.f32)
    for k in tile.range(0, a.shape[2], BK):
        left = tile.load(a[g, m : m + BM, k : k + BK], edge="clip")
        acc += tile.dot(left, tile.load(b[g, k : k + BK, n : n + BN], edge="clip"))
    shift = tile.cast(tile.load(bias[n : n + BN], edge="clip"), ts.f32)
    tile.store(out[g, m : m + BM, n : n + BN], tile.cast(tile.tanh(acc + shift[None, :]), out.dtype), edge="clip")


def run(entry, arguments, grid, arch, out="out"):
    """The result, and the text it came from."""
    artifact = emit_checked(prepare(entry, arguments, "ptx", grid).levels["tile"], arch)
    arrays = [a for a in arguments.values() if isinstance(a, np.ndarray)]
    BACKEND.interpreter(artifact)(arrays)
    return arguments[out], artifact.text(TEXT_FILE)


def check(dtype, m, n, k, block, arch="sm_80", turned=False, seed=0):
    """A product against NumPy's in f64; the text."""
    random, element = np.random.default_rng(seed), as_dtype(dtype).numpy
    scale = 40 if dtype.kind == "int" else 1
    a = (random.standard_normal((m, k)) * scale).astype(element)
    b = (random.standard_normal((n, k) if turned else (k, n)) * scale).astype(element)
    wide = {fp8_e4m3: np.float32, fp8_e5m2: np.float32}.get(dtype, element)
    out = np.zeros((m, n), np.int32 if dtype.kind == "int" else wide)
    constants = dict(zip(("BM", "BN", "BK"), block, strict=True))
    grid = (-(-m // block[0]), -(-n // block[1]))
    found, text = run(product, {"a": a, "b": b, "out": out, **constants, "turned": turned}, grid, arch)
    x, y = a.astype(np.float64), b.astype(np.float64)
    want = x @ (y.T if turned else y)
    exact = {int8: 0, int32: 0, f64: 1e-14, **dict.fromkeys((f32, fp8_e4m3, fp8_e5m2), 1e-6)}
    limit = exact.get(dtype, 2.0**-8) * np.abs(want).max() + 1e-30
    assert np.abs(found.astype(np.float64) - want).max() <= limit
    return text


def test_each_address_in_a_staging_buffer_is_computed_once():
    text = check(bf16, 128, 128, 64, (64, 64, 32))
    sums = re.findall(r"add.u32 %\w+, (%\w+, %\w+);", text)
    assert sums and len(set(sums)) == len(sums)


@pytest.mark.parametrize("dtype", (f64, f32, bf16, f16, int8, int32), ids=str)
def test_types(dtype):
    check(dtype, 17, 23, 9, (16, 8, 8))


@pytest.mark.parametrize("shape", [(1, 1, 1), (8, 16, 100), (40, 33, 64)])
def test_multiply_add(shape):
    assert "mma" not in check(f32, *shape, (16, 16, 32))


@pytest.mark.parametrize("block", [(8, 8, 16), (16, 16, 16), (32, 64, 32), (64, 32, 48), (20, 24, 16), (128, 128, 32)])
@pytest.mark.parametrize("dtype", (bf16, f16), ids=str)
def test_tensor_cores(dtype, block):
    text = check(dtype, 70, 90, 50, block, turned=block[0] == 32)
    assert f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32" in text and "ldmatrix" in text


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("block", [(64, 64, 64), (64, 128, 64), (128, 128, 64), (128, 256, 64), (256, 64, 64)])
def test_warp_groups(block, turned):
    text = check(bf16, 256, 264, 200, block, "sm_90a", turned)
    for word in ("wgmma.mma_async", "cp.async.bulk.tensor", "mbarrier.try_wait", "stmatrix", "bulk_group"):
        assert word in text


@pytest.mark.parametrize(("columns", "kind"), [(265, "b16"), (250, "b32"), (260, "b64"), (65, "b16")])
@pytest.mark.parametrize("block", [(64, 64, 64), (128, 128, 64), (128, 256, 64), (256, 64, 64)])
def test_rows_of_results_that_are_no_units_of_16_bytes(columns, kind, block):
    text = check(f16, 200, columns, 128, block, "sm_90a", turned=True)
    assert "stmatrix" in text and "bulk_group" not in text
    assert f"ld.shared.{kind}" in text and f"st.global.{kind}" in text


@pytest.mark.parametrize("begin", [0, 1, 64])
def test_such_rows_in_a_larger_memory(begin):
    @kernel
    def place(a, b, out, *, at: int):
        sums = tile.zeros((64, 64), ts.f32)
        for k in tile.range(0, a.shape[1], 64):
            sums += tile.dot(tile.load(a[0:64, k : k + 64]), tile.load(b[k : k + 64, 0:64]))
        tile.store(out[1, at + 2 : at + 66, at : at + 64], tile.cast(sums, ts.f16), edge="clip")

    random = np.random.default_rng(begin)
    a, b = (random.integers(-4, 5, size).astype(np.float16) for size in ((64, 128), (128, 64)))
    out = np.full((3, 100, 122), 7, np.float16)
    found, text = run(place, {"a": a, "b": b, "out": out, "at": begin}, (1,), "sm_90a")
    want = np.full_like(out, 7)
    part = want[1, begin + 2 : begin + 66, begin : begin + 64]
    part[...] = (a @ b)[: part.shape[0], : part.shape[1]]
    np.testing.assert_array_equal(found, want)
    assert "stmatrix" in text and ("st.global.b16" if begin == 1 else "st.global.b32") in text


@pytest.mark.parametrize("columns", [67, 70])
def test_rows_that_are_stored_and_read_again(columns):
    """Other threads store the elements than those that hold and load them: a barrier orders the two."""

    @kernel
    def add_again(a, b, out, twice):
        sums = tile.zeros((128, 64), ts.f32)
        for k in tile.range(0, a.shape[1], 64):
            sums += tile.dot(tile.load(a[0:128, k : k + 64]), tile.load(b[k : k + 64, 0:64]))
        tile.store(out[0:128, 1:65], tile.cast(sums, ts.f16), edge="clip")
        again = tile.cast(tile.load(out[0:128, 1:65], edge="clip"), ts.f32)
        tile.store(twice[0:128, 0:64], tile.cast(again + sums, ts.f16))

    random = np.random.default_rng(columns)
    a, b = (random.integers(-3, 4, size).astype(np.float16) for size in ((128, 256), (256, 64)))
    out, twice = np.zeros((128, columns), np.float16), np.zeros((128, 64), np.float16)
    program = prepare(add_again, {"a": a, "b": b, "out": out, "twice": twice}, "ptx", (1,))
    generator = get_backend("ptx:sm_90a")
    generator.sanitized(generator.emit(program.levels["tile"], {}))(program.arrays)
    np.testing.assert_array_equal(program.arrays[-1], 2 * (a @ b))


EIGHT = {fp8_e4m3: "f32.e4m3.e4m3", fp8_e5m2: "f32.e5m2.e5m2", int8: "s32.s8.s8"}


@pytest.mark.parametrize("block", [(64, 64, 128), (128, 256, 128), (256, 64, 128)])
@pytest.mark.parametrize("dtype", EIGHT, ids=str)
def test_warp_groups_of_eight_bits(dtype, block):
    text = check(dtype, 256, 264, 400, block, "sm_90a", turned=True)
    assert f"k32.{EIGHT[dtype]}" in text and "cp.async.bulk.tensor" in text


@pytest.mark.parametrize("dtype", EIGHT, ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_tensor_cores_of_eight_bits(dtype, turned):
    form = "m16n8k32.row.col.s32.s8.s8.s32" if dtype == int8 else "m16n8k16.row.col.f32.f16.f16.f32"
    for block in ((16, 16, 32), (32, 64, 64), (64, 40, 96)):
        assert f"mma.sync.aligned.{form}" in check(dtype, 70, 90, 50, block, turned=turned)


def test_transposed_columns_that_are_not_a_power_of_two():
    check(bf16, 70, 90, 50, (64, 40, 32), turned=True)


def test_mn_major_fp8_falls_back_to_mma_sync():
    text = check(fp8_e4m3, 128, 128, 256, (64, 64, 128), "sm_90a")
    assert "wgmma" not in text and "mma.sync" in text


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(*[st.integers(1, 300)] * 3, st.booleans(), st.sampled_from([bf16, f16]), st.sampled_from(["sm_80", "sm_90a"]))
def test_any_size(m, n, k, turned, dtype, arch):
    check(dtype, m, n, k, (64, 64, 64), arch, turned, seed=m)


def test_batched_product_with_epilogue():
    random = np.random.default_rng(0)
    a, b, bias = (random.standard_normal(s).astype(bf16.numpy) for s in ((3, 100, 72), (3, 72, 80), (80,)))
    arguments = {"a": a, "b": b, "bias": bias, "out": np.zeros((3, 100, 80), bf16.numpy)}
    found, text = run(gated, arguments, (1, 2, 3), "sm_90a")
    want = np.tanh(np.matmul(a.astype(np.float64), b.astype(np.float64)) + bias.astype(np.float64))
    assert np.abs(found.astype(np.float64) - want).max() < 2e-2 and "cp.async.bulk.tensor.3d" in text


def test_misaligned_rows_fall_back_to_mma_sync():
    assert "wgmma" not in check(bf16, 64, 100, 333, (64, 64, 64), "sm_90a")


def test_graph_function_uses_wgmma():
    a = np.lib.stride_tricks.as_strided(np.zeros(1, bf16.numpy), (4096, 4096), (0, 0))
    program = prepare(ts.jit(lambda x, y: ts.gelu(x @ y)), (a, a), "ptx")
    text = emit_checked(program.levels["tile"], "sm_90a").text(TEXT_FILE)
    assert "wgmma" in text and text.count(".visible .entry") == 1


@kernel
def products_of_a_round(x, y, out, *, count: int, chained: bool):
    """Products of one round that all read a block of their own."""
    rows = tile.load(x[0:64, 0:64])
    total = tile.zeros((64, 64), ts.f32)
    for k in tile.range(0, 128, 64):
        sums, i = total, 0
        while i < count:
            found = tile.dot(rows, tile.load(y[k : k + 64, 0:64]))
            sums, i = (sums + found if chained else found + (total if i == 0 else sums)), i + 1
        total = sums
    tile.store(out[0:64, 0:64], total)


@pytest.mark.parametrize("chained", [True, False])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_ring_has_the_stages_that_a_round_holds(count, chained, rng):
    """A Schedule that asks for one stage gets more, where the kernel would wait for ever with fewer."""
    x, y = (rng.standard_normal((n, 64)).astype(np.float32).astype(bf16.numpy) for n in (64, 128))
    given = {"x": x, "y": y, "out": np.zeros((64, 64), np.float32), "count": count, "chained": chained}
    program = prepare(products_of_a_round.with_schedule(ts.Schedule(stages=1)), given, "ptx", (1,))
    artifact = BACKEND.emit(program.levels["tile"], {"arch": "sm_90a"})
    assert "wgmma" in artifact.text(TEXT_FILE)
    BACKEND.interpreter(artifact)([x, y, given["out"]])
    want = count * (np.float32(x) @ (np.float32(y[:64]) + np.float32(y[64:])))
    np.testing.assert_allclose(given["out"], want, rtol=1e-3, atol=1e-2)


def test_schedule_sets_the_stages():
    def shared(kernel_, k=512):
        a = np.lib.stride_tricks.as_strided(np.zeros(1, bf16.numpy), (128, k), (0, 0))
        arguments = {"a": a, "b": a, "out": np.zeros((128, 128), bf16.numpy), "BM": 128, "BN": 128, "BK": 64}
        program = prepare(kernel_, {**arguments, "turned": True}, "ptx", (1, 1))
        artifact = BACKEND.emit(program.levels["tile"], {"arch": "sm_90a"})
        (entry,) = artifact.manifest["plan"]["entries"].values()
        return entry["shared"]

    stage = 2 * 128 * 64 * 2
    two, three = (shared(product.with_schedule(ts.Schedule(stages=n))) for n in (2, 3))
    assert 0 <= three - two - stage < 1024 < shared(product) - three
    with pytest.raises(ResourceError, match="fewer stages"):
        shared(product.with_schedule(ts.Schedule(stages=40)))


@pytest.mark.parametrize(("rows", "dtype"), [(1, bf16), (13, bf16), (16, fp8_e4m3), (40, bf16)])
def test_unfetched_rows_are_zeroed(rows, dtype):
    block = (64, 64, 128 if dtype == fp8_e4m3 else 64)
    text = check(dtype, rows, 136, 400, block, "sm_90a", turned=dtype == fp8_e4m3)
    assert "wgmma" in text and "st.shared.v4.b32" in text  # the rows that no copy reaches are set to 0


@pytest.mark.in_turn("arch")
@pytest.mark.parametrize(("arch", "size"), [("sm_80", "m8n8k4"), ("sm_90a", "m16n8k8")])
@pytest.mark.parametrize("sizes", [(16, 8, 8), (70, 33, 41), (40, 100, 64)])
@pytest.mark.parametrize("block", [(16, 8, 8), (64, 32, 16), (48, 40, 24), (32, 128, 32)])
def test_doubles_on_tensor_cores(block, sizes, arch, size):
    assert f"mma.sync.aligned.{size}.row.col.f64.f64.f64.f64" in check(f64, *sizes, block, arch)


def test_doubles_of_few_rows_or_uneven_depth_are_multiplied_and_added():
    for block in ((8, 16, 16), (16, 16, 12)):
        assert "mma.sync" not in check(f64, 20, 20, 20, block)


@kernel
def kept(a, b, out):
    left, acc = tile.load(a[0:64, 0:16]), tile.zeros((64, 64), f32)
    for n in tile.range(0, b.shape[0], 16):
        acc += tile.dot(left, tile.load(b[n : n + 16, 0:64]))
    tile.store(out[0:64, 0:64], acc)


def test_a_left_operand_from_before_the_loop_stays_in_registers():
    a, b = (np.ones(shape, bf16.numpy) for shape in ((64, 16), (48, 64)))
    found, text = run(kept, {"a": a, "b": b, "out": np.zeros((64, 64), np.float32)}, (1,), "sm_80")
    assert (found == 48).all() and "mma.sync" in text and "st.shared" not in text


@kernel
def scaled(a, b, out):
    acc = tile.zeros((64, 64), f32)
    for n in tile.range(0, b.shape[0], 16):
        acc += tile.dot(tile.load(a[n : n + 64, 0:16]) * 2, tile.load(b[n : n + 16, 0:64]))
    tile.store(out[0:64, 0:64], acc)


def test_a_left_operand_of_each_round_is_read_as_fragments():
    a, b = (np.ones(shape, bf16.numpy) for shape in ((96, 16), (48, 64)))
    found, text = run(scaled, {"a": a, "b": b, "out": np.zeros((64, 64), np.float32)}, (1,), "sm_80")
    assert (found == 96).all() and "ldmatrix" in text and "st.shared" in text and "ld.shared" not in text

"""Loops of products whose right sides are fetched beside them: found, turned around, and right."""

import math

import numpy as np
import pytest
from ptxcheck import emit_checked

from tessera import tile
from tessera.codegen.ptx import BACKEND
from tessera.codegen.ptx.ops import async_mma, exp2_ftz, fma, indices_below, release_operand, resident_operand, wait_mma
from tessera.codegen.ptx.passes.async_products import form_async_mma
from tessera.codegen.ptx.passes.instruction_selection import contract_fma, fuse_accumulation, select_exp2_ftz
from tessera.codegen.ptx.passes.loop_transformations import (
    hoist_scalars,
    narrow_index_comparisons,
    peel_masked_loops,
    sink_past_products,
)
from tessera.codegen.ptx.passes.software_pipelining import pipeline_loops
from tessera.codegen.ptx.passes.tile_scheduler import RasterOrder, choose_raster_order
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE
from tessera.core.types import bf16, f16, f32
from tessera.frontend.kernel import kernel
from tessera.interp.tile import interpreter
from tessera.ops.dialects import control_flow
from tessera.ops.tensor import elementwise
from tessera.runtime.program import prepare
from tessera.stdlib.attention import attend


@kernel
def gated(a, b, c, out, *, BM: int, BN: int, band: bool = False):
    """Rows of `a` against all of `b`, what is positive of that times `c`: no attention, but of its shape."""
    m = tile.program_id(0) * BM
    left = tile.load(a[m : m + BM, :], edge="clip")
    acc = tile.zeros((BM, c.shape[1]), f32)
    for n in tile.range(0, b.shape[0], BN):
        gate = tile.maximum(left @ tile.load(b[n : n + BN, :], edge="clip").T, 0.0)
        if band:
            gate = tile.where((n + tile.arange(0, BN))[None, :] <= (m + tile.arange(0, BM))[:, None], gate, 0.0)
        acc = acc * 0.5 + tile.cast(gate, c.dtype) @ tile.load(c[n : n + BN, :], edge="clip")
    tile.store(out[m : m + BM, :], tile.cast(acc, out.dtype), edge="clip")


def compiled(entry, given, grid, arch):
    """What the PTX emulator makes of a kernel's text, and the text."""
    artifact = emit_checked(prepare(entry, given, "ptx", grid).levels["tile"], arch)
    BACKEND.interpreter(artifact)([a for a in given.values() if isinstance(a, np.ndarray)])
    return given["out"], artifact.text(TEXT_FILE)


def arrays(dtype, rows, keys, depth, columns, seed=0):
    random = np.random.default_rng(seed)
    shapes = {"a": (rows, depth), "b": (keys, depth), "c": (keys, columns)}
    found = {k: random.standard_normal(s).astype(dtype.numpy) for k, s in shapes.items()}
    return {**found, "out": np.full((rows, columns), np.nan, dtype.numpy)}


def wanted(given, block, band):
    a, b, c = (given[k].astype(np.float64) for k in "abc")
    total = np.zeros((len(a), c.shape[1]))
    for n in range(0, len(b), block):
        gate = np.maximum(a @ b[n : n + block].T, 0)
        ahead = (n + np.arange(gate.shape[1]))[None, :] <= np.arange(len(a))[:, None]
        total = (
            total * 0.5 + np.where(ahead, gate, 0) @ c[n : n + block] if band else total * 0.5 + gate @ c[n : n + block]
        )
    return total


@kernel
def gated_heads(a, b, c, out, *, BM: int, BN: int):
    """As `gated` for each of several heads, an axis between those of rows and columns."""
    m, h = tile.program_id(0) * BM, tile.program_id(1)
    left = tile.load(a[m : m + BM, h, :], edge="clip")
    acc = tile.zeros((BM, c.shape[2]), f32)
    for n in tile.range(0, b.shape[0], BN):
        gate = tile.maximum(left @ tile.load(b[n : n + BN, h, :], edge="clip").T, 0.0)
        acc = acc * 0.5 + tile.cast(gate, c.dtype) @ tile.load(c[n : n + BN, h, :], edge="clip")
    tile.store(out[m : m + BM, h, :], tile.cast(acc, out.dtype), edge="clip")


def test_rows_need_not_lie_before_columns():
    random = np.random.default_rng(1)
    sizes = {"a": (200, 3, 64), "b": (136, 3, 64), "c": (136, 3, 128), "out": (200, 3, 128)}
    given = {k: random.standard_normal(s).astype(bf16.numpy) for k, s in sizes.items()}
    out, text = compiled(gated_heads, {**given, "BM": 128, "BN": 64}, (2, 3), "sm_90a")
    assert "wgmma.mma_async" in text and "cp.async.bulk.tensor.3d.global" in text and "mma.sync" not in text
    for h in range(3):
        want = wanted({k: given[k][:, h] for k in "abc"}, 64, False)
        assert np.linalg.norm(out[:, h].astype(np.float64) - want) < 6e-3 * np.linalg.norm(want)


def test_rows_along_any_axis_at_every_pass():
    """What the passes make computes as the kernel does, also before there is a text."""
    random = np.random.default_rng(1)
    sizes = {"a": (72, 3, 64), "b": (136, 3, 64), "c": (136, 3, 64), "out": (72, 3, 64)}
    given = {k: random.standard_normal(s).astype(bf16.numpy) for k, s in sizes.items()}
    module = prepare(gated_heads, {**given, "BM": 64, "BN": 64}, "ptx", (2, 3)).levels["tile"]
    want = np.stack([wanted({k: given[k][:, h] for k in "abc"}, 64, False) for h in range(3)], axis=1)
    names = set()
    for each in BACKEND.passes(module, {"arch": "sm_90a"}):
        module = each.run(module)
        names |= {n.op.name for f in module.functions for n in f.body.walk()}
        arrays = [a.copy() for a in given.values()]
        interpreter.run(module, arrays)
        assert np.linalg.norm(arrays[-1].astype(np.float64) - want) < 6e-3 * np.linalg.norm(want), each.name
    assert {"ptx.async_mma", "ptx.resident_operand"} <= names


@kernel
def multiplied_heads(a, b, out, *, BM: int, BN: int):
    """Products of heads, whose rows lie along the first axis of each operand or of one."""
    m, n, h = tile.program_id(0) * BM, tile.program_id(1) * BN, tile.program_id(2)
    acc = tile.zeros((BM, BN), f32)
    for k in tile.range(0, b.shape[0], 64):
        left = tile.load(a[m : m + BM, h, k : k + 64], edge="clip")
        acc += tile.dot(left, tile.load(b[k : k + 64, h, n : n + BN], edge="clip"))
    tile.store(out[m : m + BM, h, n : n + BN], tile.cast(acc, out.dtype), edge="clip")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_products_of_rows_along_the_first_axis(arch):
    random = np.random.default_rng(2)
    sizes = {"a": (200, 3, 136), "b": (136, 3, 256), "out": (200, 3, 256)}
    given = {k: random.standard_normal(s).astype(bf16.numpy) for k, s in sizes.items()}
    out, _ = compiled(multiplied_heads, {**given, "BM": 128, "BN": 128}, (2, 2, 3), arch)
    want = np.einsum("mhk,khn->mhn", given["a"].astype(np.float64), given["b"].astype(np.float64))
    assert np.linalg.norm(out.astype(np.float64) - want) < 6e-3 * np.linalg.norm(want)


@pytest.mark.parametrize(
    ("dtype", "sizes", "block", "band"),
    [
        (bf16, (256, 256, 64, 64), (256, 64), False),
        (bf16, (200, 136, 128, 128), (128, 64), True),
        (f16, (130, 72, 64, 128), (64, 128), False),
        (bf16, (130, 200, 128, 64), (64, 64), True),
    ],
)
def test_a_user_s_own_kernel(dtype, sizes, block, band):
    given = arrays(dtype, *sizes)
    out, text = compiled(
        gated, {**given, "BM": block[0], "BN": block[1], "band": band}, (-(-sizes[0] // block[0]),), "sm_90a"
    )
    assert "wgmma.mma_async" in text and "mma.sync" not in text and "ldmatrix" not in text
    want = wanted(given, block[1], band)
    assert np.linalg.norm(out.astype(np.float64) - want) < 6e-3 * np.linalg.norm(want)


@kernel
def counted(a, b, c, out, rounds, *, BM: int = 64, BN: int = 64):
    """As `gated`, for a number of blocks that only the launch knows, maybe none."""
    left = tile.load(a[0:BM, :])
    acc = tile.zeros((BM, c.shape[1]), f32)
    for n in tile.range(0, rounds * BN, BN):
        gate = tile.maximum(left @ tile.load(b[n : n + BN, :]).T, 0.0)
        acc = acc * 0.5 + tile.cast(gate, c.dtype) @ tile.load(c[n : n + BN, :])
    tile.store(out[0:BM, :], tile.cast(acc, out.dtype))


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_loops_of_unknown_length_are_not_turned_around(rounds):
    given = arrays(bf16, 64, 192, 64, 64)
    module = prepare(counted, {**given, "rounds": rounds}, "ptx", (1,)).levels["tile"]
    artifact = emit_checked(module, "sm_90a")
    BACKEND.interpreter(artifact)([*given.values(), np.int64(rounds)])
    want = wanted({**given, "b": given["b"][: 64 * rounds]}, 64, False)
    assert (
        "wgmma" in artifact.text(TEXT_FILE)
        and np.abs(given["out"].astype(np.float64) - want).max() <= 6e-3 * np.abs(want).max()
    )


def test_heads_that_share_keys():
    given, grid = attention((1, 4, 128, 64), 128, True, (128, 64))
    given |= {n: given[n][:, :2].copy() for n in "kv"}
    out, text = compiled(attend, given, grid, "sm_90a")
    whole = {**given, **{n: np.repeat(given[n], 2, 1) for n in "kv"}, "out": np.zeros_like(out)}
    np.testing.assert_array_equal(out, compiled(attend, whole, grid, "sm_90a")[0])
    assert "wgmma" in text


def attention(shape, keys, causal, block, **more):
    b, h, s, d = shape
    random = np.random.default_rng(1)
    q, k, v = (random.standard_normal((b, h, n, d)).astype(bf16.numpy) for n in (s, keys, keys))
    given = {"q": q, "k": k, "v": v, "mask": None, "lengths": None, "out": np.full(shape, np.nan, bf16.numpy)}
    given |= {"causal": causal, "scale": d**-0.5, "BM": block[0], "BN": block[1], "narrow": True, **more}
    return given, (b, h, -(-s // block[0]))


@pytest.mark.in_turn("causal")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("shape", "keys", "block"),
    [((1, 2, 256, 64), 256, (64, 64)), ((2, 1, 200, 128), 260, (128, 64)), ((1, 2, 300, 64), 300, (128, 128)),
     ((1, 1, 7, 128), 513, (64, 128))],
)  # fmt: skip
def test_attention_of_any_length(shape, keys, block, causal):
    given, grid = attention(shape, keys, causal, block)
    out, text = compiled(attend, given, grid, "sm_90a")
    q, k, v = (given[n].astype(np.float64) for n in "qkv")
    scores = q @ k.swapaxes(2, 3) * given["scale"]
    seen = np.arange(keys)[None, :] <= np.arange(shape[2])[:, None]
    weights = np.exp(scores - scores.max(-1, keepdims=True)) * (seen if causal else 1)
    want = (weights / weights.sum(-1, keepdims=True)) @ v
    assert "wgmma.mma_async" in text and np.linalg.norm(out - want) < 6e-3 * np.linalg.norm(want)


def streams(causal=True, depth=64):
    """The passes' result for attention, and the grid."""
    given, grid = attention((1, 2, 512, depth), 512, causal, (128, 128))
    function = prepare(attend, given, "ptx", grid).levels["tile"].functions[1]
    function = sink_past_products(hoist_scalars(function))
    found = form_async_mma(fuse_accumulation(select_exp2_ftz(function)))
    return narrow_index_comparisons(peel_masked_loops(pipeline_loops(contract_fma(found), grid), grid)), grid


def ops(function, region=False):
    """The ops of a function, or of its loops alone."""
    loops = [n for n in function.body.nodes if n.op is control_flow.for_]
    return [n.op for loop in loops for n in loop.regions[0].walk()] if region else [n.op for n in function.body.walk()]


def test_products_are_streamed_and_what_stays_is_given_back():
    found = ops(streams()[0])
    assert found.count(resident_operand) == found.count(release_operand) == 1 and exp2_ftz in found and fma in found


def test_a_product_is_begun_a_round_early_where_registers_allow():
    early, late = (ops(streams(False, depth)[0], region=True) for depth in (64, 128))
    assert wait_mma in early and wait_mma not in late
    assert early.index(exp2_ftz) < early.index(async_mma) and late.index(async_mma) < late.index(exp2_ftz)


def test_a_round_begins_its_own_product_before_the_one_deferred_to_it():
    (loop,) = (n for n in streams(False, 128)[0].body.nodes if n.op is control_flow.for_)
    assert [n.attrs["summed"] for n in loop.regions[0].nodes if n.op is async_mma] == [False, True]


def test_masks_are_left_to_the_rounds_that_need_them():
    masked, plain = (ops(streams(causal)[0]).count(indices_below) for causal in (True, False))
    first, second = (n for n in streams()[0].body.nodes if n.op is control_flow.for_)
    assert plain == 0 and masked == 2
    assert indices_below not in {n.op for n in first.regions[0].nodes}
    assert indices_below in {n.op for n in second.regions[0].nodes}


@kernel
def bounded(a, b, out, *, keys: int, BM: int = 64, BN: int = 64):
    """Only columns before `keys` count."""
    m, acc = tile.program_id(0) * BM, tile.zeros((BM, BN), f32)
    for n in tile.range(0, b.shape[0], BN):
        scores = tile.load(a[m : m + BM, :]) @ tile.load(b[n : n + BN, :], edge="clip").T
        acc += tile.where((n + tile.arange(0, BN))[None, :] < keys, scores, 0.0)
    tile.store(out[m : m + BM, :], acc)


@pytest.mark.parametrize(("keys", "masks"), [(256, 0), (255, 1)])
def test_masks_that_always_hold_are_dropped(keys, masks):
    sizes = {"a": (128, 64), "b": (256, 64), "out": (128, 64)}
    given = {k: np.zeros(s, f32.numpy if k == "out" else bf16.numpy) for k, s in sizes.items()}
    function = prepare(bounded, {**given, "keys": keys}, "ptx", (2,)).levels["tile"].functions[1]
    assert ops(peel_masked_loops(function, (2,))).count(elementwise.where) == masks


def test_long_programs_come_first_and_those_that_read_the_same_follow_each_other():
    assert choose_raster_order(*streams(causal=True)) == RasterOrder((0, 1, 2), True)
    assert choose_raster_order(*streams(causal=False)) == RasterOrder((0, 1, 2), False, 2)


def test_where_each_program_reads_its_own_a_cache_is_filled_at_a_time():
    given = np.lib.stride_tricks.as_strided(np.zeros(1, bf16.numpy), (8, 16, 2048, 128), (0,) * 4)
    arguments = {**attention((1, 1, 1, 128), 1, True, (128, 128))[0], **dict.fromkeys(("q", "k", "v", "out"), given)}
    function = prepare(attend, arguments, "ptx", (8, 16, 16)).levels["tile"].functions[1]
    assert choose_raster_order(form_async_mma(fuse_accumulation(function)), (8, 16, 16)) == RasterOrder(
        (0, 1, 2), True, 32
    )


def test_what_the_ops_mean():
    random = np.random.default_rng(0)
    left, right = random.standard_normal((4, 8)).astype("f4"), random.standard_normal((10, 8)).astype("f4")
    attrs = {"block": (8, 4), "flipped": True, "summed": True}
    want = np.ones((4, 4))
    want[:, :2] += left @ right[8:].T
    np.testing.assert_allclose(async_mma.ref(left, right, np.ones((4, 4), "f4"), 8, 0, **attrs), want, rtol=1e-5)
    np.testing.assert_array_equal(indices_below.ref(1, shape=(3, 3), steps=(-1, 1)), np.tri(3, dtype=bool))
    assert exp2_ftz.ref(np.float32(-127)) == 0 and exp2_ftz.ref(np.float32(-126)) == np.float32(2.0**-126)
    assert fma.ref(np.float32(3), np.float32(4), np.float32(math.pi)) == np.float32(
        12 + np.float64(np.float32(math.pi))
    )


def test_a_loop_whose_places_are_not_known_ahead_takes_the_other_way():
    given, grid = attention((1, 1, 128, 64), 128, False, (64, 64), lengths=np.array([100], np.int64))
    text = emit_checked(prepare(attend, given, "ptx", grid).levels["tile"], "sm_90a").text(TEXT_FILE)
    assert "wgmma" not in text and "mma.sync" in text


def test_the_pipeline_has_these_passes():
    from tessera.codegen.contract import run_passes
    from tessera.codegen.ptx import pipeline

    given, grid = attention((1, 2, 512, 64), 512, True, (128, 128))
    module = prepare(attend, given, "ptx", grid).levels["tile"]
    passes = BACKEND.passes(module, {"arch": "sm_90a"})
    last = [each.name for each in passes].index(pipeline.LOOPS[-1][0])
    made = run_passes(passes[: last + 1], module).functions[1]
    assert ops(made) == ops(streams()[0])


def test_one_copy_is_waited_for():
    from tessera.codegen.ptx.ops import wait_copy

    for depth in (64, 128):
        assert ops(streams(False, depth)[0], region=True).count(wait_copy) == 1

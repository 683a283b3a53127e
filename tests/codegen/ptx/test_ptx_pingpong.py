"""Ping-pong schedule: two consumer teams give right results for any number of tiles; where it is chosen."""

import numpy as np
import pytest
from ptxcheck import emit_checked

import tessera as ts
from tessera import tile
from tessera.codegen.ptx import BACKEND
from tessera.codegen.ptx.layout import WARPGROUP_THREADS
from tessera.codegen.ptx.passes.instruction_selection import contract_fma, fuse_accumulation, split_products
from tessera.codegen.ptx.passes.mainloop import form_mainloop
from tessera.codegen.ptx.passes.warp_specialisation import REGISTER_SHARES
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE
from tessera.codegen.ptx.table.warpgroup import pingpong
from tessera.core.types import bf16, f32
from tessera.frontend.kernel import kernel
from tessera.runtime.program import prepare


@kernel
def gated(a, b, bias, out, *, BN: int = 128):
    """tanh(a b + bias), less the rows' means of it."""
    m, n = tile.program_id(0) * 128, tile.program_id(1) * BN
    acc = tile.zeros((128, BN), f32)
    for k in tile.range(0, a.shape[1], 64):
        left = tile.load(a[m : m + 128, k : k + 64], edge="clip")
        acc += tile.dot(left, tile.load(b[k : k + 64, n : n + BN], edge="clip"))
    found = tile.tanh(acc + tile.cast(tile.load(bias[n : n + BN], edge="clip"), f32)[None, :])
    found = found - tile.sum(found, axis=-1)[:, None] / BN
    tile.store(out[m : m + 128, n : n + BN], tile.cast(found, out.dtype), edge="clip")


def given(m, n, k):
    random = np.random.default_rng(m)
    found = {name: random.standard_normal(s).astype(bf16.numpy) for name, s in (("a", (m, k)), ("b", (k, n)))}
    return {**found, "bias": random.standard_normal(n).astype(bf16.numpy), "out": np.zeros((m, n), bf16.numpy)}


@kernel
def stored_wide(a, b, bias, out):
    """The positive part of a b."""
    m, n = tile.program_id(0) * 128, tile.program_id(1) * 128
    acc = tile.zeros((128, 128), f32)
    for k in tile.range(0, a.shape[1], 64):
        left = tile.load(a[m : m + 128, k : k + 64], edge="clip")
        acc += tile.dot(left, tile.load(b[k : k + 64, n : n + 128], edge="clip"))
    tile.store(out[m : m + 128, n : n + 128], tile.cast(tile.maximum(acc, 0.0), out.dtype), edge="clip")


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(pingpong, "MIN_PROGRAMS", 1)


# The interpreter runs three blocks of two teams: some teams have several programs, some one, some none.
@pytest.mark.parametrize(("m", "n", "k"), [(1200, 256, 72), (400, 128, 504), (128, 128, 1000)])
def test_two_teams_of_two_warp_groups(few, m, n, k):
    arguments, grid = given(m, n, k), (-(-m // 128), n // 128)
    artifact = emit_checked(prepare(gated, arguments, "ptx", grid).levels["tile"], "sm_90a")
    assert "bar.arrive" in artifact.text(TEXT_FILE) and ".reqntid 640" in artifact.text(TEXT_FILE)
    BACKEND.interpreter(artifact)(list(arguments.values()))
    a, b, bias, out = (x.astype(np.float64) for x in arguments.values())
    want = np.tanh(a @ b + bias).reshape(m, n // 128, 128)
    want = (want - want.mean(axis=-1, keepdims=True)).reshape(m, n)
    np.testing.assert_allclose(out, want, atol=2e-2)


def test_teams_stage_their_results_apart(few):
    """Without waits that this kernel lacks: the emulator's debug mode finds where teams share memory."""
    arguments = given(400, 128, 72)
    artifact = BACKEND.emit(prepare(stored_wide, arguments, "ptx", (4, 1)).levels["tile"], {"arch": "sm_90a"})
    assert ".reqntid 384" in artifact.text(TEXT_FILE) and "cp.async.bulk.tensor.2d.global" in artifact.text(TEXT_FILE)
    BACKEND.sanitized(artifact)(list(arguments.values()))
    a, b, _, out = (x.astype(np.float64) for x in arguments.values())
    np.testing.assert_allclose(out, np.maximum(a @ b, 0), rtol=2.0**-7, atol=2.0**-7)


def chosen(entry, arguments, grid=None):
    """How many groups the teams of what an entry launches have; 0: there is one team."""
    launched = prepare(entry, arguments, "ptx", grid).levels["tile"].functions[1]
    return pingpong.choose_pingpong_groups(
        form_mainloop(contract_fma(fuse_accumulation(split_products(launched)))), grid or (256, 12)
    )


@kernel
def shifted(a, b, c, out, *, BN: int = 128):
    """a b + c."""
    m, n = tile.program_id(0) * 128, tile.program_id(1) * BN
    acc = tile.zeros((128, BN), f32)
    for k in tile.range(0, a.shape[1], 64):
        left = tile.load(a[m : m + 128, k : k + 64], edge="clip")
        acc += tile.dot(left, tile.load(b[k : k + 64, n : n + BN], edge="clip"))
    more = tile.cast(tile.load(c[m : m + 128, n : n + BN], edge="clip"), f32)
    tile.store(out[m : m + 128, n : n + BN], tile.cast(acc + more, out.dtype), edge="clip")


def test_two_teams_of_one_warp_group(few):
    given_ = given(700, 256, 136)
    arguments, grid = {**given_, "c": np.full((700, 256), 2, bf16.numpy)}, (6, 2)
    arguments = {k: arguments[k] for k in ("a", "b", "c", "out")}
    artifact = emit_checked(prepare(shifted, arguments, "ptx", grid).levels["tile"], "sm_90a")
    assert ".reqntid 384" in artifact.text(TEXT_FILE) and "bar.arrive" in artifact.text(TEXT_FILE)
    BACKEND.interpreter(artifact)(list(arguments.values()))
    a, b, c, out = (x.astype(np.float64) for x in arguments.values())
    np.testing.assert_allclose(out, a @ b + c, rtol=2.0**-8, atol=2.0**-8)


def test_chosen_for_long_epilogues(few):
    assert chosen(gated, given(256, 256, 512), (2, 2)) == 2
    assert not chosen(gated, given(256, 256, 8192), (2, 2))  # many rounds: little follows them
    assert not chosen(gated, {**given(256, 256, 512), "BN": 256}, (2, 1))  # more sums than there are registers for


def test_not_chosen_for_few_programs():
    assert not chosen(gated, given(256, 256, 512), (2, 2))


def test_chosen_for_a_gelu_layer():
    x, w, bias = (np.lib.stride_tricks.as_strided(np.zeros(1, bf16.numpy), s, (0,) * len(s)) for s in
                  ((32768, 384), (384, 1536), (1536,)))  # fmt: skip
    assert chosen(ts.jit(lambda x, w, bias: ts.gelu(x @ w + bias)), (x, w, bias))


@pytest.mark.parametrize("working", REGISTER_SHARES)
def test_setmaxnreg_fits_the_register_file(working):
    few, many = REGISTER_SHARES[working]
    threads = working + WARPGROUP_THREADS
    begun = (1 << 16) // threads // 8 * 8 * threads  # what the assembler gives to all of them at first
    assert working * many + WARPGROUP_THREADS * few <= begun and many % 8 == few % 8 == 0


@kernel
def added(a, b, c, out, *, SCALED: bool = False):
    """c + a b, or tanh(c) a b: what an epilogue reads beside its accumulator."""
    m, n = tile.program_id(0) * 128, tile.program_id(1) * 128
    acc = tile.zeros((128, 128), f32)
    for k in tile.range(0, a.shape[1], 64):
        left = tile.load(a[m : m + 128, k : k + 64], edge="clip")
        acc += tile.dot(left, tile.load(b[k : k + 64, n : n + 128], edge="clip"))
    held = tile.cast(tile.load(c[m : m + 128, n : n + 128], edge="clip"), f32)
    found = acc * tile.tanh(held) if SCALED else acc + held
    tile.store(out[m : m + 128, n : n + 128], tile.cast(found, out.dtype), edge="clip")


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", [f32, bf16])
def test_an_epilogue_loads_in_the_layout_of_its_accumulator(few, dtype, scaled):
    """Rows and columns past the end, two teams; no block is converted through shared memory."""
    random, (m, n, k) = np.random.default_rng(0), (328, 264, 136)
    a, b = (random.standard_normal(s).astype(bf16.numpy) for s in ((m, k), (k, n)))
    c = random.standard_normal((m, n)).astype(dtype.numpy)
    arguments = {"a": a, "b": b, "c": c, "out": np.zeros((m, n), dtype.numpy), "SCALED": scaled}
    artifact = emit_checked(prepare(added, arguments, "ptx", (3, 3)).levels["tile"], "sm_90a")
    text = artifact.text(TEXT_FILE)
    assert "wgmma" in text and "ld.shared" not in text
    found = arguments["out"]
    BACKEND.interpreter(artifact)([a, b, c, found])
    a, b, c = (x.astype(np.float32) for x in (a, b, c))
    want = a @ b * np.tanh(c) if scaled else a @ b + c
    np.testing.assert_allclose(found.astype(np.float32), want, rtol=2e-2, atol=0.1)

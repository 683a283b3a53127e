"""f32 products on tensor cores in two parts of tf32: against NumPy in f64, with numbers that have no such parts."""

import itertools
import re

import numpy as np
import pytest

import tessera as ts
from tessera.core.types import f32
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.tile_api import tile
from tessera.runtime.program import prepare
from tests.codegen.ptx.test_ptx_matrix_multiply import check, run

INSTRUCTION = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("block", [(16, 64, 16), (64, 64, 16), (32, 24, 40), (64, 128, 32), (128, 32, 16)])
def test_products(block, turned):
    text = check(f32, 70, 130, 50, block, turned=turned)
    assert INSTRUCTION in text and "cp.async" in text and "fma.rn.f32" in text


@pytest.mark.parametrize("block", [(32, 32, 128), (16, 64, 72)])
def test_long_contractions_are_added_up_round_by_round(block):
    text = check(f32, 40, 70, 300, block, "sm_90a")
    loop = text[text.index(INSTRUCTION) : text.index("vote.sync")]
    assert loop.index("add.rn.f32") < loop.index("bra $dot")


@pytest.mark.parametrize("block", [(16, 8, 8), (128, 32, 8), (16, 64, 12), (48, 32, 32), (64, 20, 64), (8, 64, 64)])
def test_small_and_uneven_blocks_are_multiplied_and_added(block):
    assert "mma" not in check(f32, 40, 20, 40, block)


@pytest.mark.parametrize(
    ("window", "splits"), [((2, 1, 2), False), ((2, 2, 2), False), ((1, 3, 3), True), ((4, 3, 3), True)]
)
def test_short_contractions_are_multiplied_and_added(window, splits):
    """Two roundings bound a sum of two products, and parts of tf32 have a larger error."""
    x, w = np.ones((8, window[0], 32, 40), "f4"), np.ones((16, *window), "f4")
    program = prepare(ts.jit(lambda x, w: ts.conv2d(x, w)), {"x": x, "w": w}, "ptx")
    text = program.emit("ptx", {"arch": "sm_90a"}).files["kernels.ptx"]
    assert "gather_windows" in text and (INSTRUCTION in text) == splits


VALUES = (np.inf, -np.inf, np.nan, np.finfo("f4").max, 1e-40, 2.0**60, 0.0)


def agrees(got, a, b, size=None):
    """Whether a product has the infinities and NaNs of f32, and its other elements are within the bound of f32.

    `size`: the magnitudes from which the left operand was added up.
    """
    with np.errstate(all="ignore"):
        want = (a.astype("f8") @ b.astype("f8")).astype("f4")
        size = np.abs(a if size is None else size).astype("f8") @ np.abs(b.astype("f8"))
    finite, tiny = np.isfinite(want), a.shape[1] * np.finfo("f4").smallest_subnormal
    same = np.array_equal(got[~finite], want[~finite], equal_nan=True)
    return same and (np.abs(got[finite] - want[finite]) <= 1e-6 * size[finite] + tiny).all()


@pytest.mark.parametrize("value", VALUES)
def test_numbers_without_parts(value):
    rng = np.random.default_rng(0)
    a, b = (rng.uniform(-0.2, 0.2, (64, 64)).astype("f4") for _ in range(2))
    a[3, 5], a[20], b[5, 7] = value, 1e-40 if value == 1e-40 else a[20], 0
    assert agrees(ts.jit(lambda a, b: a @ b, target="ptx")(a, b).numpy(), a, b)


@kernel
def chain(a, b, c, out):
    """out = (a · b) · c, by blocks of 32 columns of a · b."""
    rows, total = tile.load(a[0:64, 0:64]), tile.zeros((64, c.shape[1]), "f32")
    for k in tile.range(0, b.shape[1], 32):
        total = total + tile.dot(tile.dot(rows, tile.load(b[0:64, k : k + 32])), tile.load(c[k : k + 32, :]))
    tile.store(out[0:64, :], total)


@pytest.mark.parametrize("width", [32, 128])
@pytest.mark.parametrize("value", VALUES)
def test_the_result_of_a_product_stays_in_registers(value, width):
    rng = np.random.default_rng(1)
    a, b, c = (rng.uniform(-1, 1, s).astype("f4") for s in ((64, 64), (64, 96), (96, width)))
    c[40, 9] = value
    found, text = run(chain, {"a": a, "b": b, "c": c, "out": np.zeros((64, width), "f4")}, (1,), "sm_90a")
    product = (a.astype("f8") @ b.astype("f8")).astype("f4")
    assert agrees(found, product, c, np.abs(a) @ np.abs(b))
    assert text.count("bar.sync") == 1  # of the rounds: no round stores an operand, and the first is copied once


def test_small_numbers_times_large_ones():
    rng = np.random.default_rng(3)
    a, b = (rng.uniform(1, 2, (64, 64)).astype("f4") for _ in range(2))
    a, b = a * np.float32(1e-40), b * np.float32(1e30)
    assert agrees(ts.jit(lambda a, b: a @ b, target="ptx")(a, b).numpy(), a, b)


@pytest.mark.parametrize("large", [slice(0, 64), slice(64, 128)])
def test_large_operands_of_any_group_of_columns_are_seen(large):
    """The results are neither large nor small: the magnitude of the operands alone says that parts lose bits."""
    rng = np.random.default_rng(6)
    b, c = (rng.uniform(1, 2, s).astype("f4") for s in ((64, 96), (96, 128)))
    b *= np.float32(1e-40)
    c[:, large] *= np.float32(1e30)
    given = {"a": np.eye(64, dtype="f4"), "b": b, "c": c, "out": np.zeros((64, 128), "f4")}
    found, text = run(chain, given, (1,), "sm_90a")
    assert agrees(found[:, large], b, c[:, large])
    assert text.count("vote.sync") == 3  # of one group of columns, and of two


def test_a_warp_waits_before_and_after_it_shares_its_rows():
    """Of the rows that it holds in registers, its threads read those of the others."""
    a, b, c = (np.ones(s, "f4") for s in ((64, 64), (64, 96), (96, 32)))
    _, text = run(chain, {"a": a, "b": b, "c": c, "out": np.zeros((64, 32), "f4")}, (1,), "sm_90a")
    again = [part[: part.index("\n$exact")] for part in text.split("bra $exact")[1:]]
    shared = [[x for x in re.findall(r"bar\.warp\.sync|st\.shared|ld\.shared", p)] for p in again]
    shared = [[k for k, _ in itertools.groupby(each)] for each in shared if "st.shared" in each]
    assert shared and all(each == ["bar.warp.sync", "st.shared", "bar.warp.sync", "ld.shared"] for each in shared)


@kernel
def masked(a, b, out, *, held):
    """out = the first `held` rows of a · b, by blocks of 32 of the contraction's other operand."""
    rows = tile.load(a[0:64, 0:32], mask=(tile.arange(0, 64) < held)[:, None])
    for k in tile.range(0, b.shape[1], 32):
        tile.store(out[0:64, k : k + 32], tile.dot(rows, tile.load(b[0:32, k : k + 32])))


def test_an_operand_with_a_mask_is_not_copied():
    rng = np.random.default_rng(4)
    a, b = (rng.uniform(-1, 1, s).astype("f4") for s in ((64, 32), (32, 96)))
    given = {"a": a, "b": b, "out": np.ones((64, 96), "f4"), "held": 40}
    found, _ = run(masked, given, (1,), "sm_90a")
    assert agrees(found[:40], a[:40], b) and not found[40:].any()


@kernel
def held_rows(a, b, out, *, held):
    """out = a · b, with the columns of b from `held` on as 0: blocks with masks are prefetched into registers."""
    rows = tile.load(a[0:64, 0:64])
    for k in tile.range(0, b.shape[1], 32):
        inside = (k + tile.arange(0, 32) < held)[None, :]
        tile.store(out[0:64, k : k + 32], tile.dot(rows, tile.load(b[0:64, k : k + 32], mask=inside)))


def test_a_loop_that_waits_for_no_copy_reads_no_slot():
    rng = np.random.default_rng(5)
    a, b = (rng.uniform(-1, 1, s).astype("f4") for s in ((64, 64), (64, 96)))
    found, text = run(held_rows, {"a": a, "b": b, "out": np.ones((64, 96), "f4"), "held": 70}, (1,), "sm_90a")
    assert agrees(found[:, :70], a, b[:, :70]) and not found[:, 70:].any()
    assert INSTRUCTION in text and "cp.async" not in text


@kernel
def rows_of_before(a, b, out):
    """out = a · b, and a = 0."""
    rows = tile.load(a[0:64, 0:64])
    tile.store(a[0:64, 0:64], tile.zeros((64, 64), "f32"))
    for k in tile.range(0, b.shape[1], 32):
        tile.store(out[0:64, k : k + 32], tile.dot(rows, tile.load(b[0:64, k : k + 32])))


def test_an_operand_that_the_kernel_writes_is_not_copied():
    """A copy under way would read what is written."""
    rng = np.random.default_rng(7)
    a, b = (rng.uniform(-1, 1, s).astype("f4") for s in ((64, 64), (64, 96)))
    found, text = run(rows_of_before, {"a": a.copy(), "b": b, "out": np.zeros((64, 96), "f4")}, (1,), "sm_90a")
    assert agrees(found, a, b)
    assert INSTRUCTION in text and "cp.async" not in text[: text.index("st.global")]

"""Fetched blocks: which loads of f32 blocks copies fetch, of which left operands are computed."""

import re

import numpy as np
import pytest
from ptxcheck import emit_checked

import tessera as ts
from tessera import tile
from tessera.codegen.artifact import Artifact
from tessera.codegen.ptx import BACKEND
from tessera.codegen.ptx.ops import async_mma, fetched_block
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE
from tessera.core.errors import RaceError
from tessera.frontend.kernel import kernel
from tessera.runtime.program import prepare


@kernel
def multiply(x, scale, w, out, *, BK: int, in_place: bool):
    """out = (x · scale) wᵀ; in place the first columns of x are then the result, too."""
    total = tile.zeros((128, 64), "f32")
    for k in tile.range(0, x.shape[1], BK):
        left = tile.load(x[0:128, k : k + BK]) * tile.load(scale[0:1, k : k + BK])
        right = tile.transpose(tile.load(w[0:64, k : k + BK]))
        total = total + tile.dot(tile.cast(left, "bf16"), right)
    tile.store(out[0:128, 0:64], total)
    if in_place:
        tile.store(x[0:128, 0:64], total)


CASES = {"whole": (64, False, {(128, 64)}), "shallow": (16, False, set()), "in place": (64, True, None)}


@pytest.mark.parametrize("name", CASES)
def test_which_blocks_are_fetched(name):
    """Those of as many rows as the product, in whole stages, of memory that the kernel does not write."""
    depth, in_place, wanted = CASES[name]
    x, scale, w = (
        (np.arange(n * 128) % 7 - 3).reshape(n, 128).astype(d) for n, d in ((128, "f4"), (1, "f4"), (64, ts.bf16.numpy))
    )
    given = {"x": x.copy(), "scale": scale, "w": w, "out": np.zeros((128, 64), "f4"), "BK": depth, "in_place": in_place}
    module = prepare(multiply, given, "ptx", (1,)).levels["tile"]
    emitted = emit_checked(module, "sm_90a")
    for each in BACKEND.passes(module, {"arch": "sm_90a"}):
        module = each.run(module)
    nodes = [n for f in module.functions for n in f.body.walk()]
    assert any(n.op is async_mma for n in nodes) == (wanted is not None)
    assert {tuple(n.out.type.shape) for n in nodes if n.op is fetched_block} == (wanted or set())
    arrays = [given[n] for n in ("x", "scale", "w", "out")]
    BACKEND.sanitized(emitted)(arrays)
    np.testing.assert_array_equal(given["out"], (x * scale) @ w.astype("f4").T)


@kernel
def multiply_rows(x, first, w, out):
    """out = (2 x) wᵀ of the 128 rows from `first` on, which memory holds."""
    total, row = tile.zeros((128, 64), "f32"), tile.load(first[0])
    for k in tile.range(0, x.shape[1], 64):
        left = tile.load(x[row : row + 128, k : k + 64]) * 2.0
        total = total + tile.dot(tile.cast(left, "bf16"), tile.transpose(tile.load(w[0:64, k : k + 64])))
    tile.store(out[0:128, 0:64], total)


def test_a_block_whose_place_memory_holds_is_not_fetched():
    x, w = ((np.arange(n * 128) % 7 - 3).reshape(n, 128).astype(d) for n, d in ((160, "f4"), (64, ts.bf16.numpy)))
    given = {"x": x, "first": np.array([32]), "w": w, "out": np.zeros((128, 64), "f4")}
    module = prepare(multiply_rows, given, "ptx", (1,)).levels["tile"]
    emitted = emit_checked(module, "sm_90a")
    for each in BACKEND.passes(module, {"arch": "sm_90a"}):
        module = each.run(module)
    assert not any(n.op is fetched_block for f in module.functions for n in f.body.walk())
    BACKEND.sanitized(emitted)([given[n] for n in ("x", "first", "w", "out")])
    np.testing.assert_array_equal(given["out"], 2 * x[32:] @ w.astype("f4").T)


def test_stages_are_released_when_all_threads_have_read():
    """Without the barrier before a release, a copy overwrites what a thread has not read yet."""
    rng = np.random.default_rng(0)
    x, scale, w = (rng.integers(-3, 4, (n, 512)).astype("f4") for n in (128, 1, 64))
    given = {"x": x, "scale": scale, "w": w.astype(ts.bf16.numpy), "out": np.zeros((128, 64), "f4"), "BK": 64}
    emitted = emit_checked(prepare(multiply, given | {"in_place": False}, "ptx", (1,)).levels["tile"], "sm_90a")
    arrays = [given[n] for n in ("x", "scale", "w", "out")]
    BACKEND.sanitized(emitted)(arrays)
    np.testing.assert_array_equal(given["out"], (x * scale) @ w.T)
    text = emitted.text(TEXT_FILE)
    barriers = re.findall(r"\tfence\.proxy\.async\.shared::cta;\n(\tbar\.sync %r\d+, 128;\n)", text)
    assert len(barriers) == 2  # of the two stages of a block of 64 columns
    for number in range(len(barriers)):
        parts = re.split(r"(?<=\tfence\.proxy\.async\.shared::cta;\n)\tbar\.sync %r\d+, 128;\n", text)
        kept = [*barriers[:number], "", *barriers[number + 1 :], ""]
        without = "".join(part + barrier for part, barrier in zip(parts, kept, strict=True))
        with pytest.raises(RaceError):
            BACKEND.sanitized(Artifact(emitted.manifest, {TEXT_FILE: without}))(arrays)

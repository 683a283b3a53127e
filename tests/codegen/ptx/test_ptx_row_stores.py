"""Accumulators that are stored by rows: which stores are, and several of them in one kernel."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.codegen.contract import get_backend
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE
from tessera.runtime.program import prepare

RNG = np.random.default_rng(0)
A, B = (RNG.integers(-3, 4, size).astype(np.float16) for size in ((128, 128), (128, 64)))


@ts.kernel
def multiply(a, b, out, more, *, masked: bool):
    sums = tile.zeros((128, 64), ts.f32)
    for k in tile.range(0, a.shape[1], 64):
        sums += tile.dot(tile.load(a[0:128, k : k + 64]), tile.load(b[k : k + 64, 0:64]))
    if masked:
        left = tile.broadcast(tile.arange(64)[None, :] < 5, (128, 64))
        tile.store(out[0:128, 0:64], tile.cast(sums, out.dtype), mask=left)
    else:
        tile.store(out[0:128, 0:64], tile.cast(sums, out.dtype), edge="clip")
    tile.store(more[0:128, 0:64], tile.cast(sums + sums, more.dtype), edge="clip")


# The columns and types of both results, whether the first store has a mask, and the words that are stored.
CASES = {
    "two rows of other lengths": ((67, "f2"), (70, "f2"), False, ("b16", "b32")),
    "the second is longer": ((70, "f2"), (68, "f2"), False, ("b32", "b64")),
    "rows of f32": ((67, "f4"), (70, "f2"), False, ("b32",)),
    "a mask": ((67, "f2"), (70, "f2"), True, ("b32",)),
}


@pytest.mark.parametrize("case", CASES)
def test_each_store_writes_its_own_elements(case):
    (*sizes, masked, words) = CASES[case]
    out, more = (np.full((128, n), 7, dtype) for n, dtype in sizes)
    program = prepare(multiply, {"a": A, "b": B, "out": out, "more": more, "masked": masked}, "ptx", (1,))
    generator = get_backend("ptx:sm_90a")
    artifact = generator.emit(program.levels["tile"], {})
    generator.sanitized(artifact)(program.arrays)
    for factor, found, columns in zip((1, 2), program.arrays[2:], (5 if masked else 64, 64), strict=True):
        want = np.full_like(found, 7)
        want[:, :columns] = factor * (A @ B)[:, :columns]
        np.testing.assert_array_equal(found, want)
    assert "stmatrix" in artifact.text(TEXT_FILE)
    assert all(f"ld.shared.{word}" in artifact.text(TEXT_FILE) for word in words)


def test_rows_whose_length_is_known_at_the_call():
    @ts.jit(target="ptx:sm_90a")
    def product(a: ts.Tensor["M", 128, ts.f16], b: ts.Tensor["N", 128, ts.f16]):
        return a @ b.T

    a = RNG.integers(-3, 4, (256, 128)).astype(np.float16)
    b = RNG.integers(-3, 4, (131, 128)).astype(np.float16)
    np.testing.assert_array_equal(product(a, b).numpy(), a @ b.T)

"""Running sums, products and extremes of rows on a processor: one pass, in registers and without masks."""

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.llvm import BACKEND
from tessera.runtime import driver

SCANS = {
    ts.cumsum: np.cumsum, ts.cumprod: np.cumprod, ts.cummax: np.maximum.accumulate, ts.cummin: np.minimum.accumulate,
}  # fmt: skip


@pytest.mark.parametrize("scan", SCANS, ids=lambda s: s.__name__)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 9])
@pytest.mark.parametrize("dtype", ["f4", "i8"])
def test_rows(scan, rows, dtype, rng):
    x = rng.integers(-2, 3, (rows, 50)).astype(dtype)
    module = driver.lower(ts.jit(lambda x: scan(x, axis=-1)).trace(x).function, "llvm")["tile"]
    artifact = BACKEND.emit(module, {})
    found = BACKEND.guarded(artifact)([x])[0]
    np.testing.assert_array_equal(found, SCANS[scan](x, axis=-1))


def test_a_walk_of_rows_has_no_masks(rng):
    """What a program carries is in registers, and each element is stored without a branch."""
    x = rng.random((9, 50), np.float32)
    module = driver.lower(ts.jit(lambda x: ts.cumsum(x, axis=-1)).trace(x).function, "llvm")["tile"]
    artifact = BACKEND.emit(module, {})
    text = artifact.text("kernels.ll")
    walk = text[text.index("define void @scan_rows(") : text.index("define void @scan_rows.range(")]
    assert artifact.manifest["plan"]["scratch"]["scan_rows"] == 0
    assert "select i1" not in walk and walk.count("store float") == 4


def test_running_sums_of_long_rows_keep_their_digits(rng):
    """They are carried in f64: sums that are rounded in f32 one after the other would be off by 1e-5."""
    x = rng.standard_normal((2, 1 << 18)).astype(np.float32)
    x[1, 1000], x[1, 2000] = np.inf, np.nan
    with np.errstate(invalid="ignore"):
        want = np.cumsum(x, axis=1, dtype=np.float64).astype(np.float32)
    found = np.asarray(ts.jit(lambda x: ts.cumsum(x, axis=1), target="llvm")(x))
    np.testing.assert_array_equal(found, want)

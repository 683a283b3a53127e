"""A reduction of stacked slices is their combination in one kernel: pools agree with eager ones, and need no stack."""

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera.runtime import driver

POOLS = {
    "largest": lambda x: ts.max_pool2d(x, 3, 2, 1),
    "mean": lambda x: ts.avg_pool2d(x, 2, 1),
    "one axis": lambda x: ts.max_pool1d(x[:, :, 0], 3, 1),
    "sum of a stack": lambda x: ts.sum(ts.stack([x, x * 2, x - 1], axis=2), axis=2),
    "least of a stack": lambda x: ts.min(ts.stack([x, -x, x * x], axis=-1), axis=-1),
}


def draw(dtype, seed=0):
    x = np.random.default_rng(seed).integers(-4, 5, (2, 3, 7, 9)).astype(dtype)
    if np.dtype(dtype).kind != "i":
        for value in (np.nan, np.inf, -np.inf, -0.0):
            x[np.random.default_rng(seed + 1).random(x.shape) < 0.03] = value
    return x


@pytest.mark.parametrize("dtype", ["f4", "f8", ml_dtypes.bfloat16, "i4"])
@pytest.mark.parametrize("name", POOLS)
def test_pools(name, dtype):
    if dtype == "i4" and "mean" in name:
        pytest.skip("the mean of integers is f32, by another way")
    x, pool = draw(dtype), POOLS[name]
    want = pool(ts.Tensor(x)).numpy()
    for target, level in (("ptx", "tile"), ("ptx", "target"), ("llvm", "target")):
        levels = driver.lower(ts.jit(pool).trace(x).function, target)
        assert len(levels["tile"].functions) == 2  # the entry and a kernel
        (ours,) = driver.run_level(levels, level, [x], target)
        rtol = 2e-2 if dtype is ml_dtypes.bfloat16 else 1e-6
        np.testing.assert_allclose(ours.astype("f8"), want.astype("f8"), rtol=rtol)


def test_zeros_keep_the_sign_of_a_sum():
    x = np.full((2, 3), -0.0, "f4")
    program = lambda x: ts.sum(ts.stack([x, x], axis=0), axis=0)  # noqa: E731
    levels = driver.lower(ts.jit(program).trace(x).function, "ptx")
    for level in ("schedule", "tile", "target"):
        (ours,) = driver.run_level(levels, level, [x], "ptx")
        assert not np.signbit(ours).any()


def test_many_slices_stay_a_stack():
    x = np.random.default_rng(0).random((2, 3)).astype("f4")
    program = lambda x: ts.max(ts.stack([x * i for i in range(200)], axis=0), axis=0)  # noqa: E731
    levels = driver.lower(ts.jit(program).trace(x).function, "ptx")
    (ours,) = driver.run_level(levels, "tile", [x], "ptx")
    np.testing.assert_allclose(ours, x * 199, rtol=1e-6)

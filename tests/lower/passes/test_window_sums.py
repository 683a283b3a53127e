"""Gradients of windows, and sums of windows, are computed from the windows of each element, in few kernels."""

from dataclasses import replace

import numpy as np
import pytest

import tessera as ts
from tests.lower.levels import SMALL, agree

PLANS = {"threads": replace(SMALL, parallel=8), "rows": SMALL}


def draw(*sizes):
    return np.random.default_rng(sum(sizes)).integers(-3, 3, sizes).astype("f4")  # with ties


def pull_back(pool, **how):
    return ts.grad(lambda x: ts.sum(pool(x, **how) ** 2))


@pytest.mark.parametrize("kernel, stride, padding, more", [
    (2, 2, 0, {}), (3, 2, 1, {}), (3, 1, 1, {}), ((2, 3), (3, 2), (0, 1), {}), (2, 3, 0, {}),
    (3, 2, 1, {"ceil_mode": True}),
])  # fmt: skip
@pytest.mark.parametrize("pool", [ts.max_pool2d, ts.avg_pool2d])
def test_gradients_of_pools(pool, kernel, stride, padding, more):
    how = {"kernel_size": kernel, "stride": stride, "padding": padding, **more}
    x = draw(2, 3, 8, 11)
    results = agree(pull_back(pool, **how), x, plans=PLANS)
    torch = pytest.importorskip("torch")
    if pool is ts.avg_pool2d:  # gradients of ties differ
        given = torch.tensor(x, requires_grad=True)
        (torch.nn.functional.avg_pool2d(given, **how) ** 2).sum().backward()
        np.testing.assert_allclose(results[0], given.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_dilated_windows():
    agree(pull_back(ts.max_pool2d, kernel_size=3, stride=1, dilation=2), draw(1, 2, 9, 8), plans=PLANS)
    agree(pull_back(ts.max_pool2d, kernel_size=2, stride=2, dilation=3), draw(1, 2, 9, 8), plans=PLANS)


def test_sums_of_other_slices():
    def mixed(x):
        return ts.sum(ts.sin(x[:, ::3]) * x[:, 1::3] + x[:, 2::3] ** 2)

    agree(ts.grad(mixed), draw(4, 30), plans=PLANS)
    agree(ts.grad(lambda x: ts.sum(x[::2, 1::2] ** 2 * x[1::2, ::2])), draw(6, 8), plans=PLANS)
    agree(lambda x: ts.concatenate([ts.sum(x[:, a:b], axis=1, keepdims=True) for a, b in ((0, 3), (3, 4), (1, 6))], 1),
          draw(4, 6), plans=PLANS)  # fmt: skip


@pytest.mark.parametrize("size", [3, (7, 4), (1, 5), 8])
def test_adaptive_averages(size):
    x = draw(2, 3, 16, 17)
    results = agree(lambda x: ts.adaptive_avg_pool2d(x, size), x, plans=PLANS)
    torch = pytest.importorskip("torch")
    want = torch.nn.functional.adaptive_avg_pool2d(torch.tensor(x), size)
    np.testing.assert_allclose(results[0], want.numpy(), rtol=1e-5, atol=1e-6)
    agree(pull_back(ts.adaptive_avg_pool2d, output_size=size), x, plans=PLANS)

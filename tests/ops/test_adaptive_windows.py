"""Adaptive average pools: windows that divide an axis, few that are slices, many that are gathered."""

import numpy as np
import pytest

import tessera as ts

torch = pytest.importorskip("torch")
F = torch.nn.functional
RNG = np.random.default_rng(2)
CASES = [((2, 3, 12, 30), (3, 4)), ((1, 2, 7, 29), (7, 9)), ((1, 1, 5, 11), (8, 13)), ((2, 1, 1, 1), 1), ((1, 2, 9), 4)]


@pytest.mark.parametrize("target", ["interp", "llvm"])
@pytest.mark.parametrize(("shape", "windows"), [*CASES, ((1, 2, 5, 9, 20), (2, None, 3))])
def test_adaptive_means_and_their_gradients(shape, windows, target):
    x = RNG.standard_normal(shape).astype("f4")
    rank = len(shape) - 2
    pool, peer = getattr(ts, f"adaptive_avg_pool{rank}d"), getattr(F, f"adaptive_avg_pool{rank}d")
    held = torch.from_numpy(x).double().requires_grad_()
    want = peer(held, windows)
    g = RNG.standard_normal(tuple(want.shape)).astype("f4")
    (want * torch.from_numpy(g)).sum().backward()
    found = ts.jit(lambda x: pool(x, windows), target=target)(x).numpy()
    np.testing.assert_allclose(found, want.detach().numpy(), rtol=1e-5, atol=1e-6)
    gradient = ts.jit(ts.grad(lambda x: ts.sum(pool(x, windows) * g)), target=target)(x).numpy()
    np.testing.assert_allclose(gradient, held.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_an_infinity_stays_in_its_windows():
    x = np.ones((1, 1, 10), "f4")
    x[0, 0, 0], x[0, 0, 9] = np.inf, np.nan
    found = ts.jit(lambda x: ts.adaptive_avg_pool1d(x, 4), target="llvm")(x).numpy()
    np.testing.assert_array_equal(found[0, 0], [np.inf, 1, 1, np.nan])

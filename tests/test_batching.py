"""vmap against a loop, and composed with grad."""

import numpy as np
import pytest

import tessera as ts

PLACES = np.array([1, 0, 1])
CASES = {
    "pointwise": lambda x, w: ts.sin(x) * w,
    "matmul": lambda x, w: x @ w.T,
    "softmax": lambda x, w: ts.softmax(x * w).sum(axis=0),
    "moves": lambda x, w: ts.pad(ts.concatenate([x, w]).T, low=(1, 0), high=(0, 1))[1:, ::2].reshape(-1),
    "gather": lambda x, w: ts.gather(x + w, ts.argmax(x, axis=1), axis=1),
    "scatter": lambda x, w: ts.scatter_add(w, ts.argmax(x, axis=1), x[:, :2], axis=1),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dims", [(0, 0), (0, None), (None, 0)])
def test_a_loop_gives_the_same(name, dims, rng):
    f, many = CASES[name], [rng.normal(size=(4, 2, 3)), rng.normal(size=(4, 2, 3))]
    args = [m if d == 0 else m[0] for m, d in zip(many, dims, strict=True)]
    rows = [f(*(ts.Tensor(a[i] if d == 0 else a) for a, d in zip(args, dims, strict=True))).numpy() for i in range(4)]
    assert np.allclose(ts.vmap(f, in_dims=dims)(*args).numpy(), np.stack(rows))


def test_per_example_gradients(rng):
    w, x = rng.normal(size=3), rng.normal(size=(5, 3))
    each = ts.vmap(ts.grad(lambda w, x: ts.tanh((w * x).sum())), in_dims=(None, 0))(w, x).numpy()
    assert np.allclose(each, (1 - np.tanh(x @ w) ** 2)[:, None] * x)

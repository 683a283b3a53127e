"""WebAssembly modules: linked by wasm-ld, run in wasmtime, compared with NumPy."""

import numpy as np
import pytest

import tessera as ts
from tessera import deploy
from tessera.core.errors import DeviceUnavailable
from tessera.deploy import webassembly

wasmtime = pytest.importorskip("wasmtime")
RNG = np.random.default_rng(0)
X = RNG.standard_normal((5, 7)).astype(np.float32)
W = RNG.standard_normal((7, 9)).astype(np.float32)


def has_linker():
    try:
        return bool(webassembly.find_linker())
    except DeviceUnavailable:
        return False


needs_linker = pytest.mark.skipif(not has_linker(), reason="needs wasm-ld: of the package ziglang, or of lld")


def build(folder, entry, *args, **options):
    """A program as a module in wasmtime."""
    deploy.standalone(entry, *args, out=folder, machine="wasm32", **options)
    return deploy.WebModule.load(folder)


@ts.jit
def layer(x, w):
    return ts.softmax(ts.relu(x @ w) + 0.5, axis=-1)


@needs_linker
@pytest.mark.parametrize("weights", [(), ("w",)])
def test_a_layer_with_and_without_its_weights_inside(tmp_path, weights):
    hidden = np.maximum(X.astype(np.float64) @ W, 0) + 0.5
    want = np.exp(hidden) / np.exp(hidden).sum(-1, keepdims=True)
    module = build(tmp_path, layer, X, W, weights=weights)
    found = module(X) if weights else module(X, W)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, want, rtol=2e-6)


@needs_linker
def test_halves_are_rounded_to_nearest_even(tmp_path):
    """NumPy converts the same numbers: subnormals, ties, the largest, infinity and NaN."""
    bits = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    module = build(tmp_path / "up", ts.jit(lambda x: ts.cast(x, ts.f32)), bits)
    np.testing.assert_array_equal(module(bits), bits.astype(np.float32))
    finite = bits[np.isfinite(bits)].astype(np.float32)
    near = np.concatenate([finite * np.float32(1 + d) for d in (0, 2**-12, 2**-11, 2**-13, -(2**-12), -(2**-11))])
    near = np.concatenate(
        [near, np.float32([65519.99, 65520, 2**-25, 2**-25 * 1.001, -(2**-24) * 1.5, np.inf, np.nan])]
    )
    module = build(tmp_path / "down", ts.jit(lambda x: ts.cast(x, ts.f16)), near)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(module(near), near.astype(np.float16))


@needs_linker
def test_loops_and_branches_of_the_plan(tmp_path):
    @ts.jit
    def steps(x):
        y = ts.fori_loop(0, 5, lambda i, y: y * 1.5 - 0.25, x)
        y = ts.while_loop(lambda y: ts.max(y) > 1.0, lambda y: y * 0.5, y)
        return ts.cond(ts.sum(y) > 0, lambda y: y + 10.0, lambda y: -y, y)

    module = build(tmp_path, steps, X)
    for x in (X, -np.abs(X)):
        np.testing.assert_allclose(module(x), np.asarray(steps(x)), rtol=1e-6)

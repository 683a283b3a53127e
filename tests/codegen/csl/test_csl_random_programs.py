"""Random programs on random grids: simulated runs stay within the interpreter's bounds."""

import sys
from unittest.mock import patch

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera.codegen.csl.generator import Csl
from tessera.interp import bound, graph
from tessera.runtime import driver

STEPS = {
    "exp": lambda y: ts.exp(y * 0.1),
    "centred": lambda y: y - y.mean(axis=-1, keepdims=True),
    "turned": lambda y: y.T,
    "shares": lambda y: y / (1.0 + ts.abs(y).sum(axis=0, keepdims=True)),
    "largest": lambda y: ts.maximum(y, y.max(axis=0, keepdims=True) * 0.5),
    "moved": lambda y: y + ts.mesh_shift(y, axis=0, shift=1),
    "softmax": lambda y: ts.softmax(y, axis=-1),
    "gram": lambda y: (y @ y.T) * 0.1,
    "beside": lambda y: ts.concatenate([y, y * 0.5], axis=0),
    "every second": lambda y: y[::2] * 2.0,
    "by number": lambda y: ts.embedding(y, ts.arange(y.shape[0]) // 2),
    "flat and back": lambda y: (y.reshape(y.shape[0] * y.shape[1]) + 1.0).reshape(y.shape),
    "positive": lambda y: ts.where(y > 0.0, y, y * 0.1),
    "places": lambda y: y + ts.cast(ts.argmax(y, axis=1), dtype=y.dtype).reshape(y.shape[0], 1) * 0.01,
    "halves": lambda y: y * 2.0 ** ts.round(y * 0.25),
    "short": lambda y: y * 0.5 + ts.cast(ts.cast(y, dtype=ts.fp8_e4m3), dtype=y.dtype),
    "least of short": lambda y: y + ts.cast(ts.min(ts.cast(y, dtype=ts.fp6), axis=0, keepdims=True), dtype=y.dtype),
    "counted": lambda y: y + ts.cast(ts.sum(y > 0.0, axis=0, keepdims=True), dtype=y.dtype),
    "back to front": lambda y: y[::-1],
    "both ways": lambda y: y - ts.max(y) + ts.min(y, axis=1, keepdims=True),
}
sizes = st.integers(1, 8)
LAYING = sys.modules["tessera.lower.mesh.layout_search"]


@settings(max_examples=25, deadline=None)
@given(st.tuples(sizes, sizes, sizes), st.lists(st.sampled_from(sorted(STEPS)), max_size=5), st.data())
def test_within_the_bound(shape, names, data):
    grid = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    m, k, n = shape
    dtype = data.draw(st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]))
    arch = data.draw(st.sampled_from(["wse2", "wse3"]))
    choices = data.draw(
        st.sampled_from([LAYING.CHOICES, ((0, 1),)])
    )  # with the second distribution, products must communicate
    rng = np.random.default_rng(m * 64 + k * 8 + n)
    a, b = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)

    def program(a, b):
        x = a @ b
        for name in names:
            x = STEPS[name](x)
        return x

    traced = ts.jit(program).trace(a, b).function
    with patch.object(LAYING, "CHOICES", choices):
        artifact = Csl(grid).emit(driver.lower(traced, f"csl:{grid[0]}x{grid[1]}")["tile"], {"arch": arch})
    (found,) = Csl(grid).runtime(artifact).run([a, b])
    assert bound.compare_with_bound(found, bound.run(traced, [a, b])[0]).ok


WHOLE = {
    "sums": lambda y: y + ts.cast(ts.sum(y, axis=0, keepdims=True) % 97, dtype=y.dtype),
    "largest": lambda y: y - ts.max(y, axis=1, keepdims=True),
    "least": lambda y: ts.maximum(y, ts.min(y) // 3),
    "places": lambda y: y + ts.cast(ts.argmin(y, axis=0), dtype=y.dtype),
    "product": lambda y: ts.cast((y % 7) @ (y.T % 5), dtype=y.dtype),
    "bits": lambda y: (y ^ 5) & 255,
}


@settings(max_examples=12, deadline=None)
@given(st.tuples(sizes, sizes), st.lists(st.sampled_from(sorted(WHOLE)), min_size=1, max_size=4), st.data())
def test_integers_are_exact(shape, names, data):
    grid = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 3)))
    dtype = data.draw(st.sampled_from([np.int16, np.int32, np.uint8, np.uint16, np.uint32, np.uint64]))
    arch = data.draw(st.sampled_from(["wse2", "wse3"]))
    x = np.random.default_rng(sum(shape)).integers(-100, 100, shape).astype(dtype)

    def program(y):
        for name in names:
            y = WHOLE[name](y)
        return y

    traced = ts.jit(program).trace(x).function
    artifact = Csl(grid).emit(driver.lower(traced, f"csl:{grid[0]}x{grid[1]}")["tile"], {"arch": arch})
    np.testing.assert_array_equal(Csl(grid).runtime(artifact).run([x])[0], graph.run(traced, [x])[0])

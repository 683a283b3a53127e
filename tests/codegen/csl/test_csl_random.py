"""Random programs on random grids: the simulated text stays within the interpreter's bounds."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera import driver
from tessera.codegen.csl.generator import Csl
from tessera.interp import bound

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
}
sizes = st.integers(1, 8)


@settings(max_examples=25, deadline=None)
@given(st.tuples(sizes, sizes, sizes), st.lists(st.sampled_from(sorted(STEPS)), max_size=5), st.data())
def test_within_the_bound(shape, names, data):
    grid = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    m, k, n = shape
    dtype, arch = data.draw(st.sampled_from([np.float32, np.float16])), data.draw(st.sampled_from(["wse2", "wse3"]))
    rng = np.random.default_rng(m * 64 + k * 8 + n)
    a, b = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)

    def program(a, b):
        x = a @ b
        for name in names:
            x = STEPS[name](x)
        return x

    traced = ts.jit(program).trace(a, b).function
    artifact = Csl(grid).emit(driver.lower(traced, f"csl:{grid[0]}x{grid[1]}")["tile"], {"arch": arch})
    (found,) = Csl(grid).runtime(artifact).run([a, b])
    assert bound.compare(found, bound.run(traced, [a, b])[0]).ok

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
}
sizes = st.integers(1, 8)


@settings(max_examples=20, deadline=None)
@given(st.tuples(sizes, sizes, sizes), st.lists(st.sampled_from(sorted(STEPS)), max_size=4), st.data())
def test_within_the_bound(shape, names, data):
    grid = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    m, k, n = shape
    rng = np.random.default_rng(m * 64 + k * 8 + n)
    a, b = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)

    def program(a, b):
        x = a @ b
        for name in names:
            x = STEPS[name](x)
        return x

    traced = ts.jit(program).trace(a, b).function
    artifact = Csl(grid).emit(driver.lower(traced, f"csl:{grid[0]}x{grid[1]}")["tile"], {})
    (found,) = Csl(grid).runtime(artifact).run([a, b])
    assert bound.compare(found, bound.run(traced, [a, b])[0]).ok

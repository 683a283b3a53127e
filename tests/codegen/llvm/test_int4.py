"""int4 on llvm: one element for each byte; integer arithmetic wraps, conversions from float saturate."""

import numpy as np
import pytest

import tessera as ts
from tessera.runtime.program import prepare

G = np.random.default_rng(0)
A, B = (G.integers(-8, 8, (5, 37)) for _ in range(2))
B[B == 0] = 3
A, B = A.astype(ts.int4.numpy), B.astype(ts.int4.numpy)
PROGRAMS = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "chain": lambda x, y: (x + y) * x - y,
    "neg": lambda x, y: -x,
    "maximum": lambda x, y: ts.maximum(x, y),
    "sum": lambda x, y: x.sum(1),
    "max": lambda x, y: x.max(0),
    "widened": lambda x, y: x.to(ts.int8) + y.to(ts.int8),
    "scaled": lambda x, y: x.to(ts.f32) * 0.5,
    "product": lambda x, y: x @ y.T,
    "less": lambda x, y: x < y,
    "bits": lambda x, y: ~x ^ (y & x),
    "where": lambda x, y: ts.where(x > y, x, y),
    "quotient": lambda x, y: x // y,
    "sorted": lambda x, y: ts.sort(x[:, :9]),
    "joined": lambda x, y: ts.concatenate([x, ts.flip(y)]),
}


@pytest.mark.parametrize("level", ["target", "device"])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_as_in_the_interpreter(program, level):
    eager = program(ts.Tensor(A), ts.Tensor(B))
    (out,) = prepare(ts.jit(program), [A, B], "llvm").run(level, "llvm")
    assert out.dtype == eager.numpy().dtype
    np.testing.assert_array_equal(out.astype(np.float64), eager.numpy().astype(np.float64))


@pytest.mark.parametrize("source", [np.float32, np.float64, np.int8, np.int64])
def test_conversions(source):
    x = np.array([-100, -8.6, -8, -7.5, -0.5, 0, 3.9, 7, 7.5, 8, 100]).astype(source)
    out = ts.jit(lambda x: ts.cast(x, dtype=ts.int4), target="llvm")(x).numpy()
    np.testing.assert_array_equal(out.view(np.uint8), ts.cast(x, dtype=ts.int4).numpy().view(np.uint8))

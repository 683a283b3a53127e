"""Stochastic rounding below Graph: the same bits for every op, level, tile and target."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import UnsupportedOpError
from tessera.lower.passes.stochastic_rounding import rounds_stochastically
from tessera.runtime import driver

POLICY = ts.Policy(ts.bf16, rounding="stochastic", seed=3)
X = np.random.default_rng(0).normal(size=(13, 34)).astype("f4")


def styled(function):
    def program(*args):
        with ts.numerics(round="stochastic", store=ts.bf16):
            return function(*args)

    return program


PROGRAMS = {
    "pointwise": styled(lambda x: x * 1.3 + x),
    "softmax": styled(lambda x: ts.softmax(x)),
    "sum": styled(lambda x: x.sum(axis=0)),
    "transposed": lambda x: ts.cast(x, POLICY).reshape(34, 13).T[3:] * 2.3,
    "scalar": lambda x: ts.cast(x[0, 0], POLICY) * 1.3,
    "integers": lambda x: ts.cast(ts.cast(x * 1e6, ts.int32), POLICY),
    "wide": lambda x: ts.cast(ts.cast(x, ts.f64) * 1.00001, POLICY),
    "loop": lambda x: ts.fori_loop(0, 4, lambda i, s: s + 0.001, ts.cast(x, POLICY)),
    "gradient": ts.grad(styled(lambda x: ts.tanh(x).sum().to(ts.f32))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_bits_are_those_of_eager_execution(name):
    function = PROGRAMS[name]
    want = function(ts.Tensor(X))
    trace = ts.jit(function).trace(X)
    levels, arrays = driver.lower(trace.function, "llvm"), [X, *trace.captures]
    found = [driver.run_level(levels, level, arrays)[0] for level in ("schedule", "tile")]
    out = ts.jit(function, target="llvm")(X)
    assert out.type == want.type
    for bits in (*found, out.numpy()):
        assert bits.tobytes() == want.numpy().tobytes()


def test_no_type_below_graph_rounds_by_chance():
    trace = ts.jit(PROGRAMS["softmax"]).trace(X)
    tiles = driver.lower(trace.function, "llvm")["tile"]
    values = [v for f in tiles.functions for n in f.body.walk() for v in n.results]
    assert "ts.round_by_chance" in str(tiles) and not any(rounds_stochastically(v.type) for v in values)


def test_the_text_for_a_gpu_rounds_alike():
    def function(x):
        return ts.cast(x, POLICY)

    trace = ts.jit(function).trace(X)
    (got,) = driver.run_level(driver.lower(trace.function, "ptx"), "target", [X], "ptx")
    assert got.tobytes() == function(ts.Tensor(X)).numpy().tobytes()


def test_a_mesh_refuses_it_by_name():
    trace = ts.jit(lambda x: ts.cast(x, POLICY)).trace(X)
    with pytest.raises(UnsupportedOpError, match="csl does not round by the policy rounding=stochastic"):
        driver.run_level(driver.lower(trace.function, "csl"), "target", [X], "csl")

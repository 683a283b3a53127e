"""Mesh lowering: distributed programs give the results of whole tensors, on every grid."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera.core.errors import UnsupportedOpError
from tessera.interp import bound, graph
from tessera.interp.tile import interpreter
from tessera.ir.parser import parse_module
from tessera.ir.printer import print_module
from tessera.ir.verify import verify
from tessera.lower.lowering_plan import LoweringPlan
from tessera.runtime import driver

GRIDS = [(1, 1), (1, 3), (3, 1), (2, 2), (2, 3), (4, 4)]


def r(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


def stencil(x):
    around = [ts.mesh_shift(x, axis=a, shift=s) for a in (0, 1) for s in (-1, 1)]
    return (x + around[0] + around[1] + around[2] + around[3]) / 5.0


def attention(q, k, v):
    return ts.softmax((q @ k.T) * 0.25, axis=-1) @ v


CASES = {
    "chain": (lambda x, y: ts.exp(x) * y + 1.0, (r(7, 9), r(7, 9))),
    "softmax": (lambda x: ts.softmax(x, axis=-1), (r(6, 10),)),
    "layer_norm": (lambda x, g, b: ts.layer_norm(x, weight=g, bias=b), (r(6, 10), r(10), r(10))),
    "rms_norm": (lambda x, g: ts.rms_norm(x, g), (r(6, 10), r(10))),
    "product": (lambda a, b: a @ b, (r(9, 7), r(7, 11))),
    "matvec": (lambda a, x: a @ x, (r(9, 7), r(7))),
    "mlp": (lambda x, a, b, c: ts.gelu(x @ a + b) @ c, (r(8, 12), r(12, 16), r(16), r(16, 12))),
    "stencil": (stencil, (r(7, 9),)),
    "attention": (attention, (r(8, 6), r(10, 6), r(10, 6))),
    "sum of columns": (lambda x: x.sum(0), (r(6, 10),)),
    "mean": (lambda x: x.mean(), (r(6, 10),)),
    "max": (lambda x: ts.max(x, axis=1), (r(6, 10),)),
    "least": (lambda x: ts.min(x, axis=0), (r(6, 10),)),
    "batch": (lambda a, b: a @ b, (r(3, 5, 4), r(3, 4, 6))),
}


def on_mesh(function, args, grid):
    traced = ts.jit(function).trace(*args).function
    plan = LoweringPlan(mesh=grid, flash=False)
    return traced, [module for _, module in driver.iterate_passes(traced, plan)][-1]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", CASES)
def test_every_grid_agrees(name, grid):
    function, args = CASES[name]
    traced, module = on_mesh(function, args, grid)
    verify(module)
    for found, reference in zip(interpreter.run(module, args), bound.run(traced, args), strict=True):
        assert bound.compare_with_bound(found, reference).ok
    assert parse_module(print_module(module)) == module


@pytest.mark.parametrize("cut", [(0, 1), (-1, 1), (0, -1)])
def test_large_products_are_cut(cut):
    # The whole operands would not fit an element's memory, so the choice must fall on pieces.
    args = (r(96, 96), r(96, 96))
    _, module = on_mesh(lambda a, b: a @ b, args, (4, 4))
    reads = [n for n in module.functions[1].body.nodes if n.op.name == "mesh.read"]
    assert all(n.out.type.shape[0] * n.out.type.shape[1] * 4 < 36 * 1024 for n in reads)
    np.testing.assert_allclose(interpreter.run(module, args)[0], args[0] @ args[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("grid", [(1, 1), (2, 2)])
def test_what_has_no_mapping_is_named(grid):
    """No grid helps, and the error suggests none."""
    with pytest.raises(UnsupportedOpError, match=r"no mapping onto a mesh of processing elements: ts\.chol") as found:
        on_mesh(lambda x: ts.cholesky(x), (r(4, 4),), grid)
    assert "test_mesh.py" in str(found.value) and "1x1" not in str(found.value)


def test_collectives_have_no_mapping_on_any_grid():
    def program():
        on_mesh(lambda x: ts.all_reduce(x), (r(4, 4),), (1, 1))

    with pytest.raises(UnsupportedOpError, match=r"ts\.all_reduce has no mapping onto a mesh of processing") as found:
        ts.spmd(program, mesh=ts.Mesh(2), out_specs="ranks")()
    assert "1x1" not in str(found.value)


sizes = st.integers(1, 9)


@settings(max_examples=25, deadline=None)
@given(st.data(), st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_random_programs(data, grid):
    m, k, n = (data.draw(sizes) for _ in range(3))
    a, b, c = r(m, k), r(k, n), r(n)
    steps = data.draw(st.lists(st.sampled_from(["exp", "add", "norm", "turn", "rows"]), max_size=4))

    def program(a, b, c):
        x = a @ b
        for step in steps:
            x = {
                "exp": lambda y: ts.exp(y * 0.1),
                "add": lambda y: y + (c if y.shape[-1] == n and y.ndim else 1.0),
                "norm": lambda y: y - y.mean(axis=-1, keepdims=True),
                "turn": lambda y: y.T if y.ndim == 2 else y,
                "rows": lambda y: y / (1.0 + ts.abs(y).sum(axis=0, keepdims=True)),
            }[step](x)
        return x

    _, module = on_mesh(program, (a, b, c), grid)
    traced = ts.jit(program).trace(a, b, c).function
    np.testing.assert_allclose(
        interpreter.run(module, (a, b, c))[0], graph.run(traced, (a, b, c))[0], rtol=1e-3, atol=1e-4
    )

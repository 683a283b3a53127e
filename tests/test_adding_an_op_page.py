"""The page on adding an op: what it shows runs as it stands, on fresh names, with what it promises."""

import re
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from tessera.interp import bound
from tessera.interp.bound import compare_with_bound
from tessera.ir.numerics import error_model
from tessera.ir.rules import REGISTRY
from tessera.runtime.program import prepare

PAGE = (Path(__file__).parents[1] / "docs" / "adding-an-op.md").read_text()
X = np.linspace(0.5, 3.0, 12, dtype=np.float32)


@pytest.fixture
def ops(monkeypatch):
    """The ops of the page, under names of their own that are gone again after the test."""
    (ulps,) = re.findall(r'`"cbrt": ([\d.]+)`', PAGE)
    monkeypatch.setitem(error_model.SINGLE_ULPS, "page_cbrt", float(ulps))
    before, scope = dict(REGISTRY), {"np": np, "__name__": __name__}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        text = block.replace("softplus", "page_softplus").replace("def cbrt", "def page_cbrt")
        exec(text.replace("(cbrt)", "(page_cbrt)"), scope)
    yield scope
    for name in set(REGISTRY) - set(before):
        del REGISTRY[name]


def test_the_composite_has_everything(ops):
    """From semantics and lowering: gradient, batching, every level, a bound, a compiled program."""
    op = ops["page_softplus"]
    program = prepare(ts.jit(lambda x: op(x)), (X,))
    bounds = program.bounds()
    for level in ("graph", "schedule", "tile"):
        assert compare_with_bound(program.run(level)[0], bounds[0]).ok
    assert compare_with_bound(program.run("device", "llvm")[0], bounds[0]).ok
    gradient = ts.grad(lambda x: ts.sum(op(x)))(ts.Tensor(X)).numpy()
    assert np.allclose(gradient, 1 / (1 + np.exp(-X)), rtol=1e-6)
    assert np.allclose(ts.vmap(op)(ts.Tensor(X[None])).numpy(), np.logaddexp(X, 0)[None], rtol=1e-6)


def test_the_primitive_runs_with_a_bound_and_a_gradient(ops):
    """The tables below Graph are filled when the package is imported: too early for an op that a test makes."""
    op = ops["page_cbrt"]
    graph = ts.jit(lambda x: op(x)).trace(X).function
    assert op.pointwise and compare_with_bound(op(ts.Tensor(X)).numpy(), bound.run(graph, [X])[0]).ok
    gradient = ts.grad(lambda x: ts.sum(op(x)))(ts.Tensor(X)).numpy()
    assert np.allclose(gradient, np.cbrt(X) / (3 * X), rtol=1e-6)

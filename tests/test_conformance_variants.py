"""Variants of the suite's cases: right engines agree with them, and each column finds the fault that it is for."""

from random import Random

import numpy as np
import pytest

import tessera as ts
from conformance.case import all_cases
from conformance.run import run_case
from conformance.variants import SuiteInput, SuiteProgram, list_variant_engines
from tessera.interp.bound import compare_with_bound
from tessera.runtime.program import prepare
from tessera.tools.fuzz import variants

CASES = {c.name: c for c in all_cases()}
CHOSEN = ("graph/reduce/sum--1-f32", "graph/scatter/set-negative-axis0-f32-ties", "graph/linalg/transposed-operands")
ENGINES = {e.name: e for e in list_variant_engines()}


def run(name, *columns):
    return {o.engine: o for o in run_case(CASES[name], [ENGINES[c] for c in columns or ENGINES])}


@pytest.mark.parametrize("name", CHOSEN)
def test_cases_agree(name):
    found = run(name)
    assert {o.status for o in found.values()} <= {"pass", "unsupported"}, found
    assert sum(o.status == "pass" for o in found.values()) >= 5


def test_what_has_no_variants():
    (kernel,) = [n for n in CASES if n.startswith("tile/stdlib")][:1]
    assert {o.status for o in run(kernel).values()} == {"unsupported"}
    assert [e.name for e in list_variant_engines(["llvm"])][-1] == "llvm other machine"


SIZED = {
    "batched product": lambda a, b: ts.matmul(a, b),
    "product with a matrix": lambda a, b: ts.matmul(a, b[0]),
    "einsum": lambda a, b: ts.einsum("nij,njk->nik", a, b) + 1.0,
    "sums": lambda a, b: (ts.sum(a * 2.0, axis=1), ts.max(b, axis=-1), ts.mean(a)),
    "scan": lambda a, b: ts.cumsum(a, axis=1) - ts.cummax(a, axis=2),
    "softmax": lambda a, b: ts.softmax(a, axis=-1) @ b,
}


@pytest.mark.parametrize("name", SIZED)
def test_sizes_that_are_symbols_or_padded(name, rng):
    """With a name for each size no program is refused, and the padding reaches no result."""
    arrays = {"a": rng.normal(size=(2, 3, 4)).astype(np.float32), "b": rng.normal(size=(2, 4, 5)).astype(np.float32)}
    program = SuiteProgram(SIZED[name], tuple(SuiteInput(n, x, x.shape) for n, x in arrays.items()))
    want = prepare(program.load(), arrays, lower=False).bounds()
    named = EveryName()
    for found in (variants._run_padded(program, named), variants._run_with_symbolic_sizes(program, "interp", named)):
        assert all(compare_with_bound(r, b).ok for r, b in zip(found, want, strict=True))


class EveryName(Random):
    """Draws a name for each size, which equal sizes share, and padding."""

    def random(self):
        return 0.0

    def choice(self, options):
        return options[-1]


def test_a_wrong_batch_fails(monkeypatch):
    real = ts.vmap
    monkeypatch.setattr(ts, "vmap", lambda f: lambda *xs: ts.flip(real(f)(*xs), axis=0))
    found = run("graph/reduce/sum--1-f32", "batch", "other tiles")
    assert found["batch"].status == "fail" and found["other tiles"].status == "pass"


def test_a_wrong_pass_fails(monkeypatch):
    def drop(function):
        node = function.body.nodes[-1]
        return function if len(node.args) != 1 or node.args[0].type != node.out.type else _bypass(function, node)

    monkeypatch.setattr(variants, "OPTIONAL", (drop,))
    failed = [
        o.status for n in ("exp", "neg", "tanh") for o in run(f"graph/elementwise/{n}-f32", "random passes").values()
    ]
    assert "fail" in failed


def _bypass(function, node):
    body = function.body
    results = tuple(node.args[0] if r is node.out else r for r in body.results)
    return type(function)(function.name, type(body)(body.params, body.nodes[:-1], results), function.attrs)

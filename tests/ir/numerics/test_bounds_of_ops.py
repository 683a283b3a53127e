"""Every primitive with every element type lies within its bound, however it is legally evaluated."""

import argparse
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

from conformance.case import read_area
from tessera.core.types import Policy, TensorType, as_dtype
from tessera.ir.core import Attrs
from tessera.ir.numerics.interval_arithmetic import IntervalArray
from tessera.ir.rules import REGISTRY, error

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
import bound_ops  # noqa: E402

AREAS = ("graph.elementwise", "graph.reduce", "graph.shape", "graph.scatter", "graph.linalg", "graph.numerics")


@pytest.fixture(scope="module")
def uses():
    """The uses of ops in the first cases of each area, by their name without the element type."""
    first = {}
    for area in AREAS:
        for case in read_area(area):
            first.setdefault(case.name.rpartition("-")[0] or case.name, case)
    return bound_ops.harvest(first.values())


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(bound_ops, "POINTS", 64)
    monkeypatch.setattr(bound_ops, "ROUNDS", 3)


def rows(uses, ops, dtypes, monkeypatch, seed=0):
    monkeypatch.setattr(bound_ops, "harvest", lambda cases: {op: uses[op] for op in ops if op in uses})
    given = argparse.Namespace(op=[], dtype=dtypes, evaluations=1000 * len(dtypes), seed=seed)
    return list(bound_ops.list_rows(given))


@pytest.mark.parametrize("dtypes", [("f32", "fp8_e5m2", "int8"), ("f64", "bf16", "fp4")])
def test_every_primitive(uses, dtypes, monkeypatch):
    primitives = [op for op in uses if op in error]
    found = rows(uses, primitives, dtypes, monkeypatch)
    assert len({r["op"] for r in found}) >= 50 and len(found) >= 110
    assert not [r for r in found if r["outside"]]


@pytest.mark.parametrize("name", ["abs", "add", "sum", "exp"])
def test_a_rule_that_forgets_a_radius_is_found(name, uses, monkeypatch):
    op = REGISTRY[f"ts.{name}"]
    real = error.of(op)

    def forgetful(site, *operands, **attrs):
        out = real(site, *operands, **attrs)
        return IntervalArray(out.value, out.radius * 0.0)

    monkeypatch.setitem(error._table, op, forgetful)
    assert sum(r["outside"] for seed in range(3) for r in rows(uses, [op], ["bf16"], monkeypatch, seed))


@pytest.mark.parametrize("stored", ["f64", "f32", "bf16", "fp8_e4m3"])
def test_products_of_another_type_than_their_sum(stored, rng):
    """Products are summed in the type of their operands, under every policy, and rounded once to that of the result."""
    dot, tally = REGISTRY["ts.dot"], bound_ops.Tally()
    for result, compute in itertools.product(("f64", "f32", "f16"), (None, "tf32", "bf16")):
        policy = Policy(as_dtype(stored), compute=as_dtype(compute)) if compute else None
        types = tuple(TensorType(shape, as_dtype(stored), policy) for shape in ((4, 6), (6, 5)))
        attrs = Attrs({"dtype": as_dtype(result)})
        use = bound_ops.Use(dot, types, attrs, tuple(np.zeros(t.shape, t.dtype.numpy) for t in types), (True, True))
        typed = bound_ops.OpUse(dot, types, dot.result_types(types, attrs), attrs)
        for _ in range(12):
            bound_ops.examine_use(rng, bound_ops.TypedUse(use, typed, None), tally, 1e-30)
    assert tally.evaluations > 5000 and not tally.outside, tally.example

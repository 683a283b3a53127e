"""Every primitive with every element type lies within its bound, however it is legally evaluated."""

import argparse
import sys
from pathlib import Path

import pytest

from conformance.case import read_area
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

"""The yardstick of breadth: its table of families, and what it counts as right; nothing is timed."""

import argparse
import importlib
import json

import pytest

torch = pytest.importorskip("torch")

import tessera as ts  # noqa: E402
from benchmarks import breadth  # noqa: E402
from benchmarks.breadth_families import FAMILIES, Case, Draw  # noqa: E402

for table in breadth.TABLES:
    importlib.import_module(f"benchmarks.breadth_families.{table}")

OPTIONS = argparse.Namespace(no_inductor=True, max_autotune=False, seconds=0.0, lock=None)
LIMITS = {"bytes": 1e10, "flops": 1e11}


def test_every_family_draws_within_its_limits():
    assert len(FAMILIES) >= 110
    for name, draw in FAMILIES.items():
        case = draw(Draw((1, 2), 1 << 20, 1e7))
        again = draw(Draw((1, 2), 1 << 20, 1e7))
        assert case.label == again.label, name
        assert all(torch.equal(x, y) for x, y in zip(case.inputs, again.inputs, strict=True) if x.dtype.itemsize > 1)


def measure(own, theirs, **more):
    x = torch.linspace(-1, 1, 64).reshape(4, 16)
    return breadth.measure(breadth.Machine("llvm"), Case("case", own, theirs, (x,), **more), OPTIONS, LIMITS)


def test_right_wrong_and_refused_rows():
    right = measure(lambda x: x + 1, lambda x: x + 1)
    wrong = measure(lambda x: x + 1.001, lambda x: x + 1)
    refused = measure(lambda x: x.reshape(7, 7), lambda x: x)
    assert right["right"] and right["ratio"] > 0 and not wrong["right"] and "ShapeError" in refused["refused"]
    found = breadth.summarise([right, wrong, refused])
    assert (found["rows"], found["wrong"], found["refused"]) == (3, 1, 1)
    assert found["worst"] == right["ratio"] == pytest.approx(found["geometric_mean"])
    assert "WRONG" in breadth.show({"family": "f", **wrong}) and "refused" in breadth.show({"family": "f", **refused})
    assert json.dumps(found)


def test_gradients_are_compared():
    x, g = torch.linspace(-1, 1, 64).reshape(4, 16), torch.ones(4, 16)
    for own, verdict in ((lambda x: x * x, True), (lambda x: x * x * 2, False)):
        case = Case("square", own, lambda x: x * x, (x, g), wrt=(0,))
        assert breadth.measure(breadth.Machine("llvm"), case, OPTIONS, LIMITS)["right"] is verdict


def test_random_results_are_compared_by_a_summary():
    def mean(results):
        return [x.mean() for x in results]

    x = torch.ones(64, 1024)
    for own, verdict in ((lambda x: x + ts.rand((64, 1024)), True), (lambda x: x + ts.randn((64, 1024)), False)):
        case = Case("rand", own, lambda x: x + torch.rand_like(x), (x,), tolerance=0.02, summary=mean)
        assert breadth.measure(breadth.Machine("llvm"), case, OPTIONS, LIMITS)["right"] is verdict

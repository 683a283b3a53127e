"""The third-party generator in examples/plugin passes part of the suite, and refuses the rest by name."""

import re
import sys
from collections import Counter
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

from conformance.case import all_cases
from conformance.run import Engine, run_case, selected
from tessera.codegen import contract
from tessera.core.errors import ArgumentError, DeviceUnavailable
from tessera.tools.cli.entry_points import find_entry_point, make_inputs, prepare_program

PLUGIN = Path(__file__).parents[1] / "examples" / "plugin"


@pytest.fixture
def numpy_backend(monkeypatch):
    """The plugin's generator under the name its package registers."""
    monkeypatch.syspath_prepend(str(PLUGIN))
    import tessera_numpy

    point = SimpleNamespace(name="numpy", value="tessera_numpy:BACKEND", load=lambda: tessera_numpy.BACKEND)
    monkeypatch.setattr(contract, "list_backends", lambda: {"numpy": point})
    contract.get_backend.cache_clear()
    yield tessera_numpy.BACKEND
    contract.get_backend.cache_clear()
    sys.modules.pop("tessera_numpy", None)


def test_what_it_has_not_is_said(numpy_backend, tmp_path):
    """`runtime` and `interpreter` are optional; this generator has no interpreter of its text."""
    model = Path(__file__).parents[1] / "examples" / "mlp.py"
    program = prepare_program(find_entry_point(str(model)), make_inputs(find_entry_point(str(model)), 0), "numpy")
    assert program.run("device", "numpy")
    with pytest.raises(ArgumentError, match="the target numpy has no interpreter for its text"):
        program.run("target", "numpy")


def test_part_of_the_suite_passes(numpy_backend):
    cases = selected("blocks or control or softmax or matmul or policy", all_cases())
    outcomes = [o for c in cases if c.rejects is None for o in run_case(c, [Engine("numpy", "device", "numpy")])]
    counts = Counter(o.status for o in outcomes)
    failed = [f"{o.case}: {o.detail}" for o in outcomes if o.status == "fail"]
    assert not failed and counts["pass"] >= 20
    refused = [o.detail for o in outcomes if o.status == "unsupported"]
    assert all("numpy" in detail and re.search(r"\.py:\d+", detail) for detail in refused)


def test_it_is_short():
    lines = (PLUGIN / "tessera_numpy" / "__init__.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) < 200


def test_a_generator_that_does_not_load(monkeypatch):
    point = EntryPoint("lost", "no_such_package:BACKEND", contract.ENTRY_POINT_GROUP)
    monkeypatch.setattr(contract, "list_backends", lambda: {"lost": point})
    with pytest.raises(DeviceUnavailable, match="the generator lost does not load: No module named 'no_such_package'"):
        contract.get_backend("lost")

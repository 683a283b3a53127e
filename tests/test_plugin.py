"""The third-party generator in examples/plugin passes part of the suite, and refuses the rest by name."""

import re
import sys
from collections import Counter
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from conformance.case import all_cases
from conformance.run import Engine, run_case, select_cases
from tessera.codegen import contract
from tessera.codegen.coverage import list_mesh_ops, list_required_ops
from tessera.core.errors import ArgumentError, DeviceUnavailable
from tessera.core.types import f32, int64
from tessera.ir.rules import REGISTRY
from tessera.tools.cli.entry_points import find_entry_point, make_inputs, prepare_program
from tessera.tools.cli.main import main

PLUGIN = Path(__file__).parents[1] / "examples" / "plugin"
PAGE = (Path(__file__).parents[1] / "docs" / "adding-a-backend.md").read_text()


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


def test_its_artifacts_are_loaded(numpy_backend, tmp_path, capsys):
    """The manifest of a generator has what the generator wants, and what `build` adds."""
    model = Path(__file__).parents[1] / "examples" / "mlp.py"
    assert main(["build", str(model), "--target", "numpy", "-o", str(tmp_path / "out")]) == 0
    assert main(["run", str(tmp_path / "out")]) == 0
    assert "mlp for numpy" in capsys.readouterr().out


def test_part_of_the_suite_passes(numpy_backend):
    cases = select_cases("blocks or control or softmax or matmul or policy", all_cases())
    outcomes = [o for c in cases if c.rejects is None for o in run_case(c, [Engine("numpy", "device", "numpy")])]
    counts = Counter(o.status for o in outcomes)
    failed = [f"{o.case}: {o.detail}" for o in outcomes if o.status == "fail"]
    assert not failed and counts["pass"] >= 20
    refused = [o.detail for o in outcomes if o.status == "unsupported"]
    assert all("numpy" in detail and re.search(r"\.py:\d+", detail) for detail in refused)


def test_blocks_beyond_the_edge_and_masks(numpy_backend):
    """Nothing of these is refused: most kernels that users write have them."""
    cases = select_cases("memory/clipped or memory/masked", all_cases())
    outcomes = [o for c in cases for o in run_case(c, [Engine("numpy", "device", "numpy")])]
    assert len(outcomes) >= 6 and {o.status for o in outcomes} == {"pass"}


def test_an_access_outside_is_an_error(numpy_backend):
    scope = {}
    exec(sys.modules["tessera_numpy"].PREAMBLE, scope)
    x = np.arange(4.0)
    assert scope["_load"](x, (2,), (4,), "clip", other=7).tolist() == [2, 3, 7, 7]
    assert scope["_load"](x, (2,), (4,), "error", mask=np.arange(4) < 2).tolist() == [2, 3, 0, 0]
    for edge in ("clip", "error"):
        scope["_store"](x, np.ones(4), (3,), edge, np.arange(4) < 1)
    assert x.tolist() == [0, 1, 2, 1]
    with pytest.raises(IndexError, match="outside its memory"):
        scope["_load"](x, (2,), (4,), "error")


@pytest.mark.parametrize(
    ("name", "said"),
    (
        ("tile/groups", "tiles in a group"),
        ("tile/atomics", "cannot emit tile.atomic"),
        ("graph/numerics", "does not round by the policy"),
    ),
)
def test_its_checks_refuse_by_name(numpy_backend, name, said):
    cases = [c for c in select_cases(name, all_cases()) if c.rejects is None]
    outcomes = [o for c in cases for o in run_case(c, [Engine("numpy", "device", "numpy")])]
    refused = [o.detail for o in outcomes if o.status == "unsupported"]
    assert any(said in detail and "numpy" in detail for detail in refused)


def test_an_element_type_that_it_lacks_is_refused(numpy_backend, monkeypatch):
    narrow = replace(numpy_backend.capabilities, dtypes=(f32, int64))
    monkeypatch.setattr(type(numpy_backend), "capabilities", narrow)
    (case,) = select_cases("elementwise/add-f16", all_cases())
    (outcome,) = run_case(case, [Engine("numpy", "device", "numpy")])
    assert outcome.status == "unsupported" and "the target numpy has no element type f16" in outcome.detail


def test_the_page_lists_the_required_ops(numpy_backend):
    section = PAGE.partition("## 3. Emission")[2].partition("Start with")[0]
    listed = re.findall(r"`((?:ts|tile)\.\w+)`", section)
    required = {op.name for op in list_required_ops() if op not in list_mesh_ops()}
    assert len(listed) == len(set(listed)) and set(listed) == required
    emitted = {name for name in required if numpy_backend.coverage.emits(REGISTRY[name])}
    assert required - emitted - set(numpy_backend.coverage.list_missing()) == {"tile.line", "tile.pause"}


def test_it_is_short():
    lines = (PLUGIN / "tessera_numpy" / "__init__.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) < 250


def test_a_generator_that_does_not_load(monkeypatch):
    point = EntryPoint("lost", "no_such_package:BACKEND", contract.ENTRY_POINT_GROUP)
    monkeypatch.setattr(contract, "list_backends", lambda: {"lost": point})
    with pytest.raises(DeviceUnavailable, match="the generator lost does not load: No module named 'no_such_package'"):
        contract.get_backend("lost")

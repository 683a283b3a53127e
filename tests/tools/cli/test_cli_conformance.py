"""`tessera conformance`: profiles, reports, and engines in another process."""

import json
import sys
import xml.etree.ElementTree as xml
from collections import defaultdict
from pathlib import Path

import pytest

from conformance.case import PROFILES, find_profile
from conformance.foreign import ForeignEngine
from conformance.graph.sweep import cases as sweep
from conformance.run import Engine, find_guarded_engine, run_case
from tessera.core.errors import ArgumentError
from tessera.tools.cli.main import main

EXAMPLE = Path(__file__).parents[3] / "examples" / "engine" / "numpy_engine.py"
SWEEP = list(sweep.cases())
SAMPLE = SWEEP[::150]


def test_a_sample_of_the_sweep_agrees():
    engines = [Engine("graph", "graph", "interp"), Engine("tile", "tile", "interp"), find_guarded_engine("llvm")]
    outcomes = [o for case in SAMPLE for o in run_case(case, engines)]
    assert len(outcomes) == 3 * len(SAMPLE)
    assert not [f"{o.case} on {o.engine}: {o.detail}" for o in outcomes if o.status == "fail"]


def test_the_sweep_has_each_pointwise_op_with_each_kind_of_values():
    names = {case.name for case in SWEEP}
    assert len(SWEEP) == len(names) > 8000
    kinds = defaultdict(set)
    for op, dtype, *_, kind in (n.split("-") for n in names if n.count("-") > 1):
        kinds[op, dtype].add(kind)
    for op, dtypes in sweep.list_pointwise():
        for dtype in dtypes:
            assert kinds[f"graph/sweep/pointwise/{op.__name__}", dtype] == set(sweep.KINDS), (op.name, dtype)


def test_profiles_have_cases():
    names = {name: {c.name for c in find_profile(name)} for name in ("all", "autodiff", "low-precision")}
    assert set(PROFILES) >= set(names) and all(len(found) > 300 for found in names.values())
    assert names["autodiff"] < names["all"] and "graph/sweep/cast/f32-fp4-special" in names["low-precision"]


def test_the_manifest_names_every_case_and_its_profiles(tmp_path):
    path = tmp_path / "manifest.json"
    assert main(["conformance", "--profile", "all", "--manifest", str(path)]) == 0
    manifest, cases = json.loads(path.read_text()), find_profile("all")
    assert [c["name"] for c in manifest["cases"]] == [c.name for c in cases] and len(cases) >= 4000
    assert manifest["profiles"] == {name: len(find_profile(name)) for name in PROFILES}
    by_name = {c["name"]: c for c in manifest["cases"]}
    ring = by_name["graph/collectives/ring-2x2-all-f64"]
    assert ring["ranks"] == 4 and ring["profiles"] == ["collectives", "all"] and ring["compared"] == "bound"
    assert {c["compared"] for c in manifest["cases"]} >= {"bound", "equal", "bits", "error ShapeError"}
    assert main(["conformance", "--manifest", str(tmp_path / "no" / "folder.json")]) == 2


def test_an_unknown_profile():
    with pytest.raises(ArgumentError, match="is not a profile"):
        find_profile("fast")


def test_a_foreign_engine_passes_and_refuses(tmp_path, capsys):
    page, table = tmp_path / "r.html", tmp_path / "r.json"
    command, chosen = f"{sys.executable} {EXAMPLE}", "elementwise/add-bf16 or blocks/transpose"
    for report in (page, table, tmp_path / "r.xml"):
        assert main(["conformance", "--engine", command, "-k", chosen, "--report", str(report)]) == 0
    assert "1 pass, 0 fail, 1 unsupported" in capsys.readouterr().out
    assert {o["status"] for o in json.loads(table.read_text())} == {"pass", "unsupported"}
    assert xml.parse(tmp_path / "r.xml").getroot().attrib["tests"] == "2"
    assert "graph/elementwise/add-bf16" in page.read_text() and "<script" not in page.read_text()


ANSWERS = {
    "print('no json', flush=True)": "gave no answer",
    "sys.exit(3)": "gave no answer",
    "print('[]', flush=True)": "is no object",
    'print(\'{"status": "ok", "outputs": [{}]}\', flush=True)': "cannot be read",
    'print(\'{"status": "error", "detail": "broken"}\', flush=True)': "broken",
}


@pytest.mark.parametrize("code", ANSWERS)
def test_a_wrong_answer_is_a_failure_of_its_case(code, tmp_path):
    script = tmp_path / "engine.py"
    script.write_text(f"import sys\nfor line in sys.stdin:\n    {code}\n")
    command = f"{sys.executable} {script}"
    engine = ForeignEngine(command, "device", "interp", command)
    (outcome,) = run_case(SWEEP[3], [engine])
    engine.close()
    assert outcome.status == "fail" and ANSWERS[code] in outcome.detail


def test_an_engine_that_does_not_exist():
    (outcome,) = run_case(SWEEP[3], [ForeignEngine("x", "device", "interp", "/no/such/engine")])
    assert outcome.status == "fail" and "does not start" in outcome.detail


def test_a_wrong_value_of_a_foreign_engine_is_found(tmp_path):
    text = EXAMPLE.read_text().replace("np.ascontiguousarray(result)", "np.ascontiguousarray(result + 1)")
    script = tmp_path / "engine.py"
    script.write_text(text)
    engine = ForeignEngine("wrong", "device", "interp", f"{sys.executable} {script}")
    case = next(c for c in SWEEP if c.name.startswith("graph/sweep/pointwise/sub-f32-3x37-"))
    (outcome,) = run_case(case, [engine])
    engine.close()
    assert outcome.status == "fail" and outcome.detail.startswith("output 0 at")

"""The third-party generator in examples/plugin passes part of the suite, and refuses the rest by name."""

import json
import re
import sys
from collections import Counter
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from conformance.case import Outcome, all_cases
from conformance.run import Engine, rank_missing_ops, run_case, select_cases
from tessera.codegen import contract
from tessera.codegen.coverage import list_mesh_ops, list_required_ops
from tessera.core.errors import ArgumentError, DeviceUnavailable
from tessera.core.types import f32, int64
from tessera.ir.rules import REGISTRY
from tessera.runtime.program import prepare
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
    monkeypatch.setattr(contract, "entry_points", lambda group: [point])
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
    monkeypatch.setattr(contract, "entry_points", lambda group: [point])
    with pytest.raises(DeviceUnavailable, match="the generator lost does not load: No module named 'no_such_package'"):
        contract.get_backend("lost")


BROKEN = {
    "raise RuntimeError('no licence')": ("RuntimeError: no licence", 1),
    "import nothing_like_this": ("No module named 'nothing_like_this'", 1),
    "exec('1 / 0')": ("ZeroDivisionError", 1),
    "x = 1\nx = = 2": ("SyntaxError", 2),
    "x = 1": ("has no attribute 'BACKEND'", None),
}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs the text of a package as one more generator."""

    def write(text):
        name = f"broken_{abs(hash(text))}"
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        point = EntryPoint("broken", f"{name}:BACKEND", contract.ENTRY_POINT_GROUP)
        monkeypatch.setattr(contract, "entry_points", lambda group: [point])
        contract.get_backend.cache_clear()
        return tmp_path / f"{name}.py"

    yield write
    contract.get_backend.cache_clear()


@pytest.mark.parametrize(("text", "says", "line"), [(t, *w) for t, w in BROKEN.items()])
def test_the_error_of_a_package_is_reported(install, text, says, line, capsys, tmp_path):
    file = install(text)
    place = f"{file}:{line}" if line else ""
    model = Path(__file__).parents[1] / "examples" / "mlp.py"
    assert main(["build", str(model), "--target", "broken", "-o", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert "DeviceUnavailable: the generator broken does not load" in err and says in err and err.startswith(place)
    assert main(["build", str(model), "--target", "llvm", "-o", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    assert main(["doctor", "--json"]) == 0
    (found,) = [probe for probe in json.loads(capsys.readouterr().out) if probe["name"] == "generators"]
    assert not found["present"] and found["detail"].startswith("csl, llvm, ptx\n") and says in found["detail"]
    assert place in found["detail"] and "mend or uninstall its package" in found["remedy"]
    assert main(["conformance", "-k", "elementwise/add-f32", "--level", "tile"]) == 0
    said = capsys.readouterr()
    assert "left out: the generator broken" in said.err and says in said.err and "1 cases" in said.out
    assert main(["conformance", "-k", "elementwise/add-f32", "--target", "broken"]) == 2


GENERATOR = """from tessera.codegen.artifact import Artifact
from tessera.codegen.contract import Capabilities
from tessera.core.types import f32, int64

class Backend:
    name = "broken"
    capabilities = Capabilities(64, (f32, int64))
    def emit(self, module, options):
        return Artifact({"target": "broken"}, {"text": ""})
    def runtime(self, artifact):
        return self
    def run(self, arrays):
        return []

BACKEND = Backend()
"""
WRONG_HOOKS = [
    ("emit(self, module, options)", "emit(self, module)", "`emit`", "expected: emit(module, options)"),
    (
        "emit(self, module, options)",
        "emit(self, module, options, arch)",
        "`emit`",
        "received: emit(module, options, arch)",
    ),
    ("runtime(self, artifact)", "runtime(self)", "`runtime`", "expected: runtime(artifact)"),
    ("    def run(", "    def passes(self): return ()\n    def run(", "`passes`", "expected: passes(module, options)"),
    ("    def run(", "    def where(self, x): return x\n    def run(", "`where`", "expected: where()"),
    ("    def run(", "    interpreter = 3\n    def run(", "`interpreter`", "expected: interpreter(artifact)"),
    ("def emit", "def _emit", "no method `emit`", "my_package:BACKEND"),
    ("BACKEND = Backend()", "BACKEND = Backend", "`emit` of the generator broken cannot be called", "expected: emit"),
    ("capabilities =", "_capabilities =", "has no capabilities", "expected: a tessera.codegen.contract.Capabilities"),
]


def test_a_whole_generator_is_accepted(install):
    install(GENERATOR)
    assert contract.get_backend("broken").name == "broken" and not contract.find_broken_backends()


@pytest.mark.parametrize(("old", "new", "says", "wanted"), WRONG_HOOKS)
def test_a_method_with_other_arguments_is_refused_at_its_line(install, old, new, says, wanted):
    file = install(GENERATOR.replace(old, new, 1))
    with pytest.raises(ArgumentError) as caught:
        contract.get_backend("broken")
    text = str(caught.value)
    assert says in text and wanted in text
    assert text.startswith(str(file)) == ("cannot be called" in text)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [("return Artifact({", "return ({", "the method `emit` of the generator broken gives something else"),
     ("return self", "return None", "the method `runtime` of the generator broken gives something else")],
)  # fmt: skip
def test_what_a_method_gives_is_checked(install, old, new, says):
    file = install(GENERATOR.replace(old, new, 1))
    program = prepare(ts.jit(lambda x: x + 1.0), (np.ones(4, np.float32),))
    with pytest.raises(ArgumentError, match=says) as caught:
        program.run("device", "broken")
    assert caught.value.location.file == str(file)


OPS = st.sets(st.sampled_from("abcdef"), min_size=1, max_size=4)


@given(st.lists(OPS, max_size=12))
def test_missing_ops_are_ranked_by_the_cases_they_turn_green(wanted):
    outcomes = [Outcome(str(i), "e", "unsupported", missing=tuple(sorted(w))) for i, w in enumerate(wanted)]
    ranked = rank_missing_ops([*outcomes, Outcome("other", "e", "unsupported"), Outcome("good", "e", "pass")])
    chosen: set[str] = set()
    for place, op in enumerate(ranked):
        green = {o: sum(w <= chosen | {o} for w in wanted) for o in set().union(*wanted) - chosen}
        assert green[op.name] == max(green.values())  # no other op would turn more green here
        assert op.cases == sum(op.name in w for w in wanted)
        chosen.add(op.name)
        assert sum(each.green for each in ranked[: place + 1]) == green[op.name]
    assert chosen == set().union(*wanted)


def test_conformance_ranks_what_a_generator_lacks(numpy_backend, capsys):
    assert main(["conformance", "--target", "numpy", "-k", "atomics or tile/blocks"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    found = re.search(
        r"numpy: rows for these ops would turn cases green.* op cases turned green .*? (tile\.\w+) (\d+)", out
    )
    assert found and found[1] == "tile.atomic" and int(found[2]) >= 3


@pytest.mark.parametrize("line", [None, 3])
def test_a_syntax_error_of_a_package_has_its_line_if_it_is_known(line):
    place = contract._locate_failure(SyntaxError("wrong", ("made.py", line, line, "x")))
    assert (place.file, place.line, place.column) == ("made.py", line or 0, line or 0)

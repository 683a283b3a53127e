"""`tessera run`, `build` and `inspect` as a user meets them."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tessera.tools.cli.main import main

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
KERNELS = ("vector_add", "softmax", "matmul", "block_reduction", "flash_attention")
FUNCTIONS = ("mlp", "attention")


@pytest.mark.parametrize("name", KERNELS + FUNCTIONS)
@pytest.mark.parametrize("where", [[], ["--level", "tile"], ["--level", "target"], ["--target", "llvm"]])
def test_examples_run_everywhere(name, where, capsys):
    assert main(["run", str(EXAMPLES / f"{name}.py"), *where]) == 0
    out = capsys.readouterr().out
    assert "within the bound" in out and "reference" in out


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("level", ["graph", "schedule"])
def test_functions_run_at_the_upper_levels(name, level, capsys):
    assert main(["run", str(EXAMPLES / f"{name}.py"), "--level", level]) == 0
    assert f"{level} (interpreted)" in capsys.readouterr().out


def test_a_kernel_has_no_graph(capsys):
    for command in ("run", "inspect"):
        assert main([command, str(EXAMPLES / "softmax.py"), "--level", "graph"]) == 2
        said = capsys.readouterr()
        assert "has no graph level" in said.err and "expected: tile, target" in said.err and not said.out


def test_files_in_and_out(tmp_path, rng, capsys):
    x = rng.standard_normal((64, 128), np.float32)
    np.save(tmp_path / "x.npy", x)
    entry = str(EXAMPLES / "mlp.py")
    outputs = []
    for target in ([], ["--target", "llvm"]):
        out = tmp_path / f"out{len(target)}.npy"
        assert main(["run", entry, "--input", str(tmp_path / "x.npy"), "--output", str(out), *target]) == 0
        outputs.append(np.load(out))
    assert outputs[0].shape == (64, 32) and np.allclose(*outputs, rtol=1e-4, atol=1e-5)


def test_the_seed_changes_the_inputs(tmp_path):
    results = []
    for seed in ("1", "1", "2"):
        main(["run", str(EXAMPLES / "vector_add.py"), "--seed", seed, "--output", str(tmp_path / "o.npy")])
        results.append(np.load(tmp_path / "o.npy"))
    assert np.array_equal(results[0], results[1]) and not np.array_equal(results[0], results[2])


@pytest.mark.parametrize("name", ["flash_attention", "mlp"])
def test_artifacts_run_in_a_new_process(name, tmp_path):
    out = tmp_path / "artifact"
    assert main(["build", str(EXAMPLES / f"{name}.py"), "--target", "llvm", "-o", str(out)]) == 0
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["target"] == "llvm" and manifest["files"]
    command = [sys.executable, "-m", "tessera.tools.cli", "run", str(out)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "artifact" in done.stdout, done.stderr


def test_builds_are_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        main(["build", str(EXAMPLES / "mlp.py"), "-o", str(tmp_path / name)])
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert files and all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)


def test_inspect_shows_levels_and_lines(capsys):
    assert main(["inspect", str(EXAMPLES / "mlp.py")]) == 0
    out = capsys.readouterr().out
    for part in ("graph", "schedule", "tile", "target", "// mlp.py:", "hidden = ts.relu(x @ w1 + b1)"):
        assert part in out


def test_inspect_plain_is_ir_alone(capsys):
    from tessera.ir.parser import parse_module

    assert main(["inspect", str(EXAMPLES / "attention.py"), "--plain", "--level", "tile"]) == 0
    assert parse_module(capsys.readouterr().out).level == "tile"


def test_inspect_passes_and_json(capsys):
    assert main(["inspect", str(EXAMPLES / "mlp.py"), "--pass-by-pass", "--json"]) == 0
    sections = json.loads(capsys.readouterr().out)
    assert next(iter(sections)) == "after trace" and len(sections) > 3


def test_inspect_shows_a_generator_s_passes(capsys):
    from tessera.ir.parser import parse_module
    from tessera.ir.printer import print_module

    command = ["inspect", str(EXAMPLES / "mlp.py"), "--target", "ptx", "--arch", "sm_90a", "--pass-by-pass", "--json"]
    assert main(command) == 0
    sections = {k: v for k, v in json.loads(capsys.readouterr().out).items() if v["level"] == "ptx"}
    assert {"after launch analysis", "after kernel selection", "after layout assignment"} <= set(sections)
    for section in sections.values():
        assert print_module(parse_module(section["text"])) == section["text"]


def test_conformance_counts_and_reports(tmp_path, capsys):
    report = tmp_path / "out.json"
    assert main(["conformance", "-k", "softmax and f32", "--report", str(report)]) == 0
    outcomes = json.loads(report.read_text())
    assert {o["engine"] for o in outcomes} >= {"graph", "schedule", "tile", "llvm", "llvm text"}
    assert all(o["status"] == "pass" for o in outcomes if not o["engine"].startswith("csl"))
    assert not [o for o in outcomes if o["status"] == "fail"]  # kernels have no mapping onto a mesh
    xml = tmp_path / "out.xml"
    assert main(["conformance", "-k", "transpose", "--level", "tile", "--report", str(xml)]) == 0
    assert "<testsuite" in xml.read_text()


def test_conformance_shows_every_column_where_stdout_is_no_terminal(capsys):
    assert main(["conformance", "-k", "graph/composites/softmax"]) == 0
    head, *rows = (line for line in capsys.readouterr().out.splitlines() if line)
    assert all(name in head for name in ("graph", "schedule", "tile", "llvm text", "llvm  ", "ptx text", "csl text"))
    assert "…" not in head and rows[0].startswith("graph/composites/softmax")
    assert "worst error of the passing runs: " in rows[-1]


def test_conformance_lists_the_selected_cases(capsys):
    assert main(["conformance", "-k", "numerics and policy", "--list"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert "graph/numerics/policy-mixed" in names and all("policy" in n for n in names)


def test_doctor_knows_this_machine(capsys):
    assert main(["doctor", "--json"]) == 0
    found = {f["name"]: f for f in json.loads(capsys.readouterr().out)}
    assert found["NumPy"]["present"] and found["LLVM (target llvm)"]["present"]

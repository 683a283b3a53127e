"""The page on adding an op: its blocks, appended to the files that they name, give whole ops on every target."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"```python\n# (\S+)\n(.*?)```", re.DOTALL)
COMPOSITE, PRIMITIVE, DECOMPOSED = "log_cosh", "unit_clip", "cbrt"
MAX_FILES = {COMPOSITE: 2, PRIMITIVE: 5, DECOMPOSED: 3}
PAGE = (ROOT / "docs" / "adding-an-op.md").read_text()
PROPERTIES = """
import numpy as np, tessera as ts
x = np.linspace(-0.7, 1.9, 13, dtype=np.float32)
slopes = {ts.log_cosh: np.tanh(x), ts.unit_clip: ((x > 0) & (x < 1)) * 1.0, ts.cbrt: np.cbrt(x) ** -2 / 3}
for op, slope in slopes.items():
    assert np.allclose(ts.grad(lambda a: ts.sum(op(a)))(ts.Tensor(x)).numpy(), slope, rtol=1e-5, atol=1e-6)
    assert np.array_equal(ts.vmap(op)(ts.Tensor(x[None])).numpy()[0], op(ts.Tensor(x)).numpy())
    assert np.array_equal(getattr(ts.Tensor(x), op.__name__)().numpy(), op(ts.Tensor(x)).numpy())
    assert getattr(ts.tile, op.__name__) is op
assert ts.unit_clip(ts.Tensor([np.nan])).numpy() == 0
"""


def blocks_of(op):
    return [(file, text) for file, text in BLOCK.findall(PAGE) if re.search(rf"\b{op}\b", text)]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the source tree with the blocks of the page appended."""
    root = tmp_path_factory.mktemp("tree")
    for name in ("tessera", "conformance", "tests/ops"):
        shutil.copytree(ROOT / name, root / name)  # with the modules that are compiled to bytecode already
    for file, text in BLOCK.findall(PAGE):
        with (root / file).open("a") as source:
            source.write(f"\n\n{text}")
    return root


def run(tree, *args):
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    found = subprocess.run(
        [sys.executable, *args], cwd=tree, env=environment, capture_output=True, text=True, timeout=600
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.mark.parametrize("op", MAX_FILES)
def test_few_files_are_touched(op):
    assert 0 < len({file for file, _ in blocks_of(op)}) <= MAX_FILES[op]


def test_every_block_names_its_file():
    assert len(BLOCK.findall(PAGE)) == PAGE.count("```python")


def test_no_column_is_missing(tree):
    names = " or ".join(MAX_FILES)
    said = run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/ops/test_complete.py", "-k", names)
    assert f"{len(MAX_FILES)} passed" in said


def test_gradient_batching_and_names(tree):
    run(tree, "-c", PROPERTIES)


def test_every_engine_agrees_with_the_bound(tree):
    """The interpreters, and the text for each target in its emulator, on the cases that the columns give."""
    run(tree, "-m", "tessera.tools.cli", "conformance", "-k", " or ".join(MAX_FILES), "--report", "report.json")
    outcomes = json.loads((tree / "report.json").read_text())
    for op in MAX_FILES:
        mine = [each for each in outcomes if f"/{op}-f32" in each["case"]]
        assert {"graph", "schedule", "tile", "llvm text", "llvm", "ptx text", "csl text"} <= {e["engine"] for e in mine}
        assert {each["status"] for each in mine} == {"pass"}

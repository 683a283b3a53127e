"""A tuned kernel given to `tessera run`, `build` and `inspect`: tuned, or from the cache, and said so."""

import json
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.runtime.launch import tuner as measuring
from tessera.tools.cli.main import main

PROGRAM = """import numpy as np
import tessera as ts
from tessera import tile


def inputs(rng):
    return {"x": rng.random(96, np.float32)}


@ts.example(inputs, lambda x: x * 2, grid=lambda x, BLOCK: (-(-len(x) // BLOCK),))
@ts.kernel.autotune(space={"BLOCK": [8, 16, 32]}, samples=1)
def double(x, *, BLOCK: int = 8):
    i = tile.program_id(0) * BLOCK
    x[i : i + BLOCK] *= 2.0
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """The file; BLOCK=32 is the fastest on interp, 16 on llvm."""
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measuring, "_RESULTS", {})

    def measure(launch, args, named, samples):
        best = 32 if launch.kernel.options.target == "interp" else 16
        return [1.0 + abs(launch.kernel.bind(args, named).constants["BLOCK"] - best)]

    monkeypatch.setattr(measuring, "_measure", measure)
    (tmp_path / "program.py").write_text(PROGRAM)
    return str(tmp_path / "program.py")


def test_run(program, capsys):
    assert main(["run", program]) == 0
    assert "configuration: BLOCK=32 (fastest of 3, measured now: 1 ms)" in (out := capsys.readouterr().out)
    assert "within the bound" in out and "reference" in out
    measuring._RESULTS.clear()  # as another process begins
    assert main(["run", program, "--target", "llvm"]) == 0
    assert "BLOCK=16 (fastest of 3, measured now" in capsys.readouterr().out
    measuring._RESULTS.clear()
    assert main(["run", program, "--report"]) == 0
    assert "BLOCK=32 (fastest of 3, measured before: 1 ms)" in (out := capsys.readouterr().out) and "grid (3,)" in out


def test_the_example(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    for said in ("fastest of 4, measured now", "fastest of 4, measured before"):
        monkeypatch.setattr(measuring, "_RESULTS", {})
        assert main(["run", str(Path(__file__).parents[3] / "examples" / "tuned_matmul.py")]) == 0
        out = capsys.readouterr().out
        assert said in out and "within the bound" in out and "reference" in out


def test_no_tuning(program, capsys):
    assert main(["run", program, "--no-tune"]) == 0
    assert "configuration: BLOCK=8 (the first of 3, not tuned)" in capsys.readouterr().out


def test_build_and_inspect(program, tmp_path, capsys):
    assert main(["build", program, "-o", str(tmp_path / "art")]) == 0
    assert "configuration: BLOCK=16 (fastest of 3, measured now" in capsys.readouterr().out
    assert main(["run", str(tmp_path / "art")]) == 0
    capsys.readouterr()
    measuring._RESULTS.clear()  # as another process begins
    assert main(["inspect", program, "--plain", "--level", "tile"]) == 0
    found = capsys.readouterr()
    assert "measured before" in found.err and "grid = [6 : i64]" in found.out and "configuration" not in found.out


def test_a_device_that_is_not_here_is_not_measured(program, capsys, monkeypatch):

    monkeypatch.setattr("tessera.codegen.ptx.generator.PtxGenerator.has_device", property(lambda self: False))
    assert main(["inspect", program, "--target", "ptx", "--level", "tile", "--plain"]) == 0
    assert "by RooflineModel(H100); nothing was measured" in capsys.readouterr().err


def test_nor_is_it_by_a_launch(program, monkeypatch):
    monkeypatch.setattr("tessera.codegen.ptx.generator.PtxGenerator.has_device", property(lambda self: False))
    entry = ts.kernel.autotune(space={"BLOCK": [8, 32]}, options={"target": "ptx"})(double)
    x = np.ones(96, "f4")
    grid = lambda c: (96 // c["BLOCK"],)  # noqa: E731
    assert "RooflineModel" in entry[grid].tune(x).model
    entry[grid](x)
    assert x.tolist() == [2.0] * 96


def double(x, *, BLOCK: int = 8):
    i = tile.program_id(0) * BLOCK
    x[i : i + BLOCK] *= 2.0


FUNCTION = """import numpy as np
import tessera as ts


def inputs(rng):
    return {"x": rng.random((70, 4096), np.float32)}


@ts.example(inputs, lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True))
@ts.jit(tune=True)
def normalise(x):
    return ts.softmax(x)
"""


def test_the_schedules_of_a_function_are_listed_and_the_tuned_one_is_used(tmp_path, monkeypatch, capsys):
    from tessera.runtime import planning

    path = tmp_path / "normalise.py"
    path.write_text(FUNCTION)
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(planning, "_RESULTS", {})
    monkeypatch.setattr(planning, "_measure", _measure_rows)
    assert main(["tune", str(path), "--keep", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chosen"].keys() == {"rows"} and found["target"] == "llvm" and not found["cached"]
    assert [t["measured_ms"] for t in found["trials"]].count(None) == len(found["trials"]) - 2
    assert main(["tune", str(path), "--no-measure"]) == 0
    assert "nothing was measured" in capsys.readouterr().out
    assert main(["inspect", str(path), "--level", "tile", "--plain"]) == 0
    assert main(["inspect", str(path), "--level", "tile", "--plain", "--no-tune"]) == 0
    tuned = capsys.readouterr()
    assert "rows=" in tuned.err
    assert main(["run", str(path), "--target", "llvm"]) == 0


def _measure_rows(function, target, arrays, wanted, samples):
    from tessera.runtime import planning

    return [planning._make_trial(c, [0.5 if "rows" in c.choice else 1.0], "") for c in wanted]


def test_what_the_command_cannot_tune(program, tmp_path, capsys):
    path = tmp_path / "plain.py"
    path.write_text(FUNCTION)
    assert main(["tune", str(path), "--target", "interp"]) == 2
    assert "no schedules to tune" in capsys.readouterr().err
    assert main(["tune", str(program)]) == 0  # an autotuned kernel
    assert "BLOCK" in capsys.readouterr().out
    path.write_text(Path(program).read_text().replace('.autotune(space={"BLOCK": [8, 16, 32]}, samples=1)', ""))
    assert main(["tune", str(path)]) == 2
    assert "nothing to tune" in capsys.readouterr().err

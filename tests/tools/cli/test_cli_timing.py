"""What `tessera run` says about time and about how much of the results it checked."""

import re
from pathlib import Path

import pytest

from tessera.tools.cli import run
from tessera.tools.cli.main import main

EXAMPLES = Path(__file__).parents[3] / "examples"
SOFTMAX, MATMUL, MLP = (str(EXAMPLES / f"{name}.py") for name in ("softmax", "matmul", "mlp"))


def said(capsys, *arguments, status=0):
    assert main(["run", *arguments]) == status
    return " ".join(capsys.readouterr().out.split())


def test_a_target_s_time_is_that_of_a_warm_call_and_compilation_is_apart(capsys):
    out = said(capsys, SOFTMAX, "--target", "llvm")
    assert re.search(r"time \S+ m?s, a warm call", out)
    assert re.search(r"spent compilation \S+ m?s, bounds \S+ m?s, reference \S+ m?s", out)


def test_a_long_call_is_not_repeated(capsys, monkeypatch):
    monkeypatch.setattr(run, "LONG_CALL", 0.0)
    assert re.search(r"time \S+ m?s, the first call", said(capsys, SOFTMAX, "--target", "llvm"))


@pytest.mark.parametrize("where", [[], ["--target", "llvm"], ["--level", "target", "--target", "llvm"]])
def test_repeat_gives_the_least_and_the_median(where, capsys):
    found = re.search(
        r"time (\S+) (m?s) min, (\S+) (m?s) median of 3 warm calls", said(capsys, SOFTMAX, *where, "--repeat", "3")
    )
    assert found and float(found[1]) <= float(found[3]) and found[2] == found[4]


@pytest.mark.parametrize("number", ["0", "-1", "1.5", "x"])
def test_a_number_of_repeats_is_whole_and_positive(number, capsys):
    with pytest.raises(SystemExit):
        main(["run", SOFTMAX, "--repeat", number])
    assert "--repeat" in capsys.readouterr().err


def test_no_check_checks_nothing_and_says_so(capsys, monkeypatch):
    monkeypatch.setattr(run.PreparedProgram, "sample_bounds", None)
    out = said(capsys, SOFTMAX, "--no-check")
    assert "not checked (--no-check)" in out and "reference" not in out and "bounds" not in out


def test_a_sample_is_named_and_the_full_check_checks_all(capsys, monkeypatch):
    monkeypatch.setattr(run, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(run, "CHECK_SHARE", 0.0)
    monkeypatch.setattr("tessera.interp.tile.interpreter.SAMPLE_BYTES", 1)
    assert "checked in a sample: 1 of 6 programs, spread over the grid; --full-check checks everything" in said(
        capsys, MATMUL
    )
    assert "within the bound reference" in said(capsys, MATMUL, "--full-check")


def test_a_sample_that_writes_nothing_checks_nothing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(run, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(run, "CHECK_SHARE", 0.0)
    monkeypatch.setattr("tessera.interp.tile.interpreter.SAMPLE_BYTES", 1)
    (tmp_path / "model.py").write_text(
        "import numpy as np, tessera as ts\n"
        "@ts.example(lambda rng: (np.ones(8, np.float32),), grid=8)\n@ts.kernel\n"
        "def one(x: ts.Tensor[8]):\n"
        "    if ts.tile.program_id(0) == 5:\n        x[5] = 2.0\n"
    )
    assert "not checked: 1 of 8 programs were tried, and wrote nothing; --full-check" in said(
        capsys, str(tmp_path / "model.py")
    )


def test_bounds_that_take_too_long_are_not_checked_and_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(run.PreparedProgram, "sample_bounds", lambda self, *seconds: None)
    assert "not checked: its bounds take over" in said(capsys, MLP)


def test_an_architecture_belongs_to_a_generator(capsys):
    assert main(["run", SOFTMAX, "--arch", "sm_90a"]) == 2
    assert "--arch selects the architecture of a generator" in capsys.readouterr().err
    assert main(["run", SOFTMAX, "--target", "llvm", "--arch", "sm_90a"]) == 2
    assert "the target llvm has no option arch" in capsys.readouterr().err
    assert "within the bound" in said(capsys, SOFTMAX, "--target", "ptx", "--level", "target", "--arch", "sm_80")


def test_a_simulated_grid_shows_cycles_and_the_use_of_each_element(capsys, tmp_path):
    (tmp_path / "model.py").write_text(
        "import numpy as np, tessera as ts\n"
        "@ts.example(lambda rng: (np.ones((16, 16), np.float32),))\n@ts.jit\ndef f(x):\n    return x @ x + 1.0\n"
    )
    out = said(capsys, str(tmp_path / "model.py"), "--target", "csl:2x2")
    found = re.search(r"cycles ([\d,]+) of the computation, ([\d,]+) with the copies of the host", out)
    computed, whole = (int(n.replace(",", "")) for n in found.groups())
    assert 0 < computed < whole
    busy = re.search(r"by row and column of PEs: (\d+) (\d+) (\d+) (\d+) memory up to [\d,]+ of 49,152 bytes", out)
    assert all(0 < int(share) <= 100 for share in busy.groups())


def test_a_picture_of_a_simulated_grid(tmp_path, monkeypatch, capsys):
    drawn = []
    monkeypatch.setattr("tessera.codegen.csl.runtime.simulation.draw_run", lambda run, path: drawn.append((run, path)))
    file = str(tmp_path / "run.svg")
    said(capsys, MATMUL, "--target", "csl:1x1", "--picture", file, status=2)  # too large for one element
    model = tmp_path / "model.py"
    model.write_text(
        "import numpy as np, tessera as ts\n"
        "@ts.example(lambda rng: (np.ones((4, 4), np.float32),))\n@ts.jit\ndef f(x):\n    return x + 1.0\n"
    )
    said(capsys, str(model), "--target", "csl:2x2", "--picture", file)
    ((run_drawn, path),) = drawn
    assert path == file and run_drawn.cycles > 0
    assert main(["run", str(model), "--target", "llvm", "--picture", file]) == 2
    assert "the target llvm draws no picture of a run" in capsys.readouterr().err


def test_an_artifact_s_time_is_that_of_a_warm_call(tmp_path, capsys):
    out = tmp_path / "artifact"
    assert main(["build", SOFTMAX, "-o", str(out)]) == 0
    assert re.search(r"time \S+ m?s, a warm call", said(capsys, str(out)))
    assert "median of 3 warm calls" in said(capsys, str(out), "--repeat", "3")


@pytest.mark.parametrize("way", ["--debug", "--report"])
def test_modes_that_do_not_measure_refuse_to(way, capsys):
    assert main(["run", SOFTMAX, way, "--repeat", "3"]) == 2
    assert "--repeat measures or checks a plain run" in capsys.readouterr().err


def test_several_launches_are_checked_as_a_whole_with_patience(capsys, monkeypatch):
    monkeypatch.setattr(run, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(run, "CHECK_SHARE", 0.0)
    assert "within the bound reference" in said(capsys, MLP)
    monkeypatch.setattr(run, "CHECK_PATIENCE", 0.0)
    assert "not checked: its bounds take over 0 ms; --full-check checks everything" in said(capsys, MLP)

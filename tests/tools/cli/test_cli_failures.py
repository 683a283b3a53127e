"""Exceptions of the user's own Python at the command line: the line they came from, status 2, no traceback."""

import sys

import numpy as np
import pytest

from tessera.tools.cli.main import main

HEAD = "import numpy as np\nimport tessera as ts\n\n"
EXAMPLE = "@ts.example(lambda rng: (np.ones((2, 3), np.float32),){})\n@ts.jit\ndef f(x):\n    {}\n"


def model(reference="", body="return x + 1.0"):
    return HEAD + EXAMPLE.format(f", {reference}" if reference else "", body)


def fails(capsys, file, command="run"):
    assert main([command, str(file)]) == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize(
    ("source", "place", "says"),
    [
        ("def g():\n    return 1 / 0\n\nvalue = g()\n", ":2", "ZeroDivisionError: division by zero"),
        ("import no_such_package\n", ":1", "ModuleNotFoundError: No module named 'no_such_package'"),
        (model(body="raise ValueError('mine')"), ":7", "ValueError: mine"),
        (model(body="return x.nothing()"), ":7", "AttributeError: a tensor has no 'nothing'"),
        (model(reference="lambda x: x @ np.ones((9, 9))"), ":4", "ValueError: matmul"),
        (HEAD + "@ts.example(lambda rng: (missing,))\n@ts.jit\ndef f(x):\n    return x\n", ":4", "NameError"),
    ],
)
def test_the_users_line_is_shown(tmp_path, source, place, says, capsys):
    file = tmp_path / "model.py"
    file.write_text(source)
    text = fails(capsys, file)
    assert f"{file}{place}" in text and f"ProgramError: {says.split(':')[0]}" in text or says in text
    assert says in text and "--traceback" in text and source.splitlines()[int(place[1:]) - 1].strip() in text
    assert "^" in text or sys.version_info < (3, 11)


def test_a_traceback_on_demand(tmp_path):
    (tmp_path / "model.py").write_text("value = 1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        main(["run", str(tmp_path / "model.py"), "--traceback"])


def test_a_file_that_exits(tmp_path, capsys):
    (tmp_path / "model.py").write_text("raise SystemExit(3)\n")
    assert "ended the process while it was imported" in fails(capsys, tmp_path / "model.py", "inspect")


def test_a_fault_of_tessera_is_called_one(tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise KeyError("inner")

    monkeypatch.setattr("tessera.tools.cli.run.compare_with_bound", broken)
    (tmp_path / "model.py").write_text(model())
    assert "KeyError: 'inner'" in fails(capsys, tmp_path / "model.py")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("@ts.example(3)\n@ts.jit\ndef f(x):\n    return x\n", "the inputs of an example are no function"),
        ("@ts.example(lambda rng: None)\n@ts.jit\ndef f(x):\n    return x\n", "makes no arguments"),
        ("@ts.example(lambda rng: np.ones(3))\n@ts.jit\ndef f(x):\n    return x\n", "stands in a tuple too: (x,)"),
        ("@ts.example(lambda rng: (1.0, 2.0))\n@ts.jit\ndef f(x):\n    return x\n", "too many positional"),
        ("@ts.jit\ndef f(x):\n    return x\n", "f has no example inputs"),
        (EXAMPLE.format(", lambda x: (x, x)", "return x"), "another number of values"),
        (EXAMPLE.format(", lambda x: x[:1]", "return x"), "another shape than the result"),
        (EXAMPLE.format(", lambda x: {'y': x}", "return x"), "the reference has y"),
    ],
)
def test_examples_that_do_not_fit(tmp_path, source, says, capsys):
    file = tmp_path / "model.py"
    file.write_text(HEAD + source)
    text = fails(capsys, file)
    assert says in text and f"{file}:4" in text


def test_a_reference_by_name(tmp_path, capsys):
    """A kernel's reference names what it writes, or gives the last of it alone."""
    kernel = (
        "@ts.example(lambda rng: (np.ones(4, np.float32), np.zeros(4, np.float32), np.zeros(4, np.float32)), {})\n"
        "@ts.kernel\ndef k(x: ts.Tensor['N'], y: ts.Tensor['N'], z: ts.Tensor['N']):\n"
        "    i = ts.tile.program_id(0)\n    y[i] = x[i] + 1.0\n    z[i] = x[i] + 2.0\n"
    )
    file = tmp_path / "model.py"
    for right in ("lambda x, y, z: {'y': x + 1}", "lambda x, y, z: x + 2"):
        file.write_text(HEAD + kernel.format(f"{right}, grid=(4,)"))
        assert main(["run", str(file)]) == 0, capsys.readouterr()
    file.write_text(HEAD + kernel.format("lambda x, y, z: {'y': x + 7}, grid=(4,)"))
    assert main(["run", str(file)]) == 1
    assert "differs" in capsys.readouterr().out


def test_what_has_no_bound_says_so(tmp_path, capsys):
    source = HEAD + "@ts.example(lambda rng: (np.eye(3, dtype=np.float32),), {})\n@ts.jit\ndef f(x):\n    "
    (tmp_path / "model.py").write_text((source + "return ts.svd(x)[1]\n").format("lambda x: np.ones(3)"))
    assert main(["run", str(tmp_path / "model.py")]) == 0
    out = capsys.readouterr().out
    assert "without a bound: ts.svd has no error rule" in out and "largest difference 0.00e+00" in out


def test_seeds_are_not_negative(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["run", "x.py", "--seed", "-1"])
    assert caught.value.code == 2 and "whole number from 0 on" in capsys.readouterr().err


def test_a_level_as_a_target_has_it(tmp_path, capsys):
    (tmp_path / "model.py").write_text(model(reference="lambda x: x + 1"))
    for target in ("llvm", "csl:2x2"):
        assert main(["run", str(tmp_path / "model.py"), "--level", "tile", "--target", target]) == 0
        assert f"as lowered for {target}" in " ".join(capsys.readouterr().out.split())


def test_one_way_at_a_time(tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.ones(3))
    assert main(["run", "x.py", "--debug", "--report"]) == 2
    assert "received: --debug, --report" in capsys.readouterr().err

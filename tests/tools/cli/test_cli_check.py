"""`tessera check`: what is printed, the exit status, and the JSON."""

import json

import pytest

from tessera.tools.cli.main import main

PROGRAM = """import tessera as ts


def helper(x: ts.Tensor["B", "D"], y: ts.Tensor["B", "E"]):
    return x + y


@ts.jit
def model(x: ts.Tensor["B", "D"], y: ts.Tensor["B", "E"]):
    return helper(x, y)


def fine(x: ts.Tensor["B"]):
    return x * 2.0
"""


@pytest.fixture
def program(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return file


def test_an_error_is_printed_once_and_sets_the_status(program, capsys):
    assert main(["check", str(program)]) == 1
    out = capsys.readouterr().out
    assert out.count("Error: Shape mismatch in function 'helper' at program.py:5") == 1
    assert "Cannot broadcast D with E in dimension 1." in out and "1 error in 3 functions" in out


def test_one_function(program, capsys):
    assert main(["check", f"{program}:fine"]) == 0
    assert capsys.readouterr().out == "no errors in 1 function\n"


def test_json(program, capsys):
    assert main(["check", f"{program}:model", "--json"]) == 1
    (report,) = json.loads(capsys.readouterr().out)
    (finding,) = report["findings"]
    assert report["name"] == "model" and finding["location"]["line"] == 5 and finding["location"]["column"] == 12
    assert [(s["line"], s["function"]) for s in finding["stack"]] == [(10, "model"), (5, "helper")]


@pytest.mark.parametrize("what", ["nowhere.py", "{}:missing"])
def test_what_cannot_be_checked(program, what, capsys):
    assert main(["check", what.format(program)]) == 2
    assert "there is no file" in (err := capsys.readouterr().err) or "has no function missing" in err


def test_a_file_without_functions(tmp_path, capsys):
    (tmp_path / "empty.py").write_text("x = 1\n")
    assert main(["check", str(tmp_path / "empty.py")]) == 2
    assert "has no function to check" in capsys.readouterr().err

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


def test_functions_without_types_are_not_called_correct(tmp_path, capsys):
    file = tmp_path / "untyped.py"
    file.write_text("import tessera as ts\n\n\n@ts.jit\ndef f(x):\n    return x + 1.0\n")
    assert main(["check", str(file)]) == 0
    out = capsys.readouterr().out
    assert "no errors" not in out
    assert "nothing could be checked: no parameter of f has a type; annotate them: x: ts.Tensor[...]" in out
    file.write_text(file.read_text() + "\n\ndef g(x: ts.Tensor[4]):\n    return x\n")
    assert main(["check", str(file)]) == 0
    assert "no errors in 1 function; 1 not checked: no parameter of f has a type" in capsys.readouterr().out


def test_kernels_are_run_in_debug_mode_instead(tmp_path, capsys):
    file = tmp_path / "kernels.py"
    file.write_text("import tessera as ts\n\n\n@ts.kernel\ndef k(x: ts.Tensor[4]):\n    x[0] = 1.0\n")
    for entry, says in ((str(file), "has kernels only: k"), (f"{file}:k", "k is a kernel, not a function")):
        assert main(["check", entry]) == 2
        err = capsys.readouterr().err
        assert says in err and f"tessera run --debug {file}:k" in err


def test_a_file_without_functions(tmp_path, capsys):
    (tmp_path / "empty.py").write_text("x = 1\n")
    assert main(["check", str(tmp_path / "empty.py")]) == 2
    assert "has no function to check" in capsys.readouterr().err

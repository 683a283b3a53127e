"""`tessera check`: what is printed, the exit status, and the JSON."""

import json
import sys

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


KERNELS = """import tessera as ts
from tessera import tile


@ts.kernel
def right(x: ts.Tensor["M", "N"], y: ts.Tensor["M", "N"]):
    m = tile.program_id(0)
    tile.store(y[m : m + 1, :], x[m : m + 1, :] * 2.0)


@ts.kernel
def wrong(x: ts.Tensor["M", "N"], y: ts.Tensor["M", "N", ts.bf16]):
    m = tile.program_id(0)
    tile.store(y[m : m + 1, :], x[m : m + 1, :] + y[m : m + 1, :])


@ts.kernel
def untyped(x, y: ts.Tensor["N"]):
    y[0] = x[0]
"""


def test_kernels_are_checked(tmp_path, capsys):
    file = tmp_path / "kernels.py"
    file.write_text(KERNELS)
    assert main(["check", str(file)]) == 1
    out = capsys.readouterr().out
    assert "Error: Numerical type mismatch in function 'wrong' at kernels.py:14" in out
    assert "| " + " " * 32 + "^" in out  # the caret is under the sum
    assert "note: untyped: x has no type: the kernel is not checked" in out
    assert "1 error in 2 functions; 1 not checked: no parameter of untyped has a type" in out
    assert main(["check", f"{file}:right"]) == 0
    assert capsys.readouterr().out == "no errors in 1 function\n"


MODULE = """import sys
import {helper}
import tessera as ts

sys.path.append("/nowhere")
SIZE = 4
scale = {helper}.double(SIZE)
unused = {helper}.double(SIZE + 1)
try:
    import missing_package
except ImportError:
    missing_package = None


def model(x: ts.Tensor["B"]):
    return x * float(scale)


compiled = ts.jit(model)
for step in range(3):
    {helper}.calls.append("loop")
print(model(ts.ones((2,))))
{guard}
"""


@pytest.fixture
def module(tmp_path, request):
    def write(guard=""):
        name = f"helper_{abs(hash(request.node.name))}"
        (tmp_path / f"{name}.py").write_text("calls = []\ndef double(n):\n    calls.append(n)\n    return 2 * n\n")
        file = tmp_path / "module.py"
        file.write_text(MODULE.format(helper=name, guard=guard))
        return file, name

    return write


def test_what_the_functions_do_not_use_is_not_run_and_what_is_imported_is_said(module, capsys):
    file, helper = module()
    assert main(["check", str(file)]) == 0
    out = capsys.readouterr().out
    assert sys.modules[helper].calls == [4]
    assert f"note: imported for the check: {helper}" in out
    assert "note: not run: lines 8, 20-21, 22 of module.py, which define nothing that its functions use" in out
    assert "no errors in 2 functions" in out and "Tensor" not in out
    assert main(["check", f"{file}:unused"]) == 2  # it is asked for, hence run


def test_loops_that_fill_what_a_function_uses_are_run(tmp_path, capsys):
    file = tmp_path / "filled.py"
    file.write_text(
        "import tessera as ts\nSIZES, NAMES, LEFT = {}, [], []\n"
        "for n in range(3):\n    SIZES[n] = n + 1\n"
        "NAMES.extend(['a', 'b'])\n"
        "LEFT.append(1 / 0)\n"
        "def f(x: ts.Tensor['B', 3]):\n    return x.reshape(x.shape[0], SIZES[2]) * float(len(NAMES))\n"
    )
    assert main(["check", str(file)]) == 0
    assert "not run: line 6 of filled.py" in (out := capsys.readouterr().out) and "no errors in 1 function" in out


def test_a_file_with_a_main_guard_is_imported_as_it_is(module, capsys):
    file, helper = module('if __name__ == "__main__":\n    raise SystemExit')
    assert main(["check", str(file)]) == 0
    assert sys.modules[helper].calls == [4, 5, *["loop"] * 3]
    assert "not run" not in (out := capsys.readouterr().out) and "Tensor([2" in out.replace("8", "2")


def test_a_file_without_functions(tmp_path, capsys):
    (tmp_path / "empty.py").write_text("x = 1\n")
    assert main(["check", str(tmp_path / "empty.py")]) == 2
    assert "has no function to check" in capsys.readouterr().err

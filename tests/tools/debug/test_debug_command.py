"""`tessera debug`: an entry point or a whole program, with commands from the line or a file."""

import pytest

from tessera.tools.cli.main import main

PROGRAM = """
import sys
import numpy as np
import tessera as ts


@ts.example(lambda rng: (np.arange(4, dtype=np.float32), np.zeros(4, np.float32)), grid=(4,))
@ts.kernel
def double(x, out):
    i = ts.tile.program_id(0)
    y = x[i] * 2.0
    out[i] = y


@ts.example(lambda rng: (np.arange(4, dtype=np.float32),))
@ts.jit
def grown(x):
    y = ts.exp(x)
    return y + 1.0


if __name__ == "__main__":
    out = np.zeros(4, np.float32)
    double[(4,)](np.arange(4, dtype=np.float32), out)
    print(sys.argv[1], out)
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "prog.py").write_text(PROGRAM)
    (tmp_path / "commands").write_text("next\nprint y  # twice x\nquit\n")
    return tmp_path


def test_an_entry_point(program, capsys):
    path = f"{program}/prog.py:double"
    assert main(["debug", path, "-c", "next; focus 3", "--commands", f"{program}/commands"]) == 0
    shown = capsys.readouterr().out
    assert "prog.py:12 in double, program (3,)" in shown and "y = 6.0 (f32)" in shown


def test_a_whole_program(program, capsys):
    assert main(["debug", "--script", f"{program}/prog.py", "now", "-c", "break 12 if y > 5; c; p i"]) == 0
    shown = capsys.readouterr().out
    assert "i = 3 (int64)" in shown and "now [0. 2. 4. 6.]" in shown


def test_a_jit_function_by_its_lines_and_variables(program, capsys):
    assert main(["debug", f"{program}/prog.py:grown", "-c", "op; info; next; print y; back; where; continue"]) == 0
    shown = capsys.readouterr().out
    assert "->    18 |     y = ts.exp(x)" in shown and "->    19 |     return y + 1.0" in shown
    assert "ts.exp(4xf32) -> 4xf32" in shown and "2.718282" in shown


def test_the_kernels_of_a_jit_function(program, capsys):
    assert main(["debug", f"{program}/prog.py:grown", "--level", "tile", "-c", "op; info; next; back; where; c"]) == 0
    shown = capsys.readouterr().out
    assert "->    18 |     y = ts.exp(x)" in shown and "->    19 |     return y + 1.0" in shown
    assert "instances are here" in shown and "ts." in shown


def test_in_debug_mode_the_first_finding_stops(program, capsys):
    racy = PROGRAM.replace("out[i] = y", "out[0] = y")
    (program / "prog.py").write_text(racy)
    assert main(["debug", "--checked", f"{program}/prog.py:double", "-c", "c; p y"]) == 2
    shown = capsys.readouterr()
    assert "a data race on out[0]" in shown.out and "y = 0.0 (f32)" in shown.out and "RaceError" in shown.err


def test_a_file_of_commands_that_is_missing(program, capsys):
    assert main(["debug", f"{program}/prog.py:double", "--commands", "nowhere"]) == 2
    assert "there is no file nowhere" in capsys.readouterr().err

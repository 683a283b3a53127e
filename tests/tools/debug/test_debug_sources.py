"""Kernels and the debugger in programs that no file has: `python -c`, `python < FILE`, a pipe, `exec`, a notebook."""

import linecache
import subprocess
import sys

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import UnsupportedSyntaxError

PROGRAM = """import numpy as np, tessera as ts
@ts.kernel
def twice(x):
    i = ts.tile.program_id(0)
    x[i] = x[i] * 2.0
@ts.jit
def shifted(x):
    y = x + 1.0
    return y * 2.0
with ts.debug.session("step; print i; continue"):
    twice[(4,)](np.ones(4, np.float32))
with ts.debug.session("step; print y; continue"):
    shifted(np.ones(4, np.float32))
"""


def run(*arguments, **options):
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, **options)
    return done.stdout, done.stderr


def check_session(out, file):
    for text in (f"> {file}:5 in twice", "x[i] = x[i] * 2.0", "i = 0", f"> {file}:9 in shifted", "return y * 2.0"):
        assert text in out


def test_the_text_of_a_command_line():
    out, err = run("-c", PROGRAM)
    assert not err
    check_session(out, "<string>")


def test_standard_input_from_a_file(tmp_path):
    (tmp_path / "program.txt").write_text(PROGRAM)
    for option in (["-"], []):
        with (tmp_path / "program.txt").open() as file:
            out, err = run(*option, stdin=file)
        assert not err
        check_session(out, "<stdin>")


def test_a_pipe_keeps_no_text():
    out, err = run("-", input=PROGRAM)
    assert "the source of twice cannot be read: the program came through a pipe" in err
    assert "suggestion: put the function in a file and import it" in err and not out


def test_text_given_to_exec_is_not_taken_for_that_of_the_command_line():
    text = 'import tessera as ts\nexec("""\n@ts.kernel\ndef k(x):\n    x[0] = 1.0\n""")\nk[(1,)](ts.ones(1))'
    _, err = run("-c", text)
    assert "the source of k cannot be read: it was made by exec or eval" in err


@pytest.fixture
def cell():
    """What a notebook does: the text of a cell is in linecache, under a name that no file has."""
    name = "<ipython-input-7-0123456789ab>"
    linecache.cache[name] = (len(PROGRAM), None, PROGRAM.splitlines(keepends=True), name)
    yield name
    del linecache.cache[name]


def test_a_cell_of_a_notebook(cell, capsys):
    exec(compile(PROGRAM, cell, "exec"), {"__name__": "__main__"})
    check_session(capsys.readouterr().out, cell)


def test_a_function_without_a_text():
    names = {"ts": ts, "__name__": "made"}
    exec(compile("@ts.kernel\ndef k(x):\n    x[0] = 1.0\n", "<nowhere>", "exec"), names)
    with pytest.raises(UnsupportedSyntaxError, match="the source of k cannot be read") as caught:
        names["k"][(1,)](np.ones(1, np.float32))
    assert "a notebook's cell" in caught.value.expected

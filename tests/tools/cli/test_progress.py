"""Progress: what long operations report, and that only a terminal shows it."""

import io
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from rich.console import Console

import tessera as ts
from tessera import tile
from tessera.core.progress import operation, report_progress, showing_progress, track
from tessera.runtime.program import prepare
from tessera.tools.cli.progress import ProgressDisplay, progress_on_terminal


@ts.kernel
def add(x: ts.Tensor["N"], y: ts.Tensor["N"], *, B: int = 64):
    i = tile.program_id(0) * B
    y[i : i + B] = x[i : i + B] + 1.0


def reports(run):
    """What is reported while a function runs."""
    seen = []
    with showing_progress(lambda *report: seen.append(report)):
        run()
    return seen


def test_nothing_is_reported_where_nobody_listens():
    assert list(track([1, 2, 3], "numbers")) == [1, 2, 3]
    report_progress("numbers", 1, 3)


def test_an_operation_ends_when_it_fails():
    def fail():
        with operation("work"):
            report_progress("work", 1, 2)
            raise ValueError

    seen = []
    with pytest.raises(ValueError), showing_progress(lambda *report: seen.append(report)):
        fail()
    assert seen == [("work", 0, None), ("work", 1, 2), ("work", None, None)]


@pytest.mark.parametrize(
    "level, target, name",
    (
        ("tile", "interp", "interpreting add"),
        ("target", "llvm", "emulating add"),
        ("target", "ptx", "emulating add"),
        ("target", "csl", "cycles simulated"),
    ),
)
def test_interpreters_and_emulators_report(level, target, name):
    x = np.zeros(256, np.float32)
    program = prepare(add, (x, x.copy()), target, grid=(4,))
    found = [r for r in reports(lambda: program.run(level, target)) if r[0] == name]
    assert found[0][1] == 0 and found[-1] == (name, None, None)


@pytest.mark.parametrize(
    "level, name", (("graph", "interpreting program"), ("schedule", "interpreting the loops"), ("bounds", "bounding"))
)
def test_interpreters_of_whole_programs_report(level, name):
    def program(x):
        return ts.softmax(x @ x)

    made = prepare(ts.jit(program), (np.ones((8, 8), np.float32),))
    found = [r for r in reports(lambda: made.bounds() if level == "bounds" else made.run(level)) if name in r[0]]
    assert found[0][1] == 0 and found[-1][1] is None and any(r[1:] == (0, r[2]) and r[2] for r in found)


def test_tuning_and_compilation_report():
    tuned = ts.kernel.autotune(space={"B": [16, 32, 64]}, cache=False)(add.kernel_function)
    x = np.zeros(64, np.float32)
    seen = reports(lambda: tuned[lambda c: (64 // c["B"],)](x, x.copy()))
    assert [r[1:] for r in seen if r[0] == "tuning add" and r[2]] == [(0, 3), (1, 3), (2, 3)]
    lowered = reports(lambda: prepare(ts.jit(lambda x: x + 1.0), (x,), "llvm"))
    assert lowered[0][0] == lowered[-1][0] == "lowering" and lowered[-1][1] is None


def test_bars_appear_after_a_while_and_vanish(monkeypatch):
    monkeypatch.setattr("tessera.tools.cli.progress.DELAY", 0.05)
    text = io.StringIO()
    display = ProgressDisplay(Console(file=text, force_terminal=True, width=100))
    display.show("quick", 0, None)
    display.show("quick", None, None)
    assert not text.getvalue()
    display.show("matmul", 0, None)
    display.show("matmul", 5, 20)
    time.sleep(0.6)
    assert "matmul" in text.getvalue() and "5 of 20" in text.getvalue() and "left" in text.getvalue()
    display.close()
    assert "\x1b[2K\x1b[?25h" in text.getvalue()[-20:]  # the line is erased, and the cursor is back


def test_only_a_terminal_shows_progress(capsys):
    with progress_on_terminal("run"):
        assert not reports_reach_someone()
    assert capsys.readouterr().err == ""


def reports_reach_someone():
    from tessera.core import progress

    return progress._SHOW.get() is not None


SCRIPT = """
import sys, time
from tessera.core.progress import track
from tessera.tools.cli.progress import progress_on_terminal
with progress_on_terminal("run"):
    for n in track(range(10), "counting"):
        time.sleep(0.12)
print("done")
"""


def test_bars_are_on_stderr_and_output_stays_clean():
    master, terminal = pytest.importorskip("pty").openpty()
    child = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=terminal, text=True)
    os.close(terminal)
    shown = b""
    while True:
        try:
            shown += os.read(master, 4096)
        except OSError:  # the child has closed the terminal
            break
    assert child.communicate()[0] == "done\n"
    os.close(master)
    assert b"counting" in shown and b"of 10" in shown

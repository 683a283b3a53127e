"""Debug mode: findings as errors or as a report, on the command line too.

That it keeps the bits of the whole suite, tests/test_conformance.py tests.
"""

import threading

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.core.errors import AsyncCopyError, NonFiniteError, OutOfBoundsError
from tessera.tools.cli.main import main


@ts.kernel
def inverse_root(x, out):
    i = tile.program_id(0)
    shifted = x[i] - 1.0
    out[i] = tile.sqrt(shifted)


def test_the_first_nan_is_named():
    x = np.array([3, 1, 0.5, 2], np.float32)
    with pytest.raises(NonFiniteError, match="ts.sqrt makes nan of finite operands: program \\(2,\\)") as caught:
        with ts.debug.checked(nan=True):
            inverse_root[(4,)](x, np.zeros(4, np.float32))
    assert "tile.sqrt(shifted)" in str(caught.value)
    assert not ts.debug.check(inverse_root[(4,)], x, np.zeros(4, np.float32))


def test_nans_that_come_in_are_not_reported():
    x = np.array([3, np.nan, np.inf, 2], np.float32)
    assert not ts.debug.check(inverse_root[(4,)], x, np.zeros(4, np.float32), nan=True)


@ts.kernel
def two_faults(x, out):
    i = tile.program_id(0)
    row = tile.alloc_shared((4,), ts.f32)
    tile.cp_async(row[0:4], x[0:4])
    tile.cp_commit_group()
    first = row[1]
    tile.cp_wait_group(0)
    out[0] = first + i
    out[i + 2] = first


def test_collected_findings_come_in_order():
    report = ts.debug.check(two_faults[(3,)], np.ones(4, np.float32), np.zeros(4, np.float32))
    assert report.kinds == ["async", "program race", "bounds"]
    assert [f.rule for f in report] == ["M8", "M5", "M1"]
    assert "program (2,)" in report.findings[-1].message
    again = ts.debug.check(two_faults[(3,)], np.ones(4, np.float32), np.zeros(4, np.float32))
    assert str(again) == str(report)


@ts.kernel
def returns_outside(x):
    return x[tile.program_id(0) + 1]


def test_a_run_that_stops_keeps_the_shape_of_its_results():
    with ts.debug.checked(collect=True) as report:
        assert returns_outside[(4,)](np.ones(4, np.float32)).shape == (4,)
    assert report.kinds == ["bounds"]


def test_only_this_thread_is_checked():
    x, failures = np.ones(4, np.float32), []

    def other():
        try:
            two_faults[(1,)](x, np.zeros(4, np.float32))
        except Exception as error:
            failures.append(error)

    with pytest.raises(AsyncCopyError), ts.debug.checked():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        two_faults[(1,)](x, np.zeros(4, np.float32))
    assert not failures


def test_value_mode_names_the_program_too():
    with pytest.raises(OutOfBoundsError, match=r"received: 4 in program \(2,\)"):
        two_faults[(3,)](np.ones(4, np.float32), np.zeros(4, np.float32))


RACY = """
import numpy as np
import tessera as ts


@ts.example(lambda rng: (rng.random(8, np.float32), np.zeros(1, np.float32)), grid=(8,))
@ts.kernel
def total(x, out):
    out[0] += x[ts.tile.program_id(0)]
"""


@pytest.mark.parametrize(("line", "status"), [("out[0] += x", 1), ("out[0] = 2.0 * x", 1), ("y = x", 0)])
def test_the_command(line, status, tmp_path, capsys):
    (tmp_path / "racy.py").write_text(RACY.replace("out[0] += x", line))
    assert main(["run", "--debug", str(tmp_path / "racy.py")]) == status
    shown = capsys.readouterr().out
    assert ("a data race on out[0]" in shown) == bool(status) and ("no findings" in shown) != bool(status)


def test_debug_mode_is_of_the_tile_level(tmp_path, capsys):
    (tmp_path / "racy.py").write_text(RACY)
    assert main(["run", "--debug", "--target", "llvm", str(tmp_path / "racy.py")]) == 2
    assert "debug mode is the Tile interpreter's" in capsys.readouterr().err


COLUMN = RACY.replace(
    "out[0] += x[ts.tile.program_id(0)]", "out[0] = ts.tile.max(ts.tile.load(x[0:8], mask=x[0:8] < 0.5))"
)


def test_advice_does_not_fail_the_command(tmp_path, capsys):
    (tmp_path / "racy.py").write_text(COLUMN.replace("grid=(8,)", "grid=(1,)"))
    assert main(["run", "--debug", "--lint", str(tmp_path / "racy.py")]) == 0
    shown = capsys.readouterr().out
    assert "ts.max takes element" in shown and "0 findings and 1 pieces of advice" in shown

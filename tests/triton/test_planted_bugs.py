"""Findings: each planted bug is found at its line of the Triton source, with the program and the thread."""

import inspect

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

import planted_bugs  # noqa: E402

import tessera as ts  # noqa: E402


def find_lines(kernel, mark):
    """The lines of a kernel whose comment has a mark."""
    lines, first = inspect.getsourcelines(kernel.fn)
    return [first + i for i, line in enumerate(lines) if mark in line.partition("#")[2]]


@pytest.mark.parametrize("name", planted_bugs.BUGS)
def test_the_bug_is_found_at_its_line(name):
    kernel, (kind, launch) = getattr(planted_bugs, name), planted_bugs.BUGS[name]
    with pytest.raises(getattr(ts.errors, kind)) as found, ts.triton.interpreted(debug=True):
        launch(kernel)
    error = found.value
    assert error.location.file == planted_bugs.__file__ and [error.location.line] == find_lines(kernel, "bug")
    assert kind == "BarrierError" or ("program (" in error.message and "thread " in error.message)
    for line in find_lines(kernel, "other"):
        assert f"planted_bugs.py:{line}" in error.message and error.message.count("program (") == 2

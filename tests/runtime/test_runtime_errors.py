"""Errors of compiled programs at run time: they have the user's line, on targets and in loaded artifacts alike."""

import numpy as np
import pytest

import tessera as ts
from tessera.errors import ArgumentError, ExecutionError, OutOfBoundsError


@pytest.mark.parametrize("name", ["cholesky", "solve"])
def test_lapack_on_a_processor(name, tmp_path):
    def decompose(x):
        return ts.cholesky(x) if name == "cholesky" else ts.solve(x, x)

    bad = np.array([[1, 1], [1, 1]], np.float32) - 2 * np.eye(2, dtype=np.float32) * (name == "cholesky")
    ts.build(ts.jit(decompose), np.eye(2, dtype=np.float32), out=tmp_path / "a")
    for call in (ts.jit(decompose, target="llvm"), ts.load(tmp_path / "a")):
        with pytest.raises(ExecutionError, match="not positive definite|Singular") as error:
            call(bad)
        line = decompose.__code__.co_firstlineno + 1
        assert (error.value.location.file, error.value.location.line) == (__file__, line)


@pytest.mark.parametrize("target", ["llvm", "ptx"])
@pytest.mark.parametrize("dynamic", [None, {"x": {0: "B"}}])
def test_an_index_out_of_bounds_in_an_artifact(tmp_path, target, dynamic):
    """It is the index that is wrong, and not the manifest."""

    def rows(x, i):
        return ts.take(x, i, axis=0)

    x = np.ones((4, 3), np.float32)
    ts.build(ts.jit(rows), x, np.array([1, 2]), out=tmp_path / "a", target=target, dynamic=dynamic)
    with pytest.raises(OutOfBoundsError, match="index 9 is outside axis 0 of size 4") as error:
        ts.load(tmp_path / "a")(x, np.array([1, 9]))
    assert error.value.location.line == rows.__code__.co_firstlineno + 1


def test_a_list_in_place_of_an_array(tmp_path):
    """Lists are containers of arguments: one of numbers is taken apart, and the error says so."""
    x = np.ones((2, 3), np.float32)
    ts.build(ts.jit(lambda x, y: x + y), x, x, out=tmp_path / "a")
    with pytest.raises(ArgumentError, match="takes arrays, and a list is taken apart") as error:
        ts.load(tmp_path / "a")(x.tolist(), x)
    assert error.value.suggestion == "pass np.asarray(...) of it"

"""Files of arrays: what numpy.save wrote is read back, and a file that something changed is a FileError."""

import io
import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.core.errors import FileError
from tessera.core.io import read_array, write_array
from tessera.runtime.storage import on_disk


def save(array):
    held = io.BytesIO()
    np.save(held, array)
    return held.getvalue()


WHOLE = [save(a) for a in (np.arange(12, dtype="f4").reshape(3, 4), np.zeros(2, ml_dtypes.bfloat16), np.array(1.0))]
PIECES = [b"9" * 5000, b"99999999999", b"-1", b"(" * 200, b"'O'", b"None", b"\xff", b"[('a', '<f4')]", b"{", b"\n"]


@pytest.mark.parametrize("array", [np.arange(6, dtype=">i4").reshape(2, 3), np.zeros((2, 2), order="F"), np.array(3.0)])
def test_what_was_saved_is_read(tmp_path, array):
    write_array(tmp_path / "x.npy", array)
    np.testing.assert_array_equal(read_array(tmp_path / "x.npy"), array)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("arrays")


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(WHOLE), st.integers(0, 120), st.integers(0, 9), st.sampled_from(PIECES) | st.binary(max_size=4))
def test_a_changed_header_is_a_file_error_or_an_array(folder, whole, at, count, piece):
    file = folder / "x.npy"
    file.write_bytes(whole[:at] + piece + whole[at + count :])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy warns of headers that Python 2 wrote
        for read in (read_array, lambda f: on_disk(f, dtype="f64")):
            try:
                read(file)
            except FileError as error:
                assert str(file) in str(error) or "another size" in str(error)


def test_a_header_asks_for_no_more_memory_than_its_file_has(tmp_path):
    file = tmp_path / "x.npy"
    file.write_bytes(WHOLE[0].replace(b"(3, 4), }        ", b"(99999999999,), }", 1))
    with pytest.raises(FileError, match=r"describes an array of shape \(99999999999,\)"):
        read_array(file)

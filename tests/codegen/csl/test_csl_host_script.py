"""Host script: arrays are split into the pieces of PEs and reassembled."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.codegen.csl.runtime.host_script import gather, scatter


def entry(shape, split, grid, dtype="float32"):
    piece = [-(-n // grid[s]) if s >= 0 else n for n, s in zip(shape, split, strict=True)]
    return {"shape": list(shape), "split": list(split), "piece": piece, "dtype": dtype}


SPLITS = st.sampled_from([(0, 1), (1, 0), (-1, 1), (0, -1), (-1, -1)])


@given(st.integers(1, 7), st.integers(1, 7), SPLITS, st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_scatter_and_gather_are_inverse(rows, columns, split, grid):
    array = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    plan = entry(array.shape, split, grid)
    words = scatter(array, plan, grid)
    assert words.shape[:2] == grid and words.dtype == np.uint32
    np.testing.assert_array_equal(gather(words, plan, grid), array)


@pytest.mark.parametrize("dtype", ["float16", "int16", "bool"])
def test_16_bit_elements_take_a_word_each(dtype):
    array = np.array([[1, 0, 1]]).astype(dtype)
    plan = entry(array.shape, (-1, 1), (1, 2), dtype)
    words = scatter(array, plan, (1, 2))
    assert words.shape == (1, 2, 2) and words.max() < 1 << 16
    np.testing.assert_array_equal(gather(words, plan, (1, 2)), array)


def test_replicated_tensors_are_copied_to_every_pe():
    words = scatter(np.float32([1, 2]), entry((2,), (-1,), (2, 2)), (2, 2))
    np.testing.assert_array_equal(words.view(np.float32), np.broadcast_to(np.float32([1, 2]), (2, 2, 2)))

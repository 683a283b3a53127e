"""Slice updates: reads of what was updated, and updates of slices of slices, before kernels are made."""

import numpy as np
import pytest

import tessera as ts
from tessera.lower.passes.slice_updates import merge_slice_updates
from tessera.ops.tensor.scatter import update_slice
from tessera.ops.tensor.shape import slice_
from tessera.runtime import driver

X = np.arange(56, dtype=np.float32).reshape(7, 8)
NEW = -np.arange(12, dtype=np.float32).reshape(3, 4)


def change(x, new):
    return ts.update_slice(x, new, start=(2, 1))


def update_row(x, new):
    """As PyTorch's functionalisation writes to a row of a slice."""
    part = x[1:6, 2:]
    inner = ts.update_slice(part, ts.reshape(part[3, 1:5] * new[0], shape=(1, 4)), start=(3, 1))
    return ts.update_slice(x, inner, start=(1, 2))


def update_element(x, new):
    """A slice of a row, whose axis the row does not have."""
    row = x[4]
    inner = ts.update_slice(row, new[0, 1:3], start=(5,))
    return ts.update_slice(x, ts.reshape(inner, shape=(1, 8)), start=(4, 0))


# Functions, and how many updates of a slice of the first parameter remain of them, and how many slices.
READS = {
    "what was written": (lambda x, new: change(x, new)[2:5, 1:5], 0, 0),
    "a part of it": (lambda x, new: change(x, new)[3:5, 2:4], 0, 1),
    "what is beside it": (lambda x, new: change(x, new)[:2], 0, 1),
    "more than it": (lambda x, new: change(x, new)[1:], 0, 1),
    "a part of it and more": (lambda x, new: change(x, new)[3:], 0, 1),
    "with steps": (lambda x, new: change(x, new)[::2], 0, 1),
    "all": (lambda x, new: change(x, new) * 2.0, 0, 0),
    "a row of a slice": (update_row, 1, 3),
    "a slice of a row": (update_element, 1, 1),
    "another slice": (lambda x, new: ts.update_slice(x, change(x[1:], new), start=(0, 0)), 1, 1),
    "every other row": (lambda x, new: ts.update_slice(x, change(x[::2], new[:1]), start=(0, 0)), 1, 2),
    "of other memory": (lambda x, new: ts.update_slice(x * 2.0, change(x[1:], new), start=(1, 0)), 0, 1),
    "twice": (lambda x, new: ts.update_slice(change(x, new), new, start=(0, 0)), 0, 0),
}


@pytest.mark.parametrize("name", READS)
def test_updates_are_merged(name):
    function, updates, slices = READS[name]
    traced = ts.jit(function).trace(X, NEW).function
    merged = merge_slice_updates(traced, (0,))
    ops = [n.op for n in merged.body.nodes]
    assert (ops.count(update_slice), ops.count(slice_)) == (updates, slices)
    want = function(ts.tensor(X), ts.tensor(NEW)).numpy()
    for target in ("llvm", "ptx"):
        for donated in (frozenset(), frozenset({0})):
            levels = driver.lower(traced, target, {"donated": donated})
            for level in ("graph", "schedule", "tile", "target"):
                (found,) = driver.run_level(levels, level, [X, NEW], target)
                np.testing.assert_array_equal(found, want)

"""One program by every engine, and derivatives by central differences: what the transforms' tests are checked with."""

import numpy as np

import tessera as ts
from tessera.core.pytree import flatten
from tessera.runtime import driver

STEP = 1e-6


def arrays_of(result):
    """The leaves of a result as arrays."""
    return [np.asarray(x) for _, x in flatten(result)[0]]


def close(got, want, where, rtol=1e-9):
    """Check leaves: shapes, element types and elements (to rounding, for f32)."""
    for one, other in zip(arrays_of(got), arrays_of(want), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype, where
        unit = rtol if one.dtype == np.float64 else 2e-5
        np.testing.assert_allclose(one, other, rtol=unit, atol=unit * (1 + np.abs(other).max(initial=0)), err_msg=where)


def everywhere(function, *arrays, levels=("schedule", "tile"), text=True):
    """Check that jit, each level and the llvm target give what eager execution gives; that result."""
    want = function(*map(ts.Tensor, arrays))
    trace = ts.jit(function).trace(*arrays)
    arguments = [*arrays, *trace.captures]
    close(ts.jit(function)(*arrays), want, "jit")
    found = driver.lower(trace.function, "llvm")
    for level in (*levels, *(["target"] if text else [])):
        close(driver.run_level(found, level, arguments), arrays_of(want), level)
    close(driver.compile_tile(found["tile"], "llvm")(arguments), arrays_of(want), "llvm")
    return want


def central(function, *arrays):
    """The gradient of the sum of a function's results, by central differences."""
    return [_partial(function, arrays, i) for i in range(len(arrays))]


def total(result):
    """The sum of a result's elements."""
    return sum(float(a.astype(np.float64).sum()) for a in arrays_of(result) if a.dtype.kind == "f")


def _partial(function, arrays, place):
    found = np.zeros(arrays[place].shape)
    for index in np.ndindex(found.shape):
        ends = []
        for step in (STEP, -STEP):
            moved = arrays[place].copy()
            moved[index] += step
            ends.append(total(function(*map(ts.Tensor, [*arrays[:place], moved, *arrays[place + 1 :]]))))
        found[index] = (ends[0] - ends[1]) / (2 * STEP)
    return found

"""Table staging: searches read a copy of their row in the memory of a program; the results are NumPy's."""

import math
from dataclasses import replace

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.contract import get_backend
from tessera.codegen.ptx.generator import PLAN
from tessera.core.types import SHARED
from tessera.interp.tile import interpreter
from tessera.ir.core import Module
from tessera.lower.pipeline import lower
from tessera.runtime import driver

FEW = replace(PLAN, pointwise=64, pointwise_bytes=0, processors=2, table_bytes=16384)


def lower_search(function, *inputs, plan=FEW):
    """The Tile module of a function, and whether a kernel of it has a copy of a table."""
    module = dict(lower(Module("graph", (ts.jit(function).trace(*inputs).function,)), plan))["table staging"]
    allocated = [n for f in module.functions[1:] for n in f.body.nodes if n.op.name == "tile.alloc"]
    assert all(n.attrs["space"] == SHARED for n in allocated)
    return module, bool(allocated)


def run(module, *inputs):
    """The results in the interpreter, and of PTX in the emulator, which finds races and reads of fresh memory."""
    backend = get_backend("ptx")
    return interpreter.run(module, list(inputs))[0], backend.sanitized(backend.emit(module, {}))(list(inputs))[0]


def draw(size, count, dtype="f4"):
    rng = np.random.default_rng(size)
    row, values = np.sort(rng.normal(size=size) * 50).astype(dtype), (rng.normal(size=count) * 60).astype(dtype)
    if dtype == "f4":
        row[-1], values[3], values[4] = np.nan, np.nan, np.inf
    return row, values


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4"])
@pytest.mark.parametrize(("size", "count"), [(600, 8191), (512, 64 * 200), (1000, 20011)])
def test_searches_of_many_values(size, count, dtype):
    """More tiles than programs, not the same number in each, and the last one partial."""
    row, values = draw(size, count, dtype)
    module, staged = lower_search(ts.searchsorted, row, values)
    (launch,) = (n for n in module.main.body.nodes if n.op.name == "host.launch")
    assert staged and 2 <= launch.attrs["grid"][0] < math.ceil(count / 64)
    for found in run(module, row, values):
        np.testing.assert_array_equal(found, np.searchsorted(row, values))


def test_pointwise_neighbours_of_a_search_are_in_its_kernel():
    row, values = draw(600, 9000)
    module, staged = lower_search(lambda r, v: ts.searchsorted(r, ts.abs(v) - 1.0) * 2, row, values)
    assert staged
    for found in run(module, row, values):
        np.testing.assert_array_equal(found, np.searchsorted(row, np.abs(values) - 1) * 2)


@pytest.mark.parametrize(
    ("function", "inputs", "plan"),
    [
        (ts.searchsorted, draw(600, 200), FEW),  # few values: a copy would be most of the work
        (ts.searchsorted, draw(3000, 60000), FEW),  # a row that two programs have no memory for
        (ts.searchsorted, draw(100, 60000), FEW),  # a row that lies in few lines of a cache
        (ts.searchsorted, draw(600, 9000), replace(FEW, table_bytes=0)),  # a processor without such memory
        (lambda x, i: x[i] + x[i // 2] * x[i // 3], (draw(600, 9)[0], np.arange(9000) % 600), FEW),  # few gathers
    ],
    ids=["few", "long", "short", "no memory", "few gathers"],
)
def test_what_stays_as_it_is(function, inputs, plan):
    module, staged = lower_search(function, *inputs, plan=plan)
    assert not staged
    if function is ts.searchsorted:
        np.testing.assert_array_equal(interpreter.run(module, list(inputs))[0], np.searchsorted(*inputs))


def test_a_gpu_copies_rows_that_fit_its_shared_memory():
    """One of 35 KB has six programs on each of 132 multiprocessors; one of 800 KB is read through the cache."""
    for size, programs in ((8877, 792), (200000, None)):
        inputs = np.zeros(size, "f4"), np.zeros(13600000, "f4")
        module = driver.lower(ts.jit(ts.searchsorted).trace(*inputs).function, "ptx")["tile"]
        (launch,) = (n for n in module.main.body.nodes if n.op.name == "host.launch")
        assert launch.attrs["grid"][0] == programs if programs else launch.attrs["grid"][0] > 5000

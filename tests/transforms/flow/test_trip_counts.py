"""Bounds of trip counts in symbolic sizes: never less than what any program does."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.core.symbolic_dim import Dim
from tessera.core.types import RefType, f32
from tessera.ops.dialects import control_flow
from tessera.transforms.flow.launch_accesses import bound_trips

B = 4


@ts.kernel
def strided(x):
    for k in tile.range(0, x.shape[0], 4):
        x[k] = 0.0


@ts.kernel
def own_part(x):
    first = tile.program_id(0) * B
    for k in tile.range(first, first + x.shape[1], 3):
        x[k, 0] = 0.0


@ts.kernel
def causal(x):
    for k in tile.range(0, (tile.program_id(0) + 1) * B):
        x[k] = 0.0


@ts.kernel
def clipped(x):
    for k in tile.range(tile.program_id(0) * B, tile.minimum((tile.program_id(0) + 2) * B, x.shape[0])):
        x[k] = 0.0


@ts.kernel
def unknown(x, n):
    for k in tile.range(0, n):
        x[k] = 0.0


N, M = Dim.of("N"), Dim.of("M")


@pytest.mark.parametrize(
    ("kernel", "shape", "trips"),
    [
        (strided, (N,), lambda n, m, g: -(-n // 4)),
        (own_part, (N, M), lambda n, m, g: -(-m // 3)),
        (causal, (N,), lambda n, m, g: g * B),
        (clipped, (N,), lambda n, m, g: 2 * B),
    ],
)
def test_bounds(kernel, shape, trips):
    grid = (Dim.of("G"),)
    function = kernel.specialize({"x": RefType(shape, f32)}, {}, grid).functions[1]
    (loop,) = (n for n in function.body.walk() if n.op is control_flow.for_)
    found = bound_trips(function.body, loop, grid)
    for n, m, g in ((1, 1, 1), (7, 10, 3), (8, 9, 2)):
        value = found.evaluate({"N": n, "M": m, "G": g}) if isinstance(found, Dim) else found
        assert value == trips(n, m, g)


def test_run_time_bounds_have_none():
    types = unknown.bind((np.zeros(4, np.float32), 3), {}).types
    function = unknown.specialize(types, {}, (1,)).functions[1]
    (loop,) = (n for n in function.body.walk() if n.op is control_flow.for_)
    assert bound_trips(function.body, loop, (1,)) is None

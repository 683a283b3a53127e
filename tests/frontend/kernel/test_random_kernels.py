"""Random kernels: all instances side by side, and compiled, against one tile at a time; and no false finding."""

import math

import numpy as np
from hypothesis import HealthCheck, given, settings
from one_at_a_time import run as one_at_a_time
from random_kernels import BLOCK, SIZE, kernels

import tessera as ts
from tessera.runtime.program import prepare

QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)


def prepared(drawn):
    total = math.prod(drawn.grid) * drawn.group
    rng = np.random.default_rng(7)
    arguments = {
        "x": rng.integers(-4, 5, SIZE).astype("f4"),
        "n": rng.integers(0, 9, SIZE),
        "counts": np.zeros(4, "i8"),
        "out": np.zeros((total, 2 + 2 * BLOCK), "f4"),
        "last": np.zeros(total, "i8"),
    }
    return prepare(drawn.kernel(), arguments, grid=drawn.grid, group=drawn.group)


def agree(drawn, *engine):
    program = prepared(drawn)
    want = one_at_a_time(program.levels["tile"], program.arrays)
    for found, place in zip(program.run(*engine), program.written, strict=True):
        np.testing.assert_array_equal(found, want[place], err_msg=drawn.text)


@settings(max_examples=60, deadline=None, suppress_health_check=QUIET)
@given(kernels())
def test_side_by_side_is_one_at_a_time(drawn):
    agree(drawn, "tile")


@settings(max_examples=12, deadline=None, suppress_health_check=QUIET)
@given(kernels())
def test_compiled_is_one_at_a_time(drawn):
    agree(drawn, "device", "llvm")


@settings(max_examples=12, deadline=None, suppress_health_check=QUIET)
@given(kernels())
def test_debug_mode_finds_nothing(drawn):
    with ts.debug.checked():
        agree(drawn, "tile")

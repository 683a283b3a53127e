"""Bounds of a sample of programs: what is covered agrees with the bounds of all, and what is not is marked."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.interp.bound import BoundSample, TimeLimitReached, compare_with_bound, make_time_limit
from tessera.runtime.program import prepare

N, BLOCK = 64, 8


@ts.kernel
def halves(x: ts.Tensor["N"], out: ts.Tensor["N"]):
    at = tile.program_id(0) * BLOCK
    tile.store(out[at : at + BLOCK], tile.maximum(tile.exp(x[at : at + BLOCK]) - 1.0, 0.0))


@ts.kernel
def totals(x: ts.Tensor["N"], out: ts.Tensor["M"]):
    at = tile.program_id(0) * BLOCK
    tile.atomic_add(out[0], tile.sum(x[at : at + BLOCK]))


def program(kernel, size=N):
    x = np.random.default_rng(0).standard_normal(N, np.float32)
    return prepare(kernel, (x, np.zeros(size, np.float32)), grid=(N // BLOCK,))


@pytest.fixture
def small_steps(monkeypatch):
    monkeypatch.setattr("tessera.interp.tile.interpreter.SAMPLE_BYTES", 1)


def test_a_sample_covers_whole_programs_with_the_bounds_of_all(small_steps):
    ready = program(halves)
    sample, (full,) = ready.sample_bounds(0.0), ready.bounds()
    assert isinstance(sample, BoundSample) and (sample.programs, sample.total) == (1, N // BLOCK)
    covered = ~np.signbit(sample.bounds[0].radius)
    assert np.array_equal(np.flatnonzero(covered), np.arange(BLOCK))  # zeros of the result are covered too
    assert np.array_equal(sample.bounds[0].value[covered], full.value[covered])
    assert np.array_equal(sample.bounds[0].radius[covered], full.radius[covered])


def test_an_error_in_a_covered_program_is_found(small_steps):
    ready = program(halves)
    (right,), sample = ready.run("tile"), ready.sample_bounds(0.0)
    for place, found in ((BLOCK - 1, False), (BLOCK, True)):  # the first program is covered, the second is not
        wrong = right.copy()
        wrong[place] += 1
        ((result, bounds),) = sample.select([wrong])
        assert result.size == BLOCK and compare_with_bound(result, bounds).ok == found


def test_with_time_all_programs_run():
    ready = program(halves)
    sample = ready.sample_bounds(60.0)
    assert sample.programs == sample.total == N // BLOCK
    (pair,) = sample.select(ready.run("tile"))
    assert pair[0].size == N and compare_with_bound(*pair).ok


def test_programs_that_communicate_are_not_sampled():
    ready = program(totals, 1)
    assert ready.sample_bounds(0.0) is None  # no time for all of them
    sample = ready.sample_bounds(0.0, patience=60.0)
    assert compare_with_bound(ready.run("tile")[0], sample.bounds[0]).ok


def test_a_function_is_sampled_as_its_kernel():
    ready = prepare(ts.jit(lambda x: ts.softmax(x)), (np.ones((64, 16), np.float32),))
    sample = ready.sample_bounds(0.0)
    assert sample.total > 1 and all(compare_with_bound(*p).ok for p in sample.select(ready.run("graph")))


def test_a_time_limit_ends_a_run():
    make_time_limit(60.0)()
    with pytest.raises(TimeLimitReached):
        make_time_limit(-1.0)()

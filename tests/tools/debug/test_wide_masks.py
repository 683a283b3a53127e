"""Masks that admit places outside, which a clipped access hides: debug mode and `tessera check` name them."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile

N, BLOCK = 11, 8


@ts.kernel
def too_wide(x: ts.Tensor["N", ts.f32], out: ts.Tensor["N", ts.f32]):
    rows = tile.program_id(0) * BLOCK + tile.arange(0, BLOCK)
    tile.store(out[rows], tile.load(x[rows], mask=rows <= x.shape[0], other=0.0), mask=rows < x.shape[0])


@ts.kernel
def far_too_wide(x: ts.Tensor["N", ts.f32], out: ts.Tensor["N", ts.f32]):
    rows = tile.program_id(0) * BLOCK + tile.arange(0, BLOCK)
    tile.store(out[rows], tile.load(x[rows], mask=x.shape[0] + 3 > rows, other=1.0, edge="clip"), edge="clip")


@ts.kernel
def wide_store(x: ts.Tensor["N", ts.f32], out: ts.Tensor["N", ts.f32]):
    rows = tile.program_id(0) * BLOCK + tile.arange(0, BLOCK)
    tile.store(out[rows], tile.load(x[rows], edge="clip"), mask=rows <= x.shape[0], edge="clip")


@ts.kernel
def wide_gather(x: ts.Tensor["N", ts.f32], out: ts.Tensor["N", ts.f32]):
    rows = tile.program_id(0) * BLOCK + tile.arange(0, BLOCK)
    places = tile.cast(tile.load(x[rows], mask=rows < x.shape[0], other=0.0), ts.int64)
    tile.store(out[rows], tile.load(x[places], mask=places <= x.shape[0], other=0.0), mask=rows < x.shape[0])


@ts.kernel
def fitting(x: ts.Tensor["N", ts.f32], out: ts.Tensor["N", ts.f32]):
    """A mask by values, a bound that is the size, and a smaller one."""
    rows = tile.program_id(0) * BLOCK + tile.arange(0, BLOCK)
    found = tile.load(x[rows], mask=rows < x.shape[0], other=0.0)
    again = tile.load(x[rows], mask=found > 0.0, other=0.0)
    third = tile.load(x[rows], mask=rows <= x.shape[0] - 1, other=0.0)
    tile.store(out[rows], found + again + third, mask=rows < x.shape[0])


@ts.kernel
def carried(x: ts.Tensor["N", ts.f32], out: ts.Tensor["N", ts.f32]):
    """A mask that a loop carries: nothing says what it compares."""
    rows = tile.program_id(0) * BLOCK + tile.arange(0, BLOCK)
    inside = rows < x.shape[0]
    for _ in tile.range(2):
        found = tile.load(x[rows], mask=inside, other=0.0)
        tile.store(out[rows], found, mask=inside)
        inside = inside & (found > 0.0)


def findings(kernel, size=N):
    with ts.debug.checked(collect=True) as report:
        kernel[(-(-size // BLOCK),)](np.arange(size, dtype=np.float32), np.zeros(size, np.float32))
    return [f for f in report if f.kind == "wide mask"]


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (too_wide, "the mask admits index 11 outside axis 0 of x (size 11)"),
        (far_too_wide, "the mask admits 3 indices from 11 on outside axis 0 of x (size 11)"),
        (wide_store, "the mask admits index 11 outside axis 0 of out (size 11)"),
        (wide_gather, "the mask admits index 11 outside axis 0 of x (size 11)"),
    ],
)
def test_debug_mode_names_and_counts_what_clipping_hides(kernel, said):
    (found,) = findings(kernel)
    assert said in found.message and found.is_advice and "index < " in str(found)
    (note,) = [n for n in ts.check(kernel).notes if "mask" in n]
    assert "test_wide_masks.py" in note and "clipping the access hides it" in note


@pytest.mark.parametrize("kernel", [fitting, carried])
def test_a_mask_that_fits_is_none(kernel):
    assert findings(kernel) == [] and not ts.check(kernel).notes


def test_indices_that_no_program_has_are_none():
    """Blocks that divide the size never reach the place that the mask admits."""
    assert findings(too_wide, 16) == []


def test_without_debug_mode_the_mask_is_clipped():
    out = np.zeros(N, np.float32)
    too_wide[(2,)](np.arange(N, dtype=np.float32), out)
    np.testing.assert_array_equal(out, np.arange(N))

"""Layouts: every element has a place, and moved layouts tell of the same elements."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.codegen.ptx.layout import (
    DistributedLayout,
    bit_width,
    make_blocked_layout,
    make_mma_layout,
    make_square_layout,
    make_wgmma_layout,
)

SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


def places(layout):
    """The place that each register of each thread holds."""
    found = {}
    for thread, (register, offset) in itertools.product(
        range(1 << len(layout.threads)), enumerate(layout.offsets)
    ):  # fmt: skip
        place = list(offset)
        for i, bit in enumerate(layout.threads):
            if bit is not None:
                place[bit[0]] += (thread >> i & 1) << bit[1]
        found[thread, register] = tuple(place)
    return found


def whole(layout):
    """Whether the places are those of the block, filled up to powers of two."""
    return set(places(layout).values()) == set(np.ndindex(*(1 << bit_width(n) for n in layout.shape)))


@settings(deadline=None)
@given(SHAPES, st.sampled_from([1, 32, 128]), st.sampled_from([1, 4, 8]))
def test_spread_holds_every_element(shape, threads, vector):
    layout = make_blocked_layout(shape, threads, vector)
    assert whole(layout) and 1 << len(layout.threads) == threads


@pytest.mark.parametrize("shape", [(8, 8), (16, 8), (64, 64), (20, 24), (128, 256)])
def test_fragments_hold_every_element(shape):
    assert whole(make_mma_layout(shape, 128)) and whole(make_square_layout(shape, 128))


def test_fragments_of_warp_groups():
    layout = make_wgmma_layout((128, 64), 256)
    assert whole(layout) and layout.offsets[:4] == ((0, 0), (0, 1), (8, 0), (8, 1))


@settings(deadline=None)
@given(SHAPES)
def test_permuted(shape):
    layout = make_blocked_layout(shape, 32, 4)
    axes = tuple(reversed(range(len(shape))))
    moved = places(layout.permuted(axes))
    assert all(moved[key] == tuple(place[a] for a in axes) for key, place in places(layout).items())


@settings(deadline=None)
@given(st.permutations([2, 4, 1, 8, 3]))
def test_reshaped(shape):
    shape = tuple(shape)
    other = (shape[0], math.prod(shape[1:]))
    moved = make_blocked_layout(shape, 32, 4).reshaped(other)
    if moved is not None:
        for key, place in places(make_blocked_layout(shape, 32, 4)).items():
            if all(i < n for i, n in zip(place, shape, strict=True)):
                assert np.ravel_multi_index(places(moved)[key], other) == np.ravel_multi_index(place, shape)


def test_a_reshape_that_would_tear_elements_apart():
    assert make_blocked_layout((6, 4), 32, 1).reshaped((8, 3)) is None
    assert make_blocked_layout((6, 4), 32, 1).reshaped((6, 2, 2)) is not None


def test_reduced_layouts_repeat():
    layout = make_blocked_layout((4, 64), 32, 4)
    kept = layout.reduced((1,), keep=True)
    assert kept.shape == (4, 1) and kept.replicated_bits == (0, 1, 2, 3) and layout.source((4, 1)) == kept
    assert str(DistributedLayout((2,), ((0, 0),), (None,))) == "2 registers [0.0] threads [-]"

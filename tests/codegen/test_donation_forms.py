"""The factors of program numbers in an index, which decide whether a kernel may write over what it reads."""

import numpy as np
import pytest

from tessera.codegen.donation import _find_form
from tessera.core.types import int64
from tessera.ir.builder import Builder
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic
from tessera.ops.tensor import elementwise as e


def draw_index(rng, builder, depth):
    """An index of sums and multiples of program numbers, and a function that computes it."""
    kind = rng.integers(2) if depth == 0 else rng.integers(2, 5)
    if kind == 0:
        axis = int(rng.integers(3))
        return builder.add(tile.program_id, [], {"axis": axis}).out, lambda ids: ids[axis]
    number = int(rng.integers(-3, 9))
    constant = builder.add(basic.full, [], {"shape": (), "value": number, "dtype": int64}).out
    if kind == 1:
        return constant, lambda ids: number
    value, compute = draw_index(rng, builder, depth - 1)
    if kind == 2:
        operands = [value, constant] if rng.random() < 0.5 else [constant, value]
        return builder.add(e.mul, operands).out, lambda ids: compute(ids) * number
    other, compute_other = draw_index(rng, builder, depth - 1)
    if kind == 3:
        return builder.add(e.add, [value, other]).out, lambda ids: compute(ids) + compute_other(ids)
    return builder.add(e.sub, [value, other]).out, lambda ids: compute(ids) - compute_other(ids)


@pytest.mark.parametrize("seed", range(12))
def test_forms(seed):
    rng, builder = np.random.default_rng(seed), Builder()
    for depth in (0, 1, 2, 3):
        value, compute = draw_index(rng, builder, depth)
        producers = {r: n for n in builder.block((), (value,)).nodes for r in n.results}
        form = _find_form(value, producers)
        assert form is not None
        start = compute((0, 0, 0))
        for ids in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (3, 5, 7)):
            assert compute(ids) - start == sum(factor * ids[axis] for axis, factor in form.items())


def test_other_indices_have_none():
    builder = Builder()
    number = builder.add(tile.program_id, [], {"axis": 0}).out
    square = builder.add(e.floor_divide, [number, number]).out
    producers = {r: n for n in builder.block((), (square,)).nodes for r in n.results}
    assert _find_form(square, producers) is None and _find_form(square, {}) is None

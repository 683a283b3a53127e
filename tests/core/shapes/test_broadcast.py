"""Broadcasting as NumPy does it, and axes counted from the end."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.core.errors import ShapeError
from tessera.core.shapes import broadcast, format_shape, normalize_axes, normalize_axis
from tessera.core.symbolic_dim import Dim

shapes = st.lists(st.sampled_from([0, 1, 1, 2, 3]), max_size=4).map(tuple)


@settings(max_examples=150, deadline=None)
@given(st.lists(shapes, min_size=1, max_size=3))
def test_broadcast_agrees_with_numpy(listed):
    try:
        want = np.broadcast_shapes(*listed)
    except ValueError:
        with pytest.raises(ShapeError, match="cannot broadcast"):
            broadcast(*listed)
    else:
        assert broadcast(*listed) == want


def test_broadcast_of_symbols():
    b = Dim.of("B")
    assert broadcast((b, 1), (3,)) == (b, 3) and broadcast((1,), (b,)) == (b,) == broadcast((b,), (b,))
    with pytest.raises(ShapeError):
        broadcast((b,), (Dim.of("C"),))


def test_broadcast_error_names_both_shapes_and_the_dimension():
    with pytest.raises(ShapeError) as caught:
        broadcast((2, 3), (2, 4))
    assert str(caught.value) == (
        "ShapeError: cannot broadcast 3 with 4 in dimension 1\n"
        "  expected: sizes that are equal or 1 in dimension 1\n"
        "  received: (2, 3) and (2, 4)"
    )


def test_axes():
    assert normalize_axis(0, 3) == -3 and normalize_axis(-1, 3) == -1
    assert normalize_axes(None, 2) == (-2, -1) and normalize_axes((2, 0), 3) == (-3, -1)
    assert normalize_axes(1, 2) == (-1,)
    with pytest.raises(ShapeError, match="axis 3 is out of range for a tensor of rank 3"):
        normalize_axis(3, 3)
    with pytest.raises(ShapeError, match="no axis: the tensor is a scalar"):
        normalize_axis(0, 0)
    with pytest.raises(ShapeError, match="named twice"):
        normalize_axes((0, -2), 2)


def test_show():
    assert format_shape((8, Dim.of("D"))) == "(8, D)" and format_shape((3,)) == "(3,)" and format_shape(()) == "()"

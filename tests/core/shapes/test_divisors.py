"""Sizes whose divisors constraints state: exact quotients, in the same algebra."""

import operator

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tessera.core.errors import ShapeError
from tessera.core.shapes import SizeConstraint, as_size, bind_shape, use_size_constraints
from tessera.core.symbolic_dim import Dim, ceil_divide, find_size_bounds, find_size_divisor
from tests.core.shapes.test_dim import DIVISIONS, RING, combined, fast, names, small, value

FACTS = (SizeConstraint("A % 4 == 0 and B % 6 == 0 and B >= 7"),)
sizes = st.fixed_dictionaries(
    {"A": st.integers(1, 4).map(lambda n: 4 * n), "B": st.integers(2, 4).map(lambda n: 6 * n), "C": st.integers(1, 9)}
)
dims = st.recursive(names | small, combined, max_leaves=6)
B = Dim.of("B")


@fast
@given(st.data(), sizes, st.sampled_from((*RING, *DIVISIONS)))
def test_evaluation_respects_every_operator(data, at, f):
    """Dims made under constraints have the values of the numbers, and lie within their bounds."""
    with use_size_constraints(FACTS):
        a, b = data.draw(dims), data.draw(dims)
        assume(f in RING or (value(b, at) != 0 and b != 0))
        found = f(a, b)
        assert value(found, at) == f(value(a, at), value(b, at))
        low, high = find_size_bounds(found)
        assert low <= value(found, at) <= high
        assert value(found, at) % find_size_divisor(found, 12) == 0
    assert as_size(repr(found)) == found or "//" in repr(found) or "%" in repr(found)
    assert value(as_size(repr(found)), at) == value(found, at)


def test_a_quotient_is_exact_where_a_constraint_says_so():
    with use_size_constraints(FACTS):
        quotient = 4 * B // 12
        assert quotient == 2 * B // 6 and 3 * quotient == B and B % 6 == 0 and ceil_divide(B, 3) == quotient
        assert repr(quotient) == "B/3" and repr(5 * quotient - B) == "2*B/3" and (B + 7) // 6 == B // 6 + 1
    assert 3 * quotient == B and quotient != B // 3 and as_size("B/3") == quotient  # what was made stays exact
    assert operator.mod(B, 3) != 0


def test_a_quotient_that_is_not_whole():
    with pytest.raises(ShapeError, match="B/4 is not a whole number"):
        as_size("B/4").evaluate({"B": 6})
    for text in ("B/0", "4/2", "B/C", "(B-B)/2.5"):
        with pytest.raises(ShapeError, match="is not a dimension"):
            as_size(text)


def test_binding_solves_for_the_dividend():
    found: dict[str, int] = {}
    assert bind_shape((as_size("B/4+1"),), (6,), found) is None and found == {"B": 20}

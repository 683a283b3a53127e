"""Symbolic sizes: evaluation is a homomorphism, and equality is that of polynomials."""

import operator

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tessera.core.errors import ShapeError
from tessera.core.shapes import as_size, bind_shape
from tessera.core.symbolic_dim import Dim, evaluate_shape, symbol_names

fast = settings(max_examples=80, deadline=None)
NAMES = ("A", "B", "C")
names = st.sampled_from(NAMES).map(Dim.of)
small = st.integers(-4, 4)
sizes = st.fixed_dictionaries({n: st.integers(1, 9) for n in NAMES})
RING = (operator.add, operator.sub, operator.mul)
DIVISIONS = (operator.floordiv, operator.mod)


def combined(children):
    ring = st.builds(lambda f, a, b: f(a, b), st.sampled_from(RING), children, children)
    division = st.builds(lambda f, a, b: f(a, b), st.sampled_from(DIVISIONS), children, st.integers(1, 5) | names)
    return ring | division


polynomials = st.recursive(
    names | small, lambda c: st.builds(lambda f, a, b: f(a, b), st.sampled_from(RING), c, c), max_leaves=6
)
dims = st.recursive(names | small, combined, max_leaves=6)


def value(d, at):
    out = d.evaluate(at) if isinstance(d, Dim) else d
    assert isinstance(out, int)
    return out


@fast
@given(dims, dims, sizes, st.sampled_from(RING))
def test_evaluation_is_a_homomorphism(a, b, at, f):
    assert value(f(a, b), at) == f(value(a, at), value(b, at))


@fast
@given(dims, dims, sizes, st.sampled_from(DIVISIONS))
def test_evaluation_respects_division(a, b, at, f):
    assume(value(b, at) != 0 and b != 0)
    assert value(f(a, b), at) == f(value(a, at), value(b, at))


@fast
@given(polynomials, polynomials, polynomials)
def test_equal_polynomials_are_equal_dims(a, b, c):
    assert a + b == b + a and a * b == b * a and a * (b + c) == a * b + a * c and (a + b) + c == a + (b + c)
    assert a - a == 0 and a + b - b == a and hash(a + b) == hash(b + a)


@fast
@given(polynomials, names | st.integers(1, 5))
def test_exact_division(a, b):
    assert (a * b) // b == a and (a * b) % b == 0


@fast
@given(dims)
def test_text_parses_back(d):
    assert as_size(str(d)) == d


@fast
@given(dims, sizes, sizes)
def test_partial_evaluation(d, at, other):
    first = {"A": at["A"]}
    (part,) = evaluate_shape((d,), first)
    assert value(part, at) == value(d, at) and "A" not in symbol_names((part,))


def test_a_dim_whose_names_cancel_is_an_int():
    b = Dim.of("B")
    assert (b + 1) - b == 1 and isinstance(b * 0, int) and b != 3 and Dim.of("?0") != Dim.of("?1")


def test_parse():
    assert as_size("2*D+1") == 2 * Dim.of("D") + 1 and as_size(" 12 ") == 12 and as_size("-A") == -Dim.of("A")
    assert as_size("?") == Dim.of("?") and as_size("?3").names() == {"?3"}
    for text in ("2*", "f(x)", "1.5", "A**2", ""):
        with pytest.raises(ShapeError, match="is not a dimension"):
            as_size(text)


def test_division_by_zero():
    with pytest.raises(ShapeError, match="divided by zero"):
        Dim.of("B") // 0
    with pytest.raises(ShapeError, match="divided by zero"):
        Dim.of("B") % 0


def shape(*items):
    return tuple(as_size(i) for i in items)


def test_bind_takes_names_by_first_use():
    found: dict[str, int] = {}
    assert bind_shape(shape("B", 3, "B"), (5, 3, 5), found) is None and found == {"B": 5}
    assert bind_shape(shape("2*B", "B//5"), (10, 1), found) is None


@pytest.mark.parametrize(
    ("pattern", "real", "problem"),
    [
        (("B", "B"), (2, 3), "axis 1: B is 2 elsewhere and 3 here"),
        (("B", 4), (2, 3), "axis 1: expected 4, received 3"),
        (("B", "2*B"), (2, 3), "axis 1: expected 2*B = 4, received 3"),
        (("B",), (2, 3), "rank 1 expected, rank 2 received"),
    ],
)
def test_bind_says_what_is_wrong(pattern, real, problem):
    assert bind_shape(shape(*pattern), real, {}) == problem


@fast
@given(sizes, st.permutations([Dim.of(n) for n in NAMES]))
def test_bind_finds_the_sizes(at, pattern):
    found: dict[str, int] = {}
    assert bind_shape(tuple(pattern), tuple(at[next(iter(d.names()))] for d in pattern), found) is None and found == at


def test_an_expression_before_its_name_is_checked_too():
    assert bind_shape(shape("2*B", "B"), (5, 2), {}) == "axis 0: expected 2*B = 4, received 5"


@pytest.mark.parametrize("wrong", [3.5, 2.0, None, ()])
def test_what_is_no_size(wrong):
    with pytest.raises(ShapeError, match="is not a dimension"):
        as_size(wrong)

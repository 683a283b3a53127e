"""Matching of signatures with shapes, and constraints on sizes."""

import pytest

from tessera.core.errors import ShapeError
from tessera.core.shapes import as_size, bind_shapes, dims, require, use_known_sizes
from tessera.core.symbolic_dim import Dim


def shape(*items):
    return tuple(as_size(i) for i in items)


def fit(*pairs):
    sizes = {}
    misfit = bind_shapes([(shape(*p), shape(*s)) for p, s in pairs], sizes)
    return misfit, sizes


@pytest.mark.parametrize(
    ("pairs", "sizes"),
    [
        ([(("2*B",), (8,)), (("B",), (4,))], {"B": 4}),
        ([(("2*B+1", "A"), (9, 2))], {"A": 2, "B": 4}),
        ([(("2*B",), ("2*N",))], {"B": Dim.of("N")}),
        ([(("...", "D"), (2, 3, 5))], {"D": 5}),
        ([(("A", "..."), (2,))], {"A": 2}),
        ([(("?0", "D"), (2, 3)), (("?0", "D"), (7, 3))], {"?0": 2, "D": 3}),
        ([(("B*D", "B"), ("6*N", "N"))], {"B": Dim.of("N")}),
    ],
)
def test_what_fits(pairs, sizes):
    misfit, found = fit(*pairs)
    assert misfit is None and found == sizes


@pytest.mark.parametrize(
    ("pairs", "number", "problem"),
    [
        ([(("2*B",), (7,)), (("B",), (4,))], 0, "axis 0: expected 2*B = 8, received 7"),
        ([(("2*B",), (7,))], 0, "axis 0: expected 2*B, received 7"),
        ([(("B+5",), (3,))], 0, "axis 0: expected B+5, received 3"),
        ([(("B",), (4,)), (("...", "B"), (2, 5))], 1, "axis 1: B is 4 elsewhere and 5 here"),
        ([(("...", "A", "B"), (2,))], 0, "rank at least 2 expected, rank 1 received"),
        ([(("B", "B"), ("N", "K"))], 0, "axis 1: B is N elsewhere and K here"),
        ([(("D", 4), (3, "N"))], 0, "axis 1: expected 4, received N"),
    ],
)
def test_what_does_not_fit(pairs, number, problem):
    assert fit(*pairs)[0] == (number, problem)


def test_dims():
    assert dims("B S, D") == tuple(Dim.of(n) for n in "BSD")


@pytest.mark.parametrize(
    ("text", "sizes", "holds"),
    [
        ("D % 8 == 0", {"D": 16}, True),
        ("D % 8 == 0", {"D": 12}, False),
        ("D % 8 == 0", {"D": Dim.of("N")}, None),
        ("D % 8 == 0", {"D": 8 * Dim.of("N")}, True),
        ("D % 8 == 0", {}, None),
        ("2*B < D and D <= 64", {"B": 3, "D": 7}, True),
        ("1 < B < D", {"B": 3, "D": 3}, False),
        ("B != D", {"B": Dim.of("N"), "D": Dim.of("N") + 1}, True),
    ],
)
def test_requirements(text, sizes, holds):
    assert require(text).holds(sizes) is holds


def test_a_broken_requirement_says_what_was_known():
    with use_known_sizes({"D": 12}), pytest.raises(ShapeError) as caught:
        require("D % 8 == 0")
    assert "D % 8 == 0 does not hold" in str(caught.value) and caught.value.received == "D = 12"


@pytest.mark.parametrize("text", ["D", "D %", "D == 'a'", "B or D", "D in E"])
def test_what_is_no_requirement(text):
    with pytest.raises(ShapeError, match=r"is not a (constraint|dimension)"):
        require(text)

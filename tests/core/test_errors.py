"""Errors: the text that a user reads, with carets under the columns; and locations."""

import linecache
import sys

import pytest

from tessera.core.errors import UNKNOWN, DTypeError, Location, ShapeError, TesseraError, frame_location, user_location
from tessera.ir.tensor import Tensor

SOURCE = ["def f(x, y):\n", "    return add(x, y)\n", "\n"]


@pytest.fixture
def file():
    """A file of which only linecache knows."""
    linecache.cache["made_up.py"] = (sum(map(len, SOURCE)), None, SOURCE, "made_up.py")
    yield "made_up.py"
    del linecache.cache["made_up.py"]


def test_the_whole_text(file):
    error = ShapeError(
        "operand shapes differ",
        location=Location(file, 2, 12, 21),
        expected="8xf32",
        received="4xf32",
        suggestion="reshape one",
    )
    assert str(error) == (
        "made_up.py:2:12: ShapeError: operand shapes differ\n"
        "      2 |     return add(x, y)\n"
        "        |            ^^^^^^^^^\n"
        "  expected: 8xf32\n"
        "  received: 4xf32\n"
        "  suggestion: reshape one"
    )


@pytest.mark.parametrize(
    ("columns", "carets"), [((12, 15), "^^^"), ((12, 0), "^"), ((12, 99), "^^^^^^^^^"), ((12, 12), "^"), ((0, 0), None)]
)
def test_carets(file, columns, carets):
    lines = Location(file, 2, *columns).excerpt().splitlines()
    assert lines[0] == "      2 |     return add(x, y)"
    assert lines[1:] == ([] if carets is None else [f"        | {' ' * 11}{carets}"])


def test_no_excerpt_where_there_is_no_line(file):
    for location in (Location(file, 3), Location(file, 9), Location("nowhere.py", 1, 1)):
        assert location.excerpt() == ""
    assert str(ShapeError("m", location=Location("nowhere.py", 4))) == "nowhere.py:4: ShapeError: m"


def test_an_error_keeps_its_first_place():
    first, second = Location("a.py", 1), Location("b.py", 2)
    error = DTypeError("m")
    assert error.at(UNKNOWN).location is None
    assert error.at(first) is error and error.at(second).location == first


def test_falsy_fields_are_shown():
    assert str(TesseraError("m", received=0, expected="")) == "TesseraError: m\n  expected: \n  received: 0"


def test_here_is_the_users_line():
    location = user_location()
    assert location.file == __file__ and "user_location()" in linecache.getline(__file__, location.line)


def test_frame_location_has_columns():
    location = frame_location(sys._getframe())
    if sys.version_info >= (3, 11):
        assert location.excerpt().splitlines()[1].strip("| ") == "^" * len("frame_location(sys._getframe())")


def test_an_error_inside_an_op_points_at_the_expression():
    with pytest.raises(ShapeError) as caught:
        Tensor([1.0, 2.0]) + Tensor([1.0, 2.0, 3.0])
    location = caught.value.location
    assert location.file == __file__
    if sys.version_info >= (3, 11):
        text = linecache.getline(__file__, location.line)[location.column - 1 : location.end_column - 1]
        assert text == "Tensor([1.0, 2.0]) + Tensor([1.0, 2.0, 3.0])"

"""Errors: the text that a user reads, with carets under the columns; and locations."""

import linecache
import os
import subprocess
import sys
import traceback

import numpy as np
import pytest

import tessera as ts
from tessera.core import errors
from tessera.core.errors import (
    TRACEBACK_NOTE,
    TRACEBACK_VARIABLE,
    UNKNOWN,
    DTypeError,
    Location,
    OutOfBoundsError,
    ShapeError,
    TesseraError,
    frame_location,
    hides_internal_frames,
    is_package_file,
    user_location,
)
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


SCRIPT = """import sys
import numpy as np
import tessera as ts

def inner(x, y):
    return x + y

def run(kind):
    x, y = np.ones(3, np.float32), np.ones(4, np.float32)
    if kind == "jit":
        ts.jit(lambda x, y: inner(x, y))(x, y)
    if kind == "gradient":
        ts.grad(lambda x: ts.sum(inner(x, ts.ones(4))))(ts.ones(3))
    if kind == "kernel":
        store[(1,)](y)
    if kind == "interpreter":
        outside[(4,)](y)
    if kind == "library":
        with ts.debug.checked(nan=True):
            ts.jit(ts.log)(ts.ones(3) - 2.0)
    if kind == "cause":
        try:
            inner(ts.ones(3), ts.ones(4))
        except ts.TesseraError as error:
            raise ts.errors.ArgumentError("mine") from error

@ts.kernel
def store(x: ts.Tensor["N"]):
    ts.tile.store(x[0:2], x[0:4])

@ts.kernel
def outside(x: ts.Tensor["N"]):
    i = ts.tile.program_id(0)
    x[i + 3] = x[i]

*first, last = sys.argv[1:]
for kind in first:  # as Python does with an error that nothing catches
    try:
        run(kind)
    except Exception:
        sys.excepthook(*sys.exc_info())
    print("=" * 8, file=sys.stderr)
run(last)
"""
KINDS = ("jit", "gradient", "kernel", "interpreter", "library", "cause")


def run_script(folder, **environment):
    """What a process says of the error of each kind."""
    file = folder / "script.py"
    file.write_text(SCRIPT)
    env = {k: v for k, v in os.environ.items() if k != TRACEBACK_VARIABLE} | environment
    done = subprocess.run([sys.executable, str(file), *KINDS], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    return dict(zip(KINDS, done.stderr.split("=" * 8 + "\n"), strict=True))


@pytest.fixture(scope="module")
def tracebacks(tmp_path_factory):
    """The filtered and the whole text of the error of each kind."""
    folder = tmp_path_factory.mktemp("tracebacks")
    return run_script(folder), run_script(folder, **{TRACEBACK_VARIABLE: "full"})


@pytest.mark.parametrize("kind", KINDS)
def test_tracebacks_have_the_user_s_frames_alone(tracebacks, kind):
    short, whole = (found[kind] for found in tracebacks)
    frames = [line for line in short.splitlines() if line.startswith("  File ")]
    assert len(frames) >= 2 and all("script.py" in line for line in frames), short
    assert short.rstrip().endswith(TRACEBACK_NOTE) and "Error: " in short
    assert "tessera" + os.sep in whole and TRACEBACK_NOTE not in whole


def test_a_caught_error_is_filtered_at_the_call_of_a_program(monkeypatch):
    monkeypatch.delenv(TRACEBACK_VARIABLE, raising=False)
    with pytest.raises(ShapeError) as caught:
        ts.jit(lambda x, y: x + y)(np.ones(3, np.float32), np.ones(4, np.float32))
    files = {s.filename for s in traceback.extract_tb(caught.value.__traceback__)}
    own = {file for file in files if is_package_file(file)}  # before Python 3.11 the frame that raises again is left
    assert files - own == {__file__} and len(own) <= (sys.version_info < (3, 11))


@pytest.mark.parametrize("body", [lambda x: x * {}["scale"], lambda x: ts.cat([x, x])])
def test_an_error_of_the_user_s_own_code_is_filtered_too(monkeypatch, body):
    monkeypatch.delenv(TRACEBACK_VARIABLE, raising=False)
    with pytest.raises((KeyError, AttributeError)) as caught:
        ts.jit(body)(np.ones(3, np.float32))
    files = {s.filename for s in traceback.extract_tb(caught.value.__traceback__)}
    own = {file for file in files if is_package_file(file)}  # before Python 3.11 the frame that raises again is left
    assert files - own == {__file__} and len(own) <= (sys.version_info < (3, 11))


def test_an_untyped_error_of_the_package_keeps_its_frames():
    scope, file = {}, hides_internal_frames.__code__.co_filename
    exec(compile("def defect(x):\n    raise KeyError('x')", file, "exec"), scope)
    with pytest.raises(KeyError) as caught:
        ts.jit(scope["defect"])(np.ones(3, np.float32))
    assert {s.name for s in traceback.extract_tb(caught.value.__traceback__)} >= {"defect", "__call__"}


def test_other_errors_keep_their_frames():
    def fail():
        raise KeyError("x")

    with pytest.raises(KeyError) as caught:
        hides_internal_frames(fail)()
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "fail"


@pytest.mark.parametrize("file", ["/dev/zero", "/dev/stdin", "\0", "pipe"])
def test_a_location_that_is_no_regular_file_is_not_opened(file, tmp_path):
    """IR text may name any file in a location; an excerpt of a device would never end."""
    if file == "pipe":
        file = str(tmp_path / "pipe")
        os.mkfifo(file)
    assert Location(file, 1, 1).excerpt() == ""


@pytest.mark.parametrize(
    ("wrong", "kinds"),
    [
        (lambda x: x.reshape(7), (ShapeError, ValueError)),
        (lambda x: x.sum(axis=5), (ShapeError, ValueError, IndexError)),
        (lambda x: x + ts.ones((5,)), (ShapeError, ValueError)),
        (lambda x: x[9], (OutOfBoundsError, IndexError)),
        (lambda x: x[[0, 9]], (OutOfBoundsError, IndexError)),
    ],
)
def test_errors_are_those_that_numpy_raises(wrong, kinds):
    """Code written for NumPy catches them; a list of ragged lists keeps its message."""
    for kind in kinds:
        with pytest.raises(kind) as caught:
            wrong(ts.ones((2, 3)))
        assert isinstance(caught.value, kinds[0])
    with pytest.raises(ShapeError, match="these lists are no tensor"):
        ts.sum([[1.0], [1.0, 2.0]])
    with pytest.raises(ShapeError, match="2 values is given in place of a tensor") as caught:
        ts.relu((ts.ones(2), ts.ones(3)))
    assert caught.value.received == "shapes (2,), (3,)"


def test_a_command_is_no_users_line():
    """What a command calls has no line of Python that a user wrote, though one called the command."""
    scope = {"user_location": errors.user_location}
    exec(compile("found = user_location()", errors._COMMAND_FOLDER + "any.py", "exec"), scope)
    assert scope["found"] == errors.UNKNOWN
    exec(compile("found = user_location()", "/home/someone/any.py", "exec"), scope)
    assert scope["found"].file == "/home/someone/any.py"

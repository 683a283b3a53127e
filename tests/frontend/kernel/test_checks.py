"""Assertions and prints fire in the interpreter, and say where."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.core.errors import ArgumentError, DTypeError, ExecutionError, UnsupportedSyntaxError


@ts.kernel
def bounded(x, out, B: ts.constexpr):
    i = tile.program_id(0) * B
    block = tile.load(x[i : i + B])
    tile.assert_(block < 7.0, "a value is too large")
    out[i : i + B] = block


def test_an_assertion_names_program_element_and_values():
    x = np.arange(8, dtype="f4")
    with pytest.raises(ExecutionError, match="too large") as caught:
        bounded[(2,)](x, np.zeros(8, "f4"), B=4)
    assert "false at program (1,), element (3,) with 7.0, 7.0" in str(caught.value)
    assert "tile.assert_(block < 7.0" in str(caught.value)


def test_an_assertion_that_holds_says_nothing():
    out = np.zeros(4, "f4")
    bounded[(1,)](np.arange(4, dtype="f4"), out, B=4)
    assert out.tolist() == [0, 1, 2, 3]


@ts.kernel
def guarded(x, out):
    me = tile.local_id()
    if me > 1:
        assert x[me] > 0, "not positive"
    out[me] = x[me]


def test_inactive_tiles_assert_nothing():
    x = np.array([-1, -1, 1, 1], "f4")
    guarded[(1,), 4](x, np.zeros(4, "f4"))
    x[3] = -2
    with pytest.raises(ExecutionError, match="tile 3 with -2.0, 0.0"):
        guarded[(1,), 4](x, np.zeros(4, "f4"))


@ts.kernel
def talking(x):
    i = tile.program_id(0)
    tile.print("row", i, tile.load(x[i, 0:2]))


def test_print(capsys):
    talking[(2,)](np.arange(4, dtype="f4").reshape(2, 2))
    assert capsys.readouterr().out == "program (0,): row 0 [0., 1.]\nprogram (1,): row 1 [2., 3.]\n"


@ts.kernel
def formatted(x):
    i, n = tile.program_id(0), 2
    print(f"{i} of {n} {{has}}", x[i], sep=": ")
    tile.print(f"again {x[i]}")


def test_f_strings_are_printed(capsys):
    for kernel in (formatted, ts.kernel(formatted.kernel_function, target="cpu")):
        kernel[(1,)](np.float32([2.5]))
        assert capsys.readouterr().out == "program (0,): 0 of 2 {has}: 2.5\nprogram (0,): again 2.5\n"


@ts.kernel
def asserted_text(x):
    tile.assert_(x[0] > 3, f"is {x[0]}")


@ts.kernel
def with_a_format(x):
    print(f"{x[0]:.3f}")


@pytest.mark.parametrize(("entry", "says"), [(asserted_text, "only be printed"), (with_a_format, "without a format")])
def test_what_f_strings_cannot_do(entry, says):
    with pytest.raises(UnsupportedSyntaxError, match=says):
        entry[(1,)](np.zeros(1, "f4"))


@ts.kernel
def false_at_once(x):
    tile.assert_(1 > 2, "never")


@ts.kernel
def not_a_condition(x):
    tile.assert_(x[0], "a float")


@pytest.mark.parametrize(("entry", "error"), [(false_at_once, ArgumentError), (not_a_condition, DTypeError)])
def test_refusals(entry, error):
    with pytest.raises(error):
        entry[(1,)](np.zeros(1, "f4"))

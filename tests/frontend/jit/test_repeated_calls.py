"""Repeated calls: only calls like the last one take the short way, and what changes a program is seen."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.device import default_device
from tessera.frontend.jit import repeated_calls
from tessera.frontend.jit.call_keys import list_cells
from tessera.frontend.jit.line_marks import LINE_MARKS_ENABLED
from tessera.ir.builder import CURRENT_RANK_NUMBER
from tessera.ir.core import Attrs
from tessera.lower.lowering_plan import RUN_OBSERVER, SCOPED, SCOPED_FUSION

X, Y = ts.tensor([1.0, 2.0]), ts.tensor([3.0, 5.0])


def repeat(f, *args):
    """The result of a call, after calls that make it a repeated one."""
    for _ in range(3):
        f(*args)
    assert f._repeated is not None
    return f(*args)


@pytest.fixture
def short(monkeypatch):
    """The results of calls that took the short way."""
    found, call = [], repeated_calls.RepeatedCall.__call__

    def note(self, args):
        out = call(self, args)
        found.append(out is not repeated_calls.OTHER)
        return out

    monkeypatch.setattr(repeated_calls.RepeatedCall, "__call__", note)
    return found


@pytest.mark.parametrize("target", ["interp", "llvm", "ptx"])
def test_the_same_tensors_take_the_short_way(short, target):
    f = ts.jit(lambda x, y: (x + y, {"d": x - y}), target=target)
    total, rest = repeat(f, X, Y)
    assert short[-1]
    np.testing.assert_array_equal(total.numpy(), [4.0, 7.0])
    np.testing.assert_array_equal(rest["d"].numpy(), [-2.0, -3.0])
    np.testing.assert_array_equal(f(Y, Y)[0].numpy(), [6.0, 10.0])


def test_other_types_and_counts_do_not(short):
    f = ts.jit(lambda x, y=1.0: x * y)
    repeat(f, X, Y)
    for args in [
        (ts.tensor([[2.0]]), Y),
        (X.astype(ts.f64), Y.astype(ts.f64)),
        (X, 2.0),
        (X,),
        (np.float32([1, 2]), Y),
    ]:
        got, want = f(*args), args[0] * (args[1] if len(args) > 1 else 1.0)
        assert got.dtype == want.dtype and not short[-1]
        np.testing.assert_array_equal(got.numpy(), np.asarray(want))
    np.testing.assert_array_equal(f(X, y=Y).numpy(), [3.0, 10.0])


def test_what_a_function_closes_over_is_looked_at(short):
    scale, inner = 2.0, {"add": lambda x: x + scale}
    add = inner["add"]

    def outer(x):
        return add(x)

    f = ts.jit(outer)
    assert repeat(f, X).tolist() == [3.0, 4.0] and short[-1]
    scale = 10.0
    assert f(X).tolist() == [11.0, 12.0]
    add = lambda x: x * scale  # noqa: E731
    assert f(X).tolist() == [10.0, 20.0]


@pytest.mark.parametrize(
    ("change", "result"),
    [
        (lambda held: held.update(scale=4.0), [5.0, 9.0]), (lambda held: held["more"].append(3.0), [5.0, 6.0]),
        (lambda held: held["more"].__setitem__(0, 2.0), [3.0, 4.0]), (lambda held: held.pop("scale"), [3.0, 5.0]),
        (lambda held: held.update(more=[0.5]), [1.5, 2.5]), (lambda held: held.update(other=0.0), [2.0, 3.0]),
    ],
)  # fmt: skip
def test_what_a_dict_or_list_holds_is_looked_at(short, change, result):
    held = {"scale": 1.0, "more": [1.0]}
    f = ts.jit(lambda x: x * held.get("scale", 2.0) + sum(held["more"]))
    assert repeat(f, X).tolist() == [2.0, 3.0] and short[-1]
    change(held)
    assert f(X).tolist() == result and not short[-1]


def test_cells_that_cannot_be_compared_are_none():
    """A function within a list closes over cells of its own; equal numbers of other types are other objects."""

    def close_over(value):
        return lambda: value

    loop, typed = [], {"n": 1}
    loop.append(loop)
    for value in ([close_over(1.0)], {1: 2.0}, loop):
        assert list_cells(close_over(value)) is None
    (_, (cell, same)) = list_cells(lambda: typed)
    assert cell.cell_contents is same
    typed["n"] = True
    assert cell.cell_contents is not same


def test_an_equal_object_of_another_type_is_another_one():
    scale = 1
    f = ts.jit(lambda x: x * scale)
    whole = ts.tensor([1, 2])
    assert repeat(f, whole).dtype == whole.dtype
    scale = 1.0
    assert f(whole).dtype == (whole * 1.0).dtype != whole.dtype


@pytest.mark.parametrize("target", [None, "llvm"])
def test_a_symbolic_size_has_its_number(target):
    twice = ts.jit(lambda x: x + x, dynamic=True, target=target)
    for count in (3, 5, 8):
        assert repeat(twice, ts.ones((count,))).type.shape == (count,)


def test_captured_tensors_are_read_at_each_call():
    w = ts.tensor([1.0, 1.0])
    f = ts.jit(lambda x: x * w)
    assert [f(X).tolist() for _ in range(4)][-1] == [1.0, 2.0] and f._repeated is None
    w.data[...] = 3.0
    assert f(X).tolist() == [3.0, 6.0]


def test_the_context_is_looked_at(short):
    f = ts.jit(lambda x: x @ x)
    repeat(f, X)
    with ts.precision(compute=ts.bf16):
        assert f(X + 2.0**-10).numpy() == 5.0  # of rounded numbers
    assert not short[-1]
    np.testing.assert_array_equal(ts.jit(lambda x: f(x) + 1.0)(X).numpy(), 6.0)
    assert not short[-1]
    device = default_device()
    try:
        ts.set_default_device("llvm")
        assert f(X).numpy() == 5.0 and not short[-1]
    finally:
        ts.set_default_device(device)


def test_gradients_are_recorded():
    f = ts.jit(lambda x: ts.sum(x * x))
    repeat(f, X)
    learned = ts.tensor([1.0, 2.0])
    repeat(f, learned)
    learned.requires_grad = True
    assert f._repeated((learned,)) is repeated_calls.OTHER
    f(learned).backward()
    assert learned.grad.tolist() == [2.0, 4.0]


def test_donated_tensors_are_refused():
    f, give = ts.jit(lambda x: x + 1.0, target="ptx"), ts.jit(lambda x: x * 2.0, target="ptx", donate="x")
    x = ts.tensor([1.0, 2.0]).to("ptx")
    repeat(f, x)
    give(x)
    with pytest.raises(ts.errors.ArgumentError, match="donated"):
        f(x)


def test_an_error_of_the_program_names_the_users_line():
    f = ts.jit(lambda x, i: ts.take(x, i, axis=0))
    i = ts.tensor([0, 1])
    repeat(f, X, i)
    i.data[...] = 7
    with pytest.raises(ts.TesseraError) as caught:
        f(X, i)
    assert "test_repeated_calls" in str(caught.value)


CONTEXTS = {
    "marked lines": (LINE_MARKS_ENABLED, True),
    "a rank": (CURRENT_RANK_NUMBER, 1),
    "an observer": (RUN_OBSERVER, object()),
    "a fusion": (SCOPED_FUSION, Attrs({"mode": "never"})),
    "passes": (SCOPED, ("a pass",)),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_every_part_of_the_context_is_looked_at(name):
    f = ts.jit(lambda x: x * 2.0)
    repeat(f, X)
    variable, value = CONTEXTS[name]
    token = variable.set(value)
    try:
        assert f._repeated((X,)) is repeated_calls.OTHER
    finally:
        variable.reset(token)
    assert f._repeated((X,)).tolist() == [2.0, 4.0]


def test_installed_passes_are_looked_at(monkeypatch):
    f = ts.jit(lambda x: x * 2.0)
    repeat(f, X)
    monkeypatch.setattr(repeated_calls, "INSTALLED", ["a pass"])
    assert f._repeated((X,)) is repeated_calls.OTHER


def test_calls_in_another_context_are_not_repeated_outside_of_it():
    f = ts.jit(lambda x: x + 2.0**-10)
    with ts.precision(compute=ts.bf16):
        assert [f(X).tolist() for _ in range(4)][-1] == [1.0, 2.0]
    assert f(X).tolist() == [1.0 + 2.0**-10, 2.0 + 2.0**-10]


def test_what_a_repeated_call_may_not_be():
    """One that gives its tensors up, or draws random numbers."""
    give = ts.jit(lambda x: x * 2.0, target="ptx", donate="x")
    make = ts.jit(lambda x: x + 1.0, target="ptx")
    for _ in range(5):
        x = make(X)  # whose type is one object
        give(x)
        with pytest.raises(ts.errors.ArgumentError, match="donated"):
            give(x)
    noise = ts.jit(lambda x: x + ts.rand((2,)))
    assert len({tuple(noise(X).tolist()) for _ in range(5)}) == 5

"""Stepping through `ts.jit` functions: lines, variables, callers, loops, backwards, bounds, and the same results."""

import re

import numpy as np
import pytest

import tessera as ts
from conformance.case import all_cases
from tessera.core.errors import ShapeError, UnsupportedOpError
from tessera.frontend.jit.tracing import Jit


def scaled(v, by):
    w = v * by
    return w + 1.0


@ts.jit
def model(params, x, width=2):
    h = params["w"] @ x + params["b"][0]

    def body(c, row):
        c = c * 0.5
        return c + row, c.sum()

    h, sums = ts.scan(body, h, params["w"])
    y = scaled(ts.exp(h), 2.0) - 1.0
    return ts.where(y > 0, y, 0.0), sums


PARAMS = {"w": np.float32([[1, 2], [3, 4]]), "b": [np.float32([1, -1])]}
X = np.float32([1, 2])


def session(commands, function=model, *args, **options):
    """What a session shows, with the source lines left out."""
    shown = []
    with ts.debug.session(commands, write=shown.append, **options):
        function(*(args or (PARAMS, X)))
    return shown


def stops(shown):
    return [int(line.partition(" in ")[0].rpartition(":")[2]) for line in shown if re.match("> .* in ", line)]


def values(shown, command):
    return shown[shown.index(f"(tessera) {command}") + 1].split("\n")


def test_lines_in_order_into_functions_and_loops_or_over_them():
    assert stops(session("step; " * 12)) == [21, 23, 27, 24, 25, 24, 25, 28, 15, 16, 29]
    assert stops(session("next; " * 6)) == [21, 23, 27, 28, 29]


def test_variables_in_containers_and_what_is_no_tensor():
    shown = session("n; p h; p params['w']; p params['b'][0]; p width; stats h; locals")
    assert values(shown, "p h") == ["h = 2xf32", "[ 6., 10.]", "min 6, max 10, mean 8, std 2"]
    assert values(shown, "p params['b'][0]")[:2] == ["params['b'][0] = 2xf32", "[ 1., -1.]"]
    assert "params.w = [[1., 2.],\n [3., 4.]]" in shown and "x = [1., 2.]" in shown
    whole = session("p params")
    assert [line.split(" ")[0] for line in whole if line.startswith("params.")] == ["params.b.0", "params.w"]


def test_callers_and_back():
    shown = session("b 16; c; p w; where; up; p h; down; back; where; back; p h; back continue")
    assert values(shown, "up")[0].endswith("test_graph_stepping.py:28 in model")
    assert values(shown, "p h")[1] == "[5. , 7.5]"
    assert stops(shown) == [21, 16, 28, 16, 15, 28, 21]
    assert "this is where the recording begins" in shown


def test_each_round_of_a_loop_and_its_condition():
    shown = session("b 25 if c.sum() < 7; c; p c; p row; up; p h; delete 1; watch y; c")
    assert values(shown, "p c")[1] == "[2. , 3.5]" and values(shown, "p row")[1] == "[3., 4.]"
    assert values(shown, "p h")[1] == "[ 6., 10.]"


def test_bounds_hold_the_exact_value():
    shown = session("b 29; c; bound y; bound x")
    exact = np.exp(np.float64([5, 7.5])) * 2.0
    found = np.array(values(shown, "bound y")[1].strip("[]").split(","), float)
    assert np.allclose(found, exact, rtol=1e-7) and values(shown, "bound x")[2] == "within 0 (largest), 0 (mean)"


@ts.jit
def stops_here(x):
    y = ts.log(x)
    ts.debug.break_here(y.min() < 0)
    return y + 1.0


def test_break_here_with_a_session_and_without(monkeypatch, capsys):
    assert values(session("p x; c; trace_back y", stops_here, np.float32([0.5]), at_start=False), "p x")[1] == "[0.5]"
    typed = iter(["p y", "c"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    assert np.allclose(stops_here(np.float32([0.5])).numpy(), 1 + np.log(0.5))
    assert "break_here" in capsys.readouterr().out and next(typed, None) is None
    stops_here(np.float32([2.0]))  # the condition does not hold: nothing is asked


def test_a_device_that_cannot_stop_says_so():
    with pytest.raises(UnsupportedOpError, match=r"test_graph_stepping\.py.*has no breakpoints"):
        ts.jit(stops_here.function, target="llvm")(np.float32([0.5]))


@ts.jit
def differentiated(x):
    g = ts.grad(lambda v: (ts.sin(v) * v).sum())(x)
    rows = ts.vmap(lambda r: r * 2.0)(ts.stack([x, g]))
    return ts.cond(g.sum() > 0, lambda v: v * 2.0, lambda v: v - 1.0, g), rows


def test_transforms_and_branches_are_stepped_over_or_through_by_op():
    x = np.float32([1, 2, 3])
    shown = session("n; p g; n; p rows; op; info; c", differentiated, x)
    want = [a.numpy() for a in differentiated(x)]
    text = values(shown, "p g")[1]
    assert np.allclose(np.array(text.strip("[]").split(","), float), np.sin(x) + x * np.cos(x), rtol=1e-6)
    found = []
    with ts.debug.session("", write=found.append):
        again = [a.numpy() for a in differentiated(x)]
    assert [a.tobytes() for a in again] == [a.tobytes() for a in want]


def test_gradients_of_what_was_stepped_through():
    x = ts.Tensor(X, requires_grad=True)
    with ts.debug.session("n; c", write=lambda text: None):
        scaled_sum(x).backward()
        assert np.allclose(ts.grad(scaled_sum)(X).numpy(), 2 * X)
    assert np.allclose(x.grad.numpy(), 2 * X)


@ts.jit
def scaled_sum(x):
    y = x * x
    return y.sum()


def test_an_error_at_run_time_stops_at_its_line():
    @ts.jit
    def wrong(x, i):
        y = x * 2.0
        return y + i

    with pytest.raises(ShapeError), ts.debug.session("c", write=lambda text: None):
        wrong(np.ones(3, np.float32), np.ones(4, np.float32))


def test_the_decorator_stops_at_the_first_line(capsys):
    found = ts.debug.interactive(model, commands="p x; c")(PARAMS, X)
    assert np.allclose(found[1].numpy(), model(PARAMS, X)[1].numpy())
    assert "[1., 2.]" in capsys.readouterr().out


STEPPED = [c for c in all_cases() if c.rejects is None and c.mesh is None and c.name.startswith("graph/")][::15]


def test_functions_of_the_suite_keep_their_bits():
    from tessera.core.pytree import flatten  # here, since lines above are counted

    assert len(STEPPED) > 20
    for case in STEPPED:
        function, given = case.entry()
        assert isinstance(function, Jit)
        args, named = ((), given) if isinstance(given, dict) else (given, {})
        want = function(*args, **named)
        with ts.debug.session("n; op 3; locals; info; where; back; c", write=lambda text: None):
            found = function.stepped(*args, **named)
        leaves = [[np.asarray(leaf.data).tobytes() for _, leaf in flatten(v)[0]] for v in (want, found)]
        assert leaves[0] == leaves[1], case.name

"""What loops and branches refuse, and the places in the IR where they stand."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError, DTypeError, EffectError, ShapeError, UnsupportedOpError
from tessera.ir.core import Module
from tessera.ir.parser import parse_module
from tessera.ir.printer import print_module
from tessera.ir.rewrite import eliminate_dead_code
from tessera.ir.verify import verify
from tessera.runtime import driver

G = ts.Generator(1)
X = np.ones((4, 3))
ONE = ts.Tensor(1.0)
CASES = {
    "the state changes": (lambda: ts.scan(lambda s, x: (s[:1], None), ts.zeros(3), X), ShapeError, "changes its type"),
    "the state changes type": (lambda: ts.scan(lambda s, x: (s.to(ts.f64), None), ONE, X), ShapeError, "f64"),
    "another container": (lambda: ts.scan(lambda s, x: ((s, s), None), ONE, X), ArgumentError, "container"),
    "no pair": (lambda: ts.scan(lambda s, x: s, ONE, X), ArgumentError, "next state and a result"),
    "lengths differ": (lambda: ts.scan(lambda s, x: (s, x), ONE, (X, X[:2])), ShapeError, "differs in length"),
    "no length": (lambda: ts.scan(lambda s, x: (s, s), ONE), ArgumentError, "length"),
    "a scalar": (lambda: ts.map(lambda x: x, 1.0), ShapeError, "scalar"),
    "fold of nothing": (lambda: ts.fold(ts.add, X[:0]), ShapeError, "at least one slice"),
    "traced bounds": (lambda: ts.fori_loop(0, ONE, lambda i, x: x, 1.0), ArgumentError, "while_loop"),
    "branches differ": (lambda: ts.cond(ONE > 0, lambda: ts.ones(3), lambda: ts.ones(2)), ShapeError, "branches"),
    "no bool": (lambda: ts.cond(ONE, lambda: ONE, lambda: ONE), DTypeError, "not bool"),
    "no scalar": (lambda: ts.cond(ts.ones(3) > 0, lambda: ONE, lambda: ONE), ShapeError, "where"),
    "a while changes": (lambda: ts.while_loop(lambda x: x.sum() < 9, lambda x: x[:1], ts.ones(3)), ShapeError, "state"),
    "random steps": (
        lambda: ts.map(lambda x: x * ts.rand(3, generator=G), X),
        EffectError,
        "a step of scan has the effect",
    ),
    "no body": (lambda: ts.while_loop(lambda x: x < 9, init=ONE), ArgumentError, "body"),
    "reverse": (
        lambda: ts.grad(lambda x: ts.while_loop(lambda y: y < 9.0, lambda y: y * x, x))(2.0),
        UnsupportedOpError, "scan",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_refused(name):
    call, error, text = CASES[name]
    with pytest.raises(error, match=text) as caught:
        call()
    assert caught.value.location is not None and caught.value.location.file == __file__


def program(x):
    last, ys = ts.scan(lambda s, y: (ts.cond(y.sum() > 0, lambda: s + y, lambda: s), s * 2.0), ts.zeros(3, ts.f64), x)
    return ts.while_loop(lambda s: s.sum() < 50.0, lambda s: s * 2.0, last), ys


def test_each_level_says_where_the_loops_are():
    found = driver.lower(ts.jit(program).trace(X).function, "llvm")
    names = {level: {n.op.name for n in m.main.body.walk()} for level, m in found.items()}
    assert {"ts.scan", "ts.cond", "ts.while_loop"} <= names["graph"]
    for level in ("schedule", "tile"):
        assert {"host.loop", "host.if", "host.while", "host.at"} <= names[level]
    for level, module in found.items():
        assert parse_module(print_module(verify(module))) == module, level


def test_memory_of_a_loop_outlives_its_steps():
    """What is made outside a loop and used in it keeps its place while the loop runs."""
    module = driver.lower(ts.jit(program).trace(X).function, "llvm")["tile"]
    made = {n.out: _span(n) for n in module.main.body.walk() if n.op.name == "host.alloc"}
    loop = next(n for n in module.main.body.nodes if n.op.name == "host.loop")
    inside = [made[n.out] for n in loop.regions[0].walk() if n.op.name == "host.alloc"]
    outside = [made[v] for v in loop.regions[0].free if v in made]
    assert inside and outside
    assert all(end <= a or b <= start for start, end in inside for a, b in outside)


def _span(node):
    start = node.attrs["offset"]
    return start, start + max(1, int(np.prod(node.attrs["shape"]))) * node.attrs["dtype"].numpy.itemsize


def test_a_scan_of_another_length_is_refused_by_the_verifier():
    function = ts.jit(program).trace(X).function
    text = print_module(Module("graph", (function,))).replace("length = 4", "length = 5")
    with pytest.raises(ts.TesseraError, match="region|stacks"):
        verify(parse_module(text))


def test_results_of_steps_that_nothing_uses_are_not_stacked():
    program = lambda x: ts.scan(lambda s, y: (s + y, (ts.exp(y), s)), ts.zeros(3, ts.f64), x)[1][1]  # noqa: E731
    function = ts.jit(program).trace(X).function
    (node,) = [n for n in eliminate_dead_code(function).body.nodes if n.op.name == "ts.scan"]
    assert [v.type.shape for v in node.results] == [(3,), (4, 3)]
    assert not any(n.op.name == "ts.exp" for n in node.regions[0].nodes)
    verify(Module("graph", (eliminate_dead_code(function),)))


@pytest.mark.parametrize("call", [lambda x: ts.cond(ts.tensor(True), x, x), lambda x: ts.scan(x, x, x)])
def test_tensors_are_no_functions(call):
    with pytest.raises(ArgumentError, match="takes a function"):
        call(ts.ones(3))

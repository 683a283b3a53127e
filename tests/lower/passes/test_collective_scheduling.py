"""Collective scheduling: collectives start when their operands are ready, together, and end where results are used."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera.codegen.contract import emit_artifact, get_backend
from tessera.core.types import RefType, f32
from tessera.errors import AsyncCopyError, CollectiveError
from tessera.interp import host as host_interpreter
from tessera.ir.builder import Builder
from tessera.ir.core import Attrs, Function, Value
from tessera.lower.passes import collective_scheduling
from tessera.ops.dialects import host
from tessera.runtime.program import prepare

MESH = ts.Mesh(2)
rng = np.random.default_rng(0)
X, W, V = (rng.standard_normal(s).astype(np.float32) for s in ((4, 8), (8, 8), (8, 8)))
P = ts.dist.P


def list_ops(function, *arrays):
    """The host ops of rank 0's Schedule, where "kernel" stands for what the device computes."""

    def find():
        nodes = prepare(ts.jit(function), list(arrays), "llvm").levels["schedule"].main.body.nodes
        names = [n.op.__name__ for n in nodes if n.op.__name__ not in ("alloc", "view")]
        return ["kernel" if n == "launch" else n for n in names]

    return ts.spmd(find, mesh=MESH, out_specs="ranks")()[0]


def find_steps(program):
    """The steps of the host plan of a prepared program."""
    return emit_artifact(get_backend("llvm"), program.levels["tile"], {}).manifest["plan"]["steps"]


def test_a_collective_runs_beside_what_does_not_use_it():
    def function(x, w):
        return ts.all_reduce(ts.exp(x)) + ts.sum(x @ w, axis=1, keepdims=True)

    assert list_ops(function, X, W) == ["kernel", "start", "kernel", "wait", "kernel"]


def test_without_other_work_a_collective_is_one_call():
    assert list_ops(lambda x: ts.all_reduce(ts.exp(x)) * 2.0, X) == ["kernel", "call", "kernel"]


def test_gradients_start_in_the_order_of_the_backward_pass():
    def step(params, x):
        loss = lambda ws: ts.mean(ts.tanh(ts.tanh(x @ ws[0]) @ ws[1]))  # noqa: E731
        return [w - g for w, g in zip(params, ts.dist.reduce_gradients(ts.grad(loss)(params)), strict=True)]

    def find():
        program = prepare(ts.jit(step), [[W, V], X], "llvm")
        nodes = program.levels["schedule"].main.body.nodes
        return [n.op.__name__ for n in nodes if n.op in (host.start, host.wait, host.call)]

    assert ts.spmd(find, mesh=MESH, out_specs="ranks")()[0] == ["start", "call", "wait"]
    wanted = [w - g for w, g in zip((W, V), _reference((W, V)), strict=True)]
    for target in ("llvm", "ptx"):
        found = ts.spmd(step, mesh=MESH, in_specs=(None, P("ranks")), target=target)([W, V], X)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a.numpy(), b, atol=1e-6)


def _reference(params):
    first, second = (p.astype("f8") for p in params)
    h = np.tanh(X @ first)
    y = np.tanh(h @ second)
    back = (1 - y**2) / y.size
    return [X.T @ ((back @ second.T) * (1 - h**2)), h.T @ back]


@ts.spmd(mesh=MESH, in_specs=P("ranks"), out_specs="ranks", target="llvm")
def loops(x):
    def step(c, row):
        total = ts.all_reduce(c * row)
        return total + ts.sum(ts.exp(c)), ts.sum(c @ ts.tanh(c))

    return ts.scan(step, ts.ones((8,)), x)


def test_inside_a_loop():
    c, totals = np.ones(8), []
    for a, b in zip(X[:2], X[2:], strict=True):
        totals.append(np.sum(c @ np.tanh(c)))
        c = c * a + c * b + np.sum(np.exp(c))
    for carry, sums in loops(X):
        np.testing.assert_allclose(sums.numpy(), totals, rtol=1e-5)
        np.testing.assert_allclose(carry.numpy(), c, rtol=1e-5)


def layers(x, w):
    """Three collectives whose operands are ready one after the other, and more to compute beside them."""
    totals = []
    for number in range(9):
        x = ts.tanh(x @ w)
        if number < 3:
            totals.append(ts.all_reduce(x))
    return x + totals[0] + totals[1] + totals[2]


@pytest.mark.parametrize("bytes,groups", [(4 * X.nbytes, [[0, 3]]), (2 * X.nbytes, [[0, 2], [2, 3]]), (1, None)])
def test_small_collectives_start_together(bytes, groups, monkeypatch):
    monkeypatch.setattr(collective_scheduling, "BUCKET_BYTES", bytes)

    def find():
        program = prepare(ts.jit(layers), [X, W], "llvm")
        for level in ("schedule", "tile", "target", "device"):
            np.testing.assert_allclose(program.run(level, "llvm")[0], wanted, rtol=1e-5)
        return [step["start"] for step in find_steps(program) if "start" in step]

    h, wanted = X.astype("f8"), 0.0
    for number in range(9):
        h = np.tanh(h @ W)
        wanted = wanted + (2 * h if number < 3 else 0)
    wanted = wanted + h
    assert ts.spmd(find, mesh=MESH, out_specs="ranks")() == [groups or [[0, 1], [1, 2], [2, 3]]] * 2


OPS = {
    "reduce": lambda x, y: ts.all_reduce(x),
    "mean": lambda x, y: ts.all_reduce(x * y, "mean"),
    "gather": lambda x, y: ts.all_gather(x)[4:] + y,
    "scatter": lambda x, y: ts.all_gather(ts.reduce_scatter(x - y)),
    "shift": lambda x, y: ts.dist.mesh_shift(x, 0),
    "tanh": lambda x, y: ts.tanh(x + y),
    "product": lambda x, y: ts.tanh(x @ ts.permute(y, axes=(1, 0)) @ y),
    "sum": lambda x, y: x + ts.sum(y, axis=0, keepdims=True),
}


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=9))
def test_random_programs_give_what_eager_ranks_give(steps):
    def function(x):
        values = [x, x * 0.5]
        for name, i, j in steps:
            values.append(OPS[name](values[i % len(values)], values[j % len(values)]) * 0.25)
        return values[-1] + values[len(values) // 2]

    def both():
        mine = ts.Tensor(X * (ts.get_rank() + 1))
        program = prepare(ts.jit(function), [mine], "llvm")
        wanted = function(mine).numpy()
        for level in ("schedule", "tile", "device"):
            np.testing.assert_allclose(program.run(level, "llvm")[0], wanted, rtol=1e-4, atol=1e-5)

    ts.spmd(both, mesh=MESH, out_specs="ranks")()


# What the interpreter finds of a pass that is wrong.


def test_a_result_that_is_read_too_early_is_poison():
    found = run_host([host.start, host.launch, host.wait])
    assert np.isnan(found).all()


def test_an_operand_that_is_overwritten_too_early_is_found():
    with pytest.raises(AsyncCopyError, match="overwritten before its wait"):
        run_host([host.start, host.launch, host.wait], operand=True)


def run_host(ops, operand=False):
    """A program that launches between the start of an all_reduce and its wait; what the launch sees of the result."""
    x, y = (Value(RefType((2,), f32)) for _ in range(2))
    attrs = {"op": "ts.all_reduce", "operands": 1, "attrs": Attrs({"kind": "sum", "groups": ((0,),), "site": ""})}
    made, seen = Builder(), []
    for op in ops:
        given = {host.start: attrs, host.launch: {"kernel": "k", "grid": (1,)}}.get(op, {})
        made.add(op, [x, y] if op is not host.launch else [x if operand else y], given)
    main = Function("main", made.block((x, y), ()), Attrs({"outputs": 0}))

    def launch(node, args):
        seen.append(args[0].copy())
        args[0][...] = 5.0

    arrays = [np.ones(2, "f4"), np.zeros(2, "f4")]
    ts.spmd(lambda: host_interpreter.run(main, arrays, launch), mesh=ts.Mesh(1), out_specs="ranks")()
    return seen[0]


# Ranks with other programs.


def reduce_both(x, w, late_first=False):
    late = x
    for _ in range(8):
        late = ts.tanh(late @ w)
    first, second = (late, x) if late_first else (x, late)
    total, other = ts.all_reduce(first), ts.all_reduce(second)
    return total, other, ts.tanh(late @ w) @ w


@pytest.mark.parametrize("programs_before", [0, 1, 2])
def test_ranks_whose_orders_differ_are_refused(programs_before):
    def program(x, w):
        for late_first in (*(False, True)[:programs_before], ts.get_rank() == 1):
            found = ts.jit(functools.partial(reduce_both, late_first=late_first), target="llvm")(x, w)
        return found

    with pytest.raises(CollectiveError, match="rank [01] and rank [01] have other collectives, or in another order"):
        ts.spmd(program, mesh=MESH, out_specs="ranks")(X, W)


def test_each_group_compares_orders():
    """Ranks 0 and 2 have compared the same order with each other, but not with ranks 1 and 3."""
    mesh = ts.Mesh((2, 2), ("a", "b"))

    def reduce_twice(x, axis):
        part = mesh.axis(axis)
        function = ts.jit(lambda x: ts.all_reduce(x, mesh=part) + ts.all_reduce(ts.tanh(x), mesh=part), target="llvm")
        return function(x)

    def program(x):
        if ts.get_rank() in (0, 2):
            reduce_twice(x, "a")
        return reduce_twice(x, "b")

    for found in ts.spmd(program, mesh=mesh, out_specs="ranks")(X):
        np.testing.assert_allclose(found.numpy(), 2 * (X + np.tanh(X)), rtol=1e-5)


def test_one_collective_needs_no_comparison():
    def find():
        return [
            next(iter(step)) for step in find_steps(prepare(ts.jit(lambda x: ts.all_reduce(ts.exp(x))), [X], "llvm"))
        ]

    assert ts.spmd(find, mesh=MESH, out_specs="ranks")() == [["run", "call"]] * 2

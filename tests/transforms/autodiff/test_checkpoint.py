"""Checkpoints: the same gradients in less memory, and computations that are seen again in the IR."""

from collections import Counter

import numpy as np
import pytest
from everywhere import close

import tessera as ts
from tessera.core.errors import ArgumentError
from tessera.runtime import driver

POLICIES = [None, "full", "selective", "dots", "everything", lambda name: name == "tanh"]


def layer(x, w):
    return ts.checkpoint_here(ts.tanh(x @ w)) @ w.T


def model(wrap):
    def loss(ws, x):
        for w in ws:
            x = wrap(layer)(x, w)
        return (x * x).mean()

    return ts.grad(loss)


@pytest.fixture
def arguments(rng):
    return [rng.normal(size=(16, 128)) * 0.1 for _ in range(5)], rng.normal(size=(64, 16))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p if isinstance(p, str) else type(p).__name__)
def test_gradients_are_the_same(policy, arguments):
    want = model(lambda f: f)(*arguments)
    close(model(ts.checkpoint(policy=policy))(*arguments), want, "eager")
    close(ts.jit(model(ts.checkpoint.policy(policy)), target="llvm")(*arguments), want, "llvm")


def test_forward_mode_and_lanes_pass_through(rng):
    x, w = rng.normal(size=(3, 4)), rng.normal(size=(4, 5))
    for wrap in (ts.checkpoint, lambda f: ts.checkpoint(ts.checkpoint(f))):
        found, want = (ts.jvp(f, (x, w), (np.ones_like(x), w * 0.5)) for f in (wrap(layer), layer))
        close(found, want, "jvp")
        many = np.stack([x, 2 * x])
        found, want = (ts.vmap(f, in_axes=(0, None))(many, w) for f in (wrap(layer), layer))
        close(found, want, "vmap")


def lowered(wrap, arguments):
    return driver.lower(ts.jit(model(wrap)).trace(*arguments).function, "llvm")


def test_recompute_is_seen_in_the_ir_and_saves_memory(arguments):
    plain, checked = (lowered(wrap, arguments) for wrap in (lambda f: f, ts.checkpoint))
    counts = [Counter(n.op.name for n in m["graph"].main.body.walk()) for m in (plain, checked)]
    assert counts[0]["ts.tanh"] == 5 and counts[1]["ts.tanh"] == 10
    assert counts[0]["ts.recompute"] == 0 and counts[1]["ts.recompute"] == 10
    sizes = [m["tile"].main.attrs["workspace"] for m in (plain, checked)]
    assert sizes[1] < 0.6 * sizes[0]


def test_what_a_policy_keeps_is_not_computed_again(arguments):
    for policy, products in (("full", 15), ("dots", 15), ("everything", 10)):
        nodes = lowered(ts.checkpoint(policy=policy), arguments)["schedule"].main.body.walk()
        found = sum(n.op.name == "schedule.contract" for n in nodes)
        assert found >= products, (policy, found)
    saved = [
        lowered(ts.checkpoint(policy=p), arguments)["tile"].main.attrs["workspace"] for p in ("full", "everything")
    ]
    assert saved[0] < saved[1]


def test_in_a_scan_only_the_states_are_kept(rng):
    w, x = rng.normal(size=(4, 4)), rng.normal(size=(6, 4))

    def loss(wrap, w):
        step = wrap(lambda s, y: (ts.tanh(ts.sin(s @ w) + y), None))
        return (ts.scan(step, ts.zeros(4, dtype=ts.f64), x)[0] ** 2).sum()

    kept = []
    for wrap in (lambda f: f, lambda f: lambda s, y: (ts.checkpoint(lambda *a: f(*a)[0])(s, y), None)):
        function = ts.grad(lambda w, wrap=wrap: loss(wrap, w))
        kept.append((function(w), ts.jit(function).trace(w).function))
    close(kept[1][0], kept[0][0], "gradient")
    stacks = [sum(len(n.results) for n in f.body.nodes if n.op.name == "ts.scan") for _, f in kept]
    assert stacks[1] < stacks[0]


def test_outside_of_checkpoints_the_mark_changes_nothing():
    function = ts.jit(lambda x: ts.checkpoint_here({"a": ts.sin(x)})["a"])
    assert function(1.0).item() == pytest.approx(np.sin(1.0))


def test_no_such_policy():
    with pytest.raises(ArgumentError, match="unknown checkpoint policy"):
        ts.checkpoint(policy="sometimes")

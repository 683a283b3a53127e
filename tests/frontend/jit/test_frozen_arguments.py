"""Frozen arguments: a call looks at their leaves once, gives what a dict gives, and never sees another's change."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError
from tessera.frontend.jit import call_keys
from tessera.stdlib.quantised import QuantisedMatrix, quantised_matmul

RNG = np.random.default_rng(3)


def make_weights():
    codes, scale = RNG.integers(-8, 8, (5, 32)).astype(np.int8), RNG.random((5, 1)).astype(np.float32)
    matrix = QuantisedMatrix(ts.tensor(codes), ts.tensor(scale), None)
    return {"b": ts.tensor(RNG.random(5).astype(np.float32)), "layers": [{"w": matrix}, {"w": matrix}]}


def program(weights, x):
    return sum((quantised_matmul(x, layer["w"]) for layer in weights["layers"]), weights["b"])


@pytest.mark.parametrize("target", ["interp", "llvm"])
def test_a_frozen_dict_gives_what_a_dict_gives(target):
    weights, x = make_weights(), ts.tensor(RNG.random((2, 32)).astype(np.float32))
    run = ts.jit(program, target=target)
    want = run(weights, x).numpy()
    frozen = ts.tree.freeze(weights)
    for _ in range(3):
        np.testing.assert_array_equal(run(frozen, x).numpy(), want)
    np.testing.assert_array_equal(program(frozen, x).numpy(), program(weights, x).numpy())


def test_leaves_are_looked_at_once(monkeypatch):
    run, x = ts.jit(program, target="llvm"), ts.tensor(np.ones((1, 32), np.float32))
    frozen, seen = ts.tree.freeze(make_weights()), []
    plain = call_keys._add_all
    monkeypatch.setattr(
        call_keys, "_add_all", lambda values, *more: plain([seen.append(v) or v for v in values], *more)
    )
    run(frozen, x)
    first = len(seen)
    want = run(frozen, x).numpy()
    looked = len(seen)
    for _ in range(4):
        np.testing.assert_array_equal(run(frozen, x).numpy(), want)
    assert first > 4 and len(seen) - looked == 4 * 2  # its two arguments


def test_equal_structures_share_a_program():
    run, x = ts.jit(program, target="llvm"), ts.tensor(np.ones((1, 32), np.float32))
    frozen = [ts.tree.freeze(make_weights()) for _ in range(3)]
    found = [run(f, x).numpy() for f in frozen for _ in range(2)]
    for f, a, b in zip(frozen, found[::2], found[1::2], strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, program(f, x).numpy(), rtol=1e-5)
    assert len({f.walked[0] for f in frozen}) == 1
    other = ts.tree.freeze({**make_weights(), "more": ts.tensor(1.0)})
    run(other, x)
    run(other, x)
    assert other.walked[0] is not frozen[0].walked[0]


def test_what_it_gives_out_is_a_copy():
    weights = make_weights()
    frozen = ts.tree.freeze(weights)
    before = frozen["b"].numpy()
    weights["b"] = ts.tensor(np.zeros(5, np.float32))
    weights["layers"].pop()
    frozen["layers"].pop()
    frozen["b"].data = np.ones(5, np.float32)
    np.testing.assert_array_equal(frozen["b"].numpy(), before)
    assert len(frozen["layers"]) == 2 and sorted(frozen) == ["b", "layers"] and len(frozen) == 2


def test_donated_weights_are_copied():
    """The call gives up a copy: the frozen one is still there."""
    frozen = ts.tree.freeze({"w": ts.tensor(np.arange(4, dtype=np.float32))})
    run = ts.jit(lambda p: {"w": p["w"] + 1}, target="llvm", donate=("p",))
    for _ in range(3):
        np.testing.assert_array_equal(run(frozen)["w"].numpy(), np.arange(4) + 1)
    np.testing.assert_array_equal(frozen["w"].numpy(), np.arange(4))


def test_weights_with_gradients_are_walked():
    frozen = ts.tree.freeze({"w": ts.tensor([2.0], requires_grad=True)})
    run = ts.jit(lambda p, x: p["w"] * x, target="llvm")
    for _ in range(2):
        y = run(frozen, ts.tensor([3.0]))
    y.sum().backward()
    assert frozen.walked is None and frozen["w"].grad.numpy() == [3.0]


def test_an_old_gradient_is_not_held():
    w = ts.tensor([2.0], requires_grad=True)
    (w * w).sum().backward()
    w.requires_grad = False
    frozen = ts.tree.freeze({"w": w})
    assert w.grad is not None and frozen["w"].grad is None and frozen.held["w"].grad is None


def test_only_dicts_are_frozen():
    with pytest.raises(ArgumentError, match="only a dict"):
        ts.tree.freeze([ts.tensor(1.0)])

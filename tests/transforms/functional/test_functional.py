"""Functions put together, optional values, caches, versions for types: as the specification writes them."""

import subprocess
import sys
from collections import namedtuple

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError, DeviceUnavailable, EffectError, ShapeError
from tessera.ir.tensor import Tensor
from tessera.transforms.functional import Just, Maybe, Nothing, compose, curry, pipe

X, Y = Tensor([1.0, -2.0]), Tensor([4.0, 0.5])


def scale(factor):
    return lambda x: x * factor


def normalize(x):
    return x - x.mean()


def test_compose_and_pipe():
    f, g = compose(scale(2.0), normalize), pipe(scale(2.0), normalize)
    np.testing.assert_array_equal(f(X), scale(2.0)(normalize(X)))
    np.testing.assert_array_equal(g(X), normalize(scale(2.0)(X)))
    assert pipe()(3) == 3 and compose()(3) == 3
    for made in (f, g):
        np.testing.assert_allclose(ts.jit(made)(X), made(X))
        np.testing.assert_allclose(
            ts.grad(lambda x, made=made: (made(x) ** 2).sum())(X), 4 * made(X).numpy() - 0, atol=4
        )
    np.testing.assert_array_equal(ts.vmap(f)(ts.stack([X, Y])), ts.stack([f(X), f(Y)]))
    with pytest.raises(ArgumentError, match="takes functions"):
        compose(scale(1.0), 3)


def test_curry():
    def attention(query, key, dim=64, heads=1):
        return (query * key).sum() * dim * heads

    attention_128 = curry(attention, dim=128, heads=8)
    assert attention_128(X, Y).item() == 3.0 * 1024
    assert curry(attention, X)(Y).item() == 3.0 * 64 and attention_128.__name__ == "attention"
    with pytest.raises(ArgumentError, match="layers"):
        curry(attention, layers=3)


@ts.maybe
def safe_divide(x: Tensor, y: Tensor) -> Maybe[Tensor]:
    if (y == 0).any():
        return Nothing()
    return Just(x / y)


def test_maybe():
    default = Tensor(0.0)
    assert safe_divide(X, Y).map(lambda z: z + 1).unwrap_or(default).tolist() == [1.25, -3.0]
    assert safe_divide(X, Y * 0.0).map(lambda z: z + 1).unwrap_or(default) is default
    assert safe_divide(safe_divide(X, Y), Y).is_just and not safe_divide(X, safe_divide(X, Y * 0.0))
    assert safe_divide(X, Y).bind(lambda z: safe_divide(z, Y)).unwrap().shape == (2,)
    assert Nothing().bind(Just) == Nothing() and repr(Just(1)) == "Just(1)"
    with pytest.raises(ArgumentError, match="Nothing"):
        Nothing().unwrap()
    with pytest.raises(ArgumentError, match="does not return a Maybe"):
        ts.maybe(lambda x: x)(1)


def test_function_in_the_order_of_the_specification():
    @ts.compile
    @ts.checkpoint
    @ts.function
    def layer(x: Tensor["N", 2]) -> Tensor["N", 2]:
        return ts.tanh(x) * 2.0

    x = np.float32([[0.5, 1.0]])
    np.testing.assert_allclose(layer(x), np.tanh(x) * 2, rtol=1e-6)
    np.testing.assert_allclose(ts.grad(lambda x: layer(x).sum())(x), 2 * (1 - np.tanh(x) ** 2), rtol=1e-6)


def test_function_checks_shapes_and_purity():
    @ts.function
    def layer_norm(x: Tensor["...", "D"]) -> Tensor["...", "D"]:
        mean = x.mean(dim=-1, keepdim=True)
        return (x - mean) / (x.std(dim=-1, keepdim=True) + 1e-5)

    assert layer_norm(ts.ones((2, 3, 4))).shape == (2, 3, 4)

    @ts.function
    def pair(x: Tensor["B", "D"], w: Tensor["D"]):
        return x * w

    with pytest.raises(ShapeError):
        pair(ts.ones((2, 3)), ts.ones(4))
    with pytest.raises(EffectError):
        ts.function(lambda x: ts.dropout(x))(ts.ones(3))
    assert ts.function(ts.effects(["random"])(lambda x: ts.dropout(x)))(ts.ones(3)).shape == (3,)


def test_specialize_for():
    @ts.function
    @ts.specialize_for("interp", "llvm")
    def attention(x):
        return x * 2.0 if ts.current_device() == "interp" else x * 3.0

    assert attention(1.0).item() == 2.0
    ts.set_default_device("cpu")
    try:
        assert attention(1.0).item() == 3.0
        with pytest.raises(DeviceUnavailable, match="not written for llvm"):
            ts.specialize_for("A100", "H100")(lambda x: x)(1.0)
    finally:
        ts.set_default_device("interp")


def test_the_interpreter_takes_a_specialised_function_as_its_first_device():
    @ts.function
    @ts.specialize_for("A100", "H100")
    def attention(x):
        return x * 2.0 if ts.current_device() == "A100" else x * 3.0

    assert attention(1.0).item() == 2.0 and ts.current_device() == "interp"
    with pytest.raises(ArgumentError, match="names no device"):
        ts.specialize_for()


def test_the_namespace_of_combinators():
    from tessera.functional import compose, curry, pipe

    assert ts.functional.compose is compose
    assert compose(lambda x: x + 1, lambda x: x * 2)(3) == 7 == pipe(lambda x: x * 2, lambda x: x + 1)(3)
    assert curry(max, 5)(3) == 5


def test_the_default_device_of_a_block():
    with ts.device("cpu"):
        assert ts.default_device() == "llvm"
        with pytest.raises(DeviceUnavailable), ts.device("tpu"):
            pass
    assert ts.default_device() == "interp"


def test_memoize():
    calls = []

    @ts.memoize(maxsize=2, typed=True)
    def expensive(x, n=1):
        calls.append(n)
        return x * n

    assert expensive(X, n=2).tolist() == expensive(Tensor(X.numpy().copy()), n=2).tolist() and calls == [2]
    expensive(X, n=2.0), expensive(X.to(ts.f64)), expensive(X, n=2)
    assert len(calls) == 4 and expensive.cache_info() == (1, 4, 2, 2)
    expensive.cache_clear()
    assert expensive.cache_info().currsize == 0
    assert ts.grad(lambda x: expensive(x).sum())(X).tolist() == [1.0, 1.0]  # traced: not kept
    with pytest.raises(ArgumentError, match="cache's key"):
        expensive(object())


SCRIPT = """
import sys, numpy as np, tessera as ts
from typing import NamedTuple
class State(NamedTuple):
    left: object
    right: object
@ts.persistent_cache(sys.argv[1])
def forward(x, version):
    print("computed")
    half = x.to(ts.bf16 @ ts.accum(ts.f32))
    return {"y": x * 2.0, "half": half, "version": version, "pair": (1, None), "state": State([x], State(1, 2))}
found = forward(ts.Tensor(np.float32([1, 2])), sys.argv[2])
assert found["y"].tolist() == [2.0, 4.0] and found["pair"] == (1, None)
assert found["half"].type.policy == ts.bf16 @ ts.accum(ts.f32)
assert found["state"].left[0].tolist() == [1.0, 2.0] and found["state"].right == State(1, 2)
"""


def test_persistent_cache(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(SCRIPT)

    def run(version):
        command = [sys.executable, str(script), str(tmp_path / "deep" / "cache.db"), version]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert [run("v1"), run("v1"), run("v2")] == ["computed", "", "computed"]
    script.write_text(SCRIPT.replace("x * 2.0", "x + x"))
    assert run("v1") == "computed"  # the source has changed


def test_persistent_cache_refuses_what_it_cannot_keep(tmp_path):
    inner = namedtuple("inner", "a b")
    for result, says in ((object(), "kept in a file"), (inner(1, 2), "a later run would not find it")):
        with pytest.raises(ArgumentError, match=says):
            ts.persistent_cache(tmp_path / "c.db")(lambda x, result=result: result)(1)


def test_polymorphic():
    @ts.polymorphic
    def polymorphic_add(x, y):
        return x + y

    @polymorphic_add.specialize(Tensor[ts.int8])
    def add_i8(x, y):
        return ts.clip(x.to(ts.int16) + y.to(ts.int16), -128, 127).to(ts.int8)

    @polymorphic_add.specialize(Tensor["N", 2, ts.f32])
    def add_rows(x, y):
        return x + y + 100.0

    big = Tensor([100], dtype=ts.int8)
    assert polymorphic_add(big, big).tolist() == [127]
    assert polymorphic_add(X, Y).tolist() == [5.0, -1.5]
    assert polymorphic_add(ts.ones((3, 2)), ts.ones((3, 2)))[0, 0].item() == 102.0
    assert ts.jit(polymorphic_add)(big, big).tolist() == [127]
    with pytest.raises(ArgumentError, match="type of tensors"):
        polymorphic_add.specialize("f32")

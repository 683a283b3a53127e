"""Call keys of dicts: by names and values, in whatever order the names were given."""

from dataclasses import dataclass

import numpy as np
import pytest

import tessera as ts
from tessera import nn
from tessera.frontend.jit import call_keys
from tessera.frontend.jit.call_keys import walk_call

A, B = ts.tensor([1.0]), ts.tensor([[2.0]])


def walk(*args):
    return walk_call(args, {}, frozenset(), frozenset())


def test_the_order_of_the_names_does_not_matter():
    assert walk({"a": A, "b": B}) == walk({"b": B, "a": A})
    assert [x.shape for x in walk({"b": B, "a": A})[1]] == [(1,), (1, 1)]


@pytest.mark.parametrize("value", [{}, {"a": A}, {"b": A}, {"a": A, "b": A}, {"a": {"b": A}}, [A], (A,), {"a": B}])
def test_structures_have_keys_of_their_own(value):
    others = [{}, {"a": A}, {"b": A}, {"a": A, "b": A}, {"a": {"b": A}}, [A], (A,), {"a": B}]
    assert sum(walk(value)[0] == walk(other)[0] for other in others) == 1


def test_kinds_of_dicts_are_few_at_a_time(monkeypatch):
    monkeypatch.setattr(call_keys, "_MAX_DICTS", 2)
    call_keys._DICTS.clear()
    keys = [walk({f"name{i}": A, "x": B})[0] for i in range(6)]
    assert len(set(keys)) == 6 and len(call_keys._DICTS) <= 2
    assert walk({"x": B, "name0": A})[0] == keys[0]


def test_a_dict_with_what_needs_gradients_takes_the_general_way():
    learned = ts.tensor([1.0], requires_grad=True)
    assert walk({"a": A, "b": learned})[0] is None and walk([{"a": learned}, A])[0] is None
    f = ts.jit(lambda p: ts.sum(p["a"] * p["b"]))
    out = f({"b": learned, "a": A})
    out.backward()
    np.testing.assert_array_equal(learned.grad.numpy(), [1.0])


@dataclass
class Scale:
    factor: object


def test_a_dataclass_that_changes_in_place_is_another_value():
    scale, run = Scale(2.0), ts.jit(lambda scale, x: x * scale.factor)
    found = [run(scale, ts.ones(1)).item()]
    scale.factor = 5.0
    found.append(run(scale, ts.ones(1)).item())
    scale.factor = ts.full((1,), 7.0)
    found.append(run(scale, ts.ones(1)).item())
    assert found == [2.0, 5.0, 7.0]


def test_objects_that_take_the_memory_of_others_are_other_values():
    """Each instance ends with its call, so that the next one often has its address."""
    run = ts.jit(lambda scale: scale.factor * 2.0)
    assert [run(Scale(ts.full((1,), float(i)))).item() for i in range(20)] == [2.0 * i for i in range(20)]


class Settings:
    pass


def test_an_object_that_changes_in_place_is_another_value():
    """Its attributes count, and those of the objects that it holds."""
    settings, run = Settings(), ts.jit(lambda s, x: x * s.factor + s.inner.offset)
    settings.factor, settings.inner, settings.inner.offset = 2.0, Settings(), 0.0
    found = [run(settings, ts.ones(1)).item(), run(settings, ts.ones(1)).item()]
    settings.factor = 5.0
    found.append(run(settings, ts.ones(1)).item())
    settings.inner.offset = 0.5
    found.append(run(settings, ts.ones(1)).item())
    assert found == [2.0, 2.0, 5.0, 5.5]


class Scaled(nn.Module):
    """Decorated methods of a module."""

    def __init__(self):
        self.w, self.factor = nn.Parameter(ts.ones(2)), 2.0

    @ts.jit(target="cpu")
    def forward(self, x):
        return self.scale(x) + self.clip(x)

    @ts.custom_vjp
    def scale(self, x):
        return self.w * x * self.factor

    @ts.custom_jvp
    def clip(self, x):
        return 0.0 * x * self.w

    @ts.quantization_aware
    def product(self, x):
        return x[None] @ self.w[:, None]


Scaled.scale.defvjp(
    lambda self, x: (self.w * x * self.factor, (self, x)),
    lambda kept, g: (ts.tree.map(lambda w: g * kept[1] * 10.0, kept[0]), g * 0.0),
)
Scaled.clip.defjvp(lambda primals, tangents: (Scaled.clip(*primals), 0.0 * tangents[1]))


def test_methods_are_decorated():
    model, x = Scaled(), ts.Tensor([1.0, 2.0])
    assert model(x).tolist() == model.forward(x).tolist() == Scaled.forward(model, x=x).tolist() == [2.0, 4.0]
    slope = ts.grad(lambda model: model(x).sum())(model)
    assert slope.w.tolist() == [10.0, 20.0]
    model.factor = 3.0
    assert model(x).tolist() == [3.0, 6.0] and model.product(x).item() == pytest.approx(3.0, rel=0.02)


def test_methods_of_plain_objects_are_decorated():
    class Model:
        factor = 2.0

        @ts.jit
        def scale(self, x):
            return x * self.factor

        @staticmethod
        @ts.jit
        def double(x):
            return x + x

    model, x = Model(), ts.ones(1)
    found = [model.scale(x).item(), model.double(x).item()]
    model.factor = 5.0
    assert [*found, model.scale(x).item(), Model().scale(x).item()] == [2.0, 2.0, 5.0, 2.0]

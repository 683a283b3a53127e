"""Pytrees: nested containers are flattened and rebuilt."""

import dataclasses
from collections import namedtuple

from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from tessera import nn
from tessera.core.pytree import flatten, map_leaves

Pair = namedtuple("Pair", "left right")
trees = st.recursive(
    st.integers() | st.none() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3) | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@given(trees)
def test_round_trip(value):
    leaves, tree = flatten(value)
    assert tree.build(iter([leaf for _, leaf in leaves])) == value


def test_paths_name_the_leaves():
    leaves, _ = flatten({"layers": [{"w": 1}, {"w": 2}], "b": Pair(3, 4)}, "params")
    assert leaves == [("params.b.0", 3), ("params.b.1", 4), ("params.layers.0.w", 1), ("params.layers.1.w", 2)]


def test_named_tuples_keep_their_kind():
    assert map_leaves(lambda x: x + 1, Pair(1, [2])) == Pair(2, [3])


def test_static_values_that_change_in_place_are_others():
    @ts.tree.register(static=("scale",))
    @dataclasses.dataclass
    class Scaled:
        x: object
        scale: object

    program = ts.jit(lambda s: s.x * s.scale["by"][0])
    given = Scaled(ts.ones(1), {"by": [2.0]})
    given.scale["self"] = given.scale
    assert program(given).item() == 2.0 and program(given).item() == 2.0
    given.scale["by"][0] = 5.0
    assert program(given).item() == 5.0

    class Layer(nn.Module):
        def __init__(self):
            self.config = {"scale": 1.0}

        def forward(self, x):
            return x * self.config["scale"]

    layer = Layer()
    called, own = ts.jit(lambda layer, x: layer(x)), ts.jit(layer)
    assert called(layer, ts.ones(1)).item() == own(ts.ones(1)).item() == 1.0
    layer.config["scale"] = 3.0
    assert called(layer, ts.ones(1)).item() == own(ts.ones(1)).item() == 3.0

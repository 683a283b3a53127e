"""Pytrees: nested containers are flattened and rebuilt."""

from collections import namedtuple

from hypothesis import given
from hypothesis import strategies as st

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

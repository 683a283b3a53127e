"""Choice sequences: replay, and shrinking to the simplest sequence that fails in the same way."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tessera.tools.fuzz.choices import Choices, mutate, shrink


def draw_list(choices):
    return [choices.draw(100) for _ in choices.repeat(20)]


@given(st.integers(0, 1000))
def test_a_program_is_repeated_from_its_choices(seed):
    first = Choices((), Random(seed))
    assert draw_list(first) == draw_list(Choices(first.taken))


@given(st.integers(0, 300))
def test_shrinking_finds_the_smallest_list(seed):
    def replay(values):
        choices = Choices(values)
        return choices if any(item >= 50 for item in draw_list(choices)) else None

    first = Choices((), Random(seed))
    if any(item >= 50 for item in draw_list(first)):  # in most lists
        assert draw_list(Choices(shrink(first, replay, 5.0))) == [50]


@given(st.lists(st.integers(0, 9)), st.integers(0, 99))
def test_a_neighbour_of_a_sequence_can_be_drawn(values, seed):
    found = draw_list(Choices(mutate(values, Random(seed))))
    assert all(0 <= item < 100 for item in found)

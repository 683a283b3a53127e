"""Choice sequences: a random program is the list of numbers that its generator drew, and shrinking shortens that list
(internal test-case reduction, MacIver and Donaldson 2020)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """The choices of one program: replayed from a list, then drawn at random, or 0 where there is no generator.

    `taken` are the choices made, `spans` the ranges of them that belong together, such as those of one statement.
    """

    def __init__(self, given: Sequence[int] = (), random: Random | None = None) -> None:
        self._given, self._random = tuple(given), random
        self.taken: list[int] = []
        self.spans: list[tuple[int, int]] = []

    def draw(self, count: int) -> int:
        """A number from 0 to `count` - 1; 0 is the simplest.

        >>> choices = Choices([5, 1])
        >>> choices.draw(3), choices.draw(3), choices.draw(3)
        (2, 1, 0)
        """
        place = len(self.taken)
        if place < len(self._given):
            value = min(max(self._given[place], 0), count - 1)
        else:
            value = self._random.randrange(count) if self._random is not None else 0
        self.taken.append(value)
        return value

    def pick(self, items: Sequence[T]) -> T:
        """One of the items; the first is the simplest."""
        return items[self.draw(len(items))]

    def chance(self, one_in: int) -> bool:
        """True in one of `one_in` cases."""
        return self.draw(one_in) == one_in - 1

    def repeat(self, limit: int, one_in: int = 6) -> Iterator[int]:
        """Count parts: one to `limit` of them; after each it ends in one of `one_in` cases.

        Each part is a span with the choice to have it, so that shrinking deletes parts one by one.
        """
        for number in range(limit):
            start = len(self.taken)
            if number and not self.draw(one_in):
                return
            yield number
            self.spans.append((start, len(self.taken)))

    @contextmanager
    def span(self) -> Iterator[None]:
        """Mark the choices made in the block as one part, which shrinking may delete."""
        start = len(self.taken)
        yield
        self.spans.append((start, len(self.taken)))


def mutate(values: Sequence[int], random: Random) -> list[int]:
    """A neighbour of a choice sequence: some choices differ, a part is deleted or repeated."""
    out = list(values)
    for _ in range(random.randint(1, 4)):
        if not out:
            break
        place = random.randrange(len(out))
        kind = random.randrange(4)
        if kind == 0:
            out[place] = random.randrange(64)
        elif kind == 1:
            del out[place : place + random.randint(1, 6)]
        elif kind == 2:
            out[place:place] = out[place : place + random.randint(1, 8)]
        else:
            out[place] = max(0, out[place] + random.choice((-1, 1)))
    return out


Replay = Callable[[Sequence[int]], Choices | None]


def shrink(first: Choices, replay: Replay, seconds: float) -> list[int]:
    """Shorten and simplify failing choices until nothing more can go, or the time is over.

    `replay` runs a sequence: it returns the choices made if the program still fails in the same way, else None.
    """
    end, best = time.perf_counter() + seconds, first
    improved = True
    while improved and time.perf_counter() < end:
        improved = False
        for candidate in _list_candidates(best):
            if time.perf_counter() > end:
                break
            found = replay(candidate)
            if found is not None and _size(found.taken) < _size(best.taken):
                best, improved = found, True
                break
    return best.taken


def _size(values: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """The order in which a sequence is simpler than another: shorter, then smaller from the left."""
    return len(values), tuple(values)


def _list_candidates(choices: Choices) -> Iterator[list[int]]:
    """Simpler neighbours: without a span, without a few choices, with a smaller choice."""
    values = choices.taken
    for start, stop in sorted(choices.spans, key=lambda s: s[0] - s[1]):
        yield values[:start] + values[stop:]
        # Many generators ask "one more?" before a part.
        yield values[: max(start - 1, 0)] + values[stop:]
    for width in (8, 4, 2, 1):
        for start in range(len(values) - width, -1, -1):
            yield values[:start] + values[start + width :]
    for place, value in enumerate(values):
        for smaller in sorted({0, value // 2, value - 1}):
            if 0 <= smaller < value:
                yield [*values[:place], smaller, *values[place + 1 :]]

"""What recorded tasks do to memory: steps for many PEs at once, each on rows of numbers with a column for each PE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tessera.interp.target.csl.dsd_ops import DsdOp
from tessera.interp.target.csl.streams import work

Key = tuple[int, Any]  # a global variable's number, and the type of its cells


class At(NamedTuple):
    """The place of a number among the values of a record."""

    number: int


class Frame:
    """The numbers of some PEs: `arrays` have cells by PEs, `inputs` and `values` are rows."""

    def __init__(self, arrays: dict[Key, np.ndarray[Any, Any]], inputs: list[Any], count: int) -> None:
        self.arrays, self.inputs = arrays, inputs
        self.values: list[Any] = [None] * count

    def of(self, value: Any) -> Any:
        """The numbers at a place; anything else as it is."""
        return self.values[value[0]] if type(value) is At else value


@dataclass
class Work:
    """Steps in order: a function and what it takes after the frame. Equal steps are equal work."""

    steps: list[tuple[Any, ...]] = field(default_factory=list)
    memory: set[Key] = field(default_factory=set)  # what the steps touch
    written: set[int] = field(default_factory=set)  # the variables that they write
    count: int = 0  # of values
    floats: list[bytes] = field(default_factory=list)  # those in the steps: equal floats may differ in their sign

    @property
    def key(self) -> Any:
        """Equal for equal work."""
        return tuple(self.steps), tuple(self.floats)

    def run(self, frame: Frame) -> None:
        """Do it."""
        with np.errstate(all="ignore"):
            for function, *args in self.steps:
                function(frame, *args)


def take(f: Frame, place: int, position: int) -> None:
    """A number that each PE gave."""
    f.values[place] = f.inputs[position]


def fetch(f: Frame, place: int, key: Key, index: int) -> None:
    """A cell; integers are held in 64 bits."""
    row = f.arrays[key][index : index + 1]
    f.values[place] = row.astype(np.int64) if key[1].kind in "iub" else row.copy()


def keep(f: Frame, key: Key, index: int, value: Any) -> None:
    """Store into a cell."""
    f.arrays[key][index] = f.of(value)


def work_out(f: Frame, place: int, function: Callable[..., Any], given: tuple[Any, ...]) -> None:
    """A number from numbers."""
    f.values[place] = function(*[f.of(a) for a in given])


def operate(f: Frame, op: DsdOp, given: tuple[Any, ...]) -> None:
    """A DSD operation on memory."""
    work(op, tuple([f.of(o) if not hasattr(o, "array") else o._replace(array=f.arrays[o.array]) for o in given]))

"""Assertions and prints of all program instances at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tessera.errors import ExecutionError
from tessera.interp.machine import Machine
from tessera.interp.memory import expand
from tessera.ir.core import Node
from tessera.numerics.bounded import certain, lift
from tessera.op import Rules
from tessera.ops import checks

rules = Rules("tile checks")


@rules(checks.assert_)
def _(machine, node, args, run):
    wrong = ~certain(args[0])
    if machine.active is not None:
        wrong = wrong & expand(machine.active, wrong.ndim - machine.rank)
    if wrong.any():
        raise _failed(machine, node, wrong, args[1:])
    return ()


def _failed(machine: Machine, node: Node, wrong: np.ndarray, values: list[Any]) -> ExecutionError:
    first = tuple(int(i) for i in np.argwhere(wrong)[0])
    held = [_at(_plain(v), first) for v in values]
    known = f" with {', '.join(held)}" if held else ""
    element = f", element {first[machine.rank :]}" if len(first) > machine.rank else ""
    return ExecutionError(
        f"assertion failed: {node.attrs['message']}" if node.attrs["message"] else "assertion failed",
        expected="a condition that holds for every element of every program",
        received=f"false at {_named(machine, first[: machine.rank])}{element}{known}",
    )


def _plain(value: Any) -> np.ndarray:
    return lift(value).value if not isinstance(value, np.ndarray) else value


def _at(value: np.ndarray, place: tuple[int, ...]) -> str:
    """What a value holds at a place; axes of size 1 are the same everywhere."""
    aligned = place[: value.ndim] if value.ndim <= len(place) else (*place, *(0,) * (value.ndim - len(place)))
    return str(value[tuple(i if n > 1 else 0 for i, n in zip(aligned, value.shape, strict=True))])


def _named(machine: Machine, place: tuple[int, ...]) -> str:
    """An instance in words: its program and, in a group, its tile."""
    numbers = tuple(f + i for f, i in zip(machine.first, place, strict=True))
    grid = numbers[: len(machine.grid)]
    tile = f", tile {numbers[-1]}" if machine.group > 1 else ""
    return f"program {grid}{tile}"


@rules(checks.print_)
def _(machine, node, args, run):
    if machine.bound:  # the same program runs for its values as well, and prints there
        return ()
    arrays, label = [np.asarray(a) for a in args], node.attrs["label"]
    for place in _running(machine):
        words = [_shown(a, place) for a in arrays]
        text = label.format(*words) if node.attrs["ordered"] else " ".join([label, *words] if label else words)
        print(f"{_named(machine, place)}: {text}")
    return ()


@rules(checks.line, checks.pause)
def _(machine, node, args, run):
    return ()  # who steps through the program has seen it before (`checked.observe`)


def _running(machine: Machine) -> Iterator[tuple[int, ...]]:
    active = np.ones(machine.count, bool)
    if machine.active is not None:
        active &= machine.active
    return (tuple(int(i) for i in place) for place in np.argwhere(active))


def _shown(array: np.ndarray, place: tuple[int, ...]) -> str:
    own = array[tuple(i if n > 1 else 0 for i, n in zip(place, array.shape, strict=False))]
    return np.array2string(own, separator=", ") if own.ndim else str(own)

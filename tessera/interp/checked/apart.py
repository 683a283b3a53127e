"""Whether regular accesses lie apart: by their starts and lengths, for all instances at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tessera.interp.checked.ordered import Domain
from tessera.interp.checked.shadow import address
from tessera.interp.machine import Machine
from tessera.interp.memory import Memory

if TYPE_CHECKING:
    from tessera.interp.checked.windows import Window


def apart(domain: Domain, one: Window, other: Window, tile: int | None) -> bool:
    """Whether no two instances that the domain tells apart touch one element.

    Two instances i and j touch one if along every axis -n < start(i) - start'(j) < n'. Where both starts have the
    same steps that is a condition on the differences i - j, each of a known range: a difference of large step that the
    others cannot make up for is 0. What is left to show is that all differences the domain looks at are 0.
    """
    if not _same_memory(one.place.memory, other.place.memory):
        return False
    free = {
        a: ends
        for a, ends in enumerate(_differences(one, other))
        if ends != (0, 0) and (a == tile or domain.timeless)  # tiles of one program share its coordinates
    }
    wanted = {a for a in free if (a != tile if domain.timeless else a == tile)}
    pairs = list(zip(one.lines, other.lines, strict=True))
    if any(a[1] != b[1] and _disjoint(one, other, a, b) for a, b in pairs):
        return True
    return _all_zero([(a, b) for a, b in pairs if a[1] == b[1]], free, wanted)


def _all_zero(pairs: Sequence[Any], free: dict[int, tuple[int, int]], wanted: set[int]) -> bool:
    """Whether instances that meet along all these axes, of the same steps each, have all wanted differences 0."""
    changed = True
    while changed and wanted & set(free):
        changed = False
        for (o, steps, n), (p, _, m) in pairs:
            found = _solved(o - p, steps, n, m, free)
            if found is None:
                return True
            changed = changed or bool(found)
            for a in found:
                del free[a]
    return not wanted & set(free)


def clear(one: Window, other: Window, machine: Machine) -> bool:
    """Whether no two instances touch one element, nor any instance the same one in both."""
    if not _same_memory(one.place.memory, other.place.memory):
        return False
    own = one.place.memory.lead > 0  # of a program's own memory only its own tiles matter
    free = {
        a: d for a, d in enumerate(_differences(one, other)) if not own or (machine.group > 1 and a == machine.rank - 1)
    }
    pairs = list(zip(one.lines, other.lines, strict=True))
    if any(a[1] == b[1] and _solved(a[0] - b[0], a[1], a[2], b[2], free) is None for a, b in pairs):
        return True
    return any(a[1] != b[1] and _disjoint(one, other, a, b) for a, b in pairs)


def _same_memory(one: Memory, other: Memory) -> bool:
    """Whether indices mean the same in both: another name for the same memory may begin elsewhere."""
    a, b = one.array, other.array
    return bool(one.lead) or (address(a) == address(b) and a.shape == b.shape and a.strides == b.strides)


def _differences(one: Window, other: Window) -> list[tuple[int, int]]:
    """The least and greatest difference of the instances' coordinates along each axis."""
    axes = zip(one.first, one.count, other.first, other.count, strict=True)
    return [(f - (g + d - 1), f + c - 1 - g) for f, c, g, d in axes]


def _solved(apart_by: int, steps: Sequence[int], n: int, m: int, free: dict[int, tuple[int, int]]) -> list[int] | None:
    """Along one axis: the differences that must be 0 for instances to meet; None if they cannot meet at all."""
    used = sorted((a for a in free if steps[a]), key=lambda a: -abs(steps[a]))
    low, high = apart_by, apart_by
    for a in used:
        ends = (steps[a] * free[a][0], steps[a] * free[a][1])
        low, high = low + min(ends), high + max(ends)
    if low >= m or high <= -n:
        return None
    zero = []
    for a in used:
        ends = (steps[a] * free[a][0], steps[a] * free[a][1])
        rest_low, rest_high = low - min(ends), high - max(ends)
        # start(i) - start'(j) = steps[a]·k + rest must lie strictly between -n and m: for which k can it?
        least, most = _range(steps[a], -n + 1 - rest_high, m - 1 - rest_low)
        least, most = max(least, free[a][0]), min(most, free[a][1])
        if least > most:
            return None
        if least != 0 or most != 0:
            break
        zero.append(a)
        low, high = rest_low, rest_high
    return zero


def _range(step: int, low: int, high: int) -> tuple[int, int]:
    """The whole numbers k with low <= step·k <= high."""
    if step < 0:
        step, low, high = -step, -high, -low
    return -(-low // step), high // step


def _disjoint(one: Window, other: Window, line: Any, last: Any) -> bool:
    """Whether the intervals that two windows cover along an axis, over all instances, lie apart."""
    low, high = _span(one, line)
    least, most = _span(other, last)
    return high <= least or most <= low


def _span(window: Window, line: tuple[int, tuple[int, ...], int]) -> tuple[int, int]:
    origin, steps, length = line
    low = origin + sum(min(s * f, s * (f + c - 1)) for s, f, c in zip(steps, window.first, window.count, strict=True))
    high = origin + sum(max(s * f, s * (f + c - 1)) for s, f, c in zip(steps, window.first, window.count, strict=True))
    return low, high + length

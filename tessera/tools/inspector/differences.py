"""Differences of two modules as text: lines are compared up to the numbers of their values.

A pass that removes one op renumbers every value after it. The alignment ignores the numbers, and then checks them: two
aligned lines are equal if the values of the one correspond to those of the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

VALUE = re.compile(r"%\w+")
LARGEST_EXACT = 4000  # lines of a part that are aligned exactly; longer parts are aligned by their rarer lines

# An entry of a difference: (kind, line before, line after, count). Kinds: "=" equal, "~" changed (one line each),
# "-" removed, "+" added.
DiffEntry = tuple[str, int, int, int]


def compare_lines(before: Sequence[str], after: Sequence[str]) -> list[DiffEntry]:
    """The entries that turn one text into another, in order.

    >>> compare_lines(["%0 = a()", "%1 = b()", "c(%1)"], ["%0 = b()", "c(%0)"])
    [('-', 0, 0, 1), ('=', 1, 0, 2)]
    """
    names: dict[str, str] = {}
    found: list[DiffEntry] = []
    for kind, a, b, count in _align([_strip(t) for t in before], [_strip(t) for t in after]):
        if kind != "=":
            _append(found, (kind, a, b, count))
            continue
        for i in range(count):
            same = _correspond(before[a + i], after[b + i], names)
            _append(found, ("=" if same else "~", a + i, b + i, 1))
    return found


def count_changes(entries: Sequence[DiffEntry]) -> tuple[int, int]:
    """The lines removed and the lines added; a changed line is both."""
    removed = sum(n for kind, _, _, n in entries if kind in "-~")
    return removed, sum(n for kind, _, _, n in entries if kind in "+~")


def _strip(line: str) -> str:
    return VALUE.sub("%", line)


def _append(found: list[DiffEntry], entry: DiffEntry) -> None:
    """Add an entry, joined with the last one if they are adjacent and of one kind."""
    if found and found[-1][0] == entry[0]:
        kind, a, b, count = found[-1]
        if a + (0 if kind == "+" else count) == entry[1] and b + (0 if kind == "-" else count) == entry[2]:
            found[-1] = (kind, a, b, count + entry[3])
            return
    found.append(entry)


def _align(before: Sequence[str], after: Sequence[str]) -> Iterator[DiffEntry]:
    """Equal, removed and added lines; the common ends first, which are most of a large module."""
    head, limit = 0, min(len(before), len(after))
    while head < limit and before[head] == after[head]:
        head += 1
    tail = 0
    while tail < limit - head and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    if head:
        yield "=", 0, 0, head
    a, b = before[head : len(before) - tail], after[head : len(after) - tail]
    matcher = SequenceMatcher(None, a, b, autojunk=max(len(a), len(b)) > LARGEST_EXACT)
    for tag, a0, a1, b0, b1 in matcher.get_opcodes():
        if tag == "equal":
            yield "=", head + a0, head + b0, a1 - a0
        else:
            if a1 > a0:
                yield "-", head + a0, head + b0, a1 - a0
            if b1 > b0:
                yield "+", head + a1, head + b0, b1 - b0
    if tail:
        yield "=", len(before) - tail, len(after) - tail, tail


def _correspond(before: str, after: str, names: dict[str, str]) -> bool:
    """Whether the operands of two aligned lines correspond; what both define corresponds from here on."""
    if '"ts.func"' in before:
        names.clear()
    old, new = VALUE.findall(before), VALUE.findall(after)
    defined = _count_defined(before)
    used = zip(old[defined:], new[defined:], strict=True)
    same = all(names.get(a) == b for a, b in used)
    names.update(zip(old[:defined], new[:defined], strict=True))
    return same


def _count_defined(line: str) -> int:
    """How many of a line's values it defines: block parameters, or what is left of the equals sign."""
    text = line.lstrip()
    if text.startswith("^bb"):
        return len(VALUE.findall(text))
    return len(VALUE.findall(text.partition(" = ")[0])) if text.startswith("%") else 0

"""What some scalars of a function are computed by."""

from __future__ import annotations

from collections.abc import Iterable

from tessera.ir.core import Function, Node, Value


def needed(function: Function, values: Iterable[Value]) -> list[Node]:
    """The nodes at any depth of a function that some values are computed by, in order."""
    producers = {v: n for n in function.body.walk() for v in n.results}
    wanted, found = list(values), set[Node]()
    while wanted:
        made = producers.get(wanted.pop())
        if made is not None and made not in found:
            found.add(made)
            wanted += made.args
    return [n for n in function.body.walk() if n in found]

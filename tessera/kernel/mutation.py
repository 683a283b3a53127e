"""Lists and dicts of a kernel exist while compiling alone: what runs many times, or perhaps, may not change them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tessera.errors import UnsupportedSyntaxError
from tessera.kernel.frame import Frame
from tessera.kernel.trace import Trace

CHANGES = frozenset(
    {"append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse", "update", "setdefault", "popitem"}
)


@contextmanager
def fixed(frame: Frame) -> Iterator[None]:
    """A loop or branch walked at run time begins: the lists and dicts there are stay as they are in it."""
    trace = frame.trace
    seen = (v for each in _around(frame) for v in _held(each.names.values()))
    before, trace.fixed = trace.fixed, {**trace.fixed, **{id(v): v for v in seen}}
    try:
        yield
    finally:
        trace.fixed = before


def _around(frame: Frame) -> Iterator[Frame]:
    """A frame, and those of the functions that its function stands in."""
    here: Any = frame
    while isinstance(here, Frame):
        yield here
        here = getattr(here.outer, "__self__", None)


def _held(values: Any) -> Iterator[Any]:
    """The lists and dicts among values, and in them."""
    for value in values:
        if isinstance(value, (list, dict)):
            yield value
        if isinstance(value, (list, tuple, dict)):
            yield from _held(value.values() if isinstance(value, dict) else value)


def check_change(trace: Trace, container: Any) -> None:
    """Refuse to change a list or dict from outside the kernel, or from outside a loop or branch walked at run time.

    Raises:
        UnsupportedSyntaxError: this is one.
    """
    kind = type(container).__name__
    if any(container is held for held in _held([*trace.constants.values(), *(held for _, _, held in trace.guards)])):
        raise UnsupportedSyntaxError(
            f"a {kind} from outside is changed: to a kernel it is a constant, read once while compiling",
            expected=f"a {kind} made in the kernel, or memory that it writes",
            suggestion="pass a NumPy array or a ts.Tensor, which kernels write in place: out[i] = value",
        )
    if id(container) in trace.fixed:
        raise UnsupportedSyntaxError(
            f"a {kind} made outside is changed in a loop or branch walked at run time",
            expected=f"a {kind} changed by what is known while compiling: it exists only then",
            suggestion="unroll the loop (tile.static_range), or use variables, or memory: tile.alloc_register",
        )


def check_call(trace: Trace, function: Any) -> None:
    """The same for its methods."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, (list, dict)) and getattr(function, "__name__", "") in CHANGES:
        check_change(trace, owner)

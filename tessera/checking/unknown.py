"""The value of what went wrong: it takes part in everything after and says nothing more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class Undecided(Exception):
    """The program asks something that types alone cannot answer: checking stops at this function."""


class Unknown:
    """A value of which nothing is known; every operation on it gives it again."""

    __array_priority__ = 1000
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that Python probes for
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **named: Any) -> Unknown:
        return self

    def __getitem__(self, index: Any) -> Unknown:
        return self

    def __iter__(self) -> Iterator[Unknown]:
        return iter((self,))  # a loop over it is checked once

    def _refuse(self) -> Any:
        raise Undecided

    __bool__ = __len__ = __int__ = __float__ = __index__ = _refuse


def _again(self: Unknown, *others: Any) -> Unknown:
    return self


for _name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split():
    setattr(Unknown, f"__{_name}__", _again)
    setattr(Unknown, f"__r{_name}__", _again)
for _name in "lt le gt ge eq ne neg abs invert pos".split():
    setattr(Unknown, f"__{_name}__", _again)

UNKNOWN = Unknown()


def holds_unknown(value: Any) -> bool:
    """Whether a value is unknown, or a container that holds one that is."""
    if isinstance(value, Unknown):
        return True
    if isinstance(value, Mapping):
        return any(holds_unknown(v) for v in value.values())
    return isinstance(value, (list, tuple)) and any(holds_unknown(v) for v in value)

"""Poison value (LLVM LangRef): the result of an erroneous operation, propagated silently through every use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class UndecidedError(Exception):
    """The program asks something that types alone cannot answer: checking stops at this function."""


class Poison:
    """A value of which nothing is known; every operation on it gives it again."""

    __array_priority__ = 1000
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that Python probes for
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **named: Any) -> Poison:
        return self

    def __getitem__(self, index: Any) -> Poison:
        return self

    def __iter__(self) -> Iterator[Poison]:
        return iter((self,))  # a loop over it is checked once

    def _refuse(self) -> Any:
        raise UndecidedError

    __bool__ = __len__ = __int__ = __float__ = __index__ = _refuse


def _propagate(self: Poison, *others: Any) -> Poison:
    return self


for _name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split():
    setattr(Poison, f"__{_name}__", _propagate)
    setattr(Poison, f"__r{_name}__", _propagate)
for _name in "lt le gt ge eq ne neg abs invert pos".split():
    setattr(Poison, f"__{_name}__", _propagate)

POISON = Poison()


def contains_poison(value: Any) -> bool:
    """Whether a value is unknown, or a container that holds one that is."""
    if isinstance(value, Poison):
        return True
    if isinstance(value, Mapping):
        return any(contains_poison(v) for v in value.values())
    return isinstance(value, (list, tuple)) and any(contains_poison(v) for v in value)

"""The functions a module needs besides its kernels: math, micro-kernels, and declarations of intrinsics."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_DEFINED = re.compile(r"define .*?@(?P<name>[\w.]+)\(")
_CALL = re.compile(r"call (?P<result>[^@]*?) @(?P<name>[\w.]+)\((?P<args>.*)\)")


class Library:
    """Functions by name, each made when first asked for."""

    def __init__(self) -> None:
        self._functions: dict[str, list[str]] = {}
        self.sites: list[dict[str, Any]] = []  # the places of the text that report to the runtime

    def need(self, name: str, make: Callable[[], Iterable[str]]) -> str:
        """The name of a function, made here unless it was before."""
        if name not in self._functions:
            self._functions[name] = []
            self._functions[name] = list(make())
        return name

    def site(self, described: dict[str, Any]) -> int:
        """The number of a place that reports."""
        self.sites.append(described)
        return len(self.sites) - 1

    def text(self) -> Iterator[str]:
        """Every function, in the order of their names."""
        for name in sorted(self._functions):
            yield from self._functions[name]
            yield ""


def declarations(lines: Iterable[str]) -> Iterator[str]:
    """A declaration for each intrinsic or C function that is called and not defined here."""
    listed = list(lines)
    defined = {found["name"] for line in listed if (found := _DEFINED.match(line))}
    needed: dict[str, str] = {}
    for line in listed:
        call = _CALL.search(line) if " call " in line else None
        if call is not None and call["name"] not in defined:
            needed.setdefault(call["name"], f"declare {call['result']} @{call['name']}({_types(call['args'])})")
    return (needed[name] for name in sorted(needed))


def _types(args: str) -> str:
    return ", ".join(_first_type(each) for each in _split(args))


def _split(args: str) -> list[str]:
    """Operands apart; commas within < > and ( ) do not part them."""
    found, depth, start = [], 0, 0
    for place, char in enumerate(args):
        depth += (char in "<([") - (char in ">)]")
        if char == "," and depth == 0:
            found.append(args[start:place].strip())
            start = place + 1
    return [*found, args[start:].strip()] if args.strip() else []


def _first_type(operand: str) -> str:
    return operand[: operand.index(">") + 1] if operand.startswith("<") else operand.split()[0]

"""PTX text to syntax: bodies, instructions and operands."""

from __future__ import annotations

import struct
from functools import lru_cache

from tessera.errors import Location
from tessera.interp.target.ptx.constants import expression
from tessera.interp.target.ptx.lexer import Cursor
from tessera.interp.target.ptx.syntax import (
    Address,
    Group,
    Instruction,
    Item,
    Label,
    Name,
    Number,
    Operand,
    Scope,
    Targets,
)

_SPACES = {".reg", ".param", ".shared", ".global", ".const", ".local"}


def body(cursor: Cursor, files: dict[int, str]) -> Scope:
    """A body in braces."""
    return _Body(cursor, files).scope()


class _Body:
    """The items of one function; `.loc` holds until the next."""

    def __init__(self, cursor: Cursor, files: dict[int, str]) -> None:
        self.cursor, self.files = cursor, files
        self.source: Location | None = None

    def scope(self) -> Scope:
        cursor = self.cursor
        cursor.expect("{")
        items: list[Item] = []
        while not cursor.accept("}"):
            if cursor.here_kind == "end":
                cursor.fail("expected '}'")
            self._item(items)
        return Scope(tuple(items))

    def _item(self, items: list[Item]) -> None:
        from tessera.interp.target.ptx.parser import variables

        cursor = self.cursor
        kind = cursor.here_kind
        if kind == "word":
            if cursor.after_text == ":":
                self._label(items)
            else:
                items.append(self._instruction())
        elif cursor.accept(";"):
            return
        elif cursor.at("{"):
            items.append(self.scope())
        elif cursor.at(*_SPACES):
            items.extend(variables(cursor))
            cursor.expect(";")
        elif kind == "directive":
            self._directive()
        else:
            items.append(self._instruction())

    def _label(self, items: list[Item]) -> None:
        cursor = self.cursor
        name = cursor.take()
        cursor.take()
        if cursor.accept(".branchtargets"):
            labels = [cursor.kind("word")]
            while cursor.accept(","):
                labels.append(cursor.kind("word"))
            items.append(Targets(name, tuple(labels)))
        elif cursor.accept(".callprototype", ".calltargets"):
            while not cursor.at(";"):
                cursor.take()
        else:
            items.append(Label(name))

    def _directive(self) -> None:
        cursor = self.cursor
        name = cursor.take()
        if name == ".loc":
            file, line, column = cursor.integer(), cursor.integer(), cursor.integer()
            self.source = Location(self.files.get(file, f"file {file}"), line, column)
            while cursor.accept(","):
                self._inlined()
        elif name == ".pragma":
            cursor.kind("string")
            cursor.expect(";")
        else:
            cursor.index -= 1
            cursor.fail("unknown directive in a body")

    def _inlined(self) -> None:
        cursor = self.cursor
        if cursor.kind("word") == "function_name":
            cursor.kind("word")
            if cursor.accept("+"):
                cursor.integer()
        else:
            for _ in range(3):
                cursor.integer()

    def _instruction(self) -> Instruction:
        cursor = self.cursor
        guard = None
        if cursor.accept("@"):
            negated = cursor.accept("!")
            guard = Name(cursor.kind("word"), negated)
        place = cursor.place()
        op = _words(cursor.kind("word"))
        operands: list[Operand] = []
        while not cursor.at(";"):
            operands.append(operand(cursor, op[0] == "call"))
            if not cursor.accept(","):
                break
        cursor.expect(";")
        return Instruction(op, tuple(operands), guard, place, self.source)


def operand(cursor: Cursor, call: bool = False) -> Operand:
    """One operand, `a|b` pairs included; in a call, parentheses hold its arguments."""
    first = _single(cursor, call)
    if cursor.accept("|"):
        return Group((first, _single(cursor)), pair=True)
    return first


_CLOSING = {"{": "}", "(": ")"}


def _single(cursor: Cursor, call: bool = False) -> Operand:
    if cursor.here_kind == "word":
        return _name(cursor)
    if cursor.at("{") or (call and cursor.at("(")):
        closing, parts = _CLOSING[cursor.take()], []
        while not cursor.at(closing):
            parts.append(operand(cursor))
            if not cursor.accept(","):
                break
        cursor.expect(closing)
        return Group(tuple(parts))
    if cursor.accept("["):
        return _address(cursor)
    if cursor.at("!") and cursor.after_kind == "word":
        cursor.take()
        return Name(cursor.kind("word"), negated=True)
    return _number(cursor)


def _name(cursor: Cursor) -> Operand:
    text = cursor.kind("word")
    if cursor.at("+") and cursor.after_kind == "number":
        cursor.take()
        return Address(text, cursor.integer())
    return _named(text)


@lru_cache(maxsize=1 << 14)
def _named(text: str) -> Name:
    """A name; texts use the same few again and again."""
    return Name(text)


@lru_cache(maxsize=1 << 12)
def _words(opcode: str) -> tuple[str, ...]:
    return tuple(opcode.split("."))


def _address(cursor: Cursor) -> Address:
    base = cursor.kind("word") if cursor.here_kind == "word" else None
    offset = cursor.integer() if base is None else 0
    while cursor.at("+", "-"):
        cursor.accept("+")
        offset += cursor.integer()
    coordinates = None
    if cursor.accept(","):
        group = _single(cursor)
        coordinates = group.parts if isinstance(group, Group) else (group,)
    cursor.expect("]")
    return Address(base, offset, coordinates)


def _number(cursor: Cursor) -> Number:
    negative = cursor.at("-") and cursor.after_kind == "float" and cursor.accept("-")
    if cursor.here_kind != "float":
        return Number(expression(cursor))
    text = cursor.take()
    if text[:2] in ("0f", "0F"):
        return Number(int(text[2:], 16) ^ (negative << 31), 32)
    if text[:2] in ("0d", "0D"):
        return Number(int(text[2:], 16) ^ (negative << 63), 64)
    (bits,) = struct.unpack("<Q", struct.pack("<d", float(text)))
    return Number(bits ^ (negative << 63), 64)

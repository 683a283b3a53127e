"""Reading types: a cursor that knows the module's named structs."""

from __future__ import annotations

import re

from tessera.errors import UnsupportedOpError
from tessera.interp.target.llvm.lexer import Cursor, Lexer
from tessera.interp.target.llvm.types import PTR, VOID, Array, Float, Int, Struct, Type, Vector, Void

_WORDS: dict[str, Type] = {
    "void": VOID,
    "ptr": PTR,
    **{name: Void(name) for name in ("label", "metadata", "token", "opaque", "x86_amx")},
    **{name: Float(name) for name in ("half", "bfloat", "float", "double", "fp128", "x86_fp80", "ppc_fp128")},
}
_INT = re.compile(r"i\d+$")


class TypeCursor(Cursor):
    """A cursor that reads types."""

    def __init__(self, lexer: Lexer) -> None:
        super().__init__(lexer)
        self._defined = self._definitions()
        self._named: dict[str, Type] = {}

    def _definitions(self) -> dict[str, int]:
        """Where the body of every `%T = type ...` begins: a use may come before it."""
        t = self.tokens
        return {
            t[i].text: i + 3
            for i in range(len(t) - 3)
            if t[i].kind == "local" and t[i + 1].text == "=" and t[i + 2][:2] == ("word", "type")
        }

    def at_type(self) -> bool:
        """Whether a type begins here."""
        token = self.here
        if token.kind == "word":
            return token.text in _WORDS or bool(_INT.match(token.text))
        if token.kind == "local":
            return token.text in self._defined
        return self.at("<", "[", "{")

    def type(self) -> Type:
        """Read one type, typed pointers and function types included."""
        found = self._base()
        while True:
            if self.accept("*"):
                found = PTR
            elif self.at("addrspace"):
                self.take()
                self.skip_group()
            elif self.at("(") and self._is_function_type():
                self.skip_group()  # the type of a callee: only what it returns matters
            else:
                return found

    def _is_function_type(self) -> bool:
        """`void (i32, ...)`: a bracket right after a type can only be parameters."""
        return self.after().kind in ("word", "local") or self.after().text in (")", "...", "<", "[", "{")

    def _base(self) -> Type:
        token = self.here
        if token.kind == "local" and token.text in self._defined:
            return self._struct_named(self.take().text)
        if self.at("<", "[", "{"):
            return _BRACKETS[token.text](self)
        if token.kind == "word" and token.text in _WORDS:
            return _WORDS[self.take().text]
        if token.kind == "word" and _INT.match(token.text):
            return Int(int(self.take().text[1:]))
        self.fail("expected a type")

    def _struct_named(self, name: str) -> Type:
        if name not in self._named:
            self._named[name] = Void("opaque")  # a struct may hold pointers to itself
            back, self.index = self.index, self._defined[name]
            self._named[name] = self.type()
            self.index = back
        return self._named[name]

    def _sequence(self, close: str) -> tuple[int, Type]:
        self.take()
        if self.at("vscale"):
            raise UnsupportedOpError("scalable vectors are not supported", location=self.place())
        count = self.integer()
        self.expect("x")
        element = self.type()
        self.expect(close)
        return count, element

    def _array(self) -> Type:
        return Array(*self._sequence("]"))

    def _angle(self) -> Type:
        if self.after().text != "{":
            return Vector(*self._sequence(">"))
        self.take()
        inside = self._struct()
        self.expect(">")
        return Struct(inside.fields, packed=True)

    def _struct(self) -> Struct:
        self.take()
        fields: list[Type] = []
        while not self.at("}"):
            fields.append(self.type())
            if not self.accept(","):
                break
        self.expect("}")
        return Struct(tuple(fields))


_BRACKETS = {"<": TypeCursor._angle, "[": TypeCursor._array, "{": TypeCursor._struct}

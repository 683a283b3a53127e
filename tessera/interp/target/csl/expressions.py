"""The parser's expressions, types among them: by precedence, then prefix, suffix, primary."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tessera.errors import Location
from tessera.interp.target.csl import syntax as s
from tessera.interp.target.csl.lexer import Cursor, Token, unquote

T = TypeVar("T")
# Weakest first; the signs of one line associate to the left.
PRECEDENCE = (
    ("or",),
    ("and",),
    ("==", "!=", "<", ">", "<=", ">="),
    ("&", "^", "|"),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)


class Expressions(Cursor):
    """Reads expressions; statements stand in the subclass that adds `block`."""

    # The body of an affine expression or a type may be followed by `{` or `|` that is not its own.
    _plain = False

    def block(self, label: str = "") -> s.Block:
        """A block of statements (in the subclass)."""
        raise NotImplementedError

    def switch(self) -> s.Switch:
        """A switch (in the subclass)."""
        raise NotImplementedError

    def listed(self, item: Callable[[], T], close: str) -> tuple[T, ...]:
        """Items between commas up to a closing sign, which is consumed; a last comma may stand."""
        found: list[T] = []
        while not self.at(close):
            found.append(item())
            if not self.accept(","):
                break
        self.expect(close)
        return tuple(found)

    def expression(self, level: int = 0) -> s.Syntax:
        """An expression whose signs bind at least as tightly as `level`."""
        if level == len(PRECEDENCE):
            return self._prefix()
        left = self.expression(level + 1)
        while self.at(*PRECEDENCE[level]):
            place, sign = self.place, self.take().text
            left = s.Binary(place, sign, left, self.expression(level + 1))
        return left

    def type(self) -> s.Syntax:
        """A type: an expression after which `{` begins something else."""
        before, self._plain = self._plain, True
        found = self._prefix()
        self._plain = before
        return found

    def _prefix(self) -> s.Syntax:
        place = self.place
        if self.at("-", "!", "~", "&", "comptime"):
            return s.Unary(place, self.take().text, self._prefix())
        if self.accept("*"):
            return s.PointerType(place, self.accept("const"), self._prefix())
        if self.accept("["):
            return self._array(place)
        return self._suffix(self._primary())

    def _array(self, place: Location) -> s.Syntax:
        if self.at("*") and self.after().text == "]":
            self.take()
        dims = self._free(lambda: self.listed(self.expression, "]"))
        before, const = self._plain, self.accept("const")
        element = self.type()
        self._plain = before
        found = s.ArrayType(place, dims, const, element)
        return self._suffix(found) if self.at("{") else found

    def _free(self, read: Callable[[], T]) -> T:
        """Read inside brackets, where `{` after a type is a literal again."""
        before, self._plain = self._plain, False
        found = read()
        self._plain = before
        return found

    def _suffix(self, base: s.Syntax) -> s.Syntax:
        while True:
            place = self.place
            if self.accept("("):
                base = s.Call(place, base, self._free(lambda: self.listed(self.expression, ")")))
            elif self.accept("["):
                base = s.Index(place, base, self._free(lambda: self.listed(self.expression, "]")))
            elif self.at(".") and self.after().text != "{":
                base = self._member(base)
            elif self.at("{") and not self._plain and isinstance(base, (s.ArrayType, s.Name, s.Field)):
                base = self._literal(base.loc, base)
            else:
                return base

    def _member(self, base: s.Syntax) -> s.Syntax:
        self.expect(".")
        place = self.place
        if self.accept("*"):
            return s.Dereference(place, base)
        return s.Field(place, base, self.name())

    def _primary(self) -> s.Syntax:
        token = self.here
        by_text = PRIMARY_TEXT.get(token.text) if token.kind in ("keyword", "sign") else None
        read = by_text or PRIMARY_KIND.get(token.kind)
        if read is None:
            self.fail("expected an expression")
        return read(self, self.place)

    def _integer(self, place: Location) -> s.Syntax:
        text = self.take().text.replace("_", "")
        return s.Literal(place, int(text, 0) if text[:1] == "0" and not text.isdigit() else int(text))

    def _character(self, place: Location) -> s.Syntax:
        return s.Literal(place, ord(unquote(self.take().text)))

    def _float(self, place: Location) -> s.Syntax:
        return s.Literal(place, float(self.take().text.replace("_", "")))

    def _string(self, place: Location) -> s.Syntax:
        return s.Literal(place, unquote(self.take().text))

    def _word(self, place: Location) -> s.Syntax:
        token: Token = self.take()
        if self.at(":") and self.after().text == "{":
            self.take()
            return self.block(token.text)
        return s.Name(place, token.text)

    def _constant(self, place: Location) -> s.Syntax:
        return s.Literal(place, {"true": True, "false": False, "undefined": None}[self.take().text])

    def _builtin(self, place: Location) -> s.Syntax:
        name = self.take().text
        self.expect("(")
        return s.Builtin(place, name, self._free(lambda: self.listed(self.expression, ")")))

    def _group(self, place: Location) -> s.Syntax:
        self.expect("(")
        found = self._free(self.expression)
        self.expect(")")
        return found

    def _dot(self, place: Location) -> s.Syntax:
        self.expect(".")
        return self._literal(place, None) if self.at("{") else s.EnumLiteral(place, self.name())

    def _literal(self, place: Location, type_: s.Syntax | None) -> s.Syntax:
        self.expect("{")
        names: list[str] = []
        named = self.at(".") and self.after().kind == "word" and self.after(2).text == "="

        def item() -> s.Syntax:
            if named:
                self.expect(".")
                names.append(self.name())
                self.expect("=")
            return self.expression()

        values = self._free(lambda: self.listed(item, "}"))
        return s.StructLiteral(place, type_, tuple(names), values)

    def _if(self, place: Location) -> s.Syntax:
        self.expect("if")
        condition = self._group(place)
        then = self.expression()
        return s.If(place, condition, then, self.expression() if self.accept("else") else None)

    def _affine(self, place: Location) -> s.Syntax:
        self.expect("|")
        names = self.listed(self.name, "|")
        self.expect("{")
        extents = self._free(lambda: self.listed(self.expression, "}"))
        self.expect("->")
        return s.Affine(place, names, extents, self._prefix())

    def _function_type(self, place: Location) -> s.Syntax:
        kind = self.take().text
        self.expect("(")
        return s.FunctionType(place, self._free(lambda: self.listed(self.type, ")")), self.type(), kind == "task")

    def _aggregate(self, place: Location) -> s.Syntax:
        packed = self.accept("packed")
        kind = self.take().text
        tag = self._group(place) if kind == "enum" and self.at("(") else None
        self.expect("{")
        return s.AggregateType(place, kind, packed, tag, self._free(lambda: self.listed(self._member_row, "}")))

    def _member_row(self) -> s.Member:
        place, name = self.place, self.name()
        type_ = self.type() if self.accept(":") else None
        return s.Member(place, name, type_, self.expression() if self.accept("=") else None)


Reader = Callable[[Expressions, Location], s.Syntax]
PRIMARY_KIND: dict[str, Reader] = {
    "integer": Expressions._integer,
    "character": Expressions._character,
    "float": Expressions._float,
    "string": Expressions._string,
    "word": Expressions._word,
    "builtin": Expressions._builtin,
}
PRIMARY_TEXT: dict[str, Reader] = {
    "true": Expressions._constant,
    "false": Expressions._constant,
    "undefined": Expressions._constant,
    "(": Expressions._group,
    ".": Expressions._dot,
    "|": Expressions._affine,
    "if": Expressions._if,
    "fn": Expressions._function_type,
    "task": Expressions._function_type,
    "{": lambda parser, place: parser.block(),
    "switch": lambda parser, place: parser.switch(),
    **dict.fromkeys(("struct", "packed", "union", "enum"), Expressions._aggregate),
}

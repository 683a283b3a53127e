"""The parser: statements and declarations over the expressions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tessera.errors import Location
from tessera.interp.target.csl import syntax as s
from tessera.interp.target.csl.expressions import Expressions
from tessera.interp.target.csl.lexer import Lexer

_ASSIGN = ("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=")
_FLAGS = ("export", "extern", "inline", "comptime")


def parse(text: str, file: str = "<csl>") -> s.File:
    """The syntax tree of one CSL file; `docs/csl-grammar.md` is its grammar.

    Raises `ParseError` with file, line and column where the text is not CSL.

    >>> [item.name for item in parse("param n: i16; fn f() void { }").items]
    ['n', 'f']
    """
    parser = Parser(Lexer(text, file))
    items = []
    while parser.here.kind != "end":
        items.append(parser.item())
    return s.File(file, tuple(items))


def parse_file(path: str | Path) -> s.File:
    """The syntax tree of the file at `path`."""
    return parse(Path(path).read_text(encoding="utf-8"), str(path))


class Parser(Expressions):
    """Reads one file."""

    def item(self) -> s.Syntax:
        """One thing at the top level of a file."""
        place = self.place
        if self.at("comptime", "layout") and self.after().text == "{":
            return s.TopBlock(place, self.take().text, self.block())
        flags = self._flags()
        if self.at("fn", "task"):
            return self._function(place, flags)
        if self.at("const", "var", "param"):
            return self._declare(place, flags)
        self.fail("expected a declaration")

    def _flags(self) -> frozenset[str]:
        found = set()
        while self.at(*_FLAGS):
            found.add(self.take().text)
        return frozenset(found)

    def _function(self, place: Location, flags: frozenset[str]) -> s.Function:
        kind, name = self.take().text, self.name()
        self.expect("(")
        params = self.listed(self._parameter, ")")
        result = self.type()
        body = None if self.accept(";") else self.block()
        return s.Function(place, kind, name, params, result, body, flags)

    def _parameter(self) -> s.Parameter:
        place, comptime = self.place, self.accept("comptime")
        name = self.name()
        self.expect(":")
        return s.Parameter(place, name, self.type(), comptime)

    def _declare(self, place: Location, flags: frozenset[str]) -> s.Declare:
        kind, name = self.take().text, self.name()
        type_ = self.type() if self.accept(":") else None
        align = self._option("align")
        section = self._option("linksection")
        value = self.expression() if self.accept("=") else None
        self.expect(";")
        return s.Declare(place, kind, name, type_, value, align, section, flags)

    def _option(self, word: str) -> s.Syntax | None:
        return self._group(self.place) if self.accept(word) else None

    def block(self, label: str = "") -> s.Block:
        """`{ statements }`."""
        place = self.place
        self.expect("{")
        before, self._plain = self._plain, False
        body = []
        while not self.accept("}"):
            if self.here.kind == "end":
                self.fail("expected '}'")
            body.append(self.statement())
        self._plain = before
        return s.Block(place, label, tuple(body))

    def statement(self) -> s.Syntax:
        """One statement with the semicolon or block that ends it."""
        read = STATEMENTS.get(self.here.text) if self.here.kind in ("keyword", "sign") else None
        if read is not None:
            return read(self, self.place)
        if self.here.kind == "word" and self.after().text == ":":
            return self._labelled(self.place)
        found = self._assignment()
        self.expect(";")
        return found

    def _assignment(self) -> s.Syntax:
        """An expression, or an assignment to one."""
        target = self.expression()
        if not self.at(*_ASSIGN):
            return target
        place, sign = self.place, self.take().text
        return s.Assign(place, sign[:-1], target, self.expression())

    def _labelled(self, place: Location) -> s.Syntax:
        label = self.name()
        self.expect(":")
        if self.at("{"):
            return self.block(label)
        inline = self.accept("inline")
        if not self.at("while", "for"):
            self.fail("expected a loop or a block after a label")
        return self._loop(place, label, inline)

    def _loop(self, place: Location, label: str, inline: bool) -> s.Syntax:
        return self._while(place, label, inline) if self.at("while") else self._for(place, label, inline)

    def _while(self, place: Location, label: str = "", inline: bool = False) -> s.Syntax:
        self.expect("while")
        condition, step = self._group(place), None
        if self.accept(":"):
            self.expect("(")
            step = self._assignment()
            self.expect(")")
        return s.While(place, label, inline, condition, step, self.statement())

    def _for(self, place: Location, label: str = "", inline: bool = False) -> s.Syntax:
        self.expect("for")
        items = self._group(place)
        self.expect("|")
        names = self.listed(self.name, "|")
        return s.For(place, label, inline, items, names, self.statement())

    def _if_statement(self, place: Location) -> s.Syntax:
        self.expect("if")
        condition = self._group(place)
        then = self._branch()
        other = self.statement() if self.accept("else") else None
        return s.If(place, condition, then, other)

    def _branch(self) -> s.Syntax:
        """What follows a condition: before `else`, an expression needs no semicolon."""
        if self.here.kind in ("keyword", "sign") and self.here.text in STATEMENTS:
            return self.statement()
        found = self._assignment()
        if not self.at("else"):
            self.expect(";")
        return found

    def switch(self) -> s.Switch:
        """`switch (x) { … }`."""
        place = self.place
        self.expect("switch")
        subject = self._group(place)
        self.expect("{")
        return s.Switch(place, subject, self._free(lambda: self.listed(self._case, "}")))

    def _case(self) -> s.Case:
        place, values = self.place, []
        if not self.accept("else"):
            while not self.at("=>"):
                values.append(self._case_value())
                if not self.accept(","):
                    break
        self.expect("=>")
        return s.Case(place, tuple(values), self._case_body())

    def _case_value(self) -> s.Syntax:
        place, first = self.place, self.expression()
        return s.Range(place, first, self.expression()) if self.accept("...") else first

    def _case_body(self) -> s.Syntax:
        """A block, a jump, or an expression or assignment: a comma, not a semicolon, ends it."""
        place = self.place
        if self.at("{"):
            return self.block()
        if self.accept("return"):
            return s.Return(place, None if self.at(",", "}") else self.expression())
        return self._assignment()

    def _switch_statement(self, place: Location) -> s.Syntax:
        found = self.switch()
        self.accept(";")
        return found

    def _return(self, place: Location) -> s.Syntax:
        self.expect("return")
        value = None if self.at(";") else self.expression()
        self.expect(";")
        return s.Return(place, value)

    def _jump(self, place: Location) -> s.Syntax:
        kind = self.take().text
        label = self.name() if self.accept(":") else ""
        value = None if self.at(";") else self.expression()
        self.expect(";")
        return s.Jump(place, kind, label, value)

    def _comptime(self, place: Location) -> s.Syntax:
        if self.after().text == "{":
            return s.TopBlock(place, self.take().text, self.block())
        if self.after().text in ("var", "const"):
            return self._declare(place, self._flags())
        found = self._assignment()
        self.expect(";")
        return found

    def _inline(self, place: Location) -> s.Syntax:
        self.expect("inline")
        return self._loop(place, "", True)


Reader = Callable[[Parser, Location], s.Syntax]
STATEMENTS: dict[str, Reader] = {
    "{": lambda parser, place: parser.block(),
    "const": lambda parser, place: parser._declare(place, frozenset()),
    "var": lambda parser, place: parser._declare(place, frozenset()),
    "param": lambda parser, place: parser._declare(place, frozenset()),
    "if": Parser._if_statement,
    "while": Parser._while,
    "for": Parser._for,
    "inline": Parser._inline,
    "switch": Parser._switch_statement,
    "return": Parser._return,
    "break": Parser._jump,
    "continue": Parser._jump,
    "comptime": Parser._comptime,
}

"""Recursive-descent parser of CSL: expressions by precedence climbing, then statements and declarations.

`docs/csl-grammar.md` is the grammar.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tessera.core.errors import Location
from tessera.interp.target.csl.text import syntax as s
from tessera.interp.target.csl.text.lexer import CslCursor, CslLexer, unquote
from tessera.interp.target.tokens import TextToken

# Expressions, including types: by precedence, then prefix, suffix, primary.


T = TypeVar("T")
# Weakest first; the operators of one line are left-associative.
PRECEDENCE = (
    ("or",),
    ("and",),
    ("==", "!=", "<", ">", "<=", ">="),
    ("&", "^", "|"),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)


class ExpressionParser(CslCursor):
    """Parses expressions; the subclass adds statements (`block`)."""

    # The body of an affine expression or a type may precede a `{` or `|` that does not belong to it.
    _plain = False

    def block(self, label: str = "") -> s.BlockStmt:
        """Parse a block of statements (in the subclass)."""
        raise NotImplementedError

    def switch(self) -> s.SwitchStmt:
        """Parse a switch (in the subclass)."""
        raise NotImplementedError

    def listed(self, item: Callable[[], T], close: str) -> tuple[T, ...]:
        """Parse a comma-separated list up to and including its closing token; a trailing comma is allowed."""
        found: list[T] = []
        while not self.at(close):
            found.append(item())
            if not self.accept(","):
                break
        self.expect(close)
        return tuple(found)

    def expression(self, level: int = 0) -> s.SyntaxNode:
        """Parse an expression whose operators bind at least as tightly as `level`."""
        if level == len(PRECEDENCE):
            return self._prefix()
        left = self.expression(level + 1)
        while self.at(*PRECEDENCE[level]):
            place, sign = self.place, self.take().text
            left = s.BinaryExpr(place, sign, left, self.expression(level + 1))
        return left

    def type(self) -> s.SyntaxNode:
        """Parse a type: an expression after which `{` starts another construct."""
        before, self._plain = self._plain, True
        found = self._prefix()
        self._plain = before
        return found

    def _prefix(self) -> s.SyntaxNode:
        place = self.place
        if self.at("-", "!", "~", "&", "comptime"):
            return s.UnaryExpr(place, self.take().text, self._prefix())
        if self.accept("*"):
            return s.PointerTypeExpr(place, self.accept("const"), self._prefix())
        if self.accept("["):
            return self._array(place)
        return self._suffix(self._primary())

    def _array(self, place: Location) -> s.SyntaxNode:
        if self.at("*") and self.after().text == "]":
            self.take()
        dims = self._free(lambda: self.listed(self.expression, "]"))
        before, const = self._plain, self.accept("const")
        element = self.type()
        self._plain = before
        found = s.ArrayTypeExpr(place, dims, const, element)
        return self._suffix(found) if self.at("{") else found

    def _free(self, read: Callable[[], T]) -> T:
        """Parse inside brackets, where `{` after a type starts a literal again."""
        before, self._plain = self._plain, False
        found = read()
        self._plain = before
        return found

    def _suffix(self, base: s.SyntaxNode) -> s.SyntaxNode:
        while True:
            place = self.place
            if self.accept("("):
                base = s.CallExpr(place, base, self._free(lambda: self.listed(self.expression, ")")))
            elif self.accept("["):
                base = s.SubscriptExpr(place, base, self._free(lambda: self.listed(self.expression, "]")))
            elif self.at(".") and self.after().text != "{":
                base = self._member(base)
            elif self.at("{") and not self._plain and isinstance(base, (s.ArrayTypeExpr, s.NameExpr, s.FieldExpr)):
                base = self._literal(base.loc, base)
            else:
                return base

    def _member(self, base: s.SyntaxNode) -> s.SyntaxNode:
        self.expect(".")
        place = self.place
        if self.accept("*"):
            return s.DereferenceExpr(place, base)
        return s.FieldExpr(place, base, self.name())

    def _primary(self) -> s.SyntaxNode:
        token = self.here
        by_text = PRIMARY_TEXT.get(token.text) if token.kind in ("keyword", "sign") else None
        read = by_text or PRIMARY_KIND.get(token.kind)
        if read is None:
            self.fail("expected an expression")
        return read(self, self.place)

    def _integer(self, place: Location) -> s.SyntaxNode:
        text = self.take().text.replace("_", "")
        return s.LiteralExpr(place, int(text, 0) if text[:1] == "0" and not text.isdigit() else int(text))

    def _character(self, place: Location) -> s.SyntaxNode:
        return s.LiteralExpr(place, ord(unquote(self.take().text)))

    def _float(self, place: Location) -> s.SyntaxNode:
        return s.LiteralExpr(place, float(self.take().text.replace("_", "")))

    def _string(self, place: Location) -> s.SyntaxNode:
        return s.LiteralExpr(place, unquote(self.take().text))

    def _word(self, place: Location) -> s.SyntaxNode:
        token: TextToken = self.take()
        if self.at(":") and self.after().text == "{":
            self.take()
            return self.block(token.text)
        return s.NameExpr(place, token.text)

    def _constant(self, place: Location) -> s.SyntaxNode:
        return s.LiteralExpr(place, {"true": True, "false": False, "undefined": None}[self.take().text])

    def _builtin(self, place: Location) -> s.SyntaxNode:
        name = self.take().text
        self.expect("(")
        return s.BuiltinCall(place, name, self._free(lambda: self.listed(self.expression, ")")))

    def _group(self, place: Location) -> s.SyntaxNode:
        self.expect("(")
        found = self._free(self.expression)
        self.expect(")")
        return found

    def _dot(self, place: Location) -> s.SyntaxNode:
        self.expect(".")
        return self._literal(place, None) if self.at("{") else s.EnumLiteralExpr(place, self.name())

    def _literal(self, place: Location, type_: s.SyntaxNode | None) -> s.SyntaxNode:
        self.expect("{")
        names: list[str] = []
        named = self.at(".") and self.after().kind == "word" and self.after(2).text == "="

        def item() -> s.SyntaxNode:
            if named:
                self.expect(".")
                names.append(self.name())
                self.expect("=")
            return self.expression()

        values = self._free(lambda: self.listed(item, "}"))
        return s.StructLiteralExpr(place, type_, tuple(names), values)

    def _if(self, place: Location) -> s.SyntaxNode:
        self.expect("if")
        condition = self._group(place)
        then = self.expression()
        return s.IfStmt(place, condition, then, self.expression() if self.accept("else") else None)

    def _affine(self, place: Location) -> s.SyntaxNode:
        self.expect("|")
        names = self.listed(self.name, "|")
        self.expect("{")
        extents = self._free(lambda: self.listed(self.expression, "}"))
        self.expect("->")
        return s.AffineAccessExpr(place, names, extents, self._prefix())

    def _function_type(self, place: Location) -> s.SyntaxNode:
        kind = self.take().text
        self.expect("(")
        return s.FunctionTypeExpr(place, self._free(lambda: self.listed(self.type, ")")), self.type(), kind == "task")

    def _aggregate(self, place: Location) -> s.SyntaxNode:
        packed = self.accept("packed")
        kind = self.take().text
        tag = self._group(place) if kind == "enum" and self.at("(") else None
        self.expect("{")
        return s.AggregateTypeExpr(place, kind, packed, tag, self._free(lambda: self.listed(self._member_row, "}")))

    def _member_row(self) -> s.MemberDecl:
        place, name = self.place, self.name()
        type_ = self.type() if self.accept(":") else None
        return s.MemberDecl(place, name, type_, self.expression() if self.accept("=") else None)


ExpressionReader = Callable[[ExpressionParser, Location], s.SyntaxNode]
PRIMARY_KIND: dict[str, ExpressionReader] = {
    "integer": ExpressionParser._integer,
    "character": ExpressionParser._character,
    "float": ExpressionParser._float,
    "string": ExpressionParser._string,
    "word": ExpressionParser._word,
    "builtin": ExpressionParser._builtin,
}
PRIMARY_TEXT: dict[str, ExpressionReader] = {
    "true": ExpressionParser._constant,
    "false": ExpressionParser._constant,
    "undefined": ExpressionParser._constant,
    "(": ExpressionParser._group,
    ".": ExpressionParser._dot,
    "|": ExpressionParser._affine,
    "if": ExpressionParser._if,
    "fn": ExpressionParser._function_type,
    "task": ExpressionParser._function_type,
    "{": lambda parser, place: parser.block(),
    "switch": lambda parser, place: parser.switch(),
    **dict.fromkeys(("struct", "packed", "union", "enum"), ExpressionParser._aggregate),
}


# Statements and declarations.


_ASSIGN = ("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=")
_FLAGS = ("export", "extern", "inline", "comptime")


def parse(text: str, file: str = "<csl>") -> s.SourceFile:
    """The syntax tree of one CSL file; `docs/csl-grammar.md` is its grammar.

    Raises `ParseError` with file, line and column where the text is not CSL.

    >>> [item.name for item in parse("param n: i16; fn f() void { }").items]
    ['n', 'f']
    """
    parser = CslParser(CslLexer(text, file))
    items = []
    while parser.here.kind != "end":
        items.append(parser.item())
    return s.SourceFile(file, tuple(items))


def parse_file(path: str | Path) -> s.SourceFile:
    """The syntax tree of the file at `path`."""
    return parse(Path(path).read_text(encoding="utf-8"), str(path))


class CslParser(ExpressionParser):
    """Parses one file."""

    def item(self) -> s.SyntaxNode:
        """Parse one top-level item."""
        place = self.place
        if self.at("comptime", "layout") and self.after().text == "{":
            return s.TopLevelBlock(place, self.take().text, self.block())
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

    def _function(self, place: Location, flags: frozenset[str]) -> s.FunctionDecl:
        kind, name = self.take().text, self.name()
        self.expect("(")
        params = self.listed(self._parameter, ")")
        result = self.type()
        body = None if self.accept(";") else self.block()
        return s.FunctionDecl(place, kind, name, params, result, body, flags)

    def _parameter(self) -> s.ParameterDecl:
        place, comptime = self.place, self.accept("comptime")
        name = self.name()
        self.expect(":")
        return s.ParameterDecl(place, name, self.type(), comptime)

    def _declare(self, place: Location, flags: frozenset[str]) -> s.VariableDecl:
        kind, name = self.take().text, self.name()
        type_ = self.type() if self.accept(":") else None
        align = self._option("align")
        section = self._option("linksection")
        value = self.expression() if self.accept("=") else None
        self.expect(";")
        return s.VariableDecl(place, kind, name, type_, value, align, section, flags)

    def _option(self, word: str) -> s.SyntaxNode | None:
        return self._group(self.place) if self.accept(word) else None

    def block(self, label: str = "") -> s.BlockStmt:
        """Parse `{ statements }`."""
        place = self.place
        self.expect("{")
        before, self._plain = self._plain, False
        body = []
        while not self.accept("}"):
            if self.here.kind == "end":
                self.fail("expected '}'")
            body.append(self.statement())
        self._plain = before
        return s.BlockStmt(place, label, tuple(body))

    def statement(self) -> s.SyntaxNode:
        """Parse one statement with its final semicolon or block."""
        read = STATEMENTS.get(self.here.text) if self.here.kind in ("keyword", "sign") else None
        if read is not None:
            return read(self, self.place)
        if self.here.kind == "word" and self.after().text == ":":
            return self._labelled(self.place)
        found = self._assignment()
        self.expect(";")
        return found

    def _assignment(self) -> s.SyntaxNode:
        """Parse an expression or an assignment."""
        target = self.expression()
        if not self.at(*_ASSIGN):
            return target
        place, sign = self.place, self.take().text
        return s.AssignStmt(place, sign[:-1], target, self.expression())

    def _labelled(self, place: Location) -> s.SyntaxNode:
        label = self.name()
        self.expect(":")
        if self.at("{"):
            return self.block(label)
        inline = self.accept("inline")
        if not self.at("while", "for"):
            self.fail("expected a loop or a block after a label")
        return self._loop(place, label, inline)

    def _loop(self, place: Location, label: str, inline: bool) -> s.SyntaxNode:
        return self._while(place, label, inline) if self.at("while") else self._for(place, label, inline)

    def _while(self, place: Location, label: str = "", inline: bool = False) -> s.SyntaxNode:
        self.expect("while")
        condition, step = self._group(place), None
        if self.accept(":"):
            self.expect("(")
            step = self._assignment()
            self.expect(")")
        return s.WhileStmt(place, label, inline, condition, step, self.statement())

    def _for(self, place: Location, label: str = "", inline: bool = False) -> s.SyntaxNode:
        self.expect("for")
        items = self._group(place)
        self.expect("|")
        names = self.listed(self.name, "|")
        return s.ForStmt(place, label, inline, items, names, self.statement())

    def _if_statement(self, place: Location) -> s.SyntaxNode:
        self.expect("if")
        condition = self._group(place)
        then = self._branch()
        other = self.statement() if self.accept("else") else None
        return s.IfStmt(place, condition, then, other)

    def _branch(self) -> s.SyntaxNode:
        """Parse the arm of a condition: before `else`, an expression needs no semicolon."""
        if self.here.kind in ("keyword", "sign") and self.here.text in STATEMENTS:
            return self.statement()
        found = self._assignment()
        if not self.at("else"):
            self.expect(";")
        return found

    def switch(self) -> s.SwitchStmt:
        """Parse `switch (x) { … }`."""
        place = self.place
        self.expect("switch")
        subject = self._group(place)
        self.expect("{")
        return s.SwitchStmt(place, subject, self._free(lambda: self.listed(self._case, "}")))

    def _case(self) -> s.SwitchCase:
        place, values = self.place, []
        if not self.accept("else"):
            while not self.at("=>"):
                values.append(self._case_value())
                if not self.accept(","):
                    break
        self.expect("=>")
        return s.SwitchCase(place, tuple(values), self._case_body())

    def _case_value(self) -> s.SyntaxNode:
        place, first = self.place, self.expression()
        return s.CaseRange(place, first, self.expression()) if self.accept("...") else first

    def _case_body(self) -> s.SyntaxNode:
        """Parse a block, a jump, an expression or an assignment, which ends with a comma instead of a semicolon."""
        place = self.place
        if self.at("{"):
            return self.block()
        if self.accept("return"):
            return s.ReturnStmt(place, None if self.at(",", "}") else self.expression())
        return self._assignment()

    def _switch_statement(self, place: Location) -> s.SyntaxNode:
        found = self.switch()
        self.accept(";")
        return found

    def _return(self, place: Location) -> s.SyntaxNode:
        self.expect("return")
        value = None if self.at(";") else self.expression()
        self.expect(";")
        return s.ReturnStmt(place, value)

    def _jump(self, place: Location) -> s.SyntaxNode:
        kind = self.take().text
        label = self.name() if self.accept(":") else ""
        value = None if self.at(";") else self.expression()
        self.expect(";")
        return s.JumpStmt(place, kind, label, value)

    def _comptime(self, place: Location) -> s.SyntaxNode:
        if self.after().text == "{":
            return s.TopLevelBlock(place, self.take().text, self.block())
        if self.after().text in ("var", "const"):
            return self._declare(place, self._flags())
        found = self._assignment()
        self.expect(";")
        return found

    def _inline(self, place: Location) -> s.SyntaxNode:
        self.expect("inline")
        return self._loop(place, "", True)


StatementReader = Callable[[CslParser, Location], s.SyntaxNode]
STATEMENTS: dict[str, StatementReader] = {
    "{": lambda parser, place: parser.block(),
    "const": lambda parser, place: parser._declare(place, frozenset()),
    "var": lambda parser, place: parser._declare(place, frozenset()),
    "param": lambda parser, place: parser._declare(place, frozenset()),
    "if": CslParser._if_statement,
    "while": CslParser._while,
    "for": CslParser._for,
    "inline": CslParser._inline,
    "switch": CslParser._switch_statement,
    "return": CslParser._return,
    "break": CslParser._jump,
    "continue": CslParser._jump,
    "comptime": CslParser._comptime,
}

"""Recursive-descent parser of CSL: expressions by precedence climbing, then statements and declarations.

`docs/csl-grammar.md` is the grammar.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from tessera.core.errors import FileError, Location
from tessera.interp.target import tokens
from tessera.interp.target.csl.text import syntax as s
from tessera.interp.target.csl.text.lexer import CslCursor, CslLexer, unquote

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
_WEIGHTS = {sign: weight for weight, signs in enumerate(PRECEDENCE) for sign in signs}


_PREFIXES = frozenset(("-", "!", "~", "&", "comptime", "*", "["))
_SUFFIXES = frozenset(("(", "[", ".", "{"))
_BASES = frozenset(("0x", "0b", "0o"))


class ExpressionParser(CslCursor):
    """Parses expressions; the subclass adds statements (`block`)."""

    # The body of an affine expression or a type may precede a `{` or `|` that does not belong to it.
    _plain = False

    # What the parser has read so far of this file: the counts of loops and jumps, and of the present function the names
    # whose address it takes.
    _loops = _jumps = 0
    _addressed: frozenset[str] = frozenset()

    def parse_block(self, label: str = "") -> s.BlockStmt:
        """Parse a block of statements (in the subclass)."""
        raise NotImplementedError

    def parse_switch(self) -> s.SwitchStmt:
        """Parse a switch (in the subclass)."""
        raise NotImplementedError

    def parse_listed(self, item: Callable[[], T], close: str) -> tuple[T, ...]:
        """Parse a comma-separated list up to and including its closing token; a trailing comma is allowed."""
        items: list[T] = []
        texts = self.texts
        while texts[self.index] != close:
            items.append(item())
            if texts[self.index] != ",":
                break
            self.index += 1
        self.expect(close)
        return tuple(items)

    def parse_expression(self, weight: int = 0) -> s.SyntaxNode:
        """Parse an expression whose operators bind at least as tightly as `weight`."""
        left = self._parse_prefix()
        while (found := _WEIGHTS.get(self.texts[self.index], -1)) >= weight:
            place, sign = self.place, self.take()
            left = s.BinaryExpr(place, sign, left, self.parse_expression(found + 1))
        return left

    def parse_type(self) -> s.SyntaxNode:
        """Parse a type: an expression after which `{` starts another construct."""
        before, self._plain = self._plain, True
        found = self._parse_prefix()
        self._plain = before
        return found

    def _parse_prefix(self) -> s.SyntaxNode:
        text = self.texts[self.index]
        if text in _PREFIXES:
            place = self.place
            self.index += 1
            if text == "*":
                return s.PointerTypeExpr(place, self.accept("const"), self._parse_prefix())
            return self._parse_array(place) if text == "[" else self._parse_unary(place, text)
        found = self._parse_primary()
        return self._parse_suffix(found) if self.texts[self.index] in _SUFFIXES else found

    def _parse_unary(self, place: Location, sign: str) -> s.SyntaxNode:
        operand = self._parse_prefix()
        if sign == "&" and isinstance(operand, s.NameExpr):
            self._addressed |= {operand.text}
        return s.UnaryExpr(place, sign, operand)

    def _parse_array(self, place: Location) -> s.SyntaxNode:
        if self.at("*") and self.texts[self.index + 1] == "]":
            self.take()
        dims = self._parse_arguments("]")
        before, const = self._plain, self.accept("const")
        element = self.parse_type()
        self._plain = before
        found = s.ArrayTypeExpr(place, dims, const, element)
        return self._parse_suffix(found) if self.at("{") else found

    def _parse_free(self, read: Callable[[], T]) -> T:
        """Parse inside brackets, where `{` after a type starts a literal again."""
        before, self._plain = self._plain, False
        result = read()
        self._plain = before
        return result

    def _parse_arguments(self, close: str) -> tuple[s.SyntaxNode, ...]:
        """Parse expressions up to a closing bracket."""
        before, self._plain = self._plain, False
        found = self.parse_listed(self.parse_expression, close)
        self._plain = before
        return found

    def _parse_suffix(self, base: s.SyntaxNode) -> s.SyntaxNode:
        while True:
            place = self.place
            if self.accept("("):
                base = s.CallExpr(place, base, self._parse_arguments(")"))
            elif self.accept("["):
                base = s.SubscriptExpr(place, base, self._parse_arguments("]"))
            elif self.at(".") and self.texts[self.index + 1] != "{":
                base = self._parse_member(base)
            elif self.at("{") and not self._plain and isinstance(base, (s.ArrayTypeExpr, s.NameExpr, s.FieldExpr)):
                base = self._parse_literal(base.loc, base)
            else:
                return base

    def _parse_member(self, base: s.SyntaxNode) -> s.SyntaxNode:
        self.expect(".")
        place = self.place
        if self.accept("*"):
            return s.DereferenceExpr(place, base)
        return s.FieldExpr(place, base, self.name())

    def _parse_primary(self) -> s.SyntaxNode:
        read = PRIMARY_TEXT.get(self.texts[self.index]) or PRIMARY_KIND.get(self.kind())
        if read is None:
            self.fail("expected an expression")
        return read(self, self.place)

    def _parse_number(self, place: Location) -> s.SyntaxNode:
        text = self.take().replace("_", "")
        if text[:2] in _BASES:
            return s.LiteralExpr(place, int(text, 0))
        return s.LiteralExpr(place, float(text) if not text.isdecimal() else int(text))

    def _parse_character(self, place: Location) -> s.SyntaxNode:
        return s.LiteralExpr(place, ord(unquote(self.take())))

    def _parse_string(self, place: Location) -> s.SyntaxNode:
        return s.LiteralExpr(place, unquote(self.take()))

    def _parse_word(self, place: Location) -> s.SyntaxNode:
        text = self.take()
        if self.at(":") and self.texts[self.index + 1] == "{":
            self.take()
            return self.parse_block(text)
        return s.NameExpr(place, text)

    def _parse_constant(self, place: Location) -> s.SyntaxNode:
        return s.LiteralExpr(place, {"true": True, "false": False, "undefined": None}[self.take()])

    def _parse_builtin(self, place: Location) -> s.SyntaxNode:
        name = self.take()
        self.expect("(")
        return s.BuiltinCall(place, name, self._parse_arguments(")"))

    def _parse_group(self, place: Location) -> s.SyntaxNode:
        self.expect("(")
        found = self._parse_free(self.parse_expression)
        self.expect(")")
        return found

    def _parse_dot(self, place: Location) -> s.SyntaxNode:
        self.expect(".")
        return self._parse_literal(place, None) if self.at("{") else s.EnumLiteralExpr(place, self.name())

    def _parse_literal(self, place: Location, type_: s.SyntaxNode | None) -> s.SyntaxNode:
        self.expect("{")
        names: list[str] = []
        named = self.at(".") and self.kind(1) == "word"
        named = named and self.texts[self.index + 2] == "="

        def parse_item() -> s.SyntaxNode:
            if named:
                self.expect(".")
                names.append(self.name())
                self.expect("=")
            return self.parse_expression()

        values = self._parse_free(lambda: self.parse_listed(parse_item, "}"))
        return s.StructLiteralExpr(place, type_, tuple(names), values)

    def _parse_if(self, place: Location) -> s.SyntaxNode:
        self.expect("if")
        condition = self._parse_group(place)
        then = self.parse_expression()
        return s.IfStmt(place, condition, then, self.parse_expression() if self.accept("else") else None)

    def _parse_affine(self, place: Location) -> s.SyntaxNode:
        self.expect("|")
        names = self.parse_listed(self.name, "|")
        self.expect("{")
        extents = self._parse_arguments("}")
        self.expect("->")
        return s.AffineAccessExpr(place, names, extents, self._parse_prefix())

    def _parse_function_type(self, place: Location) -> s.SyntaxNode:
        kind = self.take()
        self.expect("(")
        return s.FunctionTypeExpr(
            place, self._parse_free(lambda: self.parse_listed(self._parse_parameter_type, ")")), self.parse_type(),
            kind == "task",
        )  # fmt: skip

    def _parse_parameter_type(self) -> s.SyntaxNode:
        """A type, which a name may precede."""
        first = self.parse_type()
        return self.parse_type() if self.accept(":") else first

    def _parse_aggregate(self, place: Location) -> s.SyntaxNode:
        packed = self.accept("packed")
        kind = self.take()
        tag = self._parse_group(place) if kind == "enum" and self.at("(") else None
        self.expect("{")
        return s.AggregateTypeExpr(
            place, kind, packed, tag, self._parse_free(lambda: self.parse_listed(self._parse_member_row, "}"))
        )

    def _parse_member_row(self) -> s.MemberDecl:
        place, name = self.place, self.name()
        type_ = self.parse_type() if self.accept(":") else None
        return s.MemberDecl(place, name, type_, self.parse_expression() if self.accept("=") else None)


ExpressionReader = Callable[[ExpressionParser, Location], s.SyntaxNode]
PRIMARY_KIND: dict[str, ExpressionReader] = {
    "number": ExpressionParser._parse_number,
    "character": ExpressionParser._parse_character,
    "string": ExpressionParser._parse_string,
    "word": ExpressionParser._parse_word,
    "builtin": ExpressionParser._parse_builtin,
}
PRIMARY_TEXT: dict[str, ExpressionReader] = {
    "true": ExpressionParser._parse_constant,
    "false": ExpressionParser._parse_constant,
    "undefined": ExpressionParser._parse_constant,
    "(": ExpressionParser._parse_group,
    ".": ExpressionParser._parse_dot,
    "|": ExpressionParser._parse_affine,
    "if": ExpressionParser._parse_if,
    "fn": ExpressionParser._parse_function_type,
    "task": ExpressionParser._parse_function_type,
    "{": lambda parser, place: parser.parse_block(),
    "switch": lambda parser, place: parser.parse_switch(),
    **dict.fromkeys(("struct", "packed", "union", "enum"), ExpressionParser._parse_aggregate),
}


# Statements and declarations.


_ASSIGN = ("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=")
_FLAGS = ("export", "extern", "inline", "comptime")


@lru_cache(maxsize=64)
def parse(text: str, file: str = "<csl>") -> s.SourceFile:
    """The syntax tree of one CSL file, which the programs that import it share; `docs/csl-grammar.md` is its grammar.

    Raises `ParseError` with file, line and column where the text is not CSL.

    >>> [item.name for item in parse("param n: i16; fn f() void { }").items]
    ['n', 'f']
    """
    parser = CslParser(CslLexer(text, file))
    items = []
    with tokens.deep_nesting(lambda: parser.place):
        while parser.texts[parser.index]:
            items.append(parser.parse_item())
    return s.SourceFile(file, tuple(items))


def parse_file(path: str | Path) -> s.SourceFile:
    """The syntax tree of the file at `path`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not UTF-8", received=str(error)) from None
    return parse(text, str(path))


class CslParser(ExpressionParser):
    """Parses one file."""

    def parse_item(self) -> s.SyntaxNode:
        """Parse one top-level item."""
        place = self.place
        if self.at("comptime", "layout") and self.texts[self.index + 1] == "{":
            return s.TopLevelBlock(place, self.take(), self.parse_block())
        flags = self._parse_flags()
        if self.at("fn", "task"):
            return self._parse_function(place, flags)
        if self.at("const", "var", "param"):
            return self._parse_declare(place, flags)
        self.fail("expected a declaration")

    def _parse_flags(self) -> frozenset[str]:
        flags = set()
        while self.at(*_FLAGS):
            flags.add(self.take())
        return frozenset(flags)

    def _parse_function(self, place: Location, flags: frozenset[str]) -> s.FunctionDecl:
        kind, name = self.take(), self.name()
        self.expect("(")
        params = self.parse_listed(self._parse_parameter, ")")
        result = self.parse_type()
        self._addressed = frozenset()
        body = None if self.accept(";") else self.parse_block()
        return s.FunctionDecl(place, kind, name, params, result, body, flags, self._addressed)

    def _parse_parameter(self) -> s.ParameterDecl:
        place, comptime = self.place, self.accept("comptime")
        name = self.name()
        self.expect(":")
        return s.ParameterDecl(place, name, self.parse_type(), comptime)

    def _parse_declare(self, place: Location, flags: frozenset[str]) -> s.VariableDecl:
        kind, name = self.take(), self.name()
        type_ = self.parse_type() if self.accept(":") else None
        align = self._parse_option("align")
        section = self._parse_option("linksection")
        value = self.parse_expression() if self.accept("=") else None
        self.expect(";")
        return s.VariableDecl(place, kind, name, type_, value, align, section, flags)

    def _parse_option(self, word: str) -> s.SyntaxNode | None:
        return self._parse_group(self.place) if self.accept(word) else None

    def parse_block(self, label: str = "") -> s.BlockStmt:
        """Parse `{ statements }`."""
        place = self.place
        self.expect("{")
        before, self._plain = self._plain, False
        body = []
        while not self.accept("}"):
            if not self.texts[self.index]:
                self.fail("expected '}'")
            body.append(self.parse_statement())
        self._plain = before
        return s.BlockStmt(place, label, tuple(body))

    def parse_statement(self) -> s.SyntaxNode:
        """Parse one statement with its final semicolon or block."""
        read = STATEMENTS.get(self.texts[self.index])
        if read is not None:
            return read(self, self.place)
        if self.kind() == "word" and self.texts[self.index + 1] == ":":
            return self._parse_labelled(self.place)
        node = self._parse_assignment()
        self.expect(";")
        return node

    def _parse_assignment(self) -> s.SyntaxNode:
        """Parse an expression or an assignment."""
        target = self.parse_expression()
        if not self.at(*_ASSIGN):
            return target
        place, sign = self.place, self.take()
        return s.AssignStmt(place, sign[:-1], target, self.parse_expression())

    def _parse_labelled(self, place: Location) -> s.SyntaxNode:
        label = self.name()
        self.expect(":")
        if self.at("{"):
            return self.parse_block(label)
        inline = self.accept("inline")
        if not self.at("while", "for"):
            self.fail("expected a loop or a block after a label")
        return self._parse_loop(place, label, inline)

    def _parse_loop(self, place: Location, label: str, inline: bool) -> s.SyntaxNode:
        return self._parse_while(place, label, inline) if self.at("while") else self._parse_for(place, label, inline)

    def _parse_while(self, place: Location, label: str = "", inline: bool = False) -> s.SyntaxNode:
        self.expect("while")
        condition, step = self._parse_group(place), None
        if self.accept(":"):
            self.expect("(")
            step = self._parse_assignment()
            self.expect(")")
        body, jumps, _ = self._parse_body()
        return s.WhileStmt(place, label, inline, condition, step, body, jumps)

    def _parse_body(self) -> tuple[s.SyntaxNode, bool, bool]:
        """Parse the body of a loop, and say whether it contains jumps and loops."""
        jumps, loops = self._jumps, self._loops
        body = self.parse_statement()
        found = body, self._jumps > jumps, self._loops > loops
        self._loops += 1
        return found

    def _parse_for(self, place: Location, label: str = "", inline: bool = False) -> s.SyntaxNode:
        self.expect("for")
        items = self._parse_group(place)
        self.expect("|")
        names = self.parse_listed(self.name, "|")
        return s.ForStmt(place, label, inline, items, names, *self._parse_body())

    def _parse_if_statement(self, place: Location) -> s.SyntaxNode:
        self.expect("if")
        condition = self._parse_group(place)
        then = self._parse_branch()
        other = self.parse_statement() if self.accept("else") else None
        return s.IfStmt(place, condition, then, other)

    def _parse_branch(self) -> s.SyntaxNode:
        """Parse the arm of a condition: before `else`, an expression needs no semicolon."""
        if self.texts[self.index] in STATEMENTS:
            return self.parse_statement()
        node = self._parse_assignment()
        if not self.at("else"):
            self.expect(";")
        return node

    def parse_switch(self) -> s.SwitchStmt:
        """Parse `switch (x) { … }`."""
        place = self.place
        self.expect("switch")
        subject = self._parse_group(place)
        self.expect("{")
        return s.SwitchStmt(place, subject, self._parse_free(lambda: self.parse_listed(self._parse_case, "}")))

    def _parse_case(self) -> s.SwitchCase:
        place, values = self.place, []
        if not self.accept("else"):
            while not self.at("=>"):
                values.append(self._parse_case_value())
                if not self.accept(","):
                    break
        self.expect("=>")
        return s.SwitchCase(place, tuple(values), self._parse_case_body())

    def _parse_case_value(self) -> s.SyntaxNode:
        place, first = self.place, self.parse_expression()
        return s.CaseRange(place, first, self.parse_expression()) if self.accept("...") else first

    def _parse_case_body(self) -> s.SyntaxNode:
        """Parse a block, a jump, an expression or an assignment, which ends with a comma instead of a semicolon."""
        place = self.place
        if self.at("{"):
            return self.parse_block()
        if self.accept("return"):
            return s.ReturnStmt(place, None if self.at(",", "}") else self.parse_expression())
        return self._parse_assignment()

    def _parse_switch_statement(self, place: Location) -> s.SyntaxNode:
        found = self.parse_switch()
        self.accept(";")
        return found

    def _parse_return(self, place: Location) -> s.SyntaxNode:
        self.expect("return")
        value = None if self.at(";") else self.parse_expression()
        self.expect(";")
        return s.ReturnStmt(place, value)

    def _parse_jump(self, place: Location) -> s.SyntaxNode:
        self._jumps += 1
        kind = self.take()
        label = self.name() if self.accept(":") else ""
        value = None if self.at(";") else self.parse_expression()
        self.expect(";")
        return s.JumpStmt(place, kind, label, value)

    def _parse_comptime(self, place: Location) -> s.SyntaxNode:
        if self.texts[self.index + 1] == "{":
            return s.TopLevelBlock(place, self.take(), self.parse_block())
        if self.texts[self.index + 1] in ("var", "const"):
            return self._parse_declare(place, self._parse_flags())
        found = self._parse_assignment()
        self.expect(";")
        return found

    def _parse_inline(self, place: Location) -> s.SyntaxNode:
        self.expect("inline")
        return self._parse_loop(place, "", True)


StatementReader = Callable[[CslParser, Location], s.SyntaxNode]
STATEMENTS: dict[str, StatementReader] = {
    "{": lambda parser, place: parser.parse_block(),
    "const": lambda parser, place: parser._parse_declare(place, frozenset()),
    "var": lambda parser, place: parser._parse_declare(place, frozenset()),
    "param": lambda parser, place: parser._parse_declare(place, frozenset()),
    "if": CslParser._parse_if_statement,
    "while": CslParser._parse_while,
    "for": CslParser._parse_for,
    "inline": CslParser._parse_inline,
    "switch": CslParser._parse_switch_statement,
    "return": CslParser._parse_return,
    "break": CslParser._parse_jump,
    "continue": CslParser._parse_jump,
    "comptime": CslParser._parse_comptime,
}

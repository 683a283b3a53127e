"""Lexer and operand parser of LLVM IR: types, values and constants, attributes and flags."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import ClassVar

import ml_dtypes
import numpy as np

from tessera.core.errors import Location, UnsupportedOpError
from tessera.interp.target import tokens
from tessera.interp.target.llvm.text import instruction_memo
from tessera.interp.target.llvm.text.syntax import (
    I8,
    PTR,
    VOID,
    ConstantExpression,
    GlobalOperand,
    LlvmArray,
    LlvmFloat,
    LlvmInstruction,
    LlvmInt,
    LlvmOperand,
    LlvmStruct,
    LlvmType,
    LlvmVector,
    LlvmVoid,
    LocalOperand,
    NumberConstant,
    SequenceConstant,
    Undefined,
    Zero,
)
from tessera.interp.target.tokens import TextToken

# Lexer of LLVM IR text, and a cursor over its tokens.


_NAME = r"[-a-zA-Z$._0-9]+"
_QUOTED = r'"[^"]*"'
_TOKEN_PATTERN = re.compile(
    rf"""[ \t\r\n]*(?:(?P<space>[ \t\r\n]+|;[^\n]*)
  | (?P<label>(?:{_NAME}|{_QUOTED}):)
  | (?P<local>%(?:{_NAME}|{_QUOTED}))
  | (?P<global>@(?:{_NAME}|{_QUOTED}))
  | (?P<comdat>\$(?:{_NAME}|{_QUOTED}))
  | (?P<bytes>c{_QUOTED})
  | (?P<string>{_QUOTED})
  | (?P<meta>!{_QUOTED}|![-a-zA-Z$._0-9\\]*)
  | (?P<record>\#dbg_\w+)
  | (?P<group>[\#^]\d+)
  | (?P<hex>0x[KLMHR]?[0-9a-fA-F]+)
  | (?P<number>[-+]?\d+(?:\.\d*(?:[eE][-+]?\d+)?)?)
  | (?P<word>[a-zA-Z_][-\w.$]*)
  | (?P<punct>\.\.\.|[=,()\[\]{{}}<>*|:]))""",
    re.VERBOSE,
)
_OPEN, _CLOSE = frozenset("([{<"), frozenset(")]}>")


def _read_symbol(text: str) -> str:
    """A name without its sigil and quotes."""
    return text[2:-1] if text[1] == '"' else text[1:]


def _read_label(text: str) -> str:
    """A name without its colon and quotes."""
    return text[1:-2] if text[0] == '"' else text[:-1]


class LlvmLexer(tokens.TextLexer):
    """The tokens of a text; names have no sigil, colon or quotes. Of an instruction that is in `parsed`, by the offset
    of its first token, with its debug metadata, the tokens are that one alone."""

    pattern = _TOKEN_PATTERN
    names: ClassVar = {**dict.fromkeys(("local", "global", "comdat"), _read_symbol), "label": _read_label}

    def __init__(self, text: str, file: str) -> None:
        self.text = text
        self.line_based = instruction_memo.is_line_based(text)
        self.parsed: dict[int, tuple[LlvmInstruction, str]] = {}
        super().__init__(text, file)

    def _scan(self, text: str) -> list[TextToken]:
        if not self.line_based:
            return super()._scan(text)
        result: list[TextToken] = []
        position = 0
        for start, end, (first, instruction), debug in instruction_memo.find_parsed_lines(text):
            if start > position + 1:  # else at most the end of the line before
                result += self.scan_part(text, position, start)
            offset, position = start + first.offset, end
            result.append(tokens.make_token((first.kind, first.text, offset)))
            self.parsed[offset] = instruction, debug
        result += self.scan_part(text, position, len(text))
        return [*result, TextToken("end", self.end, len(text))]


class LlvmCursor(tokens.TokenCursor):
    """A reading position in the tokens of a text."""

    spelled = ("word", "punct")
    lexer: LlvmLexer

    def expect_kind(self, kind: str) -> str:
        """Consume a token of this kind; its text."""
        if self.here.kind != kind:
            self.fail(f"expected a {kind}")
        return self.take().text

    def integer(self) -> int:
        """Consume a decimal integer."""
        token = self.here
        if token.kind != "number" or not token.text.lstrip("-+").isdigit():
            self.fail("expected an integer")
        return int(self.take().text)

    def line(self, token: TextToken | None = None) -> int:
        """The line of a token (by default the next one)."""
        return self.place(token).line

    def place(self, token: TextToken | None = None) -> Location:
        """The location of a token (by default the next one)."""
        return self.lexer.place((token or self.here).offset)

    def skip_group(self) -> None:
        """Skip a bracketed group, with nested brackets."""
        depth = 0
        while True:
            token = self.take()
            if token.kind == "end":
                self.fail("unclosed bracket")
            if token.kind == "punct":
                depth += (token.text in _OPEN) - (token.text in _CLOSE)
            if depth == 0:
                return

    def skip_line(self) -> None:
        """Skip the rest of this line."""
        line = self.line()
        while self.here.kind != "end" and self.line() == line:
            self.take()


# Types.


_TYPE_KEYWORDS: dict[str, LlvmType] = {
    "void": VOID,
    "ptr": PTR,
    **{name: LlvmVoid(name) for name in ("label", "metadata", "token", "opaque", "x86_amx")},
    **{name: LlvmFloat(name) for name in ("half", "bfloat", "float", "double", "fp128", "x86_fp80", "ppc_fp128")},
}
_INTEGER_PATTERN = re.compile(r"i\d+$")
MAX_INTEGER_BITS = 1 << 23  # as LLVM
MAX_SPLAT_ELEMENTS = 1 << 20  # each is an object here


class LlvmTypeCursor(LlvmCursor):
    """A cursor that parses types."""

    def __init__(self, lexer: LlvmLexer) -> None:
        super().__init__(lexer)
        self._defined = self._find_definitions()
        self._named: dict[str, LlvmType] = {}

    def _find_definitions(self) -> dict[str, int]:
        """The position of the body of every `%T = type ...`: a type may be used before its definition."""
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
            return token.text in _TYPE_KEYWORDS or bool(_INTEGER_PATTERN.match(token.text))
        if token.kind == "local":
            return token.text in self._defined
        return self.at("<", "[", "{")

    def type(self) -> LlvmType:
        """Parse a type, typed pointers and function types included."""
        result = self._parse_base_type()
        following = self.tokens[self.index]
        if following.kind != "punct" and following.text != "addrspace":
            return result
        while True:
            if self.accept("*"):
                result = PTR
            elif self.at("addrspace"):
                self.take()
                self.skip_group()
            elif self.at("(") and self._is_function_type():
                self.skip_group()  # the type of a callee: only its return type matters
            else:
                return result

    def _is_function_type(self) -> bool:
        """Whether a parenthesis after a type begins parameters, as in `void (i32, ...)`."""
        return self.after().kind in ("word", "local") or self.after().text in (")", "...", "<", "[", "{")

    def _parse_base_type(self) -> LlvmType:
        token = self.here
        known = _TYPE_KEYWORDS.get(token.text) if token.kind == "word" else None
        if known is not None:
            self.index += 1
            return known
        if token.kind == "local" and token.text in self._defined:
            return self._parse_named_struct(self.take().text)
        if self.at("<", "[", "{"):
            return _BRACKET_PARSERS[token.text](self)
        if token.kind == "word" and _INTEGER_PATTERN.match(token.text):
            if not 0 < (bits := int(token.text[1:])) <= MAX_INTEGER_BITS:
                self.fail(f"expected an integer type of 1 to {MAX_INTEGER_BITS} bits")
            self.take()
            return LlvmInt(bits)
        self.fail("expected a type")

    def _parse_named_struct(self, name: str) -> LlvmType:
        if name not in self._named:
            self._named[name] = LlvmVoid("opaque")  # a struct may contain pointers to itself
            back, self.index = self.index, self._defined[name]
            self._named[name] = self.type()
            self.index = back
        return self._named[name]

    def _parse_sequence(self, close: str) -> tuple[int, LlvmType]:
        self.take()
        if self.at("vscale"):
            raise UnsupportedOpError("scalable vectors are not supported", location=self.place())
        count = self.integer()
        self.expect("x")
        element = self.type()
        self.expect(close)
        return count, element

    def _parse_array(self) -> LlvmType:
        return LlvmArray(*self._parse_sequence("]"))

    def _parse_angle(self) -> LlvmType:
        if self.after().text != "{":
            return LlvmVector(*self._parse_sequence(">"))
        self.take()
        inside = self._parse_struct()
        self.expect(">")
        return LlvmStruct(inside.fields, packed=True)

    def _parse_struct(self) -> LlvmStruct:
        self.take()
        fields: list[LlvmType] = []
        while not self.at("}"):
            fields.append(self.type())
            if not self.accept(","):
                break
        self.expect("}")
        return LlvmStruct(tuple(fields))


_BRACKET_PARSERS = {
    "<": LlvmTypeCursor._parse_angle,
    "[": LlvmTypeCursor._parse_array,
    "{": LlvmTypeCursor._parse_struct,
}


# Operands: registers, globals and constants.


OperandParser = Callable[[LlvmTypeCursor, LlvmType], LlvmOperand]


def parse_typed_value(c: LlvmTypeCursor) -> LlvmOperand:
    """A type and a value of it: `i32 %x`."""
    return parse_value(c, c.type())


def parse_value(c: LlvmTypeCursor, type: LlvmType) -> LlvmOperand:
    """A value of a known type."""
    token = c.here
    reader = _VALUE_KEYWORDS.get(token.text) if token.kind in ("word", "punct") else _VALUE_TOKENS.get(token.kind)
    if reader is None:
        c.fail(f"expected a value of type {type}")
    return reader(c, type)


def starts_value(c: LlvmTypeCursor) -> bool:
    """Whether a value begins here, not an attribute."""
    token = c.here
    return token.text in _VALUE_KEYWORDS if token.kind in ("word", "punct") else token.kind in _VALUE_TOKENS


def _parse_local(c: LlvmTypeCursor, type: LlvmType) -> LlvmOperand:
    return LocalOperand(type, c.take().text)


def _parse_symbol(c: LlvmTypeCursor, type: LlvmType) -> LlvmOperand:
    return GlobalOperand(type, c.take().text)


def _parse_number(c: LlvmTypeCursor, type: LlvmType) -> LlvmOperand:
    if isinstance(type, LlvmFloat):
        return NumberConstant(type, _check_exact(c, type, float(c.take().text)))
    if not isinstance(type, LlvmInt):
        c.fail(f"expected a value of type {type}")
    return NumberConstant(type, c.integer())


def _check_exact(c: LlvmTypeCursor, type: LlvmFloat, number: float) -> float:
    """A literal must be exact in its type, as in LLVM."""
    if number == number and float(np.asarray(number).astype(type.dtype)) != number:
        c.index -= 1
        c.fail(f"expected a literal that is exact in {type}")
    return number


def _read_half(digits: str) -> float:
    return float(np.array(int(digits, 16), np.uint16).view(np.float16))


def _read_bfloat(digits: str) -> float:
    return float(np.array(int(digits, 16), np.uint16).view(ml_dtypes.bfloat16))


def _read_double(digits: str) -> float:
    return float(struct.unpack(">d", bytes.fromhex(digits.rjust(16, "0")))[0])


_HEX_READERS = {"H": _read_half, "R": _read_bfloat}


def _parse_hex(c: LlvmTypeCursor, type: LlvmType) -> LlvmOperand:
    digits = c.here.text[2:]
    if not isinstance(type, LlvmFloat):
        c.fail(f"expected a value of type {type}")
    if digits[0] in "KLM":
        raise UnsupportedOpError(f"the float format {type} is not supported", location=c.place())
    read = _HEX_READERS.get(digits[0])
    if not 0 < len(digits) - bool(read) <= (4 if read else 16):
        c.fail(f"expected at most {4 if read else 16} digits of a float")
    c.take()
    return NumberConstant(type, read(digits[1:]) if read else _read_double(digits))


def _parse_bytes(c: LlvmTypeCursor, type: LlvmType) -> LlvmOperand:
    """`c"..."`, in which a backslash and two hexadecimal digits are a byte."""
    text = c.take().text[2:-1]
    raw = re.sub(rb"\\([0-9a-fA-F]{2}|\\)", _unescape, text.encode())
    return SequenceConstant(LlvmArray(len(raw), I8), tuple(NumberConstant(I8, byte) for byte in raw))


def _unescape(match: re.Match[bytes]) -> bytes:
    return b"\\" if match.group(1) == b"\\" else bytes.fromhex(match.group(1).decode())


def _make_keyword_parser(make: Callable[[LlvmType], LlvmOperand]) -> OperandParser:
    def read(c: LlvmTypeCursor, type: LlvmType) -> LlvmOperand:
        c.take()
        return make(type)

    return read


def _make_sequence_parser(close: str) -> OperandParser:
    def read(c: LlvmTypeCursor, type: LlvmType) -> LlvmOperand:
        c.take()
        elements: list[LlvmOperand] = []
        while not c.at(close):
            elements.append(parse_typed_value(c))
            if not c.accept(","):
                break
        c.expect(close)
        return SequenceConstant(type, tuple(elements))

    return read


_parse_row = _make_sequence_parser(">")


def _parse_angle(c: LlvmTypeCursor, type: LlvmType) -> LlvmOperand:
    """A vector, or a packed struct `<{ ... }>`."""
    if c.after().text != "{":
        return _parse_row(c, type)
    c.take()
    inside = _make_sequence_parser("}")(c, type)
    c.expect(">")
    return inside


def _parse_splat(c: LlvmTypeCursor, type: LlvmType) -> LlvmOperand:
    c.take()
    c.expect("(")
    element = parse_typed_value(c)
    c.expect(")")
    if not isinstance(type, LlvmVector):
        c.fail("splat needs a vector type")
    if type.count > MAX_SPLAT_ELEMENTS:
        c.fail(f"a splat has at most {MAX_SPLAT_ELEMENTS} elements")
    return SequenceConstant(type, (element,) * type.count)


def _skip_flags(c: LlvmTypeCursor) -> None:
    while c.at("inbounds", "nuw", "nusw", "nsw", "inrange"):
        inrange = c.take().text == "inrange"
        if inrange and c.at("("):
            c.skip_group()


def _parse_getelementptr(c: LlvmTypeCursor, type: LlvmType) -> LlvmOperand:
    """`getelementptr (T, ptr @g, i64 1)`"""
    op = c.take().text
    _skip_flags(c)
    c.expect("(")
    source = c.type()
    operands = []
    while c.accept(","):
        _skip_flags(c)
        operands.append(parse_typed_value(c))
    c.expect(")")
    return ConstantExpression(type, op, tuple(operands), source)


def _parse_cast(c: LlvmTypeCursor, type: LlvmType) -> LlvmOperand:
    """`ptrtoint (ptr @g to i64)`"""
    op = c.take().text
    c.expect("(")
    operand = parse_typed_value(c)
    c.expect("to")
    target = c.type()
    c.expect(")")
    return ConstantExpression(target, op, (operand,))


def _parse_arithmetic(c: LlvmTypeCursor, type: LlvmType) -> LlvmOperand:
    """`add (i64 ptrtoint (ptr @g to i64), i64 8)`"""
    op = c.take().text
    _skip_flags(c)
    c.expect("(")
    left = parse_typed_value(c)
    c.expect(",")
    right = parse_typed_value(c)
    c.expect(")")
    return ConstantExpression(type, op, (left, right))


def _parse_metadata(c: LlvmTypeCursor, type: LlvmType) -> LlvmOperand:
    """An operand of type metadata, which has no value."""
    if c.take().text.startswith("!DI") or c.at("{"):
        c.skip_group()
    return Undefined(VOID)


_VALUE_TOKENS: dict[str, OperandParser] = {
    "local": _parse_local,
    "global": _parse_symbol,
    "number": _parse_number,
    "hex": _parse_hex,
    "bytes": _parse_bytes,
    "meta": _parse_metadata,
}

_VALUE_KEYWORDS: dict[str, OperandParser] = {
    "true": _make_keyword_parser(lambda t: NumberConstant(t, 1)),
    "false": _make_keyword_parser(Zero),
    "null": _make_keyword_parser(Zero),
    "none": _make_keyword_parser(Zero),
    "zeroinitializer": _make_keyword_parser(Zero),
    "undef": _make_keyword_parser(Undefined),
    "poison": _make_keyword_parser(Undefined),
    "splat": _parse_splat,
    "<": _parse_angle,
    "[": _make_sequence_parser("]"),
    "{": _make_sequence_parser("}"),
    "getelementptr": _parse_getelementptr,
    **dict.fromkeys(("bitcast", "ptrtoint", "ptrtoaddr", "inttoptr", "addrspacecast", "trunc"), _parse_cast),
    **dict.fromkeys(("add", "sub", "mul", "xor", "and", "or", "shl", "lshr"), _parse_arithmetic),
}


# Flags, orderings and attributes.


_FLAG_WORDS = frozenset(
    "nsw nuw exact disjoint nneg samesign inbounds nusw fast nnan ninf nsz arcp contract afn reassoc "
    "volatile atomic weak inalloca tail musttail notail".split()
)
_ORDERINGS = ("unordered", "monotonic", "acquire", "release", "acq_rel", "seq_cst")


def parse_flags(c: LlvmTypeCursor) -> frozenset[str]:
    """The flags between an opcode and its operands."""
    result = set()
    while c.here.kind == "word" and c.here.text in (*_FLAG_WORDS, "inrange"):
        result.add(c.take().text)
        if c.at("(") and "inrange" in result:
            c.skip_group()
    return frozenset(result)


def skip_ordering(c: LlvmTypeCursor) -> None:
    """Skip scopes and memory orderings: every access is atomic and in order."""
    if c.accept("syncscope"):
        c.skip_group()
    while c.accept(*_ORDERINGS):
        pass


def _starts_attribute(c: LlvmTypeCursor) -> bool:
    """Whether neither a type nor a value begins here."""
    word = c.here.kind == "word" and not c.at_type() and not starts_value(c)
    return word or c.here.kind in ("string", "group")


def skip_attributes(c: LlvmTypeCursor) -> int:
    """Skip attributes up to a type or a value; their alignment, or 0."""
    align = 0
    while _starts_attribute(c):
        name = c.take().text
        if c.accept("="):
            c.take()
        elif name == "align":
            bracket = c.accept("(")
            align = c.integer()
            align = align if not bracket or c.expect(")") else 0
        elif c.at("("):
            c.skip_group()
        elif c.here.kind == "number":
            c.take()
    return align

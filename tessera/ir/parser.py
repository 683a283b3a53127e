"""IR parser: lexer and recursive-descent grammar that read what `print_module` wrote, or MLIR's generic printing of
it."""

from __future__ import annotations

import difflib
import re
import struct
from collections import ChainMap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from tessera.core.errors import UNKNOWN, Location, ParseError, TesseraError
from tessera.core.shapes import as_size
from tessera.core.symbolic_dim import Dim, Size
from tessera.core.types import DType, Policy, RefType, TensorType, Type
from tessera.ir.core import Attrs, Block, Function, Module, Node, Value
from tessera.ir.levels import TARGET_OPS
from tessera.ir.printer import ELEMENT_TYPES
from tessera.ir.rules import REGISTRY, Op

# Lexer.


# A shape is one token with the word before it: `0x4xf32` would otherwise begin with a hex number.
_TOKEN = re.compile(
    r"""
      (?P<space>(?:\s+|//[^\n]*)+)
    | (?P<shaped>(?:tensor|!tile\.ref)<(?:(?:\d+|\?)x)*)
    | (?P<string>"(?:[^"\\\n]|\\(?:[0-9A-Fa-f]{2}|[nt"\\]))*")
    | (?P<value>%[\w$.-]+(?:\#\d+)?)
    | (?P<label>\^[\w$.-]+)
    | (?P<dialect>[!#][A-Za-z_][\w$.]*)
    | (?P<number>0x[0-9A-Fa-f]+|-?\d+(?:\.\d*(?:[eE][+-]?\d+)?)?)
    | (?P<word>[A-Za-z_][\w$.]*)
    | (?P<mark>->|[(){}\[\]<>:,=])
    """,
    re.VERBOSE | re.ASCII,
)
_ESCAPE = re.compile(rb'\\([0-9A-Fa-f]{2}|[nt"\\])')
_ESCAPED = {b"n": b"\n", b"t": b"\t", b'"': b'"', b"\\": b"\\"}
_END_KIND = "end"
MAX_DIGITS = 4000  # characters of a token that is no string: Python converts numbers of at most 4,300 digits
MAX_RESULTS = 1 << 12  # of a node

Element = TypeVar("Element")


class IrToken(NamedTuple):
    """A token: its kind (a group of the pattern above), its text, and its offset."""

    kind: str
    text: str
    start: int


def unquote_string(text: str) -> str:
    """The value of a string literal."""
    if "\\" not in text:
        return text[1:-1]
    raw = text[1:-1].encode("utf-8", "surrogatepass")
    return _ESCAPE.sub(_unescape, raw).decode("utf-8", "surrogatepass")


def _unescape(match: re.Match[bytes]) -> bytes:
    return _ESCAPED.get(match[1]) or bytes.fromhex(match[1].decode())


class IrCursor:
    """The tokens of a text and the position of the parser."""

    def __init__(self, text: str, name: str) -> None:
        self._text, self._name = text, name
        self._tokens = list(self._scan())
        self._next = 0

    def _scan(self) -> Iterator[IrToken]:
        at = 0
        while at < len(self._text):
            match = _TOKEN.match(self._text, at)
            if match is None:
                received = self._text[at : at + 20].partition("\n")[0]
                raise ParseError("this is no part of the language", location=self._place(at), received=received)
            kind = match.lastgroup or ""
            if kind not in ("space", "string") and match.end() - at > MAX_DIGITS:
                raise ParseError("this number is too long", location=self._place(at), expected=f"{MAX_DIGITS} digits",
                                 received=f"{match.end() - at} characters")  # fmt: skip
            if kind != "space":
                yield IrToken(kind, match[0], at)
            at = match.end()
        yield IrToken(_END_KIND, "the end of the text", at)

    def _place(self, at: int) -> Location:
        line = self._text.count("\n", 0, at) + 1
        return Location(self._name, line, at - self._text.rfind("\n", 0, at))

    @property
    def token(self) -> IrToken:
        """The next token, without consuming it."""
        return self._tokens[self._next]

    def advance(self) -> IrToken:
        """Consume the next token."""
        token = self.token
        self._next += token.kind != _END_KIND
        return token

    def at(self, text: str) -> bool:
        """Whether the next token is this text."""
        return self.token.text == text

    def accept(self, text: str) -> bool:
        """Consume the next token if it has this text."""
        found = self.token.text == text
        self._next += found
        return found

    def expect(self, *texts: str) -> None:
        """Consume tokens that must have these texts."""
        for text in texts:
            if not self.accept(text):
                raise self.error("unexpected text", expected=text)

    def take(self, kind: str, what: str) -> IrToken:
        """Consume a token that must be of this kind."""
        if self.token.kind != kind:
            raise self.error("unexpected text", expected=what)
        return self.advance()

    def many(self, open: str, close: str, item: Callable[[], Element]) -> list[Element]:
        """Parse a bracketed list, separated by commas."""
        self.expect(open)
        items: list[Element] = []
        if not self.at(close):
            items.append(item())
            while self.accept(","):
                items.append(item())
        self.expect(close)
        return items

    def error(
        self, message: str, token: IrToken | None = None, *, expected: object = None, received: object = None,
        suggestion: str | None = None,
    ) -> ParseError:  # fmt: skip
        """Make an error at a token, by default the next one."""
        token = token or self.token
        shown = token.text if received is None else received
        place = self._place(token.start)
        return ParseError(message, location=place, expected=expected, received=shown, suggestion=suggestion)


# Grammar of types, attributes and locations.


_ANONYMOUS_DIM = re.compile(r"\?(\w*)")
_REF_HEAD = "!tile.ref"
_POLICY_FIELDS: dict[str, type] = {
    "storage": DType,
    "compute": DType,
    "accumulate": DType,
    "rounding": str,
    "saturate": bool,
    "denormals": str,
    "loss_scale": float,
    "compensated": bool,
    "seed": int,
}


def parse_type(c: IrCursor) -> Type:
    """The type of a value."""
    token = c.take("shaped", "a type: tensor<...> or !tile.ref<...>")
    head, _, sizes = token.text.partition("<")
    dtype = parse_element(c)
    space = ""
    if head == _REF_HEAD:
        c.expect(",")
        space = c.take("word", "a memory space").text
    extra = dict(parse_dictionary(c)) if c.accept(",") else {}
    c.expect(">")
    shape = _make_shape(c, token, sizes.split("x")[:-1], extra.pop("dims", ()))
    policy = _make_policy(c, token, {"storage": dtype, **extra}) if extra else None
    return RefType(shape, dtype, space, policy) if head == _REF_HEAD else TensorType(shape, dtype, policy)


def parse_element(c: IrCursor) -> DType:
    """An element type."""
    if c.token.text not in ELEMENT_TYPES:
        raise c.error("this is not an element type", expected=", ".join(ELEMENT_TYPES))
    return ELEMENT_TYPES[c.advance().text]


def _make_shape(c: IrCursor, token: IrToken, sizes: list[str], dims: Any) -> tuple[Size, ...]:
    if not isinstance(dims, tuple) or sizes.count("?") != len(dims):
        raise c.error("dims does not name each size that is ?", token, expected=sizes.count("?"), received=dims)
    names = iter(dims)
    return tuple(_parse_dim(c, token, next(names)) if s == "?" else int(s) for s in sizes)


def _parse_dim(c: IrCursor, token: IrToken, text: Any) -> Size:
    """A symbolic size. Python's grammar, which reads it, has no names like ?0: they are renamed for it."""
    try:
        nameless: dict[str, Any] = {f"nameless_{n}": Dim.of(f"?{n}") for n in _ANONYMOUS_DIM.findall(text)}
        size = as_size(_ANONYMOUS_DIM.sub(r"nameless_\1", text))
        return size.evaluate(nameless) if isinstance(size, Dim) else size
    except (TesseraError, ValueError, TypeError, ArithmeticError):
        raise c.error("this is not a size", token, expected='a name or arithmetic: "2*D+1"', received=text) from None


def _make_policy(c: IrCursor, token: IrToken, fields: dict[str, Any]) -> Policy:
    wrong = [k for k, v in fields.items() if not isinstance(v, _POLICY_FIELDS.get(k, ()))]
    if wrong or "storage" not in fields:
        raise c.error("this is not a policy", token, expected=", ".join(_POLICY_FIELDS), received=", ".join(wrong))
    return Policy(**fields)


def parse_location(c: IrCursor) -> Location:
    """Parse a location; `loc` is consumed already."""
    c.expect("(")
    if c.accept("unknown"):
        c.expect(")")
        return UNKNOWN
    token = c.take("string", "a file name")
    if not c.accept("("):
        place = _parse_source_position(c, token, 2)
        c.expect(")")
        return place
    end = unquote_string(token.text).removeprefix("to ")
    if not end.isdecimal():
        raise c.error("a named location holds the end column", token, expected='"to 9"("f.py":12:4)')
    place = _parse_source_position(c, c.take("string", "a file name"), 2)
    c.expect(")", ")")
    return Location(place.file, place.line, place.column, int(end))


def _parse_source_position(c: IrCursor, file: IrToken, count: int) -> Location:
    numbers = []
    for _ in range(count):
        c.expect(":")
        numbers.append(parse_integer(c, "a line or column"))
    return Location(unquote_string(file.text), *numbers)  # type: ignore[arg-type]


def parse_integer(c: IrCursor, what: str = "a whole number") -> int:
    """A whole number."""
    token = c.take("number", what)
    try:
        return int(token.text)
    except ValueError:
        raise c.error("this is not a whole number", token) from None


def parse_dictionary(c: IrCursor) -> Attrs:
    """Named attributes in braces; a name alone is `unit`, as MLIR abbreviates it."""
    items: dict[str, Any] = {}

    def item() -> None:
        token = c.advance()
        if token.kind not in ("word", "string"):
            raise c.error("unexpected text", token, expected="the name of an attribute")
        name = unquote_string(token.text) if token.kind == "string" else token.text
        if name in items:
            raise c.error(f"{name} is given twice", token)
        items[name] = parse_attribute(c) if c.accept("=") else None

    c.many("{", "}", item)
    return Attrs(items)


def parse_attribute(c: IrCursor) -> Any:
    """One attribute."""
    token = c.token
    if token.text in ELEMENT_TYPES:
        return parse_element(c)
    rule = _RULES_BY_TEXT.get(token.text) or _RULES_BY_KIND.get(token.kind)
    if rule is None:
        raise c.error("this is not an attribute")
    return rule(c)


def _constant_rule(value: Any) -> Callable[[IrCursor], Any]:
    def rule(c: IrCursor) -> Any:
        c.advance()
        return value

    return rule


def _parse_number(c: IrCursor) -> int | float:
    token = c.advance()
    dtype = parse_element(c) if c.accept(":") else None  # MLIR leaves out i64 and f64
    if token.text.startswith("0x"):
        return _parse_float_bits(c, token)
    whole = "." not in token.text and not (dtype and dtype.is_float)
    return int(token.text) if whole else float(token.text)


def _parse_float_bits(c: IrCursor, token: IrToken) -> float:
    if len(token.text) != 18:
        raise c.error("a float in hex has 16 digits", token)
    return struct.unpack(">d", bytes.fromhex(token.text[2:]))[0]


def _bracketed_rule(read: Callable[[IrCursor], Any]) -> Callable[[IrCursor], Any]:
    """The parser rule of an opaque attribute: its name, and the text between < and >."""

    def rule(c: IrCursor) -> Any:
        c.advance()
        c.expect("<")
        value = read(c)
        c.expect(">")
        return value

    return rule


def _parse_dim_attribute(c: IrCursor) -> Size:
    token = c.take("string", "a size in quotes")
    return _parse_dim(c, token, unquote_string(token.text))


def _parse_policy_attribute(c: IrCursor) -> Policy:
    token = c.token
    return _make_policy(c, token, dict(parse_dictionary(c)))


_RULES_BY_TEXT: dict[str, Callable[[IrCursor], Any]] = {
    "true": _constant_rule(True),
    "false": _constant_rule(False),
    "unit": _constant_rule(None),
    "[": lambda c: tuple(c.many("[", "]", lambda: parse_attribute(c))),
    "{": parse_dictionary,
    "#ts.dim": _bracketed_rule(_parse_dim_attribute),
    "#ts.int": _bracketed_rule(parse_integer),
    "#ts.policy": _bracketed_rule(_parse_policy_attribute),
    "#ts.loc": _bracketed_rule(lambda c: _parse_source_position(c, c.take("string", "a file name"), 3)),
}
_RULES_BY_KIND: dict[str, Callable[[IrCursor], Any]] = {
    "string": lambda c: unquote_string(c.advance().text),
    "number": _parse_number,
    "shaped": parse_type,
}


# Grammar of modules, functions, blocks and nodes.


_RETURN, _YIELD = '"ts.return"', '"ts.yield"'

# The values in scope by name; the first map holds those of the current block.
_ValueScope = ChainMap[str, Value]


class _TypeSignature(NamedTuple):
    args: list[Type]
    results: list[Type]


def parse_module(text: str, name: str = "<ir>") -> Module:
    """Parse a module; `parse_module(print_module(m)) == m`. The result is not verified.

    The ops must be defined, that is, `tessera.ops` imported.

    Raises:
        ParseError: the text does not parse; the place is a line and column of it, in the file `name`.
    """
    c = IrCursor(text, name)
    try:
        return _parse_module_op(c)
    except RecursionError:
        raise c.error("the text nests too deep") from None
    except UnicodeDecodeError as error:
        raise c.error("a string before this is not UTF-8", expected="escapes of UTF-8", received=str(error)) from None


def _parse_module_op(c: IrCursor) -> Module:
    start = c.token
    c.expect('"builtin.module"', "(", ")", "(", "{")
    functions = []
    while not c.at("}"):
        functions.append(_parse_function(c))
    c.expect("}", ")")
    attrs = _parse_attributes(c)
    _expect_no_types(c)
    _parse_trailing_location(c)
    c.take("end", "the end of the text")
    level, rest = attrs.get("ts.level"), attrs.get("ts.attrs", Attrs())
    if not isinstance(level, str) or not isinstance(rest, Attrs):
        raise c.error("the module does not tell its level", start, expected='{ts.attrs = {}, ts.level = "tile"}')
    return Module(level, tuple(functions), rest)


def _parse_function(c: IrCursor) -> Function:
    start = c.token
    c.expect('"ts.func"', "(", ")", "(", "{")
    body = _parse_block(c, ChainMap(), _RETURN)
    c.expect("}", ")")
    attrs = dict(_parse_attributes(c))
    _expect_no_types(c)
    name = attrs.pop("sym_name", None)
    if not isinstance(name, str):
        raise c.error("the function has no name", start, expected='{sym_name = "main"}')
    return Function(name, body, Attrs(attrs), _parse_trailing_location(c))


def _parse_attributes(c: IrCursor) -> Attrs:
    return parse_dictionary(c) if c.at("{") else Attrs()


def _expect_no_types(c: IrCursor) -> None:
    c.expect(":", "(", ")", "->", "(", ")")


def _parse_trailing_location(c: IrCursor) -> Location:
    return parse_location(c) if c.accept("loc") else UNKNOWN


def _parse_block(c: IrCursor, outer: _ValueScope, terminator: str) -> Block:
    scope = outer.new_child()
    params = _parse_params(c, scope)
    nodes = []
    while not c.accept(terminator):
        if c.at("}"):
            raise c.error("the block has no end", expected=terminator)
        nodes.append(_parse_node(c, scope))
    args = c.many("(", ")", lambda: c.take("value", "a value"))
    results = _resolve_operands(c, scope, args, _parse_signature(c))
    _parse_trailing_location(c)
    return Block(params, tuple(nodes), results)


def _parse_params(c: IrCursor, scope: _ValueScope) -> tuple[Value, ...]:
    if c.token.kind != "label":
        return ()
    c.advance()
    params = c.many("(", ")", lambda: _parse_param(c, scope)) if c.at("(") else []
    c.expect(":")
    return tuple(params)


def _parse_param(c: IrCursor, scope: _ValueScope) -> Value:
    token = c.take("value", "a parameter")
    c.expect(":")
    value = _define_value(c, scope, token, token.text, parse_type(c))
    _parse_trailing_location(c)
    return value


def _define_value(c: IrCursor, scope: _ValueScope, token: IrToken, name: str, type: Type) -> Value:
    if name in scope:
        raise c.error(f"{name} is defined twice", token)
    scope[name] = Value(type)
    return scope[name]


def _parse_node(c: IrCursor, scope: _ValueScope) -> Node:
    start = c.token
    names = _parse_result_names(c)
    op = _parse_op(c)
    args = c.many("(", ")", lambda: c.take("value", "a value"))
    regions = c.many("(", ")", lambda: _parse_region(c, scope)) if c.at("(") else []
    attrs = _parse_attributes(c)
    signature = _parse_signature(c)
    if len(names) != len(signature.results):
        want, got = len(signature.results), len(names)
        raise c.error("results and their types differ in number", start, expected=want, received=got)
    operands = _resolve_operands(c, scope, args, signature)
    results = [_define_value(c, scope, t, n, type) for (t, n), type in zip(names, signature.results, strict=True)]
    return Node(op, operands, attrs, tuple(results), tuple(regions), _parse_trailing_location(c))


def _parse_result_names(c: IrCursor) -> list[tuple[IrToken, str]]:
    """Parse the result names before `=`; MLIR writes `%3:2 =` for %3#0 and %3#1."""
    names: list[tuple[IrToken, str]] = []
    while c.token.kind == "value":
        token = c.advance()
        count = parse_integer(c, "a number of results") if c.accept(":") else 0
        if not 0 <= count <= MAX_RESULTS:
            raise c.error("a node has no such number of results", token, expected=f"1 to {MAX_RESULTS}", received=count)
        names += [(token, f"{token.text}#{i}") for i in range(count)] if count else [(token, token.text)]
        if not c.accept(","):
            break
    if names:
        c.expect("=")
    return names


def _parse_op(c: IrCursor) -> Op:
    token = c.take("string", "an op in quotes")
    name = unquote_string(token.text)
    if name in TARGET_OPS:
        return TARGET_OPS[name]
    if name not in REGISTRY:
        near = difflib.get_close_matches(name, REGISTRY, n=1)
        raise c.error(f"{name} is not an op", token, suggestion=f'write "{near[0]}"' if near else None)
    return REGISTRY[name]


def _parse_region(c: IrCursor, scope: _ValueScope) -> Block:
    c.expect("{")
    block = _parse_block(c, scope, _YIELD)
    c.expect("}")
    return block


def _parse_signature(c: IrCursor) -> _TypeSignature:
    c.expect(":")
    args = c.many("(", ")", lambda: parse_type(c))
    c.expect("->")
    results = c.many("(", ")", lambda: parse_type(c)) if c.at("(") else [parse_type(c)]
    return _TypeSignature(args, results)


def _resolve_operands(
    c: IrCursor, scope: _ValueScope, tokens: list[IrToken], signature: _TypeSignature
) -> tuple[Value, ...]:
    if len(tokens) != len(signature.args):
        raise c.error("operands and their types differ in number", expected=len(signature.args), received=len(tokens))
    return tuple(_resolve_value(c, scope, t, type) for t, type in zip(tokens, signature.args, strict=True))


def _resolve_value(c: IrCursor, scope: _ValueScope, token: IrToken, type: Type) -> Value:
    value = scope.get(token.text)
    if value is None:
        raise c.error(f"{token.text} is not defined here", token, expected="a value defined before")
    if value.type != type:
        raise c.error(f"{token.text} has another type", token, expected=str(value.type), received=str(type))
    return value

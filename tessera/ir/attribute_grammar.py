"""The grammar of types, attributes and locations: the other half of `attributes`."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

from tessera.errors import UNKNOWN, Location, TesseraError
from tessera.ir.attributes import ELEMENTS
from tessera.ir.core import Attrs
from tessera.ir.lexer import Cursor, Token, unquote
from tessera.shapes import Dim, Size, as_size
from tessera.types import DType, Policy, RefType, TensorType, Type

_NAMELESS = re.compile(r"\?(\w*)")
_REF = "!tile.ref"
_CLAUSES: dict[str, type] = {
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


def parse_type(c: Cursor) -> Type:
    """The type of a value."""
    token = c.take("shaped", "a type: tensor<...> or !tile.ref<...>")
    head, _, sizes = token.text.partition("<")
    dtype = parse_element(c)
    space = ""
    if head == _REF:
        c.expect(",")
        space = c.take("word", "a memory space").text
    extra = dict(parse_dictionary(c)) if c.accept(",") else {}
    c.expect(">")
    shape = _shape(c, token, sizes.split("x")[:-1], extra.pop("dims", ()))
    policy = _policy(c, token, {"storage": dtype, **extra}) if extra else None
    return RefType(shape, dtype, space, policy) if head == _REF else TensorType(shape, dtype, policy)


def parse_element(c: Cursor) -> DType:
    """An element type."""
    if c.token.text not in ELEMENTS:
        raise c.error("this is not an element type", expected=", ".join(ELEMENTS))
    return ELEMENTS[c.advance().text]


def _shape(c: Cursor, token: Token, sizes: list[str], dims: Any) -> tuple[Size, ...]:
    if not isinstance(dims, tuple) or sizes.count("?") != len(dims):
        raise c.error("dims does not name each size that is ?", token, expected=sizes.count("?"), received=dims)
    names = iter(dims)
    return tuple(_dim(c, token, next(names)) if s == "?" else int(s) for s in sizes)


def _dim(c: Cursor, token: Token, text: Any) -> Size:
    """A symbolic size. Python's grammar, which reads it, has no names like ?0: they travel under others."""
    try:
        nameless: dict[str, Any] = {f"nameless_{n}": Dim.of(f"?{n}") for n in _NAMELESS.findall(text)}
        size = as_size(_NAMELESS.sub(r"nameless_\1", text))
        return size.evaluate(nameless) if isinstance(size, Dim) else size
    except (TesseraError, ValueError, TypeError, ArithmeticError):
        raise c.error("this is not a size", token, expected='a name or arithmetic: "2*D+1"', received=text) from None


def _policy(c: Cursor, token: Token, fields: dict[str, Any]) -> Policy:
    wrong = [k for k, v in fields.items() if not isinstance(v, _CLAUSES.get(k, ()))]
    if wrong or "storage" not in fields:
        raise c.error("this is not a policy", token, expected=", ".join(_CLAUSES), received=", ".join(wrong))
    return Policy(**fields)


def parse_location(c: Cursor) -> Location:
    """A place after `loc`, which has been taken."""
    c.expect("(")
    if c.accept("unknown"):
        c.expect(")")
        return UNKNOWN
    token = c.take("string", "a file name")
    if not c.accept("("):
        place = _place(c, token, 2)
        c.expect(")")
        return place
    end = unquote(token.text).removeprefix("to ")
    if not end.isdecimal():
        raise c.error("a named location holds the end column", token, expected='"to 9"("f.py":12:4)')
    place = _place(c, c.take("string", "a file name"), 2)
    c.expect(")", ")")
    return Location(place.file, place.line, place.column, int(end))


def _place(c: Cursor, file: Token, count: int) -> Location:
    numbers = []
    for _ in range(count):
        c.expect(":")
        numbers.append(parse_whole(c, "a line or column"))
    return Location(unquote(file.text), *numbers)


def parse_whole(c: Cursor, what: str = "a whole number") -> int:
    """A whole number."""
    token = c.take("number", what)
    try:
        return int(token.text)
    except ValueError:
        raise c.error("this is not a whole number", token) from None


def parse_dictionary(c: Cursor) -> Attrs:
    """Named attributes in braces; a name alone is `unit`, as MLIR abbreviates it."""
    items: dict[str, Any] = {}

    def item() -> None:
        token = c.advance()
        if token.kind not in ("word", "string"):
            raise c.error("unexpected text", token, expected="the name of an attribute")
        name = unquote(token.text) if token.kind == "string" else token.text
        if name in items:
            raise c.error(f"{name} is given twice", token)
        items[name] = parse_attribute(c) if c.accept("=") else None

    c.many("{", "}", item)
    return Attrs(items)


def parse_attribute(c: Cursor) -> Any:
    """One attribute."""
    token = c.token
    if token.text in ELEMENTS:
        return parse_element(c)
    rule = _BY_TEXT.get(token.text) or _BY_KIND.get(token.kind)
    if rule is None:
        raise c.error("this is not an attribute")
    return rule(c)


def _constant(value: Any) -> Callable[[Cursor], Any]:
    def rule(c: Cursor) -> Any:
        c.advance()
        return value

    return rule


def _number(c: Cursor) -> int | float:
    token = c.advance()
    dtype = parse_element(c) if c.accept(":") else None  # MLIR leaves out i64 and f64
    if token.text.startswith("0x"):
        return _bits(c, token)
    whole = "." not in token.text and not (dtype and dtype.is_float)
    return int(token.text) if whole else float(token.text)


def _bits(c: Cursor, token: Token) -> float:
    if len(token.text) != 18:
        raise c.error("a float in hex has 16 digits", token)
    return struct.unpack(">d", bytes.fromhex(token.text[2:]))[0]


def _inside(read: Callable[[Cursor], Any]) -> Callable[[Cursor], Any]:
    """The rule of an attribute of ours: its name, and what stands between < and >."""

    def rule(c: Cursor) -> Any:
        c.advance()
        c.expect("<")
        value = read(c)
        c.expect(">")
        return value

    return rule


def _read_dim(c: Cursor) -> Size:
    token = c.take("string", "a size in quotes")
    return _dim(c, token, unquote(token.text))


def _read_policy(c: Cursor) -> Policy:
    token = c.token
    return _policy(c, token, dict(parse_dictionary(c)))


_BY_TEXT: dict[str, Callable[[Cursor], Any]] = {
    "true": _constant(True),
    "false": _constant(False),
    "unit": _constant(None),
    "[": lambda c: tuple(c.many("[", "]", lambda: parse_attribute(c))),
    "{": parse_dictionary,
    "#ts.dim": _inside(_read_dim),
    "#ts.int": _inside(parse_whole),
    "#ts.policy": _inside(_read_policy),
    "#ts.loc": _inside(lambda c: _place(c, c.take("string", "a file name"), 3)),
}
_BY_KIND: dict[str, Callable[[Cursor], Any]] = {
    "string": lambda c: unquote(c.advance().text),
    "number": _number,
    "shaped": parse_type,
}

"""The parser: what `print_module` wrote, and MLIR's generic printing of it, back as a module."""

from __future__ import annotations

import difflib
from collections import ChainMap
from typing import NamedTuple

from tessera.errors import UNKNOWN, Location
from tessera.ir.attribute_grammar import parse_dictionary, parse_location, parse_type, parse_whole
from tessera.ir.core import Attrs, Block, Function, Module, Node, Value
from tessera.ir.lexer import Cursor, Token, unquote
from tessera.op import REGISTRY, Op
from tessera.types import Type

_RETURN, _YIELD = '"ts.return"', '"ts.yield"'

# The values that may be named here, by name; those of the block being read are in the first map.
_Scope = ChainMap[str, Value]


class _Signature(NamedTuple):
    args: list[Type]
    results: list[Type]


def parse_module(text: str, name: str = "<ir>") -> Module:
    """The module a text stands for; `parse_module(print_module(m)) == m`. It is not verified.

    The ops must be defined, that is, `tessera.ops` imported.

    Raises:
        ParseError: the text does not parse; the place is a line and column of it, in the file `name`.
    """
    c = Cursor(text, name)
    try:
        return _module(c)
    except RecursionError:
        raise c.error("the text nests too deep") from None


def _module(c: Cursor) -> Module:
    start = c.token
    c.expect('"builtin.module"', "(", ")", "(", "{")
    functions = []
    while not c.at("}"):
        functions.append(_function(c))
    c.expect("}", ")")
    attrs = _attributes(c)
    _no_types(c)
    _location(c)
    c.take("end", "the end of the text")
    level, rest = attrs.get("ts.level"), attrs.get("ts.attrs", Attrs())
    if not isinstance(level, str) or not isinstance(rest, Attrs):
        raise c.error("the module does not tell its level", start, expected='{ts.attrs = {}, ts.level = "tile"}')
    return Module(level, tuple(functions), rest)


def _function(c: Cursor) -> Function:
    start = c.token
    c.expect('"ts.func"', "(", ")", "(", "{")
    body = _block(c, ChainMap(), _RETURN)
    c.expect("}", ")")
    attrs = dict(_attributes(c))
    _no_types(c)
    name = attrs.pop("sym_name", None)
    if not isinstance(name, str):
        raise c.error("the function has no name", start, expected='{sym_name = "main"}')
    return Function(name, body, Attrs(attrs), _location(c))


def _attributes(c: Cursor) -> Attrs:
    return parse_dictionary(c) if c.at("{") else Attrs()


def _no_types(c: Cursor) -> None:
    c.expect(":", "(", ")", "->", "(", ")")


def _location(c: Cursor) -> Location:
    return parse_location(c) if c.accept("loc") else UNKNOWN


def _block(c: Cursor, outer: _Scope, terminator: str) -> Block:
    scope = outer.new_child()
    params = _params(c, scope)
    nodes = []
    while not c.accept(terminator):
        if c.at("}"):
            raise c.error("the block has no end", expected=terminator)
        nodes.append(_node(c, scope))
    args = c.many("(", ")", lambda: c.take("value", "a value"))
    results = _operands(c, scope, args, _signature(c))
    _location(c)
    return Block(params, tuple(nodes), results)


def _params(c: Cursor, scope: _Scope) -> tuple[Value, ...]:
    if c.token.kind != "label":
        return ()
    c.advance()
    params = c.many("(", ")", lambda: _param(c, scope)) if c.at("(") else []
    c.expect(":")
    return tuple(params)


def _param(c: Cursor, scope: _Scope) -> Value:
    token = c.take("value", "a parameter")
    c.expect(":")
    value = _define(c, scope, token, token.text, parse_type(c))
    _location(c)
    return value


def _define(c: Cursor, scope: _Scope, token: Token, name: str, type: Type) -> Value:
    if name in scope:
        raise c.error(f"{name} is defined twice", token)
    scope[name] = Value(type)
    return scope[name]


def _node(c: Cursor, scope: _Scope) -> Node:
    start = c.token
    names = _results(c)
    op = _op(c)
    args = c.many("(", ")", lambda: c.take("value", "a value"))
    regions = c.many("(", ")", lambda: _region(c, scope)) if c.at("(") else []
    attrs = _attributes(c)
    signature = _signature(c)
    if len(names) != len(signature.results):
        want, got = len(signature.results), len(names)
        raise c.error("results and their types differ in number", start, expected=want, received=got)
    operands = _operands(c, scope, args, signature)
    results = [_define(c, scope, t, n, type) for (t, n), type in zip(names, signature.results, strict=True)]
    return Node(op, operands, attrs, tuple(results), tuple(regions), _location(c))


def _results(c: Cursor) -> list[tuple[Token, str]]:
    """The names before `=`; MLIR writes `%3:2 =` for %3#0 and %3#1."""
    names: list[tuple[Token, str]] = []
    while c.token.kind == "value":
        token = c.advance()
        count = parse_whole(c, "a number of results") if c.accept(":") else 0
        names += [(token, f"{token.text}#{i}") for i in range(count)] if count else [(token, token.text)]
        if not c.accept(","):
            break
    if names:
        c.expect("=")
    return names


def _op(c: Cursor) -> Op:
    token = c.take("string", "an op in quotes")
    name = unquote(token.text)
    if name not in REGISTRY:
        near = difflib.get_close_matches(name, REGISTRY, n=1)
        raise c.error(f"{name} is not an op", token, suggestion=f'write "{near[0]}"' if near else None)
    return REGISTRY[name]


def _region(c: Cursor, scope: _Scope) -> Block:
    c.expect("{")
    block = _block(c, scope, _YIELD)
    c.expect("}")
    return block


def _signature(c: Cursor) -> _Signature:
    c.expect(":")
    args = c.many("(", ")", lambda: parse_type(c))
    c.expect("->")
    results = c.many("(", ")", lambda: parse_type(c)) if c.at("(") else [parse_type(c)]
    return _Signature(args, results)


def _operands(c: Cursor, scope: _Scope, tokens: list[Token], signature: _Signature) -> tuple[Value, ...]:
    if len(tokens) != len(signature.args):
        raise c.error("operands and their types differ in number", expected=len(signature.args), received=len(tokens))
    return tuple(_use(c, scope, t, type) for t, type in zip(tokens, signature.args, strict=True))


def _use(c: Cursor, scope: _Scope, token: Token, type: Type) -> Value:
    value = scope.get(token.text)
    if value is None:
        raise c.error(f"{token.text} is not defined here", token, expected="a value defined before")
    if value.type != type:
        raise c.error(f"{token.text} has another type", token, expected=str(value.type), received=str(type))
    return value

"""IR printer: writes a module of any level as MLIR generic text, which MLIR, xDSL and `parse_module` read.

Types, attributes and locations use MLIR's own forms, and opaque forms of the `ts` dialect where MLIR has none.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tessera.core.errors import UNKNOWN, Location
from tessera.core.symbolic_dim import Dim, Size
from tessera.core.types import DTYPES, DType, Policy, RefType, TensorType, Type
from tessera.ir.core import Attrs, Block, Function, Module, Node, Value

# Types, attributes and locations: MLIR's own syntax, or opaque types and attributes where it has none.


# The builtin element types of MLIR; the others are printed as opaque types.
_BUILTIN = frozenset(("f64", "f32", "f16", "bf16", "i4", "i8", "i16", "i32", "i64", "ui8", "i1"))
# Characters that need no escape in a string: not " or \, nor control and bidirectional characters.
_PLAIN = re.compile(r"[ !#-\[\]-~\xa0-\u2027\u2030-\ud7ff\ue000-\U0010ffff]*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.$]*")
_I64 = range(-(1 << 63), 1 << 63)


def print_string(text: str) -> str:
    """A string literal; bytes of other characters are escaped as two hex digits."""
    if _PLAIN.fullmatch(text):
        return f'"{text}"'
    return '"' + "".join(c if _PLAIN.fullmatch(c) else _escape_character(c) for c in text) + '"'


def _escape_character(character: str) -> str:
    return "".join(f"\\{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))


def print_element(dtype: DType) -> str:
    """An element type: `f32`, `!ts.f8E4M3FN`."""
    return dtype.mlir if dtype.mlir in _BUILTIN else f"!ts.{dtype.mlir}"


ELEMENT_TYPES: Mapping[str, DType] = {print_element(t): t for t in DTYPES}


def print_type(type: Type) -> str:
    """The type of a value: `tensor<?x4xf32, {dims = ["B"]}>`, `!tile.ref<4xf32, shared>`."""
    body = "".join(f"{'?' if isinstance(s, Dim) else int(s)}x" for s in type.shape) + print_element(type.dtype)
    extra = _tensor_encoding(type.shape, type.dtype, type.policy)
    tail = f", {print_dictionary(extra)}" if extra else ""
    return f"!tile.ref<{body}, {type.space}{tail}>" if isinstance(type, RefType) else f"tensor<{body}{tail}>"


def _tensor_encoding(shape: tuple[Size, ...], dtype: DType, policy: Policy | None) -> dict[str, Any]:
    """The encoding of a shaped type: the names of its dynamic sizes, and the policy."""
    dims = tuple(repr(s) for s in shape if isinstance(s, Dim))
    return ({"dims": dims} if dims else {}) | (policy_fields(policy, dtype) if policy else {})


def policy_fields(policy: Policy, dtype: DType | None = None) -> dict[str, Any]:
    """The clauses of a policy; the storage type too, where `dtype` does not imply it or there is no clause."""
    clauses = policy.clauses()
    return clauses if clauses and policy.storage == dtype else {"storage": policy.storage, **clauses}


def print_location(loc: Location) -> str:
    """A location: `loc("f.py":12:4)`, with the end column (if known) as a name: `loc("to 9"("f.py":12:4))`."""
    if loc == UNKNOWN:
        return "loc(unknown)"
    start = f"{print_string(loc.file)}:{loc.line}:{loc.column}"
    return f'loc("to {loc.end_column}"({start}))' if loc.end_column else f"loc({start})"


def print_dictionary(items: Mapping[str, Any]) -> str:
    """Named attributes, in the order of their names: `{axis = -1 : i64}`."""
    return "{" + ", ".join(f"{_print_name(k)} = {print_attribute(v)}" for k, v in sorted(items.items())) + "}"


def _print_name(name: str) -> str:
    return name if _NAME.fullmatch(name) else print_string(name)


def print_attribute(value: Any) -> str:
    """One attribute; `is_printable` tells which values can be printed."""
    return _PRINTERS[type(value)](value)


def is_printable(value: Any) -> bool:
    """Whether this attribute can be printed and parsed back exactly."""
    if isinstance(value, Attrs):
        return all(isinstance(k, str) and k and is_printable(v) for k, v in value.items())
    return all(is_printable(v) for v in value) if isinstance(value, tuple) else type(value) in _PRINTERS


def _print_int(value: int) -> str:
    return f"{value} : i64" if value in _I64 else f"#ts.int<{value}>"


def _print_float(value: float) -> str:
    if not math.isfinite(value):
        return f"0x{struct.pack('>d', value).hex().upper()} : f64"
    text = repr(value)
    return f"{text if '.' in text else text.replace('e', '.0e')} : f64"  # MLIR wants a point


def _print_place(loc: Location) -> str:
    return f"#ts.loc<{print_string(loc.file)}:{loc.line}:{loc.column}:{loc.end_column}>"


_PRINTERS: dict[type, Callable[[Any], str]] = {
    bool: lambda value: "true" if value else "false",
    int: _print_int,
    float: _print_float,
    str: print_string,
    type(None): lambda value: "unit",
    tuple: lambda value: f"[{', '.join(print_attribute(v) for v in value)}]",
    Attrs: print_dictionary,
    DType: print_element,
    TensorType: print_type,
    RefType: print_type,
    Dim: lambda value: f"#ts.dim<{print_string(repr(value))}>",
    Policy: lambda value: f"#ts.policy<{print_dictionary(policy_fields(value))}>",
    Location: _print_place,
}


# Modules, functions, blocks and nodes.


def print_module(module: Module, locations: bool = True) -> str:
    """A module as text; equal modules give equal text.

    >>> print(print_module(Module("graph", ())))
    "builtin.module"() ({
    }) {ts.level = "graph"} : () -> ()
    <BLANKLINE>
    """
    return "\n".join([*(line for line, _ in iterate_lines(module, locations)), ""])


# What a line of text shows: a node's first or last line, the parameters of a block, the edges of a function.
LineOwner = Node | Block | Function | None


def iterate_lines(module: Module, locations: bool = True) -> Iterator[tuple[str, LineOwner]]:
    """The lines of `print_module`, each with the node, block (its parameters) or function that it shows."""
    # MLIR wants the attributes of its own module op qualified by a dialect, hence the inner dictionary.
    attrs = {"ts.level": module.level} | ({"ts.attrs": module.attrs} if module.attrs else {})
    yield '"builtin.module"() ({', None
    for function in module.functions:
        for line, owner in _function_lines(function, locations):
            yield "  " + line, owner
    yield f"}}) {print_dictionary(attrs)} : () -> ()", None


def print_function(function: Function, locations: bool = True) -> str:
    """One function as text, as in its module."""
    return "\n".join([*(line for line, _ in _function_lines(function, locations)), ""])


def _function_lines(function: Function, locations: bool) -> Iterator[tuple[str, LineOwner]]:
    yield '"ts.func"() ({', function
    yield from _FunctionPrinter(locations).block(function.body, "ts.return", "  ")
    attrs = print_dictionary({"sym_name": function.name, **function.attrs})
    yield f"}}) {attrs} : () -> (){_location_suffix(function, locations)}", function


def _location_suffix(item: Function | Node, locations: bool) -> str:
    return f" {print_location(item.loc)}" if locations else ""


def _print_types(types: Sequence[Type]) -> str:
    return f"({', '.join(map(print_type, types))})"


class _FunctionPrinter:
    """A function being printed: the number of each value so far."""

    def __init__(self, locations: bool) -> None:
        self.locations = locations
        self.names: dict[Value, str] = {}

    def block(self, block: Block, terminator: str, indent: str) -> Iterator[tuple[str, LineOwner]]:
        """The lines of a block: its parameters, its nodes, and a terminator with its results."""
        if block.params:
            params = ", ".join(f"{self.define(v)}: {print_type(v.type)}" for v in block.params)
            yield f"{indent[2:]}^bb0({params}):", block
        for node in block.nodes:
            yield from self.node(node, indent)
        types = _print_types([v.type for v in block.results])
        yield f'{indent}"{terminator}"{self.operands(block.results)} : {types} -> ()', None

    def node(self, node: Node, indent: str) -> Iterator[tuple[str, LineOwner]]:
        """The lines of a node: one, or more where it has regions."""
        operands = self.operands(node.args)
        results = f"{', '.join(map(self.define, node.results))} = " if node.results else ""
        head = f'{indent}{results}"{node.op.name}"{operands}'
        attrs = f" {print_dictionary(node.attrs)}" if node.attrs else ""
        tail = f"{attrs} : {self.signature(node)}{_location_suffix(node, self.locations)}"
        if not node.regions:
            yield head + tail, node
            return
        yield head + " ({", node
        for number, region in enumerate(node.regions):
            if number:
                yield indent + "}, {", None
            yield from self.block(region, "ts.yield", indent + "  ")
        yield f"{indent}}}){tail}", node

    def signature(self, node: Node) -> str:
        """The types of the operands and results; a single result goes without parentheses."""
        out = [v.type for v in node.results]
        results = print_type(out[0]) if len(out) == 1 else _print_types(out)
        return f"{_print_types([v.type for v in node.args])} -> {results}"

    def define(self, value: Value) -> str:
        """The next number, as this value's name."""
        self.names[value] = f"%{len(self.names)}"
        return self.names[value]

    def operands(self, values: Sequence[Value]) -> str:
        """Value names in parentheses; an undefined value of an invalid module is marked."""
        return f"({', '.join(self.names.get(v, '%undefined') for v in values)})"

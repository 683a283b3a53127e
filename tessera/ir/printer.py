"""The printer: any level as MLIR generic text, which MLIR, xDSL and `parse_module` read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tessera.ir.attributes import print_dictionary, print_location, print_type
from tessera.ir.core import Block, Function, Module, Node, Value
from tessera.types import Type


def print_module(module: Module, locations: bool = True) -> str:
    """A module as text; equal modules give equal text.

    >>> print(print_module(Module("graph", ())))
    "builtin.module"() ({
    }) {ts.level = "graph"} : () -> ()
    <BLANKLINE>
    """
    # MLIR wants the attributes of its own module op qualified by a dialect, hence the inner dictionary.
    attrs = {"ts.level": module.level} | ({"ts.attrs": module.attrs} if module.attrs else {})
    lines = ['"builtin.module"() ({']
    for function in module.functions:
        lines.extend("  " + line for line in _function(function, locations))
    return "\n".join([*lines, f"}}) {print_dictionary(attrs)} : () -> ()", ""])


def print_function(function: Function, locations: bool = True) -> str:
    """One function as text, the way it stands in a module."""
    return "\n".join([*_function(function, locations), ""])


def _function(function: Function, locations: bool) -> Iterator[str]:
    yield '"ts.func"() ({'
    yield from _Printer(locations).block(function.body, "ts.return", "  ")
    attrs = print_dictionary({"sym_name": function.name, **function.attrs})
    yield f"}}) {attrs} : () -> (){_place(function, locations)}"


def _place(item: Function | Node, locations: bool) -> str:
    return f" {print_location(item.loc)}" if locations else ""


def _types(types: Sequence[Type]) -> str:
    return f"({', '.join(map(print_type, types))})"


class _Printer:
    """One function being printed: the number of each value so far."""

    def __init__(self, locations: bool) -> None:
        self.locations = locations
        self.names: dict[Value, str] = {}

    def block(self, block: Block, terminator: str, indent: str) -> Iterator[str]:
        """The lines of a block: its parameters, its nodes, and a terminator with its results."""
        if block.params:
            params = ", ".join(f"{self.define(v)}: {print_type(v.type)}" for v in block.params)
            yield f"{indent[2:]}^bb0({params}):"
        for node in block.nodes:
            yield from self.node(node, indent)
        yield f'{indent}"{terminator}"{self.operands(block.results)} : {_types([v.type for v in block.results])} -> ()'

    def node(self, node: Node, indent: str) -> Iterator[str]:
        """The lines of a node: one, or more where it has regions."""
        operands = self.operands(node.args)
        results = f"{', '.join(map(self.define, node.results))} = " if node.results else ""
        head = f'{indent}{results}"{node.op.name}"{operands}'
        attrs = f" {print_dictionary(node.attrs)}" if node.attrs else ""
        tail = f"{attrs} : {self.signature(node)}{_place(node, self.locations)}"
        if not node.regions:
            yield head + tail
            return
        yield head + " ({"
        for number, region in enumerate(node.regions):
            if number:
                yield indent + "}, {"
            yield from self.block(region, "ts.yield", indent + "  ")
        yield f"{indent}}}){tail}"

    def signature(self, node: Node) -> str:
        """The types of the operands and results; a single result goes without parentheses."""
        out = [v.type for v in node.results]
        return f"{_types([v.type for v in node.args])} -> {print_type(out[0]) if len(out) == 1 else _types(out)}"

    def define(self, value: Value) -> str:
        """The next number, as this value's name."""
        self.names[value] = f"%{len(self.names)}"
        return self.names[value]

    def operands(self, values: Sequence[Value]) -> str:
        """Names in parentheses; text of a broken module shows where a value is not defined."""
        return f"({', '.join(self.names.get(v, '%undefined') for v in values)})"

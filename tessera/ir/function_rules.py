"""Rules about functions: definitions (V1), what stands where (V3), launches (V5), outputs (V6), shapes (V8)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tessera.ir.breach import Breach, differing, nodes, types
from tessera.ir.core import Block, Function, Module, Node, Value
from tessera.ir.levels import LAUNCH, Level, Place
from tessera.types import GLOBAL, RefType, Type


def definitions(module: Module, level: Level) -> Iterator[Breach]:
    """V1: each name and value is defined once, and a value is used only after that and inside its block."""
    names = [f.name for f in module.functions]
    if not names:
        yield Breach(module, "a module needs an entry function")
    for number, function in enumerate(module.functions):
        if function.name in names[:number]:
            yield Breach(function, f"the function {function.name} is defined twice")
        yield from _Known().block(function.body, function)


class _Known:
    """The values defined so far, and those of them that may be used here."""

    def __init__(self) -> None:
        self.ever: set[Value] = set()
        self.here: set[Value] = set()

    def block(self, block: Block, where: Node | Function) -> Iterator[Breach]:
        """The breaches of a block, whose values are forgotten after it."""
        yield from self.define(block.params, where)
        for node in block.nodes:
            yield from self.use(node.args, node)
            for region in node.regions:
                yield from self.block(region, node)
            yield from self.define(node.results, node)
        yield from self.use(block.results, where)
        self.here.difference_update(block.params, *(n.results for n in block.nodes))

    def define(self, values: Sequence[Value], where: Node | Function) -> Iterator[Breach]:
        """Make values known."""
        for value in values:
            if value in self.ever:
                yield Breach(where, "a value is defined twice", received=str(value.type))
            self.ever.add(value)
            self.here.add(value)

    def use(self, values: Sequence[Value], where: Node | Function) -> Iterator[Breach]:
        """Check that values are known."""
        for value in values:
            if value not in self.here:
                yield Breach(where, "a value is used that is not defined before", received=str(value.type))


def placed(module: Module, level: Level) -> list[tuple[Function, Place | None]]:
    """Each function with what it is at this level; None where the level has no such functions."""
    return [(f, level.others if number else level.entry) for number, f in enumerate(module.functions)]


def legal(module: Module, level: Level) -> Iterator[Breach]:
    """V3: ops, parameters and results stand only where the level allows them."""
    for function, place in placed(module, level):
        if place is None:
            yield Breach(function, f"a {level.name} module has one function")
            continue
        for param in function.params:
            if not place.takes(param.type):
                yield Breach(function, f"a parameter is illegal in {place.name}", place.params, param.type)
        if function.results and not place.returns:
            yield Breach(function, f"{place.name} returns nothing", received=f"{len(function.results)} results")
        yield from _illegal(function.body, place, level)


def _illegal(block: Block, place: Place, level: Level) -> Iterator[Breach]:
    for node in block.nodes:
        if not place.legal(node.op):
            yield Breach(node, f"illegal in {place.name}", place.ops, node.op.name)
        for region in node.regions:
            yield from _illegal(region, level.regions.get(node.op.name, place), level)


def launches(module: Module, level: Level) -> Iterator[Breach]:
    """V5: a launch names a tile function of the module, with operands of its parameters' types and a real grid."""
    kernels = {f.name: f for f in module.functions[1:]}
    for node in nodes(module):
        if node.op.name != LAUNCH:
            continue
        kernel = kernels.get(node.attrs["kernel"])
        if kernel is None:
            yield Breach(node, "no tile function has this name", ", ".join(kernels) or "none", node.attrs["kernel"])
            continue
        yield from differing(node, f"the operands of {kernel.name}", types(kernel.params), types(node.args))
        if not all(is_count(n) for n in node.attrs["grid"]):
            yield Breach(node, "a grid is a tuple of sizes", received=node.attrs["grid"])


def is_count(value: Any, least: int = 0) -> bool:
    """Whether this is an integer (a bool is none) from `least` on."""
    return type(value) is int and value >= least


def outputs(module: Module, level: Level) -> Iterator[Breach]:
    """V6: only an entry that returns nothing counts outputs, which are its last refs; a group has a tile."""
    for function, place in placed(module, level):
        count = function.attrs.get("outputs", 0)
        params = types(function.params)
        if "outputs" in function.attrs and place is not level.entry or (place and place.returns and count):
            yield Breach(function, "outputs are counted by the entry of a schedule or tile module", received=count)
        elif not is_count(count) or count > len(params):
            yield Breach(function, "not a number of outputs", f"0 to {len(params)}", count)
        elif not all(isinstance(t, RefType) for t in params[len(params) - count :]):
            yield Breach(function, "an output is no ref", "refs", ", ".join(map(str, params[len(params) - count :])))
        if not is_count(function.attrs.get("group", 1), 1):
            yield Breach(function, "not a group size", "1 or more", function.attrs["group"])


def static(module: Module, level: Level) -> Iterator[Breach]:
    """V8: in a tile function the shape of each block, and of memory that is not global, is known."""
    for function, place in placed(module, level):
        if place is level.entry:
            continue
        yield from _symbolic(function.params, function)
        for node in function.body.walk():
            yield from _symbolic((*node.results, *(p for r in node.regions for p in r.params)), node)


def _symbolic(values: Sequence[Value], where: Node | Function) -> Iterator[Breach]:
    for value in values:
        if not _is_global(value.type) and not all(isinstance(s, int) for s in value.type.shape):
            yield Breach(where, "a shape in a tile function is not static", "sizes that are numbers", value.type)


def _is_global(type: Type) -> bool:
    return isinstance(type, RefType) and type.space == GLOBAL

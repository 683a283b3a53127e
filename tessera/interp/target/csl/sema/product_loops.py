"""Loops of products: a generated loop whose body only accumulates products of vectors and loaded numbers gets a quick
path, one call that computes the products of all its iterations (`pe/product_loops.py`). Functions whose body is such a
product of registers are found too, for `@map`.

The quick path collects the indices of the numbers, and the offsets of descriptors that each iteration computes anew.
Descriptors that advance by a constant after each product advance once. Where the call refuses, the loop itself runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tessera.core.errors import UNKNOWN, Location
from tessera.interp.target.csl.sema.context import GeneratedLine

_HEAD = re.compile(r"for (\w+) in range\(.*\):")
_CYCLES = re.compile(r"pe\.clock \+= (\d+)")
_PRODUCT = re.compile(r"compute\(pe, (\w+), \((\w+), \2, (\w+), (.+),\)\)")
_LOAD = re.compile(r"(\w+) = (.+)")
_ELEMENT = re.compile(r"(\w+(?:\[0\])?)\[(.+)\]")
_ADVANCE = re.compile(r"(\w+) = increment_dsd_offset\((\w+), (.+)\)")
# What an index or an offset may use besides local variables, pointers and numbers: nothing that reads memory or has an
# effect.
_CALLS = re.compile(r"(\w+)\(")
_PURE_CALLS = frozenset(("check_index", "above", "below", "wrap"))
_MEMORY = re.compile(r"\b[GW]\d|\bR\d+_(?!\[[01]\])|\.item|\byield\b|\[(?![01]\])")


_REGISTER_PRODUCT = re.compile(r"\(yield from pe\.perform\((\w+), \((\w+), (\w+), (\w+), (\w+),\), \{\}, \w+\)\)")


@dataclass
class ProductLoopBody:
    """What the body of a loop does: the operation with its descriptors, the loaded numbers, cycles of an iteration."""

    variable: str
    operation: str = ""
    descriptors: tuple[str, str] = ("", "")  # of the destination and of the vector
    number: str = ""  # the loaded number, or the local variable that holds it
    loads: dict[str, str] = field(default_factory=dict)  # the texts of local variables
    anew: dict[str, tuple[str, str]] = field(default_factory=dict)  # descriptors from a base and an offset
    steps: dict[str, str] = field(default_factory=dict)  # the constant advances after the product
    cycles: int = 0
    loc: Location = UNKNOWN  # of the operation

    def add(self, line: GeneratedLine) -> bool:
        """Take a line of the body; returns whether the loop may still become a call."""
        for pattern, take in _LINES:
            match = pattern.fullmatch(line.text)
            if match is not None:
                return take(self, line.loc, *match.groups())
        return False

    def add_cycles(self, loc: Location, cycles: str) -> bool:
        """Cycles of scalar code."""
        self.cycles += int(cycles)
        return True

    def add_product(self, loc: Location, operation: str, dest: str, vector: str, number: str) -> bool:
        """The operation of the loop, the only one."""
        only = not self.operation and dest != vector
        self.operation, self.descriptors, self.number, self.loc = operation, (dest, vector), number, loc
        return only

    def add_advance(self, loc: Location, name: str, base: str, offset: str) -> bool:
        """A descriptor that advances after the product, or that is computed before it."""
        if not self.operation:
            self.anew[name] = base, offset
            return name != base and is_pure(offset)
        self.steps[name] = offset
        uses_variable = re.search(rf"\b{self.variable}\b", offset)
        return name == base and name not in self.anew and is_pure(offset) and not uses_variable

    def add_load(self, loc: Location, name: str, text: str) -> bool:
        """A number that is loaded before the product."""
        self.loads[name] = text
        return not self.operation

    def find_element(self) -> tuple[str, str] | None:
        """The array of the loaded numbers, and the index."""
        text = self.loads.get(self.number, self.number)
        match = _ELEMENT.fullmatch(text)
        unused = [name for name in self.loads if name != self.number]
        unknown = [name for name in (*self.anew, *self.steps) if name not in self.descriptors]
        if match is None or unused or unknown or not is_pure(match[2]):
            return None
        return match[1], match[2]


_LINES: tuple[tuple[re.Pattern[str], Callable[..., bool]], ...] = (
    (_CYCLES, ProductLoopBody.add_cycles),
    (_PRODUCT, ProductLoopBody.add_product),
    (_ADVANCE, ProductLoopBody.add_advance),
    (_LOAD, ProductLoopBody.add_load),
)


def is_pure(text: str) -> bool:
    """Whether the text of an integer reads no memory and calls nothing with an effect.

    >>> is_pure("check_index(((j_9 * 14) + k_6), 196)"), is_pure("G4[j_9]"), is_pure("f_next_3()")
    (True, False, False)
    """
    return _MEMORY.search(text) is None and _PURE_CALLS.issuperset(_CALLS.findall(text))


def combine_products(lines: list[GeneratedLine], make_name: Callable[[str], str]) -> list[GeneratedLine]:
    """The lines of a loop, behind a quick path if it does nothing but accumulate products."""
    head = _HEAD.fullmatch(lines[0].text)
    if head is None:
        return lines
    loop, depth = ProductLoopBody(head[1]), lines[0].depth
    if any(line.depth != depth + 1 or not loop.add(line) for line in lines[1:]) or not loop.operation:
        return lines
    element = loop.find_element()
    if element is None:
        return lines
    return list(_add_quick_path(loop, lines, element, make_name))


def _add_quick_path(
    loop: ProductLoopBody, lines: list[GeneratedLine], element: tuple[str, str], make_name: Callable[[str], str]
) -> Iterator[GeneratedLine]:
    """The loop as the branch that runs if the call refuses."""
    (cells, index), indices, depth = element, make_name("indices"), lines[0].depth

    def line(more: int, text: str) -> GeneratedLine:
        return GeneratedLine(depth + more, text, loop.loc)

    offsets = {name: make_name("offsets") for name in loop.anew}
    collected = {indices: index, **{offsets[name]: text for name, (_, text) in loop.anew.items()}}
    yield line(0, "try:")
    for name in collected:
        yield line(1, f"{name} = []")
    yield lines[0]._replace(depth=depth + 1)
    for name, text in collected.items():
        yield line(2, f"{name}.append({text})")
    yield line(0, "except Exception:")  # the loop itself raises the fault
    yield line(1, f"{indices} = None")
    steps = {**loop.steps, **offsets}
    operands = [f"{loop.anew.get(name, (name,))[0]}, {steps.get(name, '0')}" for name in loop.descriptors]
    what = ", ".join((loop.operation, *operands, cells, indices, str(loop.cycles)))
    yield line(0, f"if not accumulate_products(pe, {what}):")
    for one in lines:
        yield one._replace(depth=one.depth + 1)
    if loop.steps:
        yield line(0, "else:")
    for name, step in loop.steps.items():
        yield line(1, f"{name} = increment_dsd_offset({name}, ({step}) * len({indices}))")


def find_register_products(functions: Iterable[tuple[str, str, list[str]]]) -> dict[str, tuple[str, ...]]:
    """The functions of one number that only accumulate a product with it: their operation and registers, by name.

    Functions are given as their names, arguments and lines.

    >>> lines = ["(yield from pe.perform(k0, (k1, k2, k3, x,), {}, k4))", "if False: yield"]
    >>> find_register_products([("f", "x", lines), ("g", "y", lines)])
    {'f': ('k0', 'k1', 'k2', 'k3')}
    """
    found: dict[str, tuple[str, ...]] = {}
    for name, arguments, lines in functions:
        match = _REGISTER_PRODUCT.fullmatch(lines[0]) if len(lines) == 2 else None
        if match is not None and match[5] == arguments:
            found[name] = match.groups()[:4]
    return found

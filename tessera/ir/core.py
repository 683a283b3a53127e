"""IR data structures: values, nodes, blocks, functions and modules of every level. All are frozen."""

from __future__ import annotations

import dataclasses
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Set, ValuesView
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tessera.core.errors import UNKNOWN, Location
from tessera.core.io import hash_text
from tessera.core.symbolic_dim import Dim
from tessera.core.types import DType, RefType, TensorType, Type
from tessera.ir.rules import Op

# The names of the scopes of a location at which several were traced.
SCOPE_SEPARATOR, MAX_SCOPES = " or ", 2


class Attrs(Mapping[str, Any]):
    """Attributes: an immutable, hashable mapping; nested mappings are Attrs too."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any] | None = None) -> None:
        if items.__class__ is Attrs:
            self._items: dict[str, Any] = items._items  # type: ignore[union-attr]
        else:
            self._items = (
                {k: v if v.__class__ in _FROZEN else _freeze_attribute(v) for k, v in items.items()} if items else {}
            )

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return f"Attrs({self._items})"

    # As those of Mapping, which go through Python for each item.

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def get(self, key: str, default: Any = None) -> Any:
        """The attribute, or the default."""
        return self._items.get(key, default)

    def plain(self) -> dict[str, Any]:
        """The dict that holds the attributes, which Python unpacks faster than any other mapping: it never changes."""
        return self._items

    def keys(self) -> KeysView[str]:
        """The names."""
        return self._items.keys()

    def values(self) -> ValuesView[Any]:
        """The values."""
        return self._items.values()

    def items(self) -> ItemsView[str, Any]:
        """The names and values."""
        return self._items.items()


def evaluate_attribute(value: Any, sizes: Mapping[str, int]) -> Any:
    """An attribute with the symbolic sizes in `sizes` replaced."""
    if isinstance(value, (Dim, TensorType, RefType)):
        return value.evaluate(sizes)
    if isinstance(value, Attrs):
        return Attrs({k: evaluate_attribute(v, sizes) for k, v in value.items()})
    return tuple(evaluate_attribute(v, sizes) for v in value) if isinstance(value, tuple) else value


def find_size_names(function: Function) -> tuple[str, ...]:
    """The names of the symbolic sizes that the types and attributes of a function mention, sorted."""
    return function.size_names


def _collect_size_names(attr: Any, found: set[str]) -> None:
    if isinstance(attr, Dim):
        found |= attr.names()
    elif isinstance(attr, (tuple, Attrs)):
        for each in attr.values() if isinstance(attr, Attrs) else attr:
            _collect_size_names(each, found)


_WITHOUT_SIZES = frozenset({int, float, bool, str, type(None), DType})
_FROZEN = frozenset({int, float, bool, str, type(None), Attrs, DType, Dim, TensorType, RefType})


def _freeze_attribute(value: Any) -> Any:
    if value.__class__ in _FROZEN or (value.__class__ is tuple and _FROZEN.issuperset([v.__class__ for v in value])):
        return value
    if isinstance(value, (list, tuple)):
        return tuple([_freeze_attribute(v) for v in value])
    if isinstance(value, Mapping) and not isinstance(value, Attrs):
        return Attrs(value)
    return value


@dataclass(frozen=True, eq=False)
class Value:
    """An SSA value: the result of a node or the parameter of a block. Equality is identity."""

    type: Type
    hint: str = ""

    def __repr__(self) -> str:
        return f"%{self.hint or id(self)}: {self.type}"


@dataclass(frozen=True, eq=False)
class Node:
    """An application of an op: operands, attributes, results, regions, and the source location."""

    op: Op
    args: tuple[Value, ...]
    attrs: Attrs
    results: tuple[Value, ...]
    regions: tuple[Block, ...] = ()
    loc: Location = UNKNOWN

    @property
    def out(self) -> Value:
        """The only result."""
        (value,) = self.results
        return value

    @cached_property
    def types(self) -> tuple[Type, ...]:
        """The types of the operands."""
        return tuple(v.type for v in self.args)

    @cached_property
    def result_types(self) -> tuple[Type, ...]:
        """The types of the results."""
        return tuple(v.type for v in self.results)


@dataclass(frozen=True, eq=False)
class Block:
    """A basic block: parameters, nodes in program order, and the values that it yields."""

    params: tuple[Value, ...]
    nodes: tuple[Node, ...]
    results: tuple[Value, ...]

    def walk(self) -> Iterator[Node]:
        """Every node; the nodes of a region follow the node that holds it."""
        return iter(self.all_nodes)

    @cached_property
    def all_nodes(self) -> tuple[Node, ...]:
        """Every node, as `walk` has them."""
        if not any([node.regions for node in self.nodes]):
            return self.nodes
        found: list[Node] = []
        for node in self.nodes:
            found.append(node)
            for region in node.regions:
                found += region.all_nodes
        return tuple(found)

    @cached_property
    def ops(self) -> frozenset[Op]:
        """The ops of every node."""
        return frozenset([node.op for node in self.all_nodes])

    @cached_property
    def free(self) -> Set[Value]:
        """The values used here that are defined outside, in the order of their first use (deterministic)."""
        made, used = set(self.params), dict[Value, None]()
        for node in self.nodes:
            used.update(dict.fromkeys(node.args))
            made.update(node.results)
            for region in node.regions:
                used.update(dict.fromkeys(region.free))
        used.update(dict.fromkeys(self.results))
        return {v: None for v in used if v not in made}.keys()


@dataclass(frozen=True, eq=False)
class Function:
    """A named block with attributes (for a kernel: its launch shape, schedule, ...)."""

    name: str
    body: Block
    attrs: Attrs = field(default_factory=Attrs)
    loc: Location = UNKNOWN

    @property
    def params(self) -> tuple[Value, ...]:
        """The parameters of the body."""
        return self.body.params

    @property
    def results(self) -> tuple[Value, ...]:
        """The values returned."""
        return self.body.results

    @cached_property
    def size_names(self) -> tuple[str, ...]:
        """The names of the symbolic sizes that its types and attributes mention, sorted."""
        found: set[str] = set()
        values = [*self.params]
        for node in self.body.walk():
            values += node.results
            for region in node.regions:
                values += region.params
            for attr in node.attrs.plain().values():
                if attr.__class__ not in _WITHOUT_SIZES:
                    _collect_size_names(attr, found)
        for shape in {v.type.shape for v in values}:
            for size in shape:
                if isinstance(size, Dim):
                    found |= size.names()
        return tuple(sorted(found))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Function) and structural_key(self) == structural_key(other))

    def __hash__(self) -> int:
        return hash(structural_key(self))


@dataclass(frozen=True, eq=False)
class Module:
    """Functions of one level: "graph", "schedule" or "tile". The first one is the entry."""

    level: str
    functions: tuple[Function, ...]
    attrs: Attrs = field(default_factory=Attrs)

    @property
    def main(self) -> Function:
        """The entry function."""
        return self.functions[0]

    def function(self, name: str) -> Function:
        """The function of this name."""
        return next(f for f in self.functions if f.name == name)

    def replace(self, *functions: Function, level: str | None = None) -> Module:
        """A copy of this module with other functions."""
        return dataclasses.replace(self, functions=functions, level=level or self.level)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Module) and structural_key(self) == structural_key(other))

    def __hash__(self) -> int:
        return hash(structural_key(self))


def structural_key(item: Function | Module, locations: bool = True) -> tuple:
    """The structure of a function or module as nested tuples; values are numbered in order of definition."""
    if isinstance(item, Module):
        functions = tuple(structural_key(f, locations) for f in item.functions)
        return (item.level, functions, _attrs_key(item.attrs))
    numbers: dict[Value, int] = {}
    loc = (item.loc,) if locations else ()
    return (item.name, _block_key(item.body, numbers, locations), _attrs_key(item.attrs), *loc)


def _block_key(block: Block, numbers: dict[Value, int], locations: bool) -> tuple:
    params = tuple(_number_value(v, numbers) for v in block.params)
    nodes = tuple(_node_key(n, numbers, locations) for n in block.nodes)
    return params, nodes, tuple(numbers[v] for v in block.results)


def _node_key(node: Node, numbers: dict[Value, int], locations: bool) -> tuple:
    args = tuple(numbers[v] for v in node.args)
    regions = tuple(_block_key(r, numbers, locations) for r in node.regions)
    results = tuple(_number_value(v, numbers) for v in node.results)
    loc = (node.loc,) if locations else ()
    return (node.op.name, args, _attrs_key(node.attrs), regions, results, *loc)


def _number_value(value: Value, numbers: dict[Value, int]) -> tuple[int, Type]:
    numbers[value] = len(numbers)
    return numbers[value], value.type


def _attrs_key(attrs: Mapping[str, Any]) -> tuple:
    return tuple((k, _attr_key(v)) for k, v in sorted(attrs.items()))


def _attr_key(value: Any) -> Any:
    """Attributes compare by type too, since 1, 1.0 and True are equal in Python; NaN equals itself."""
    if isinstance(value, Mapping):
        return ("dict", _attrs_key(value))
    if isinstance(value, tuple):
        return ("tuple", tuple(_attr_key(v) for v in value))
    return (type(value).__name__, repr(value))


def structural_hash(item: Function | Module) -> str:
    """A hash of the structure without locations: the same in every run and on every machine."""
    return hash_text(repr(structural_key(item, locations=False)))


def merge_scopes(function: Function, other: Function) -> Function:
    """A function that stands for an equal one too: its locations name the scopes of both."""
    return dataclasses.replace(function, body=_merge_block_scopes(function.body, other.body))


def _merge_block_scopes(block: Block, other: Block) -> Block:
    pairs = zip(block.nodes, other.nodes, strict=True)
    return dataclasses.replace(block, nodes=tuple([_merge_node_scopes(a, b) for a, b in pairs]))


def _merge_node_scopes(node: Node, other: Node) -> Node:
    names = node.loc.scope.split(SCOPE_SEPARATOR)
    if not node.regions and other.loc.scope in names:
        return node
    if other.loc.scope not in names:
        names = [*names, other.loc.scope] if len(names) < MAX_SCOPES else [*names[:MAX_SCOPES], "another"]
    loc = dataclasses.replace(node.loc, scope=SCOPE_SEPARATOR.join(names))
    regions = zip(node.regions, other.regions, strict=True)
    return dataclasses.replace(node, loc=loc, regions=tuple([_merge_block_scopes(a, b) for a, b in regions]))

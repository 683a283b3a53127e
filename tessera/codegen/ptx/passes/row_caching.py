"""Row caching: a program that walks its row several times keeps it in shared memory after the first time.

A softmax of rows that registers do not hold reads them three times. The rows of all programs under way are as large as
the cache of a GPU, so that each time is one from memory. Loops of the lowering walk the same blocks in the same order;
the first of the loads of a block writes it to shared memory, and the others read it there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tessera.codegen.ptx.context import VECTOR_BYTES
from tessera.codegen.ptx.ops import get_fact, index_constant, set_facts
from tessera.core.types import GLOBAL, SHARED, RefType
from tessera.ir.builder import Builder
from tessera.ir.core import Attrs, Block, Function, Node, Value
from tessera.ir.rewrite import UseDef
from tessera.lower.indexing_maps import get_shape, get_tensor_type
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import basic

LOADS = (tile.load, tile.gather)
MOST_BYTES = {"sm_80": 136 << 10, "sm_90a": 200 << 10}  # beside what threads exchange
# The same of elements of 16 bits and less: rows of twice as many bytes leave one program for a multiprocessor, which
# computes more than it moves, and two that read them again take less time (measured on an H200).
MOST_NARROW_BYTES = {"sm_80": 80 << 10, "sm_90a": 112 << 10}
LEAST_BYTES = 32 << 10  # of a row: the caches hold less for all programs under way
Key = tuple[object, ...]


@dataclass(frozen=True)
class LoadedBlock:
    """A load of a block of a row at the top of a function, or in a loop there: `column` is the loop's variable."""

    node: Node
    key: Key
    rounds: int
    column: Value | None

    @property
    def count(self) -> int:
        """The elements of all rounds."""
        return self.rounds * math.prod(get_shape(self.node.out))  # type: ignore[arg-type]


def cache_rows(function: Function) -> Function:
    """The function with the blocks that it loads several times in shared memory, where they fit there."""
    if not (function.attrs.get("peel") and get_fact(function, "noalias")) or int(function.attrs.get("group", 1)) > 1:
        return function
    found: dict[Key, list[LoadedBlock]] = {}
    for each in _list_loads(function):
        found.setdefault(each.key, []).append(each)
    repeated = [blocks for blocks in found.values() if len(blocks) > 1]
    bits = [get_tensor_type(blocks[0].node.out).dtype.bits for blocks in repeated]
    size = sum(blocks[0].count * n // 8 for blocks, n in zip(repeated, bits, strict=True))
    most = MOST_NARROW_BYTES if max(bits, default=0) <= 16 else MOST_BYTES
    if not LEAST_BYTES <= size <= most[get_fact(function, "arch")]:
        return function
    return set_facts(RowCache(function, repeated).rewrite(), cached=size)


def _list_loads(function: Function) -> Iterator[LoadedBlock]:
    """The loads of blocks of single rows from memory that the function does not write, in order."""
    uses, written = UseDef(function), tile.find_written_refs(function.body)
    for node in function.body.nodes:
        if _is_block(node, written):
            yield LoadedBlock(node, _make_key(uses, node, {}), 1, None)
        bounds = [uses.find(v, basic.full) for v in node.args[:3]] if node.op is control_flow.for_ else []
        if not bounds or None in bounds:
            continue
        start, stop, step = (int(b.attrs["value"]) for b in bounds)  # type: ignore[union-attr]
        (region,) = node.regions
        for each in region.nodes:
            if start == 0 and stop % step == 0 and _is_block(each, written) and get_shape(each.out)[-1] == step:
                key = (stop, _make_key(uses, each, {region.params[0]: "column"}))
                yield LoadedBlock(each, key, stop // step, region.params[0])


def _is_block(node: Node, written: set[Value]) -> bool:
    """Whether a node loads a block of one row, all of it, from global memory that keeps its contents."""
    if node.op not in LOADS or node.args[0] in written or node.attrs.get("edge", "error") != "error":
        return False
    ref, sizes = node.args[0].type, get_shape(node.out)
    assert isinstance(ref, RefType)
    known = all(isinstance(n, int) for n in (*sizes, *ref.shape)) and ref.policy is None and ref.dtype.bits >= 8
    whole = len(node.args) == 1 + len(ref.shape)  # no mask
    row = bool(sizes) and known and sizes[-1] > 1 and math.prod(sizes[:-1]) == 1  # type: ignore[arg-type, operator]
    return ref.space == GLOBAL and whole and row


def _make_key(uses: UseDef, node: Node, names: Mapping[Value, str]) -> Key:
    """What a node computes, in terms of parameters and names: equal keys are equal values."""

    def describe(value: Value) -> object:
        made = uses.get(value)
        if value in names or made is None or made.op.effects or made.regions:
            return names.get(value, value)
        return _make_key(uses, made, names)

    return (node.op, tuple(sorted(node.attrs.items())), *map(describe, node.args))


@dataclass
class RowCache:
    """The rewriting of a function whose loads in `repeated` are of the same blocks, group by group."""

    function: Function
    repeated: list[list[LoadedBlock]]
    builder: Builder = field(default_factory=Builder)
    memories: dict[Node, tuple[Value, LoadedBlock, bool]] = field(default_factory=dict)

    def rewrite(self) -> Function:
        """The function with the cache and a barrier behind what fills it."""
        last = max(self._find_top(blocks[0].node) for blocks in self.repeated)
        with self.builder.region() as made:
            for blocks in self.repeated:
                self._allocate(blocks)
            for place, node in enumerate(self.function.body.nodes):
                self._copy(node)
                if place == last:
                    self.builder.add(tile.barrier, [])
        body = Block(self.function.params, tuple(made), self.function.body.results)
        return Function(self.function.name, body, self.function.attrs, self.function.loc)

    def _find_top(self, node: Node) -> int:
        nodes = self.function.body.nodes
        return next(i for i, n in enumerate(nodes) if n is node or any(node in r.nodes for r in n.regions))

    def _allocate(self, blocks: list[LoadedBlock]) -> None:
        type = get_tensor_type(blocks[0].node.out)
        sizes = (*(1 for _ in type.shape[1:]), blocks[0].count)
        attrs = {"shape": sizes, "dtype": type.dtype, "space": SHARED, "alignment": VECTOR_BYTES}
        memory = self.builder.add(tile.alloc, [], attrs, loc=blocks[0].node.loc).out
        self.memories |= {each.node: (memory, each, i == 0) for i, each in enumerate(blocks)}

    def _copy(self, node: Node) -> None:
        with self.builder.at(node.loc):
            memory, each, first = self.memories.get(node, (None, None, False))
            if memory is not None and each is not None and not first:
                self._reload(memory, each)
                return
            regions = []
            for region in node.regions:
                with self.builder.region() as inner:
                    for part in region.nodes:
                        self._copy(part)
                regions.append(Block(region.params, tuple(inner), region.results))
            self.builder.append(Node(node.op, node.args, node.attrs, node.results, tuple(regions), node.loc))
            if memory is not None and each is not None:
                operands = [memory, node.out, *self._find_place(each)]
                self.builder.add(tile.store, operands, {"edge": "error", "vector": _find_vector(each)})

    def _find_place(self, each: LoadedBlock) -> list[Value]:
        zeros = [index_constant(self.builder, 0) for _ in get_shape(each.node.out)]
        return zeros if each.column is None else [*zeros[:-1], each.column]

    def _reload(self, memory: Value, each: LoadedBlock) -> None:
        attrs = {"shape": get_shape(each.node.out), "edge": "error", "vector": _find_vector(each)}
        operands = (memory, *self._find_place(each))
        self.builder.append(Node(tile.load, operands, Attrs(attrs), each.node.results, (), each.node.loc))


def _find_vector(each: LoadedBlock) -> int:
    """Blocks begin at multiples of so many elements."""
    most = VECTOR_BYTES * 8 // get_tensor_type(each.node.out).dtype.bits
    return math.gcd(most, int(get_shape(each.node.out)[-1]))  # type: ignore[call-overload]

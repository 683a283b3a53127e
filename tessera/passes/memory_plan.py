"""Memory plan: a place in one workspace for each buffer, shared by those that are never alive together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tessera.ir.core import Attrs, Block, Function, Module, Node, Value
from tessera.ops import host

ALIGNMENT = 64


@dataclass(frozen=True)
class Lifetime:
    """A buffer: its size in bytes and the first and last node that touch it."""

    buffer: Value
    size: int
    first: int
    last: int

    def meets(self, other: Lifetime) -> bool:
        """Whether both are alive at some time."""
        return self.first <= other.last and other.first <= self.last


def memory_plan(module: Module) -> Module:
    """A Schedule module whose buffers have offsets, and whose entry says how large the workspace is."""
    main = module.main
    offsets = place(lifetimes(main.body))
    nodes = tuple(_planned(n, offsets) for n in main.body.nodes)
    size = max((o + _bytes(v) for v, o in offsets.items()), default=0)
    attrs = Attrs({**main.attrs, "workspace": size})
    body = Block(main.params, nodes, main.results)
    return module.replace(Function(main.name, body, attrs, main.loc), *module.functions[1:])


def lifetimes(block: Block) -> list[Lifetime]:
    """The buffers of an entry function; views belong to the buffer they see."""
    owner: dict[Value, Value] = {}
    touched: dict[Value, list[int]] = {}
    for number, node in enumerate(block.nodes):
        if node.op is host.alloc:
            owner[node.out], touched[node.out] = node.out, []
        for value in node.args:
            if value in owner:
                touched[owner[value]].append(number)
                owner.update(dict.fromkeys(node.results, owner[value]))
    return [Lifetime(v, _bytes(v), min(at), max(at)) for v, at in touched.items() if at]


def place(found: Sequence[Lifetime]) -> dict[Value, int]:
    """An offset for each buffer: the largest first, each at the lowest place free throughout its life."""
    offsets: dict[Value, int] = {}
    placed: list[Lifetime] = []
    for each in sorted(found, key=lambda life: (-life.size, life.first)):
        taken = sorted((offsets[p.buffer], p.size) for p in placed if p.meets(each))
        offset = 0
        for start, size in taken:
            if offset + each.size <= start:
                break
            offset = max(offset, start + size)
        offsets[each.buffer] = offset
        placed.append(each)
    return offsets


def _bytes(value: Value) -> int:
    size = math.prod(int(n) for n in value.type.shape) * value.type.dtype.numpy.itemsize
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT


def _planned(node: Node, offsets: dict[Value, int]) -> Node:
    if node.op is not host.alloc or node.out not in offsets:
        return node
    return replace(node, attrs=Attrs({**node.attrs, "offset": offsets[node.out]}))

"""Memory ops: blocks and single elements loaded and stored, buffers, copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tessera.codegen.ptx.blocks.slots import put
from tessera.codegen.ptx.entries.unload import Unload
from tessera.codegen.ptx.layout import Layout, spread
from tessera.codegen.ptx.memory import Memory, Run, block_runs, read, write
from tessera.codegen.ptx.passes.infer import sizes
from tessera.codegen.ptx.room import LOCAL, SHARED
from tessera.codegen.ptx.team import both
from tessera.codegen.ptx.types import size
from tessera.codegen.ptx.visit import visit
from tessera.ir.core import Node, Value
from tessera.ops import tile
from tessera.types import SHARED as SHARED_SPACE

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel


@visit(tile.alloc)
def _(kernel: Kernel, node: Node) -> None:
    dtype = node.attrs["dtype"]
    count = size(dtype)
    for n in node.attrs["shape"]:
        count *= int(n)
    # What one tile alone sees is its team's: shared memory, or of one thread its own.
    own = node.attrs["space"] != SHARED_SPACE and kernel.team.threads == 1
    offset = kernel.room.local(count) if own else kernel.room.shared(count, node.attrs["alignment"])
    base = kernel.text.let("mov.u64", "b64", LOCAL if own else SHARED)
    base = kernel.text.let("add.s64", "b64", base, offset) if offset else base
    shape = tuple(int(n) for n in node.attrs["shape"])
    kernel.memories[node.out] = Memory(dtype, "local" if own else "shared", base, shape)


@visit(tile.load)
def _(kernel, node):
    m, rest = kernel.memories[node.args[0]], node.args[1:]
    rank, layout = len(m.shape), kernel.layout(node.out)
    mask = spread_to(kernel, rest[rank], layout) if rest[rank:] else ()
    other = spread_to(kernel, rest[rank + 1], layout) if rest[rank + 1 :] else ()
    runs = block_runs(kernel, m, rest[:rank], layout, node.attrs["edge"] == "clip", mask, once=False)
    kernel.values[node.out] = read(kernel, m, runs, other)


@visit(tile.store)
def _(kernel, node):
    ref, value, *rest = node.args
    if node in kernel.unloads:
        Unload(kernel, node, kernel.unloads[node]).run()
        return
    layout = kernel.layout(value)
    if ref not in kernel.memories:
        put(kernel, kernel.slots[ref], kernel.one(rest[0]), value)
        return
    m = kernel.memories[ref]
    rank = len(m.shape)
    mask = spread_to(kernel, rest[rank], layout) if rest[rank:] else ()
    runs = block_runs(kernel, m, rest[:rank], layout, node.attrs["edge"] == "clip", mask, once=True)
    write(kernel, m, runs, kernel.values[value])


def spread_to(kernel: Kernel, v: Value, layout: Layout) -> tuple[str, ...]:
    """The elements of a block that is broadcast, one for each register of the whole."""
    theirs, held = kernel.layout(v), kernel.values[v]
    missing = len(layout.shape) - len(theirs.shape)
    return tuple(
        held[theirs.index[tuple(0 if n == 1 else at for n, at in zip(theirs.shape, place[missing:], strict=True))]]
        for place in layout.offsets
    )


def points(
    kernel: Kernel, m: Memory, indices: Sequence[Value], mask: Value | None, layout: Layout, once: bool
) -> list[Run]:
    """The place of each single element at blocks of indices."""
    text = kernel.text
    places = [spread_to(kernel, v, layout) for v in indices]
    wide: dict[tuple[Value, str], str] = {}
    masks = spread_to(kernel, mask, layout) if mask is not None else ("",) * layout.count
    owner = kernel.team.owner(layout) if once else ""
    runs = []
    for i in range(layout.count):
        address = m.base
        for v, step, at in zip(indices, m.steps, (p[i] for p in places), strict=True):
            if (v, at) not in wide:
                narrow = v.type.dtype.bits < 64 and at.startswith("%")
                form = "u32" if v.type.dtype.kind == "uint" else "s32"
                wide[v, at] = text.let(f"cvt.s64.{form}", "b64", at) if narrow else at
            address = text.let("mad.lo.s64", "b64", wide[v, at], step, address)
        guard = both(text, owner, *kernel.team.inside(layout, layout.offsets[i]), masks[i])
        runs.append(Run(i, 1, address, 0, (guard,)))
    return runs


@visit(tile.gather)
def _(kernel, node):
    m, rest = kernel.memories[node.args[0]], node.args[1:]
    rank, layout = len(m.shape), kernel.layout(node.out)
    runs = points(kernel, m, rest[:rank], rest[rank] if rest[rank:] else None, layout, once=False)
    other = spread_to(kernel, rest[rank + 1], layout) if rest[rank + 1 :] else ()
    kernel.values[node.out] = read(kernel, m, runs, other)


@visit(tile.scatter)
def _(kernel, node):
    ref, value, *rest = node.args
    m, rank = kernel.memories[ref], node.args[0].type.rank
    layout = whole(kernel, (value, *rest[:rank]))
    runs = points(kernel, m, rest[:rank], rest[rank] if rest[rank:] else None, layout, once=True)
    write(kernel, m, runs, spread_to(kernel, value, layout))


def whole(kernel: Kernel, blocks: Sequence[Value]) -> Layout:
    """The layout of what blocks are broadcast to, of which each has its part."""
    rank = max(len(sizes(v)) for v in blocks)
    shape = tuple(max(s) for s in zip(*((1,) * (rank - v.type.rank) + sizes(v) for v in blocks), strict=True))
    full = next((kernel.layout(v) for v in blocks if sizes(v) == shape), None)
    return full or spread(shape, kernel.team.threads, kernel.vector)

"""Blocks that lie in memory as they are: a pointer and strides in place of a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.codegen.llvm.element import placed
from tessera.codegen.llvm.lane import Body, Lane
from tessera.codegen.llvm.memory import address, pointer
from tessera.codegen.llvm.scratch import Memory
from tessera.ir.core import Value
from tessera.op import Rules
from tessera.ops import basic, shape, tile

if TYPE_CHECKING:
    from tessera.codegen.llvm.kernel import Kernel

views = Rules("llvm view")


def view_of(kernel: Kernel, v: Value) -> Memory | None:
    """The memory in which a block's elements lie unconverted, if there is such."""
    held = kernel.buffers.get(v)
    if held is not None:
        return held if held.dtype == v.type.dtype else None
    rule = views.get(kernel.producers[v].op) if v in kernel.producers else None
    return rule(kernel, kernel.producers[v]) if rule is not None else None


def offset(kernel: Kernel, m: Memory, index: list[Lane]) -> str:
    """The address of an element."""
    body = Body(kernel)
    return pointer(body, m, address(body, m, tuple(index)))


@views(tile.load)
def _(kernel, node):
    ref, rest = node.args[0], node.args[1:]
    m, starts = kernel.memories[ref], rest[: ref.type.rank]
    clip = node.attrs["edge"] == "clip" and kernel.ranges.loose(starts, node.attrs["shape"], m.shape)
    if clip or len(rest) > ref.type.rank:
        return None
    here = placed(Body(kernel), starts, tuple(Lane("0") for _ in starts))
    return m.at(offset(kernel, m, list(here)), m.strides, node.attrs["shape"])


@views(shape.permute)
def _(kernel, node):
    inner = view_of(kernel, node.args[0])
    if inner is None:
        return None
    axes = node.attrs["axes"]
    return inner.at(inner.base, tuple(inner.strides[a] for a in axes), tuple(inner.shape[a] for a in axes))


@views(shape.reshape)
def _(kernel, node):
    here, there = node.args[0].type.shape, node.attrs["shape"]
    inner = view_of(kernel, node.args[0])
    if inner is None or [n for n in here if n != 1] != [n for n in there if n != 1]:
        return None
    held = iter(s for s, n in zip(inner.strides, here, strict=True) if n != 1)
    return inner.at(inner.base, tuple(next(held) if n != 1 else 0 for n in there), there)


@views(basic.broadcast_to)
def _(kernel, node):
    inner = view_of(kernel, node.args[0])
    if inner is None:
        return None
    there = node.attrs["shape"]
    strides = tuple(s if n != 1 else 0 for s, n in zip(inner.strides, inner.shape, strict=True))
    return inner.at(inner.base, (0,) * (len(there) - len(strides)) + strides, there)

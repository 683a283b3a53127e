"""Strided views: blocks read in place instead of copied, with the number of elements of each axis within bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tessera.codegen.llvm.table.loop_fusion import offset_index
from tessera.codegen.llvm.text.builder import LaneValue, LoopBody
from tessera.codegen.llvm.text.memory import StridedMemRef, compute_address, emit_pointer
from tessera.core.symbolic_dim import Dim
from tessera.ir.core import Value
from tessera.ir.rules import Rules
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic, shape

if TYPE_CHECKING:
    from tessera.codegen.llvm.text.kernel_context import LlvmKernelContext


@dataclass(frozen=True)
class ClippedView:
    """The memory of a block, and for each axis an i64 operand: so many elements of it are within bounds."""

    memory: StridedMemRef
    limits: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        """Whether every element is known to be within bounds."""
        return self.is_whole_but_for(0)

    def is_whole_but_for(self, count: int) -> bool:
        """Whether every element is known to be within bounds along all but the last axes."""
        end = len(self.limits) - count
        return self.limits[:end] == tuple(map(str, self.memory.shape[:end]))


view_rule = Rules("llvm view")


def find_clipped_view(kernel: LlvmKernelContext, v: Value) -> ClippedView | None:
    """The memory that holds a block's elements in its own dtype, or None."""
    stored = kernel.buffers.get(v)
    if stored is not None:
        return _view_whole(stored) if stored.dtype == v.type.dtype else None  # type: ignore[union-attr]
    rule = view_rule.get(kernel.producers[v].op) if v in kernel.producers else None
    return rule(kernel, kernel.producers[v]) if rule is not None else None


def find_view(kernel: LlvmKernelContext, v: Value) -> StridedMemRef | None:
    """The memory that holds all elements of a block in its own dtype, or None."""
    found = find_clipped_view(kernel, v)
    return found.memory if found is not None and found.is_whole else None


def _view_whole(memory: StridedMemRef) -> ClippedView:
    return ClippedView(memory, tuple(map(str, memory.shape)))


def emit_element_pointer(kernel: LlvmKernelContext, m: StridedMemRef, index: Sequence[LaneValue]) -> str:
    """The address of an element."""
    body = LoopBody(kernel)
    return emit_pointer(body, m, compute_address(body, m, tuple(index)))


@view_rule(tile.load)
def _(kernel, node):
    ref, rest = node.args[0], node.args[1:]
    m, starts, block = kernel.memrefs[ref], rest[: ref.type.rank], node.attrs["shape"]
    clipped = kernel.ranges.find_unproven_axes(starts, block, m.shape) if node.attrs["edge"] == "clip" else ()
    if len(rest) > ref.type.rank or any(kernel.ranges.of(starts[a])[0] < 0 for a in clipped):
        return None
    origin = offset_index(LoopBody(kernel), starts, tuple(LaneValue("0") for _ in starts))
    limits = [_emit_limit(kernel, m.shape[a], origin[a]) if a in clipped else str(n) for a, n in enumerate(block)]
    return ClippedView(m.at(emit_element_pointer(kernel, m, origin), m.strides, block), tuple(limits))


def _emit_limit(kernel: LlvmKernelContext, size: Any, start: LaneValue) -> str:
    """The elements of an axis from a start on."""
    end = kernel.sizes.find(size) if isinstance(size, Dim) else str(size)
    return kernel.text.let(f"sub i64 {end}, {start.name}", "limit")


@view_rule(shape.permute)
def _(kernel, node):
    inner = find_clipped_view(kernel, node.args[0])
    if inner is None:
        return None
    axes, m = node.attrs["axes"], inner.memory
    turned = m.at(m.base, tuple(m.strides[a] for a in axes), tuple(m.shape[a] for a in axes))
    return ClippedView(turned, tuple(inner.limits[a] for a in axes))


@view_rule(shape.reshape)
def _(kernel, node):
    sizes, to = node.args[0].type.shape, node.attrs["shape"]
    inner = find_clipped_view(kernel, node.args[0])
    if inner is None or [n for n in sizes if n != 1] != [n for n in to if n != 1]:
        return None
    if any(n == 1 and limit != "1" for n, limit in zip(sizes, inner.limits, strict=True)):
        return None
    kept = [a for a, n in enumerate(sizes) if n != 1]
    strides, limits = (iter([x[a] for a in kept]) for x in (inner.memory.strides, inner.limits))
    m = inner.memory.at(inner.memory.base, tuple(next(strides) if n != 1 else 0 for n in to), to)
    return ClippedView(m, tuple(next(limits) if n != 1 else "1" for n in to))


@view_rule(basic.broadcast_to)
def _(kernel, node):
    inner = find_view(kernel, node.args[0])
    if inner is None:
        return None
    to = node.attrs["shape"]
    strides = tuple(s if n != 1 else 0 for s, n in zip(inner.strides, inner.shape, strict=True))
    return _view_whole(inner.at(inner.base, (0,) * (len(to) - len(strides)) + strides, to))

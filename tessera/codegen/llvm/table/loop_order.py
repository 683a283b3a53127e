"""Loop interchange: which axis of a block is contiguous in the memory that its elements are read from.

The innermost loop of a nest is vectorised; along another axis each vector register is a gather.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tessera.codegen.legality import static_shape
from tessera.ir.core import Node, Value
from tessera.ir.rules import Rules
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic, shape

if TYPE_CHECKING:
    from tessera.codegen.llvm.text.kernel_context import LlvmKernelContext

# The axis of the block at hand that each axis of a value is; None where it is none of them.
AxisMap = tuple[int | None, ...]
# rule(node, axes) gives the axis map of the first operand of a node that moves elements.
movement_rules = Rules("llvm axis map")


def count_gathers(kernel: LlvmKernelContext, v: Value) -> Counter[int]:
    """For each axis of a value of rank > 0, the number of reads that are gathers where lanes run along it.

    A read is none if it is contiguous along the axis, or does not depend on it.
    """
    found: Counter[int] = Counter()
    seen: set[tuple[Value, AxisMap]] = set()
    work: list[tuple[Value, AxisMap]] = [(v, tuple(range(len(static_shape(v.type)))))]
    while work:
        value, axes = work.pop()
        if (value, axes) in seen or not axes or value in kernel.scalars:
            continue
        seen.add((value, axes))
        node = kernel.producers.get(value)
        if value in kernel.buffers or (node is not None and node.op is tile.load):
            found.update(_find_strided_axes(value, axes))
        elif node is not None:
            work += [(x, _map_operand(node, x, axes)) for x in node.args]
    return found


def _find_strided_axes(value: Value, axes: AxisMap) -> list[int]:
    """The axes along which the memory of a value is strided: all but the last of those of more than one element."""
    long = [a for a, n in zip(axes, static_shape(value.type), strict=True) if n != 1]
    return [a for a in long[:-1] if a is not None]


def _map_operand(node: Node, x: Value, axes: AxisMap) -> AxisMap:
    rule = movement_rules.get(node.op)
    if rule is not None:
        return rule(node, axes)  # type: ignore[no-any-return]
    return axes if node.op.pointwise and static_shape(x.type) == static_shape(node.out.type) else ()


@movement_rules(shape.permute)
def _(node, axes):
    order: Sequence[int] = node.attrs["axes"]
    return tuple(axes[order.index(a)] for a in range(len(order)))


@movement_rules(basic.broadcast_to)
def _(node, axes):
    return axes[len(axes) - node.args[0].type.rank :]


@movement_rules(shape.reshape)
def _(node, axes):
    before, after = node.args[0].type.shape, node.out.type.shape
    if [n for n in before if n != 1] != [n for n in after if n != 1]:
        return ()
    long = iter(a for a, n in zip(axes, after, strict=True) if n != 1)
    return tuple(None if n == 1 else next(long) for n in before)

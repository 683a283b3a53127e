"""Loop nests over a block: outer axes as loops, the innermost one in vectors with a masked rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tessera.codegen.blocks import sizes
from tessera.codegen.llvm.element import value_at
from tessera.codegen.llvm.lane import ZERO, Body, Index, Kind, Lane, ones
from tessera.codegen.llvm.memory import store
from tessera.codegen.llvm.scratch import Memory, fit
from tessera.codegen.llvm.text import Loop
from tessera.codegen.llvm.types import size
from tessera.ir.core import Value
from tessera.types import DType

if TYPE_CHECKING:
    from tessera.codegen.llvm.kernel import Kernel

Visit = Callable[[Body, Index], None]


def lanes_for(kernel: Kernel, *dtypes: DType) -> int:
    """How many elements a vector holds, by the widest type among them (at least 4 bytes)."""
    return kernel.vector_bytes // max([4, *(size(t) for t in dtypes)])


def nest(kernel: Kernel, shape: Sequence[int], width: int, visit: Visit) -> None:
    """Call `visit(body, index)` where the code for each register's worth of a block goes."""
    if 0 in shape:
        return
    axes = [a for a, n in enumerate(shape) if n != 1]
    walk(
        kernel,
        shape,
        axes[:-1],
        [ZERO] * len(shape),
        lambda index: _innermost(kernel, shape, axes[-1:], width, index, visit),
    )


def walk(kernel: Kernel, shape: Sequence[int], axes: Sequence[int], index: list[Lane], inside: Callable) -> None:
    """Scalar loops over some axes, around what `inside(index)` emits."""
    if not axes:
        inside(index)
        return
    first, *rest = axes
    with Loop(kernel.text, "0", str(shape[first])) as loop:
        here = [*index]
        here[first] = Lane(loop.index)
        walk(kernel, shape, rest, here, inside)


def _innermost(
    kernel: Kernel, shape: Sequence[int], axes: list[int], width: int, index: list[Lane], visit: Visit
) -> None:
    if not axes:
        visit(Body(kernel), tuple(index))
        return
    (axis,) = axes
    if width == 1:
        walk(kernel, shape, axes, index, lambda here: visit(Body(kernel), tuple(here)))
        return
    before, outer = kernel.text.section(), dict[object, Lane]()
    for start, stop, step, mask in stretches(shape[axis], fit(width, shape[axis])):
        with Loop(kernel.text, start, stop, step) as loop:
            visit(Body(kernel, step, mask, before, outer), ramped(index, axis, loop.index, step))


def stretches(count: int, width: int) -> list[tuple[str, str, int, str | None]]:
    """An axis as whole vectors and, masked, the rest: (start, stop, step, mask)."""
    full = count // width * width
    whole = [("0", str(full), width, None)] if full else []
    rest = [(str(full), str(count), width, ones(width, count - full))] if count > full else []
    return [*whole, *rest]


def ramped(index: Sequence[Lane], axis: int, base: str, width: int) -> Index:
    """An index whose elements run along one axis from `base`, a multiple of the width."""
    here = [*index]
    here[axis] = Lane(base, Kind.RAMP, width)
    return tuple(here)


def fill(kernel: Kernel, v: Value, target: Memory) -> None:
    """Compute a block into a memory."""
    width = lanes_for(kernel, v.type.dtype)
    nest(kernel, sizes(v.type), width, lambda body, index: store(body, target, index, value_at(body, v, index)))

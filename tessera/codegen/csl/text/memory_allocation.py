"""Memory allocation: assigns IR values to arrays of the PE, and reuses an array after the last use of its values."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tessera.codegen.csl.text.context import CslContext
from tessera.codegen.csl.text.dsd import (
    CSL_TYPES,
    PeArray,
    PeArrayView,
    count_elements,
    make_row_major_strides,
    spell_type,
)
from tessera.core.types import TensorType
from tessera.ir.core import Value

# The memory of a PE, and the part that arrays may use: code and stack need the rest.
PE_MEMORY_BYTES, ARRAY_MEMORY_BYTES = 48 * 1024, 40 * 1024


def declare_array(ctx: CslContext, ref: Value, shape: Sequence[int]) -> PeArray:
    """Declare the array of a tensor that the host copies."""
    buffer = PeArray(export_symbol(ctx, ref), CSL_TYPES[ref.type.dtype], max(count_elements(shape), 1))
    ctx.buffers.append(buffer)
    ctx.symbols[ref] = buffer
    return buffer


def export_symbol(ctx: CslContext, ref: Value) -> str:
    """Choose the exported name of a tensor."""
    name = "host_" + re.sub(r"\W", "_", ref.hint, flags=re.ASCII)  # a part of a container has a hint such as `x.0`
    ctx.exported[ref] = name if name not in ctx.exported.values() else f"{name}_{next(ctx.names)}"
    return ctx.exported[ref]


def export_in_place(ctx: CslContext, ref: Value, view: PeArrayView) -> bool:
    """Export the array of a value as an output tensor, which saves a copy; False if the array is not its own."""
    buffer = view.buffer
    if buffer is None or buffer in ctx.symbols.values() or not view.contiguous or buffer.size != max(view.size, 1):
        return False
    export_symbol(ctx, ref)
    ctx.symbols[ref] = buffer  # exported arrays are never reused
    return True


def allocate_for(ctx: CslContext, type: TensorType) -> PeArrayView:
    """Allocate an array for a value of a tensor type."""
    shape, element_type = tuple(map(int, type.shape)), spell_type(type)
    return allocate_array(ctx, shape, element_type)


def allocate_array(ctx: CslContext, shape: tuple[int, ...], element_type: str) -> PeArrayView:
    """Allocate an array: the smallest free one that fits (best fit), else a new one."""
    size = max(count_elements(shape), 1)
    fitting = [b for b in ctx.free_arrays if b.type == element_type and b.size >= size]
    if fitting:
        buffer = min(fitting, key=lambda b: b.size)
        ctx.free_arrays.remove(buffer)
    else:
        buffer = PeArray(f"t{next(ctx.names)}", element_type, size)
        ctx.buffers.append(buffer)
    return PeArrayView(element_type, shape, buffer, 0, make_row_major_strides(shape))


def bind_value(ctx: CslContext, value: Value, view: PeArrayView) -> None:
    """Bind a value to a view, and count the reference to its array."""
    ctx.values[value] = view
    if view.buffer is not None:
        ctx.reference_counts[view.buffer] = ctx.reference_counts.get(view.buffer, 0) + 1


def drop_value(ctx: CslContext, value: Value) -> None:
    """Unbind a value after its last use; free its array with the last reference."""
    view = ctx.values.pop(value, None)
    if view is not None and view.buffer is not None:
        ctx.reference_counts[view.buffer] -= 1
        if not ctx.reference_counts[view.buffer] and view.buffer not in ctx.symbols.values():
            ctx.free_arrays.append(view.buffer)


def can_reuse(ctx: CslContext, value: Value, view: PeArrayView, element_type: str) -> bool:
    """Whether a result may overwrite the array of an operand: it is contiguous, not exported, and not used again."""
    holders = 2 if value in ctx.params else 1  # a loop parameter shares its array with the loop's result
    own = view.buffer is not None and view.contiguous and view.type == element_type
    if not own or view.buffer in ctx.symbols.values():
        return False
    return value in ctx.last_used_values and ctx.reference_counts.get(view.buffer) == holders  # type: ignore[arg-type]


def pin_view(ctx: CslContext, view: PeArrayView) -> None:
    """Keep an array allocated while an asynchronous send reads it."""
    if view.buffer is not None:
        ctx.reference_counts[view.buffer] = ctx.reference_counts.get(view.buffer, 0) + 1
        ctx.pinned_views.append(view)


def unpin_views(ctx: CslContext) -> None:
    """Release all pinned arrays: their sends are complete."""
    for view in ctx.pinned_views:
        assert view.buffer is not None
        ctx.reference_counts[view.buffer] -= 1
        if view.buffer not in ctx.symbols.values():
            release_view(ctx, view)
    ctx.pinned_views.clear()


def release_view(ctx: CslContext, view: PeArrayView) -> None:
    """Free the array of a view unless a value refers to it."""
    if view.buffer is not None and not ctx.reference_counts.get(view.buffer):
        ctx.free_arrays.append(view.buffer)

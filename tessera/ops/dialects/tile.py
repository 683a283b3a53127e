"""Tile dialect: ids, memory, asynchronous copies, barriers, group exchange, assertions, prints and debugger stops."""

from __future__ import annotations

import math
from typing import Any

from tessera.core.errors import DTypeError, ShapeError
from tessera.core.shapes import broadcast, format_shape
from tessera.core.types import SHARED, SPACES, DType, RefType, TensorType, Type, f32, int64, scalar
from tessera.ir.analysis import interval_rules
from tessera.ir.rules import STORAGE, op
from tessera.ops.dialects.control_flow import refuse_direct_call

# Diagnostics: assertions and prints of a running kernel.


def _infer_check(condition: TensorType, *values: TensorType, message: str) -> None:
    if condition.dtype.kind != "bool":
        raise DTypeError(
            "the condition of an assertion is not bool", expected="bool", received=str(condition),
            suggestion="compare: tile.assert_(x > 0)",
        )  # fmt: skip


@op(infer=_infer_check, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile", effects=("io",), name="assert")
def assert_(condition, *values, message: str = ""):
    """Stop the program if an element of the bool block `condition` is false.

    The error names the first such program, tile and element, and the `values` there. Inactive tiles assert nothing.
    """


def _infer_print(*values: TensorType, label: str, ordered: bool) -> None:
    return None


@op(infer=_infer_print, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile", effects=("io",), name="print")
def print_(*values, label: str = "", ordered: bool = False):
    """Print `values`, one line for each active tile, in the order of programs and then tiles.

    The label precedes them; with `ordered` each `{}` in the label is replaced by one of them.
    """


def _infer_line(*values: Type, names: tuple, known: tuple, function: str, depth: int) -> None:
    return None


@op(infer=_infer_line, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile", effects=("io",), name="line")
def line(*values, names: tuple, known: tuple, function: str, depth: int):
    """The source line that runs next, for a debugger; only kernels compiled for stepping contain these.

    `names` are those of `values`, `known` the variables known while compiling as (name, text); `depth` counts the calls
    between the kernel and `function`.
    """


def _infer_pause(condition: TensorType, *values: Type, names: tuple, known: tuple, function: str, depth: int) -> None:
    _infer_check(condition, message="")


@op(infer=_infer_pause, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile", effects=("io",), name="pause")
def pause(condition, *values, names: tuple, known: tuple, function: str, depth: int):
    """Stop in the debugger if the bool scalar `condition` holds; the attributes are those of `line`."""


# Exchange of registers between the tiles of a group: the ops from which the warp functions are composed.
#
# Tiles of consecutive `local_id` form segments of `width` tiles; `width` divides the size of the group. Either all
# tiles of a segment execute such an op together, or none of them does.


def _check_width(width: int) -> None:
    if width < 1:
        raise ShapeError("a segment has at least one tile", received=str(width))


def _infer_collect(x: TensorType, *, width: int) -> TensorType:
    _check_width(width)
    return x.with_shape((width, *x.shape))


@op(infer=_infer_collect, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile")
def collect(x, *, width: int = 1):
    """The values `x` of all tiles in this tile's segment: element i of the new first axis is that of tile i."""


def _infer_exchange(x: TensorType, lane: TensorType, *, width: int) -> TensorType:
    _check_width(width)
    if lane.rank or not lane.dtype.is_integer:
        raise DTypeError("a lane is an integer scalar", expected="int64", received=str(lane))
    return x


def _infer_meet(*, width: int) -> None:
    _check_width(width)


@op(infer=_infer_meet, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile", effects=("memory",))
def meet(*, width: int = 1):
    """Wait for the tiles of this tile's segment; their earlier writes are then visible to all of them."""


@op(infer=_infer_exchange, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile")
def exchange(x, lane, *, width: int = 1):
    """The value `x` of the tile with number `lane` (modulo `width`) in this tile's segment."""


# The ops of the Tile level: ids, memory, asynchronous copies, barriers.
#
# A tile program runs once for each point of a grid and, within that, once for each tile of a group.
# A ref names memory; a ref and one int64 index for each axis are an address. The operands after these are optional:
# the mask, then for loads the value read where the mask is false.


INDEX_TYPE = scalar(int64)
MEMORY_EFFECTS = ("memory",)


def _infer_index(**_: Any) -> TensorType:
    return INDEX_TYPE


@op(infer=_infer_index, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile")
def program_id(*, axis: int = 0):
    """This program's index along one grid axis (int64)."""


@op(infer=_infer_index, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile")
def grid_size(*, axis: int = 0):
    """The number of programs along one grid axis (int64)."""


@op(infer=_infer_index, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile")
def local_id():
    """This tile's index in its group (int64); 0 if the group has one tile."""


@op(infer=_infer_index, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile")
def group_size():
    """The number of tiles in a group (int64)."""


@interval_rules(program_id)
def _(analysis, node):
    axis, grid = node.attrs["axis"], analysis.grid
    return (0, math.inf) if grid is None else (0, (grid[axis] if axis < len(grid) else 1) - 1)


@interval_rules(local_id)
def _(analysis, node):
    return 0, math.inf


@interval_rules(grid_size, group_size)
def _(analysis, node):
    return 1, math.inf


def _check_indices(ref: RefType, indices: tuple[TensorType, ...]) -> None:
    if len(indices) < ref.rank:
        raise ShapeError(f"{ref.rank} indices are needed, received {len(indices)} came", received=str(ref))
    for each in indices[: ref.rank]:
        if not each.dtype.is_integer:
            raise DTypeError("an index is not an integer", expected="int64", received=str(each))


def _check_mask(mask: TensorType, shape: tuple) -> None:
    fits = mask.rank in (0, len(shape)) and broadcast(mask.shape, shape) == tuple(shape)
    if mask.dtype.kind != "bool" or not fits:
        raise ShapeError("the mask does not fit the block", expected=f"bool {format_shape(shape)}", received=str(mask))


def _infer_load(ref: RefType, *rest: TensorType, shape: tuple[int, ...], edge: str, vector: int) -> TensorType:
    _check_indices(ref, rest)
    if len(shape) != ref.rank:
        raise ShapeError(f"the block has rank {len(shape)}, the memory rank {ref.rank}")
    if rest[ref.rank :]:
        _check_mask(rest[ref.rank], shape)
    return ref.block(shape)


@op(infer=_infer_load, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile", effects=("read",))
def load(ref, *rest, shape: tuple, edge: str = "error", vector: int = 1):
    """The block of `shape` that starts at the given indices: load(ref, *starts, [mask, [other]]).

    Elements outside the memory are an error where `edge` is "error", unless masked off; with
    "clip" they read as `other` (0 when not given), and so do elements whose mask is false. The block begins at a
    multiple of `vector` elements, counted from the memory's first.
    """


def _infer_store(ref: RefType, value: TensorType, *rest: TensorType, edge: str, vector: int) -> None:
    _check_indices(ref, rest)
    if value.dtype != ref.dtype:
        raise DTypeError(
            f"cannot store {value.dtype} into {ref.dtype}",
            expected=str(ref.dtype),
            received=str(value),
            suggestion=f"cast first: tile.cast(value, ts.{ref.dtype})",
        )
    if value.rank != ref.rank:
        raise ShapeError(f"a block of rank {value.rank} cannot be stored into memory of rank {ref.rank}")
    if rest[ref.rank :]:
        _check_mask(rest[ref.rank], value.shape)


@op(infer=_infer_store, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile", effects=("write",))
def store(ref, value, *rest, edge: str = "error", vector: int = 1):
    """Write the block `value` at the given indices: store(ref, value, *starts, [mask]).

    Elements outside the memory are an error where `edge` is "error", unless masked off; "clip" drops them. The
    block begins at a multiple of `vector` elements, as for `load`.
    """


def _gather_shape(ref: RefType, rest: tuple[TensorType, ...]) -> tuple:
    _check_indices(ref, rest)
    return broadcast(*(t.shape for t in rest[: ref.rank + 1]))


def _infer_gather(ref: RefType, *rest: TensorType) -> TensorType:
    return ref.block(_gather_shape(ref, rest))


@op(infer=_infer_gather, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile", effects=("read",))
def gather(ref, *rest):
    """The elements at blocks of indices, broadcast together: gather(ref, *indices, [mask, [other]])."""


def _infer_scatter(ref: RefType, value: TensorType, *rest: TensorType) -> None:
    shape = _gather_shape(ref, rest)
    if value.dtype != ref.dtype or broadcast(value.shape, shape) != shape:
        raise ShapeError("the value does not fit", expected=f"{format_shape(shape)} {ref.dtype}", received=str(value))


@op(infer=_infer_scatter, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile", effects=("write",))
def scatter(ref, value, *rest):
    """Write elements at blocks of indices: scatter(ref, value, *indices, [mask]). Equal indices are undefined."""


ATOMIC_KINDS = ("add", "max", "min", "and", "or", "xor", "exchange")


def _infer_atomic(ref: RefType, value: TensorType, *rest: TensorType, kind: str) -> TensorType:
    if kind not in ATOMIC_KINDS:
        raise ShapeError(f'"{kind}" is not an atomic update', expected=", ".join(ATOMIC_KINDS))
    if kind in ("and", "or", "xor"):
        _check_integer(ref, kind)
    return ref.block(_gather_shape(ref, rest))


def _check_integer(ref: RefType, what: str) -> None:
    if not ref.dtype.is_integer:
        raise DTypeError(f"an atomic {what} needs integers", expected="int32 or int64", received=str(ref))


@op(infer=_infer_atomic, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile", effects=("read", "write"))
def atomic(ref, value, *rest, kind: str = "add"):
    """Update memory with `value` atomically; the result is the previous value.

    `kind` is "add", "max", "min", "exchange", or for integers "and", "or", "xor". Updates of one
    element are serialised in an undefined order.
    """


def _infer_compare(ref: RefType, value: TensorType, expected: TensorType, *rest: TensorType) -> TensorType:
    _check_integer(ref, "compare-and-exchange")
    return ref.block(_gather_shape(ref, rest))


@op(infer=_infer_compare, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile", effects=("read", "write"))
def compare_exchange(ref, value, expected, *rest):
    """Store `value`, atomically, where memory holds the integer `expected`; the result is the previous value.

    As for `atomic`: compare_exchange(ref, value, expected, *indices, [mask]).
    """


def _infer_alloc(*, shape: tuple, dtype: DType, space: str, alignment: int, swizzle: str, padding: int) -> RefType:
    if space not in SPACES[1:]:
        raise ShapeError(f'"{space}" is not a space to allocate in', expected="shared or register")
    return RefType(tuple(shape), dtype, space)


@op(infer=_infer_alloc, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile", effects=MEMORY_EFFECTS)
def alloc(
    *, shape: tuple, dtype: DType = f32, space: str = SHARED, alignment: int = 16, swizzle: str = "", padding: int = 0
):
    """Uninitialised memory: one buffer for the group ("shared") or one for each tile ("register").

    `alignment` (bytes), `swizzle` and `padding` (elements unused after each row) are its layout.
    """


def _infer_copy(dst: RefType, src: RefType, *starts: TensorType, shape: tuple, edge: str) -> None:
    if dst.dtype != src.dtype:
        raise DTypeError(f"cannot copy {src.dtype} into {dst.dtype}")
    if len(starts) != dst.rank + src.rank:
        raise ShapeError(f"{dst.rank + src.rank} starts are needed, received {len(starts)} came")


@op(infer=_infer_copy, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile", effects=("read", "write", "async"))
def async_copy(dst, src, *starts, shape: tuple, edge: str = "error"):
    """Start an asynchronous copy of a block: async_copy(dst, src, *dst_starts, *src_starts).

    `shape` is that of the block; the side of lower rank lacks leading axes of size 1. The copy is complete after a wait
    for its group. "clip" fills elements outside the source with 0.
    """


def _infer_nothing(**_: Any) -> None:
    return None


@op(infer=_infer_nothing, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile", effects=("async",))
def async_commit():
    """Commit the copies started since the last commit as a group."""


@op(infer=_infer_nothing, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile", effects=("async",))
def async_wait(*, pending: int = 0):
    """Wait until at most `pending` committed groups are incomplete."""


@op(infer=_infer_nothing, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile", effects=MEMORY_EFFECTS)
def barrier():
    """Wait for every tile of the group; their earlier writes are then visible to all."""


@op(infer=_infer_nothing, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile", effects=MEMORY_EFFECTS)
def grid_barrier():
    """Wait for every tile of every group of the launch; their earlier writes are then visible to all."""


def find_written_refs(body: Any) -> set[Any]:
    """The memories that the nodes of a block, inner regions included, write."""
    return {n.args[0] for n in body.walk() if "write" in n.op.effects}


def uses_grid_barrier(body: Any) -> bool:
    """Whether a launch of this block has a grid barrier, so that all its programs must be resident at once."""
    return any(n.op is grid_barrier for n in body.walk())

"""The ops of the Tile level: ids, memory, asynchronous copies, barriers.

A tile program runs once for each point of a grid and, within that, once for each tile of a group.
Memory is named by refs; a place in it is a ref and one int64 index for each axis. Operands after
those are optional: the mask, then for loads the value read where the mask is false.
"""

from __future__ import annotations

from typing import Any

from tessera.errors import DTypeError, ShapeError
from tessera.op import STORAGE, op
from tessera.ops.control import direct
from tessera.shapes import broadcast
from tessera.shapes.rules import show
from tessera.types import SHARED, SPACES, DType, RefType, TensorType, f32, int64, scalar

INDEX = scalar(int64)
MEMORY = ("memory",)


def _index(**_: Any) -> TensorType:
    return INDEX


@op(infer=_index, coerce=direct, numerics=STORAGE, dialect="tile")
def program_id(*, axis: int = 0):
    """This program's place along one grid axis (int64)."""


@op(infer=_index, coerce=direct, numerics=STORAGE, dialect="tile")
def grid_size(*, axis: int = 0):
    """The number of programs along one grid axis (int64)."""


@op(infer=_index, coerce=direct, numerics=STORAGE, dialect="tile")
def local_id():
    """This tile's place in its group (int64), 0 where the group has one tile."""


@op(infer=_index, coerce=direct, numerics=STORAGE, dialect="tile")
def group_size():
    """The number of tiles in a group (int64)."""


def _check_indices(ref: RefType, indices: tuple[TensorType, ...]) -> None:
    if len(indices) < ref.rank:
        raise ShapeError(f"{ref.rank} indices are needed, {len(indices)} came", received=str(ref))
    for each in indices[: ref.rank]:
        if not each.dtype.is_integer:
            raise DTypeError("an index is not an integer", expected="int64", received=str(each))


def _check_mask(mask: TensorType, shape: tuple) -> None:
    if mask.dtype.kind != "bool" or broadcast(mask.shape, shape) != tuple(shape):
        raise ShapeError("the mask does not fit the block", expected=f"bool {show(shape)}", received=str(mask))


def _load_type(ref: RefType, *rest: TensorType, shape: tuple[int, ...], edge: str, vector: int) -> TensorType:
    _check_indices(ref, rest)
    if len(shape) != ref.rank:
        raise ShapeError(f"the block has rank {len(shape)}, the memory rank {ref.rank}")
    if rest[ref.rank :]:
        _check_mask(rest[ref.rank], shape)
    return ref.block(shape)


@op(infer=_load_type, coerce=direct, numerics=STORAGE, dialect="tile", effects=("read",))
def load(ref, *rest, shape: tuple, edge: str = "error", vector: int = 1):
    """The block of `shape` that starts at the given indices: load(ref, *starts, [mask, [other]]).

    Elements outside the memory are an error where `edge` is "error", unless masked off; with
    "clip" they read as `other` (0 when not given), and so do elements whose mask is false. The block begins at a
    multiple of `vector` elements, counted from the memory's first.
    """


def _store_type(ref: RefType, value: TensorType, *rest: TensorType, edge: str, vector: int) -> None:
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


@op(infer=_store_type, coerce=direct, numerics=STORAGE, dialect="tile", effects=("write",))
def store(ref, value, *rest, edge: str = "error", vector: int = 1):
    """Write the block `value` at the given indices: store(ref, value, *starts, [mask]).

    Elements outside the memory are an error where `edge` is "error", unless masked off; "clip" drops them. The
    block begins at a multiple of `vector` elements, as for `load`.
    """


def _gather_shape(ref: RefType, rest: tuple[TensorType, ...]) -> tuple:
    _check_indices(ref, rest)
    return broadcast(*(t.shape for t in rest[: ref.rank + 1]))


def _gather_type(ref: RefType, *rest: TensorType) -> TensorType:
    return ref.block(_gather_shape(ref, rest))


@op(infer=_gather_type, coerce=direct, numerics=STORAGE, dialect="tile", effects=("read",))
def gather(ref, *rest):
    """The elements at blocks of indices, broadcast together: gather(ref, *indices, [mask, [other]])."""


def _scatter_type(ref: RefType, value: TensorType, *rest: TensorType) -> None:
    shape = _gather_shape(ref, rest)
    if value.dtype != ref.dtype or broadcast(value.shape, shape) != shape:
        raise ShapeError("the value does not fit", expected=f"{show(shape)} {ref.dtype}", received=str(value))


@op(infer=_scatter_type, coerce=direct, numerics=STORAGE, dialect="tile", effects=("write",))
def scatter(ref, value, *rest):
    """Write elements at blocks of indices: scatter(ref, value, *indices, [mask]). Equal indices are undefined."""


ATOMIC = ("add", "max", "min", "and", "or", "xor", "exchange")


def _atomic_type(ref: RefType, value: TensorType, *rest: TensorType, kind: str) -> TensorType:
    if kind not in ATOMIC:
        raise ShapeError(f'"{kind}" is not an atomic update', expected=", ".join(ATOMIC))
    if kind in ("and", "or", "xor"):
        _check_whole(ref, kind)
    return ref.block(_gather_shape(ref, rest))


def _check_whole(ref: RefType, what: str) -> None:
    if not ref.dtype.is_integer:
        raise DTypeError(f"an atomic {what} needs integers", expected="int32 or int64", received=str(ref))


@op(infer=_atomic_type, coerce=direct, numerics=STORAGE, dialect="tile", effects=("read", "write"))
def atomic(ref, value, *rest, kind: str = "add"):
    """Combine `value` into memory without losing an update; gives what was there before.

    `kind` is "add", "max", "min", "exchange", or for integers "and", "or", "xor". Updates of one place happen
    one after the other, in no defined order.
    """


def _compare_type(ref: RefType, value: TensorType, expected: TensorType, *rest: TensorType) -> TensorType:
    _check_whole(ref, "compare-and-exchange")
    return ref.block(_gather_shape(ref, rest))


@op(infer=_compare_type, coerce=direct, numerics=STORAGE, dialect="tile", effects=("read", "write"))
def compare_exchange(ref, value, expected, *rest):
    """Where memory holds the integer `expected`, put `value` there, at once; gives what was there before.

    As for `atomic`: compare_exchange(ref, value, expected, *indices, [mask]).
    """


def _alloc_type(*, shape: tuple, dtype: DType, space: str, alignment: int, swizzle: str, padding: int) -> RefType:
    if space not in SPACES[1:]:
        raise ShapeError(f'"{space}" is not a space to allocate in', expected="shared or register")
    return RefType(tuple(shape), dtype, space)


@op(infer=_alloc_type, coerce=direct, numerics=STORAGE, dialect="tile", effects=MEMORY)
def alloc(
    *, shape: tuple, dtype: DType = f32, space: str = SHARED, alignment: int = 16, swizzle: str = "", padding: int = 0
):
    """Memory without initial value: one for the group ("shared") or one for each tile ("register").

    `alignment` (bytes), `swizzle` and `padding` (elements unused after each row) say how it is laid out.
    """


def _copy_type(dst: RefType, src: RefType, *starts: TensorType, shape: tuple, edge: str) -> None:
    if dst.dtype != src.dtype:
        raise DTypeError(f"cannot copy {src.dtype} into {dst.dtype}")
    if len(starts) != dst.rank + src.rank:
        raise ShapeError(f"{dst.rank + src.rank} starts are needed, {len(starts)} came")


@op(infer=_copy_type, coerce=direct, numerics=STORAGE, dialect="tile", effects=("read", "write", "async"))
def async_copy(dst, src, *starts, shape: tuple, edge: str = "error"):
    """Begin to copy a block between memories: async_copy(dst, src, *dst_starts, *src_starts).

    `shape` is the block's; leading axes of the lower rank side are those it lacks (size 1). The copy
    is done when a wait says so; "clip" fills with 0 what lies outside the source.
    """


def _nothing(**_: Any) -> None:
    return None


@op(infer=_nothing, coerce=direct, numerics=STORAGE, dialect="tile", effects=("async",))
def async_commit():
    """Make a group of the copies begun since the last commit."""


@op(infer=_nothing, coerce=direct, numerics=STORAGE, dialect="tile", effects=("async",))
def async_wait(*, pending: int = 0):
    """Wait until at most `pending` committed groups are still under way."""


@op(infer=_nothing, coerce=direct, numerics=STORAGE, dialect="tile", effects=MEMORY)
def barrier():
    """Wait for every tile of the group; what they wrote before is then seen by all."""


@op(infer=_nothing, coerce=direct, numerics=STORAGE, dialect="tile", effects=MEMORY)
def grid_barrier():
    """Wait for every tile of every group of the launch; what they wrote before is then seen by all."""


def meets(body: Any) -> bool:
    """Whether the programs of a launch of this block wait for each other, so that all must be under way at once."""
    return any(n.op is grid_barrier for n in body.walk())

"""The ops of programs on a mesh of processing elements: one program per element, each with its own memory.

Programs stand on a grid of rows (mesh axis 0) and columns (mesh axis 1). A tensor is held in pieces: `split` names for
each of its axes the mesh axis along which it is cut into equal pieces, or WHOLE where every program has all of it.
Where a size is no multiple of the pieces, the last ones reach past the end: what lies there is 0 when read.
"""

from __future__ import annotations

from typing import Any

from tessera.errors import ArgumentError, DTypeError, ShapeError
from tessera.op import STORAGE, op
from tessera.ops.control import direct
from tessera.types import RefType, TensorType

# An axis of which every program has all.
WHOLE = -1
KINDS = ("sum", "max", "min")


def _check_axis(axis: int) -> None:
    if axis not in (0, 1):
        raise ArgumentError("a mesh has two axes", expected="0 (rows) or 1 (columns)", received=str(axis))


def _check_split(ref: RefType, split: tuple[int, ...], shape: tuple) -> None:
    cut = [s for s in split if s != WHOLE]
    if len(split) != ref.rank or len(shape) != ref.rank or len(set(cut)) != len(cut):
        raise ShapeError("the pieces do not fit the tensor", received=f"{ref} split {split} into {shape}")


def _read_type(ref: RefType, *, split: tuple[int, ...], shape: tuple[int, ...]) -> TensorType:
    _check_split(ref, split, shape)
    return ref.block(shape)


@op(infer=_read_type, coerce=direct, numerics=STORAGE, dialect="mesh", effects=("read",), name="read")
def read(ref, *, split: tuple, shape: tuple):
    """This program's piece, of `shape`, of a tensor that the host holds."""


def _write_type(ref: RefType, value: TensorType, *, split: tuple[int, ...]) -> None:
    _check_split(ref, split, value.shape)
    if value.dtype != ref.dtype:
        raise DTypeError(f"cannot write {value.dtype} into {ref.dtype}", received=str(value))


@op(infer=_write_type, coerce=direct, numerics=STORAGE, dialect="mesh", effects=("write",), name="write")
def write(ref, value, *, split: tuple):
    """Hand the host this program's piece of a tensor; what lies past its end is dropped."""


def _all_reduce_type(x: TensorType, *, axis: int, kind: str) -> TensorType:
    _check_axis(axis)
    if kind not in KINDS:
        raise ArgumentError(f'"{kind}" is not a reduction', expected=", ".join(KINDS))
    return x


@op(infer=_all_reduce_type, coerce=direct, numerics=STORAGE, dialect="mesh")
def all_reduce(x, *, axis: int, kind: str = "sum"):
    """The elementwise sum, max or min of `x` over the programs along a mesh axis, for each of them."""


def _broadcast_type(x: TensorType, root: TensorType, *, axis: int) -> TensorType:
    _check_axis(axis)
    if root.rank or not root.dtype.is_integer:
        raise DTypeError("a root is an integer scalar", expected="int64", received=str(root))
    return x


@op(infer=_broadcast_type, coerce=direct, numerics=STORAGE, dialect="mesh", name="broadcast")
def broadcast(x, root, *, axis: int):
    """What the program at place `root` along a mesh axis holds as `x`; `root` is the same for all along it."""


def _shift_type(x: TensorType, *, axis: int, offset: int) -> TensorType:
    _check_axis(axis)
    if offset not in (-1, 1):
        raise ArgumentError("a shift goes to the next program", expected="-1 or 1", received=str(offset))
    return x


@op(infer=_shift_type, coerce=direct, numerics=STORAGE, dialect="mesh", name="shift")
def shift(x, *, axis: int, offset: int):
    """What the program `offset` before this one along a mesh axis holds as `x`; zeros where there is none."""


@op(infer=_shift_type, coerce=direct, numerics=STORAGE, dialect="mesh", name="rotate")
def rotate(x, *, axis: int, offset: int):
    """As `shift`, but in a ring: at the edge comes what the program at the other edge holds."""


def _panel_type(x: TensorType, number: TensorType, *, axis: int, count: int) -> TensorType:
    if not -x.rank <= axis < 0 or int(x.shape[axis]) % count:
        raise ShapeError(f"axis {axis} cannot be cut into {count} equal panels", received=str(x))
    sizes: list[Any] = list(x.shape)
    sizes[axis] = int(x.shape[axis]) // count
    return x.with_shape(tuple(sizes))


@op(infer=_panel_type, coerce=direct, numerics=STORAGE, dialect="mesh", name="panel")
def panel(x, number, *, axis: int, count: int):
    """The `number`-th of `count` equal panels of `x` along a (negative) axis."""


def _halo_type(x: TensorType, edge: TensorType, *, axis: int, offset: int) -> TensorType:
    slab: list[Any] = list(x.shape)
    slab[axis] = 1
    if tuple(edge.shape) != tuple(slab) or edge.dtype != x.dtype or offset not in (-1, 1):
        raise ShapeError("the edge does not fit", expected=str(x.with_shape(tuple(slab))), received=str(edge))
    return x


@op(infer=_halo_type, coerce=direct, numerics=STORAGE, dialect="mesh", name="halo")
def halo(x, edge, *, axis: int, offset: int):
    """`x` moved one place up (1) or down (-1) a (negative) axis, with `edge` coming in."""

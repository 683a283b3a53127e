"""What the tiles of a group tell each other through registers: two ops, from which the warp functions are made.

The tiles of a group stand side by side by their `local_id`, in stretches of `width` tiles: `width` divides
the size of the group. Either all tiles of a stretch reach such an op together, or none of them does.
"""

from __future__ import annotations

from tessera.errors import DTypeError, ShapeError
from tessera.op import STORAGE, op
from tessera.ops.control import direct
from tessera.types import TensorType


def _width(width: int) -> None:
    if width < 1:
        raise ShapeError("a stretch of tiles has at least one", received=str(width))


def _collect_type(x: TensorType, *, width: int) -> TensorType:
    _width(width)
    return x.with_shape((width, *x.shape))


@op(infer=_collect_type, coerce=direct, numerics=STORAGE, dialect="tile")
def collect(x, *, width: int = 1):
    """What each tile of this tile's stretch holds as `x`: element i along the new first axis is the i-th tile's."""


def _exchange_type(x: TensorType, lane: TensorType, *, width: int) -> TensorType:
    _width(width)
    if lane.rank or not lane.dtype.is_integer:
        raise DTypeError("a lane is an integer scalar", expected="int64", received=str(lane))
    return x


def _meet_type(*, width: int) -> None:
    _width(width)


@op(infer=_meet_type, coerce=direct, numerics=STORAGE, dialect="tile", effects=("memory",))
def meet(*, width: int = 1):
    """Wait for the tiles of this tile's stretch; what they wrote before is then seen by all of them."""


@op(infer=_exchange_type, coerce=direct, numerics=STORAGE, dialect="tile")
def exchange(x, lane, *, width: int = 1):
    """What the tile at place `lane` (modulo `width`) of this tile's stretch holds as `x`."""

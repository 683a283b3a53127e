"""Fragments: the operands and sums of matrix instructions, as memory of one tile's own."""

from __future__ import annotations

from typing import Any

from tessera.errors import ArgumentError, ShapeError
from tessera.kernel.copies import alloc_register
from tessera.kernel.marks import takes_places
from tessera.kernel.place import Place, View, value
from tessera.kernel.subscript import subscript
from tessera.kernel.transfer import locate
from tessera.ops.shape import iota, reshape
from tessera.tensor import Tensor
from tessera.types import bf16, f32


class Fragments:
    """`tile.fragment`: makes fragments, filled with zeros. A matrix instruction takes an `a`, a `b` and a `c`."""

    def a(self, shape: Any, dtype: Any = bf16) -> View:
        """A left operand [M, K]."""
        return _zeros(shape, dtype)

    def b(self, shape: Any, dtype: Any = bf16) -> View:
        """A right operand [K, N]."""
        return _zeros(shape, dtype)

    def c(self, shape: Any, dtype: Any = f32) -> View:
        """A sum [M, N]."""
        return _zeros(shape, dtype)


fragment = Fragments()


def _zeros(shape: Any, dtype: Any) -> View:
    if not isinstance(shape, (tuple, list)) or len(shape) != 2:
        raise ShapeError("a fragment is a matrix", expected="shape=(16, 16)", received=repr(shape))
    made = alloc_register(shape, dtype)
    made.store(0)
    return made


@takes_places
def load_matrix(into: Any, place: Any, stride: int | None = None) -> None:
    """Fill a fragment with the matrix at a place; from a whole tensor, with this program's block of it.

    `stride` is the number of elements from one row to the next: a memory of one axis needs it, and where the
    memory has rows it must be theirs.

    Raises:
        ArgumentError: `into` is no fragment, or the stride is not that of the memory's rows.
    """
    into.store(_matrix(place, _fragment(into).shape, stride).load())


@takes_places
def store_matrix(place: Any, held: Any, stride: int | None = None) -> None:
    """Write a fragment (or a block) to the matrix at a place, found as `load_matrix` finds it."""
    block = value(held)
    if not isinstance(block, Tensor) or block.ndim != 2:
        raise ShapeError("a matrix is stored", received=str(getattr(block, "type", block)))
    _matrix(place, tuple(int(n) for n in block.shape), stride).store(block)


def _fragment(x: Any) -> View:
    if not isinstance(x, View) or x.ndim != 2:
        raise ArgumentError(
            "this is no fragment", expected="tile.fragment.a(shape=(16, 16), dtype=ts.bf16)", received=repr(x)
        )
    return x


def _matrix(place: Any, shape: tuple[int, ...], stride: int | None) -> Place:
    """The matrix of a shape at a place."""
    found = locate(place, (), None)
    if isinstance(found, View) and found.ndim == 1 and len(found.memory.shape) == 1:
        return _strided(found, shape, stride)
    row = found.memory.shape[-1]
    if stride is not None and stride != row:
        raise ArgumentError(
            f"the rows of {found.memory.name} are {row} elements apart", expected=f"stride={row}",
            received=f"stride={stride}",
        )  # fmt: skip
    return locate(place, (), shape)


def _strided(view: View, shape: tuple[int, ...], stride: int | None) -> Place:
    """Rows `stride` apart in a memory of one axis."""
    if not isinstance(stride, int) or stride < shape[1]:
        raise ArgumentError(
            f"rows of {shape[1]} elements in a memory of one axis need a stride",
            expected=f"stride= an int of at least {shape[1]}", received=repr(stride),
        )  # fmt: skip
    rows = reshape(iota(shape=shape[:1]) * stride, shape=(shape[0], 1))
    return subscript(view, rows + reshape(iota(shape=shape[1:]), shape=(1, shape[1])))

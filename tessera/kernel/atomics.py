"""Atomic updates of memory, in a tensor or a buffer: none is lost, and each gives what was there before.

Updates of one place by several tiles happen one after the other, in an order that nothing defines.
"""

from __future__ import annotations

from typing import Any

from tessera.errors import DTypeError
from tessera.kernel.fit import to_dtype, to_mask, to_shape
from tessera.kernel.marks import takes_places
from tessera.kernel.place import Place, value
from tessera.kernel.trace import emit
from tessera.kernel.transfer import locate
from tessera.ops import tile
from tessera.tensor import Tensor


def _operand(place: Place, operand: Any) -> Tensor:
    """An operand of the type and shape of the place."""
    name = place.memory.name
    return to_shape(to_dtype(value(operand), place.dtype, name), place.shape, name)


def _where(place: Place, mask: Any) -> list[Tensor]:
    """The indices of a place, and the mask if there is one."""
    try:
        given = to_mask(value(mask), place.shape)
    except DTypeError as error:
        error.suggestion = "an element is named by subscripts: tile.atomic_add(A[index], value); a mask is a comparison"
        raise
    return [*place.indices(), *([] if given is None else [given])]


def _atomic(kind: str, place: Any, operand: Any, mask: Any) -> Tensor:
    found = locate(place, (), None)
    return emit(tile.atomic, [found.memory.ref(), _operand(found, operand), *_where(found, mask)], kind=kind)


@takes_places
def atomic_add(place: Any, operand: Any, mask: Any = None) -> Tensor:
    """Add to memory without losing an update of another tile; gives what was there."""
    return _atomic("add", place, operand, mask)


@takes_places
def atomic_max(place: Any, operand: Any, mask: Any = None) -> Tensor:
    """Raise memory to at least the operand; gives what was there."""
    return _atomic("max", place, operand, mask)


@takes_places
def atomic_min(place: Any, operand: Any, mask: Any = None) -> Tensor:
    """Lower memory to at most the operand; gives what was there."""
    return _atomic("min", place, operand, mask)


@takes_places
def atomic_exchange(place: Any, operand: Any, mask: Any = None) -> Tensor:
    """Replace what is in memory; gives what was there."""
    return _atomic("exchange", place, operand, mask)


@takes_places
def atomic_and(place: Any, operand: Any, mask: Any = None) -> Tensor:
    """Keep in memory only the bits that the operand has; gives what was there."""
    return _atomic("and", place, operand, mask)


@takes_places
def atomic_or(place: Any, operand: Any, mask: Any = None) -> Tensor:
    """Set in memory the bits that the operand has; gives what was there."""
    return _atomic("or", place, operand, mask)


@takes_places
def atomic_xor(place: Any, operand: Any, mask: Any = None) -> Tensor:
    """Flip in memory the bits that the operand has; gives what was there."""
    return _atomic("xor", place, operand, mask)


@takes_places
def atomic_cas(place: Any, expected: Any, operand: Any, mask: Any = None) -> Tensor:
    """Replace an integer in memory if it is `expected`, at once; gives what was there."""
    found = locate(place, (), None)
    values = [_operand(found, operand), _operand(found, expected)]
    return emit(tile.compare_exchange, [found.memory.ref(), *values, *_where(found, mask)])

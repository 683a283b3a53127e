"""Places of extremes: argmin and argmax of long rows in parts, whose places two reductions find."""

from __future__ import annotations

import math

from tessera.core.symbolic_dim import ceil_divide, round_up, symbol_names
from tessera.core.types import bool_, int32
from tessera.ir.core import Node
from tessera.ir.rewrite import UseDef
from tessera.ir.tensor import Tensor
from tessera.lower.indexing_maps import get_shape, get_tensor_type
from tessera.ops.tensor import elementwise, reduce, shape
from tessera.ops.tensor.basic import cast

PART_ELEMENTS = 1 << 10  # of a long row in which a program finds an extreme
MOST_PARTS = 1 << 10
NOWHERE = (1 << 31) - 1


def _find_least(x: Tensor, best: Tensor, places: Tensor, axis: int = 1) -> Tensor:
    """The least of the places along an axis where an extreme is; where there is NaN, it is the extreme."""
    found = elementwise.where(elementwise.equal(best, best), elementwise.equal(x, best), elementwise.not_equal(x, x))
    return reduce.min(elementwise.where(found, places, NOWHERE), axis=(axis,), keepdims=False)


def divides_rows(node: Node, parallel: int) -> bool:
    """Whether an argmin or argmax is one of few long rows, whose parts keep more of `parallel` programs busy."""
    type, axis = get_tensor_type(node.args[0]), node.attrs["axis"]
    sizes = type.shape
    if axis is None or symbol_names(sizes) or 0 in sizes or type.policy is not None:
        return False
    if not type.dtype.is_float and type.dtype.bits < 8 and type.dtype != bool_:
        return False
    at, last = axis % len(sizes), max((i for i, n in enumerate(sizes) if n != 1), default=0)
    count = math.prod(int(n) for n in sizes)
    return at == last and 2 * PART_ELEMENTS <= int(sizes[at]) and count < 1 << 31 and 2 * count <= parallel * sizes[at]


def find_in_parts(node: Node, x: Tensor) -> Tensor:
    """The result of an argmin or argmax along the last axis: places of the extremes of parts, then the first of them.

    The last part is filled with what is no extreme before an element is.
    """
    size = int(x.shape[node.attrs["axis"]])
    rows = math.prod(int(n) for n in x.shape) // size
    length = int(max(PART_ELEMENTS, round_up(ceil_divide(size, MOST_PARTS), PART_ELEMENTS)))
    parts, flat = int(ceil_divide(size, length)), shape.reshape(x, shape=(rows, size))
    if parts * length > size:
        worst = reduce.find_neutral_element("max" if node.op is reduce.argmax else "min", x.dtype)
        flat = shape.pad(flat, low=(0, 0), high=(0, parts * length - size), value=worst)
    inner = cast(node.op(shape.reshape(flat, shape=(rows, parts, length)), axis=-1, keepdims=False), dtype=int32)
    places = elementwise.minimum(inner + shape.iota(shape=(rows, parts), axis=1, dtype=int32) * length, size - 1)
    begins = shape.iota(shape=(rows, parts), axis=0, dtype=int32) * size
    held = shape.gather(shape.reshape(x, shape=(rows * size,)), places + begins, axis=0)
    best = (reduce.min if node.op is reduce.argmin else reduce.max)(held, axis=(1,), keepdims=True)
    found = shape.reshape(_find_least(held, best, places), shape=get_shape(node.out))
    return cast(found, dtype=get_tensor_type(node.out).dtype)


MOVEMENTS = frozenset((shape.reshape, shape.permute, shape.slice_))


def crosses_rows(node: Node, uses: UseDef) -> bool:
    """Whether an argmin or argmax is along an outer axis: the extreme is found first, and then its place.

    The elements are read, not computed: both reductions must see the same numbers.
    """
    source, type, axis = node.args[0], get_tensor_type(node.args[0]), node.attrs["axis"]
    plain = axis is not None and type.policy is None and type.dtype.bits >= (16 if type.dtype.is_float else 8)
    while (made := uses.get(source)) is not None and made.op in MOVEMENTS:
        source = made.args[0]
    if made is not None or not plain or symbol_names(type.shape) or 0 in type.shape:
        return False
    last = max((i for i, n in enumerate(type.shape) if n != 1), default=0)
    return 1 < int(type.shape[axis % type.rank]) < NOWHERE and axis % type.rank != last


def find_in_columns(node: Node, x: Tensor) -> Tensor:
    """The result of an argmin or argmax along an outer axis by two reductions of whole rows."""
    axis = node.attrs["axis"] % x.ndim
    best = (reduce.min if node.op is reduce.argmin else reduce.max)(x, axis=(axis,), keepdims=True)
    found = _find_least(x, best, shape.iota(shape=x.shape, axis=axis, dtype=int32), axis)
    return cast(shape.reshape(found, shape=get_shape(node.out)), dtype=get_tensor_type(node.out).dtype)

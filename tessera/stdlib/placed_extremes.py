"""Extremes by place: scatter-max and scatter-min through atomic maxima of integers, in the kernel language.

A maximum of integers does not depend on the order of its operands. Other types are compared as integers that have their
order (`make_order_keys`), in which NaN wins as it does in `maximum`, and -0 is below +0. The update that a place keeps
is the one with the largest number.
"""

from __future__ import annotations

from typing import Any

from tessera.core.symbolic_dim import ceil_divide
from tessera.core.types import DType, bool_, f32, f64, int32, int64, uint64
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.basic import broadcast_to, cast, full
from tessera.ops.tensor.bits import bitcast
from tessera.ops.tensor.elementwise import bitwise_xor, not_equal, where
from tessera.ops.tensor.shape import iota, reshape
from tessera.stdlib.exact_sums import BLOCK, load_updates

# mypy: disable-error-code="operator, attr-defined, index"


@kernel
def raise_integers(places, updates, table, *, rows, count, rest, block):
    """Raise the numbers of `table`, flat, to at least their updates, on the grid (blocks,), as `add_integers`."""
    first = tile.program_id(0) * block
    given, slot, inside = load_updates(places, updates, first, rows=rows, count=count, rest=rest, block=block)
    tile.atomic_max(table[slot], given, mask=inside)


def raise_places(x: Tensor, places: Tensor, updates: Tensor) -> Tensor:
    """`x` [L, N, R] of int32 or int64 with its rows at places [P] raised to at least the updates [L, P, R]."""
    lead, rows, rest = (int(n) for n in x.shape)
    count = int(places.shape[0])
    total = lead * count * rest
    block = min(BLOCK, 1 << (total - 1).bit_length())
    found = launch(
        raise_integers, (ceil_divide(total, block),), places, reshape(updates, shape=(total,)),
        reshape(x, shape=(lead * rows * rest,)), rows=rows, count=count, rest=rest, block=block,
    )  # fmt: skip
    return reshape(found, shape=x.shape)


def find_last_updates(places: Tensor, rows: int) -> Tensor:
    """For each of `rows` rows the number (int32) of the last of the places [P] that names it, or -1."""
    count = int(places.shape[0])
    numbers = reshape(cast(iota(shape=(count,), axis=0), dtype=int32), shape=(1, count, 1))
    return reshape(raise_places(full(shape=(1, rows, 1), value=-1, dtype=int32), places, numbers), shape=(rows,))


def make_order_keys(x: Tensor, lowest: bool) -> Tensor:
    """Integers (int32 or int64) with the order of the elements; `lowest`: in the opposite order. NaN is the largest."""
    if x.dtype.is_float:
        wide = x if x.dtype == f64 else cast(x, dtype=f32)
        word = int64 if x.dtype == f64 else int32
        bits = bitcast(wide, word)
        keys = where(bits < 0, bitwise_xor(bits, _mask_magnitude(word, bits)), bits)
        keys = bitwise_xor(keys, _fill(-1, keys)) if lowest else keys
        return where(not_equal(wide, wide), _mask_magnitude(word, keys), keys)
    if x.dtype == uint64:
        keys = bitcast(x, int64)
        keys = bitwise_xor(keys, _fill(-1 << 63, keys))
    else:
        keys = cast(x, dtype=int32 if x.dtype.bits < 32 or x.dtype == int32 else int64)
    return bitwise_xor(keys, _fill(-1, keys)) if lowest else keys


def read_order_keys(keys: Tensor, dtype: DType, lowest: bool) -> Tensor:
    """The elements of a type whose keys these are."""
    if dtype.is_float:
        nan = keys == _mask_magnitude(keys.dtype, keys)
        keys = bitwise_xor(keys, _fill(-1, keys)) if lowest else keys
        bits = where(keys < 0, bitwise_xor(keys, _mask_magnitude(keys.dtype, keys)), keys)
        wide = bitcast(bits, f64 if dtype == f64 else f32)
        return cast(where(nan, _fill(float("nan"), wide), wide), dtype=dtype)
    keys = bitwise_xor(keys, _fill(-1, keys)) if lowest else keys
    if dtype == uint64:
        return bitcast(bitwise_xor(keys, _fill(-1 << 63, keys)), uint64)
    return not_equal(keys, _fill(0, keys)) if dtype == bool_ else cast(keys, dtype=dtype)


def _mask_magnitude(word: DType, like: Tensor) -> Tensor:
    """All bits but the sign; as a key, that of NaN."""
    return _fill((1 << (word.bits - 1)) - 1, like)


def _fill(value: Any, like: Tensor) -> Tensor:
    return broadcast_to(full(shape=(), value=value, dtype=like.dtype), shape=like.shape)


def take_extremes(x: Tensor, places: Tensor, updates: Tensor, lowest: bool) -> Tensor:
    """`x` [L, N, R] and the updates [L, P, R] at its rows' places [P]: the largest of each place, or the least."""
    keys, more = (make_order_keys(v, lowest) for v in (x, updates))
    return read_order_keys(raise_places(keys, places, more), x.dtype, lowest)

"""Row of rng_bit_generator: the counter-based generators ThreeFry and Philox (Salmon et al. 2011), with XLA's order of
words, so that the bits are those of JAX on a CPU."""

from __future__ import annotations

import math
from typing import Any

from tessera.core.types import BY_NAME, DType, int64, uint32, uint64
from tessera.ir.numerics.conversion import philox_4x32
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import shape as s
from tessera.ops.tensor.basic import broadcast_to, cast
from tessera.ops.tensor.bits import bitcast
from tessera.stablehlo.table import Site, row

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
LOW_WORD = 0xFFFFFFFF


@row("stablehlo.rng_bit_generator")
def _(site: Site, state: Tensor) -> list[Tensor]:
    type = site.operation.types[1]
    if state.dtype != uint64:
        raise site.refuse(f"a state of {state.dtype}", "pass a state of ui64")
    algorithm = (site.get("rng_algorithm") or site.get("algorithm") or "DEFAULT").upper()
    if algorithm == "THREE_FRY":
        new, bits = _generate_threefry(state, type.shape, type.dtype.bits)
    else:  # what XLA's CPU and GPU take for DEFAULT
        new, bits = _generate_philox(state, type.shape, type.dtype.bits)
    return [new, _convert_bits(bits, type.dtype)]


def _convert_bits(bits: Tensor, dtype: DType) -> Tensor:
    """Words of at least 32 bits as elements of this type."""
    unsigned = BY_NAME[f"uint{dtype.bits}"]
    return bitcast(bits if bits.dtype == unsigned else cast(bits, dtype=unsigned), dtype)


def _element(x: Tensor, i: int) -> Tensor:
    return s.reshape(s.slice_(x, start=(i,), stop=(i + 1,)), shape=())


def _split_word(x: Tensor, dtype: DType) -> tuple[Tensor, Tensor]:
    """The low and the high 32 bits."""
    return cast(e.bitwise_and(x, LOW_WORD), dtype=dtype), cast(e.shift_right(x, 32), dtype=dtype)


def _join_words(low: Tensor, high: Tensor) -> Tensor:
    return e.bitwise_or(cast(low, dtype=uint64), e.shift_left(cast(high, dtype=uint64), 32))


# ThreeFry.


def _threefry_2x32(counter: tuple[Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two random words for a counter of two and a key of two, of 20 rounds."""
    keys = (*key, e.bitwise_xor(e.bitwise_xor(key[0], key[1]), _PARITY))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for i in range(5):
        for by in _ROTATIONS[i % 2]:
            x = x + y
            y = e.bitwise_xor(x, e.bitwise_or(e.shift_left(y, by), e.shift_right(y, 32 - by)))
        x, y = x + keys[(i + 1) % 3], y + keys[(i + 2) % 3] + (i + 1)
    return x, y


def _generate_threefry(state: Tensor, shape: tuple[int, ...], width: int) -> tuple[Tensor, Tensor]:
    key, start = _element(state, 0), _element(state, 1)
    halves = shape if width == 64 else _halve(shape)[0]
    count = math.prod(halves)
    counter = s.iota(shape=(count,), axis=0, dtype=uint64) + start
    words = _threefry_2x32(_split_word(counter, uint32), _split_word(key, uint32))
    if width == 64:
        bits = s.reshape(_join_words(*words), shape=shape)
    else:
        bits = _interleave(words, shape)
    new = s.stack([key, start + count])
    return new, bits


def _halve(shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """The shape of half of the words, and the axis that is halved: the first even one, else the largest."""
    whole = shape or (1,)
    even = [i for i, n in enumerate(whole) if n % 2 == 0]
    axis = even[0] if even else max(range(len(whole)), key=lambda i: whole[i])
    return tuple(-(-n // 2) if i == axis else n for i, n in enumerate(whole)), axis


def _interleave(words: tuple[Tensor, Tensor], shape: tuple[int, ...]) -> Tensor:
    """Pairs of words side by side along the axis that was halved."""
    half, axis = _halve(shape)
    joined = s.stack([s.reshape(w, shape=half) for w in words], axis=axis + 1)
    wide = s.reshape(joined, shape=tuple(2 * n if i == axis else n for i, n in enumerate(half)))
    return s.reshape(s.slice_(wide, start=(0,) * len(half), stop=shape or (1,)), shape=shape)


# Philox.


def _generate_philox(state: Tensor, shape: tuple[int, ...], width: int) -> tuple[Tensor, Tensor]:
    key, low = _element(state, 0), _element(state, 1)
    size = state.shape[0]
    high = _element(state, 2) if size == 3 else key  # XLA takes the key again for a state of two
    count, per_block = math.prod(shape), 2 if width == 64 else 4
    blocks = -(-count // per_block)
    lows = s.iota(shape=(blocks,), axis=0, dtype=uint64) + low
    highs = cast(e.less(lows, low), dtype=uint64) + high
    counter = (*_split_word(lows, int64), *_split_word(highs, int64))
    words: list[Any] = list(philox_4x32(counter, _split_word(key, int64)))
    words = [broadcast_to(w, shape=(blocks,)) for w in words]
    if width == 64:
        parts = [_join_words(words[0], words[1]), _join_words(words[2], words[3])]
    else:
        parts = [cast(w, dtype=uint32) for w in words]
    flat = s.reshape(s.stack(parts, axis=1), shape=(blocks * per_block,))
    bits = s.reshape(s.slice_(flat, start=(0,), stop=(count,)), shape=shape)
    end = low + blocks
    new = [key, end, high + cast(e.less(end, low), dtype=uint64)]
    return s.stack(new[:size]), bits

"""Exact sums by place: scatter-add through integers that atomic additions change in any order, in the kernel language.

The sum of integers does not depend on its order. A float is added exactly (Kulisch 1981): its fraction, shifted, goes
to one word of a long fixed-point number, which has a word for each 16 exponents. The words have room for 2^24 such
addends; all exponents of f16 fit in one, which has room for 2^22. At the end carries are propagated, and the number is
rounded once: the same bits on every run and target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tessera.core.symbolic_dim import ceil_divide, round_up
from tessera.core.types import DType, TensorType, bf16, f16, f32, int32, int64
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import reduce
from tessera.ops.tensor.basic import cast, full
from tessera.ops.tensor.bits import bitcast
from tessera.ops.tensor.shape import reshape

# mypy: disable-error-code="operator, attr-defined, index"

EXPONENT_BIAS = 127  # of f32
WORD_BITS, WORD_LOG = 16, 4  # the bits between the lowest ones of two words, and their logarithm
LEAST_EXPONENT, LEAST_F16 = -149, -24  # of f32 and f16: the power of two of the lowest bit
# That of the first word that finite elements reach, and how many they reach: f32 has 254 exponents, f16 those of -24 to
# 15. One more word counts infinities, positive ones from bit 0 on and negative ones from bit 24 on.
WORDS = {f32: (LEAST_EXPONENT, 16), bf16: (LEAST_EXPONENT, 16), f16: (LEAST_EXPONENT + 6 * WORD_BITS, 3)}
ONE_WORD, MAX_IN_WORD = (LEAST_F16, 1), 1 << 22  # those of f16, for so many addends
MAX_ADDENDS = (1 << 24) - 1  # of a number, for which its words have room
BLOCK = 1024  # updates of a program
JOINED = 128  # numbers of a program that rounds them
SPREAD = 16384  # addresses that keep atomic additions apart: fewer numbers have copies
MAX_COPIES = 1024
MAX_COUNTED, FEWEST_UPDATES = 4096, 1 << 14  # numbers, and updates by one number, which programs count by themselves
PLACES_FOR_NUMBER, ROUNDS = 4, 4  # places of a program at least, for each number, and rounds
MAX_WIDTH = 8  # numbers of a place
MAX_WORDS = 17 << 21  # of all numbers, 285 MB


def load_updates(places, updates, first, *, rows, count, rest, block):
    """A block of updates, the numbers that they are added to, and which of them there are.

    The updates are [L, P, R] and the numbers [L, N, R], flat; `places` are from 0 to N - 1.
    """
    element = first + tile.arange(0, block)
    inside = element < updates.shape[0]
    given = tile.load(updates[first : first + block], edge="clip")
    if updates.shape[0] == count:
        return given, tile.load(places[first : first + block], edge="clip"), inside
    outer = tile.minimum(element, updates.shape[0] - 1) // rest
    return given, (outer // count * rows + places[outer % count]) * rest + element % rest, inside


def split_float(x, least, words):
    """Which of so many words the elements of a block of f32 are added to, and the integers that are added; the lowest
    bit of the first word is 2^least."""
    bits = bitcast(x, int32)
    exponent, fraction = (bits >> 23) & 255, bits & 0x7FFFFF
    whole = tile.cast(tile.where(exponent > 0, fraction | 0x800000, fraction), "int64")
    above = tile.maximum(exponent, 1) - 1
    if words == 1:  # f16, whose fractions have 11 bits
        places = tile.maximum(above - (LEAST_F16 + EXPONENT_BIAS - 1), 0)
        shifted = ((whole >> 13) << tile.cast(places, "int64")) >> 10
    else:
        shifted = whole << tile.cast(above & (WORD_BITS - 1), "int64")
    infinite, both = tile.where(bits < 0, 1 << 24, 1), (1 << 24) + 1  # infinities of both signs give NaN
    addend = tile.where(exponent == 255, tile.where(fraction != 0, both, infinite), 0)
    finite = tile.where(bits < 0, -shifted, shifted)
    number = above * 0 if words == 1 else (above - (least - LEAST_EXPONENT)) >> WORD_LOG
    word = tile.where(exponent == 255, words, number)
    return word, tile.where(exponent == 255, tile.cast(addend, "int64"), finite)


@kernel
def add_floats(places, updates, table, *, rows, count, rest, block, least):
    """Add the elements of `updates` to numbers of `table` [copies, words + 1, numbers], on the grid (blocks,)."""
    program = tile.program_id(0)
    given, slot, inside = load_updates(places, updates, program * block, rows=rows, count=count, rest=rest, block=block)
    word, addend = split_float(tile.cast(given, "f32"), least, table.shape[1] - 1)
    copy = tile.broadcast(tile.reshape(program % table.shape[0], (1,)), (block,))
    tile.atomic_add(table[copy, tile.cast(word, "int64"), slot], addend, mask=inside & (addend != 0))


@kernel
def add_integers(places, updates, table, *, rows, count, rest, block):
    """As `add_floats` for integers; `table` is [copies, numbers]."""
    program = tile.program_id(0)
    given, slot, inside = load_updates(places, updates, program * block, rows=rows, count=count, rest=rest, block=block)
    copy = tile.broadcast(tile.reshape(program % table.shape[0], (1,)), (block,))
    tile.atomic_add(table[copy, slot], tile.cast(given, table.dtype), mask=inside)


@kernel
def round_sums(x, table, out, *, block, least):
    """out[n] = x[n] plus number n of `table` [words + 1, numbers], rounded once: grid (ceil(numbers / block),)."""
    first, words = tile.program_id(0) * block, table.shape[0] - 1
    carry = tile.zeros((block,), "int64")
    for number in tile.static_range(words):
        carry = (tile.load(table[number, first : first + block], edge="clip") + carry) >> WORD_BITS
    negative = carry < 0
    carry, total = tile.zeros((block,), "int64"), tile.zeros((block,), "f64")
    for number in tile.static_range(words):
        word = tile.load(table[number, first : first + block], edge="clip")
        part = tile.where(negative, -word, word) + carry
        carry = part >> WORD_BITS
        digit = part - (carry << WORD_BITS)
        total = total + tile.cast(digit, "f64") * 2.0 ** (least + number * WORD_BITS)
    total = total + tile.cast(carry, "f64") * 2.0 ** (least + words * WORD_BITS)
    special = tile.load(table[words, first : first + block], edge="clip")
    total = tile.where(negative, -total, total)
    total = tile.where((special & MAX_ADDENDS) != 0, float("inf"), total)
    # Infinities of both signs are NaN, as their sum.
    total = tile.where(special >> 24 != 0, tile.where(total < float("inf"), 0.0, total) + float("-inf"), total)
    given = tile.load(x[first : first + block], edge="clip")
    found = tile.cast(tile.cast(given, "f64") + total, out.dtype)
    tile.store(out[first : first + block], tile.where(total == 0, given, found), edge="clip")


@kernel
def count_few(places, counts, *, length, block, held):
    """Add to counts [numbers] how often each number is among `places`, on the grid (ceil(P / length),).

    A program counts its places in shared memory, and adds up `held` counts, or fewer numbers.
    """
    found, first = tile.alloc_shared((held,), int32), tile.program_id(0) * length
    tile.store(found[0:held], tile.zeros((held,), "int32"))
    for at in tile.range(first, first + length, block):
        slot = tile.load(places[at : at + block], edge="clip")
        inside = at + tile.arange(0, block) < places.shape[0]
        tile.atomic_add(found[slot], tile.full((block,), 1, "int32"), mask=inside)
    number, own = tile.arange(0, held), tile.load(found[0:held])
    tile.atomic_add(counts[number], tile.cast(own, counts.dtype), mask=own != 0)


def has_few_numbers(numbers: int, count: int) -> bool:
    """Whether so many updates are added to so few numbers that programs count them in their own memory."""
    return numbers <= MAX_COUNTED and count >= max(FEWEST_UPDATES, PLACES_FOR_NUMBER * numbers)


def count_exactly(x: Tensor, places: Tensor, update: int) -> Tensor:
    """Integers `x` [N] with one number added at each of the places [P], from 0 to N - 1; N is small."""
    numbers, count = int(x.shape[0]), int(places.shape[0])
    length = round_up(max(ROUNDS * BLOCK, PLACES_FOR_NUMBER * numbers), BLOCK)
    zeros = full(shape=(numbers,), value=0, dtype=int64)
    how = {"length": length, "block": BLOCK, "held": 1 << (numbers - 1).bit_length()}
    counts = launch(count_few, (ceil_divide(count, length),), places, zeros, **how)
    return x + cast(counts if update == 1 else counts * update, dtype=x.dtype)


def find_words(dtype: DType, count: int) -> tuple[int, int]:
    """The power of two of the lowest bit of numbers to which so many floats are added, and how many words they have."""
    return ONE_WORD if dtype == f16 and count <= MAX_IN_WORD else WORDS[dtype]


def is_exact(dtype: DType, sizes: Sequence[int], count: int) -> bool:
    """Whether the sums of `count` updates a slice [L, P, R] by places in [L, N, R] are computed here.

    The type is an integer or a float of at most 32 bits, the numbers are few compared with the updates, and a place has
    few of them: a sort of the places would serve all numbers of a place.
    """
    lead, rows, rest = sizes
    updates, numbers = lead * count * rest, lead * rows * rest
    if lead * rest > MAX_WIDTH:
        return False
    if dtype.is_float:
        if dtype not in WORDS or count > MAX_ADDENDS:
            return False
        most = MAX_WORDS // (find_words(dtype, count)[1] + 1)
        return numbers <= max(min(updates, most), 1 << 16)
    return dtype.is_integer and numbers <= max(4 * updates, 1 << 22)


def add_exactly(x: Tensor, places: Tensor, updates: Tensor) -> Tensor:
    """`x` [L, N, R] with updates [L, P, R] added to its rows at places [P], from 0 to N - 1."""
    lead, rows, rest = (int(n) for n in x.shape)
    count, numbers = int(places.shape[0]), lead * rows * rest
    total = lead * count * rest
    copies = max(1, min(MAX_COPIES, SPREAD // numbers, ceil_divide(total, BLOCK)))
    flat = reshape(updates, shape=(total,))
    sizes: dict[str, Any] = {
        "rows": rows,
        "count": count,
        "rest": rest,
        "block": min(BLOCK, 1 << (total - 1).bit_length()),
    }
    grid = (ceil_divide(total, sizes["block"]),)
    if not x.dtype.is_float:
        wide = x.dtype if x.dtype in (int32, int64) else int64
        table = launch(add_integers, grid, places, flat, full(shape=(copies, numbers), value=0, dtype=wide), **sizes)
        return x + cast(reshape(_join_copies(table), shape=x.shape), dtype=x.dtype)
    least, count = find_words(x.dtype, count)
    zeros = full(shape=(copies, count + 1, numbers), value=0, dtype=int64)
    table = launch(add_floats, grid, places, flat, zeros, **sizes, least=least)
    words = _join_copies(table)
    memory, held = OutputMemory(TensorType((numbers,), x.dtype)), min(JOINED, 1 << (numbers - 1).bit_length())
    found = launch(
        round_sums, (ceil_divide(numbers, held),), reshape(x, shape=(numbers,)), words, memory, block=held, least=least
    )  # fmt: skip
    return reshape(found, shape=x.shape)


def _join_copies(table: Tensor) -> Tensor:
    """The sum of the copies of a table, which is the table itself where there is one."""
    return reshape(table, shape=table.shape[1:]) if table.shape[0] == 1 else reduce.sum(table, axis=0)

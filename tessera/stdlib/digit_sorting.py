"""Digit sorting: stable radix sorts of rows by digits of eight bits, the lowest first, in the kernel language.

A pass counts the digits of each part of a row, adds the counts up, and moves each word to its place. Within a part the
places come from votes of warps, which tell how many words before one have the same digit (Merrill and Garland 2016).
Rows that the threads of one group can hold stay in its shared memory for all passes.
A word holds an element's order above its index, as in `row_sorting`.
"""

from __future__ import annotations

import math
from typing import Any

from tessera.core.symbolic_dim import ceil_divide
from tessera.core.types import DType, TensorType, int32, int64, uint32
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.basic import cast, full
from tessera.ops.tensor.elementwise import bitwise_and, bitwise_xor, shift_right, where
from tessera.ops.tensor.rearrange import take_along_axis
from tessera.stdlib.placed_extremes import make_order_keys
from tessera.stdlib.row_sorting import INDEX_BITS, INDEX_MASK, LAST_KEY, count_order_bits, make_keys
from tessera.stdlib.running_sums import running_sums

# mypy: disable-error-code="operator, attr-defined, index"

DIGIT_BITS = 8
DIGITS = 1 << DIGIT_BITS  # and the threads of a group: each has a digit
WARP, WARPS = 32, DIGITS // 32
ITEMS = 16  # words of a thread
CHUNK = DIGITS * ITEMS  # words that a group moves at a time
LOADED = 8  # words that a thread counts at a time
PROGRAMS = 528  # that keep a GPU busy
MAX_NETWORK_ROW = 128  # elements of a row, for each digit, up to which many rows are sorted as fast by a network
MAX_WAITING_ROW = 128  # the same of so few rows that programs wait more than they compute


def read_words(source, row, place, inside, descending, keyed):
    """The words of some elements of a row: of a row of words, or of elements that get their words now."""
    x = tile.load(source[row, place], mask=inside)
    return x if keyed else make_keys(x, place, descending)


def find_digits(words, shift):
    """The digit of each word from bit `shift` on."""
    return tile.cast((words >> shift) & (DIGITS - 1), "int32")


def sum_before(x, memory):
    """The sum of what the threads of this group before this one hold; `memory` has a number for each warp."""
    lane, warp, total = tile.lane_id(), tile.warp_id(), x
    for reach in (1, 2, 4, 8, 16):
        total = total + tile.where(lane >= reach, tile.warp.shuffle_up(total, reach), 0)
    tile.store(memory[warp], total, mask=lane == WARP - 1)
    tile.barrier()
    others = tile.load(memory[0:WARPS])
    return total - x + tile.cast(tile.sum(tile.where(tile.arange(0, WARPS) < warp, others, 0)), "int32")


@kernel
def count_digits(source, counts, *, shift, length, descending, keyed):
    """counts[r, p, d] = how many words of part p of row r have digit d, on the grid (R, parts) of groups of 256.

    A part has `length` words.
    """
    row, part, thread = tile.program_id(0), tile.program_id(1), tile.local_id()
    found = tile.alloc_shared((DIGITS,), int32)
    found[thread] = 0
    tile.barrier()
    end = tile.minimum(part * length + length, source.shape[1])
    for at in tile.range(part * length, end, LOADED * DIGITS):
        place = at + thread + tile.arange(0, LOADED) * DIGITS
        digits = find_digits(read_words(source, row, place, place < end, descending, keyed), shift)
        tile.atomic_add(found[digits], tile.full((LOADED,), 1, int32), mask=place < end)
    tile.barrier()
    counts[row, part, thread] = found[thread]


@kernel
def move_words(source, ends, out, *, shift, length, descending, keyed, last, items):
    """out = the words of each row in the stable order of one digit, on the grid (R, parts) of groups of 256.

    ends[r, p, d] is how many words of the parts of row r up to p have digit d. A group moves `items` words of each
    thread at a time. `last`: out holds the words' indices.
    """
    row, part, thread, warp = tile.program_id(0), tile.program_id(1), tile.local_id(), tile.warp_id()
    counts, sums = tile.alloc_shared((WARPS * DIGITS,), int32), tile.alloc_shared((WARPS,), int32)
    target, staged = tile.alloc_shared((DIGITS,), int32), tile.alloc_shared((DIGITS * items,), int64)
    columns = thread + tile.arange(0, WARPS) * DIGITS  # the counts of this thread's digit
    before = tile.load(ends[row, tile.maximum(part - 1, 0), thread])
    goal = sum_before(tile.load(ends[row, ends.shape[1] - 1, thread]), sums) + tile.where(part > 0, before, 0)
    end = tile.minimum(part * length + length, source.shape[1])
    for at in tile.range(part * length, end, DIGITS * items):
        place = at + warp * (WARP * items) + tile.lane_id() + tile.arange(0, items) * WARP
        words = read_words(source, row, place, place < end, descending, keyed)
        # What lies past the end has the largest digit, and comes after all that has it.
        digits = tile.where(place < end, find_digits(words, shift), DIGITS - 1)
        counts[columns] = tile.zeros((WARPS,), int32)
        tile.barrier()
        slots = warp * DIGITS + tile.cast(digits, "int64")
        ranks = rank_in_warp(digits, slots, counts)
        tile.barrier()
        each = tile.load(counts[columns])
        whole = tile.cast(tile.sum(each), "int32")
        first = sum_before(whole, sums)
        target[thread] = goal - first
        goal = goal + whole
        for w in tile.static_range(WARPS):
            counts[w * DIGITS + thread] = first
            first = first + each[w]
        tile.barrier()
        starts = tile.load(counts[slots])
        for i in tile.static_range(items):
            staged[starts[i] + ranks[i]] = words[i]
        tile.barrier()
        number = thread + tile.arange(0, items) * DIGITS
        moved = tile.load(staged[number])
        to = tile.load(target[find_digits(moved, shift)]) + number
        tile.store(out[row, to], moved & INDEX_MASK if last else moved, mask=at + number < end)
        tile.barrier()


@kernel
def sort_rows(x, out, *, first, passes, descending, items):
    """out = the indices that sort each row of x [R, N] stably, on the grid (R,) of groups of 256 that have it whole.

    A thread holds `items` words, and all together at least N; `first` is the bit where the lowest digit begins.
    """
    row, thread, warp = tile.program_id(0), tile.local_id(), tile.warp_id()
    counts, sums = tile.alloc_shared((WARPS * DIGITS,), int32), tile.alloc_shared((WARPS,), int32)
    staged = tile.alloc_shared((DIGITS * items,), int64)
    columns = thread + tile.arange(0, WARPS) * DIGITS  # the counts of this thread's digit
    place = warp * (WARP * items) + tile.lane_id() + tile.arange(0, items) * WARP
    inside = place < x.shape[1]
    words = tile.where(inside, read_words(x, row, place, inside, descending, False), LAST_KEY)
    for number in tile.range(0, passes, 1):
        digits = find_digits(words, first + number * DIGIT_BITS)
        counts[columns] = tile.zeros((WARPS,), int32)
        tile.barrier()
        slots = warp * DIGITS + tile.cast(digits, "int64")
        ranks = rank_in_warp(digits, slots, counts)
        tile.barrier()
        each = tile.load(counts[columns])
        start = sum_before(tile.cast(tile.sum(each), "int32"), sums)
        for w in tile.static_range(WARPS):
            counts[w * DIGITS + thread] = start
            start = start + each[w]
        tile.barrier()
        starts = tile.load(counts[slots])
        for i in tile.static_range(items):
            staged[starts[i] + ranks[i]] = words[i]
        tile.barrier()
        words = tile.load(staged[place])
    tile.store(out[row, place], words & INDEX_MASK, mask=inside)


def rank_in_warp(digits, slots, counts):
    """How many words of this warp before each of this thread's have its digit, by `counts` of those so far, which grow.

    Word i of all lanes comes before word i + 1 of any.
    """
    peers = tile.full(digits.shape, 0xFFFFFFFF, "uint32")
    for bit in tile.static_range(DIGIT_BITS):
        is_set = (digits >> bit) & 1 == 1
        votes = tile.cast(tile.warp.ballot(is_set), "uint32")
        peers = peers & tile.where(is_set, votes, ~votes)
    lane = tile.cast(tile.lane_id(), "uint32")
    before, known = count_bits(peers & ((tile.cast(1, "uint32") << lane) - 1)), []
    is_last = peers >> lane == 1  # no lane after this one has the digit
    for i in tile.static_range(digits.shape[0]):
        known.append(tile.load(counts[slots[i]]))
        tile.warp.sync()
        tile.store(counts[slots[i]], known[i] + before[i] + 1, mask=is_last[i])
        tile.warp.sync()
    return [known[i] + before[i] for i in tile.static_range(digits.shape[0])]


def count_bits(x):
    """The number of bits of uint32 that are set."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return tile.cast(((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101 >> 24, "int32")


def list_digits(dtype: DType) -> list[int]:
    """The bit of a word where each digit of an element type begins."""
    return [INDEX_BITS + start for start in range(0, count_order_bits(dtype), DIGIT_BITS)]


def are_digits_faster(type: TensorType, axis: int) -> bool:
    """Whether a GPU sorts rows along an axis faster by digits than by a network."""
    size, rows = int(type.shape[axis]), math.prod(int(n) for n in type.shape) // int(type.shape[axis])
    return size > (MAX_NETWORK_ROW * len(list_digits(type.dtype)) if rows > PROGRAMS else MAX_WAITING_ROW)


def fits_group(size: int) -> bool:
    """Whether the threads of a group hold a row of so many elements, which its shared memory sorts."""
    return size <= CHUNK


def sort_by_digits(x: Tensor, descending: bool) -> Tensor:
    """The indices (int64) that sort the rows of `x` [R, N] stably; static sizes, elements that have keys."""
    return _sort_whole_rows(x, descending) if fits_group(int(x.shape[1])) else _sort_parts(x, descending)


def sort_words(x: Tensor, descending: bool) -> Tensor:
    """As `sort_by_digits` for elements of 64 bits: by the low 32 bits of their order, and stably by the high ones."""
    x = where(x == 0, full(shape=x.shape, value=0, dtype=x.dtype), x) if x.dtype.is_float else x  # one zero
    order = make_order_keys(x, lowest=False)
    order = bitwise_xor(order, full(shape=x.shape, value=-1, dtype=int64)) if descending else order
    low = cast(bitwise_and(order, full(shape=x.shape, value=0xFFFFFFFF, dtype=int64)), dtype=uint32)
    high = cast(shift_right(order, full(shape=x.shape, value=32, dtype=int64)), dtype=int32)
    first = sort_by_digits(low, False)
    return take_along_axis(first, sort_by_digits(take_along_axis(high, first, -1), False), -1)


def _sort_whole_rows(x: Tensor, descending: bool) -> Tensor:
    rows, size = (int(n) for n in x.shape)
    digits, memory = list_digits(x.dtype), OutputMemory(TensorType((rows, size), int64))
    how = {"first": digits[0], "passes": len(digits), "items": ceil_divide(size, DIGITS)}
    return launch(sort_rows, ((rows,), DIGITS), x, memory, **how, descending=descending)


def _sort_parts(x: Tensor, descending: bool) -> Tensor:
    rows, size = (int(n) for n in x.shape)
    parts = max(min(PROGRAMS // rows, ceil_divide(size, CHUNK)), 1)
    length = ceil_divide(ceil_divide(size, parts), CHUNK) * CHUNK
    parts = ceil_divide(size, length)
    memory, table = (
        OutputMemory(TensorType((rows, size), int64)),
        OutputMemory(TensorType((rows, parts, DIGITS), int32)),
    )
    digits, words = list_digits(x.dtype), x
    for number, shift in enumerate(digits):
        how: dict[str, Any] = {"shift": shift, "length": length}
        how |= {"descending": descending, "keyed": number > 0}
        counts = launch(count_digits, ((rows, parts), DIGITS), words, table, **how)
        ends = running_sums(counts, int64, int32) if parts > 1 else counts
        is_last = number == len(digits) - 1
        words = launch(move_words, ((rows, parts), DIGITS), words, ends, memory, **how, last=is_last, items=ITEMS)
    return words

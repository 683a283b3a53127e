"""Row selection: radix selection of sorted places of rows, and of their first elements, in the kernel language.

Elements are compared as integers that have their order (`make_order`). A place is found digit by digit, two bits in a
pass: a pass counts the elements below each of three candidates (radix select; Alabi et al. 2012). Counts do not depend
on the order of addition, so every target and every number of threads gives the same places.
"""

from __future__ import annotations

from typing import Any

from tessera.core.symbolic_dim import ceil_divide
from tessera.core.types import TensorType, int32, int64
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.elementwise import bitwise_and
from tessera.ops.tensor.rearrange import take_along_axis
from tessera.ops.tensor.sorting import argsort
from tessera.stdlib.row_sorting import (
    FIRST_KEY,
    INDEX_MASK,
    LAST_KEY,
    MAX_CHUNK,
    MAX_SELECTED,
    count_order_bits,
    join_key,
    make_order,
    merge_phases,
    select_places,
)
from tessera.stdlib.running_sums import scan_up_to

# mypy: disable-error-code="operator, attr-defined, index"

DIGIT = 2  # bits of a pass
CHUNK = 256  # elements that a program counts at once
PACKED = 32  # elements whose places among the chosen are found at once
MAX_LANES = 4096  # lanes that have an extreme of their own
LANES_PER_CHOSEN = 2  # lanes for each element that is chosen: the bound is then near the last of them
ROWS_OF_LANES = 8  # elements of a lane from which on a bound saves more than it costs
LEAST_LANES = 256  # of the kernels that sort candidates
KEY_CHUNK = 512  # elements that such a program counts at once
MAX_KEYED = 512  # elements that are chosen so: their networks sort 1024 candidates, and then 4096
MAX_KEYS = 1 << 29  # elements whose keys take 4 GB, as all of them do where none exceeds the bound
MAX_ROUNDS = 8  # so many rounds of a minimum are as fast (measured on an H200)
MAX_LITTLE, MAX_LITTLE_ROUNDS = 1 << 18, 32  # elements of all rows up to which rounds wait more than they compute
WIDE_CHUNK, MANY_ROWS_CHUNK = 2048, 512  # elements that a program counts at once, of few rows and of many
PROGRAMS = 1056  # that a GPU executes side by side
GROWTH = 4  # the candidates of the larger of two networks, in those of the smaller


def load_order(x, row, at, size, *, chunk, descending, ordered):
    """The order of a chunk of a row and its indices; what lies at `size` or beyond has the largest order."""
    block = tile.load(x[row, at : at + chunk], edge="clip")
    order = block if ordered else make_order(block, descending)
    index = at + tile.arange(0, chunk)
    most = (1 << (count_order_bits(x.dtype) - 1)) - 1
    return tile.where(index < size, order, most), index


def advance(start, step, before, place, one, two, three):
    """One digit: the start of the range of orders that has the place, and the number of elements below it."""
    up = tile.where(one <= place, start + step, start)
    up = tile.where(two <= place, start + 2 * step, up)
    start = tile.where(three <= place, start + 3 * step, up)
    before = tile.where(one <= place, one, before)
    before = tile.where(two <= place, two, before)
    before = tile.where(three <= place, three, before)
    return start, before


def find_order(x, row, size, place, *, chunk, descending, ordered):
    """The order of the element at a sorted place of a row, and the number of elements below it."""
    bits = count_order_bits(x.dtype)
    word = "int64" if bits == 64 else "int32"
    start, step = tile.cast(-(1 << (bits - 1)), word), tile.cast(1 << (bits - DIGIT), word)
    before = tile.cast(0, "int64")
    for _i in tile.range(0, bits // DIGIT, 1):
        one = tile.full((chunk,), 0, "int32")
        two, three = one, one
        for at in tile.range(0, size, chunk):
            order, _index = load_order(x, row, at, size, chunk=chunk, descending=descending, ordered=ordered)
            one = one + tile.cast(order < start + step, "int32")
            two = two + tile.cast(order < start + 2 * step, "int32")
            three = three + tile.cast(order < start + 3 * step, "int32")
        start, before = advance(start, step, before, place, tile.sum(one), tile.sum(two), tile.sum(three))
        step = step >> DIGIT
    return start, before


def find_bound(x, row, count, *, lanes, descending):
    """An order that at least `count` elements of a row do not exceed: the count-th least of the lanes' extremes."""
    bits = count_order_bits(x.dtype)
    word = "int64" if bits == 64 else "int32"
    least = tile.full((lanes,), (1 << (bits - 1)) - 1, word)
    for at in tile.range(0, x.shape[1], lanes):
        order, _index = load_order(x, row, at, x.shape[1], chunk=lanes, descending=descending, ordered=False)
        least = tile.minimum(least, order)
    start, step = tile.cast(-(1 << (bits - 1)), word), tile.cast(1 << (bits - DIGIT), word)
    before = tile.cast(0, "int64")
    for _i in tile.range(0, bits // DIGIT, 1):
        one, two = tile.sum(least < start + step), tile.sum(least < start + 2 * step)
        three = tile.sum(least < start + 3 * step)
        start, before = advance(start, step, before, count - 1, one, two, three)
        step = step >> DIGIT
    return start


def count_up_to(marks, chunk):
    """The number of marks up to each element of a block (int32), itself included."""
    none = tile.full((1, 1, 1), 0, "int32")
    found, _total = scan_up_to(tile.reshape(marks, (1, chunk, 1)), none, "sum", 0, False)
    return tile.reshape(found, (chunk,))


@kernel
def find_places(x, places, *, place, chunk, descending):
    """places[r, 0] = the index of the element at a sorted place of row r of x [R, N], on the grid (R,)."""
    row, size = tile.program_id(0), x.shape[1]
    wanted, before = find_order(x, row, size, place, chunk=chunk, descending=descending, ordered=False)
    # Of equal elements the first come first: the chunk that has the wanted one, then its index.
    rest, seen = place - before, tile.cast(0, "int64")
    first, skipped = tile.cast(0, "int64"), tile.cast(0, "int64")
    for at in tile.range(0, size, chunk):
        order, index = load_order(x, row, at, size, chunk=chunk, descending=descending, ordered=False)
        same = tile.sum((order == wanted) & (index < size))
        here = (seen <= rest) & (rest < seen + same)
        first, skipped = tile.where(here, at, first), tile.where(here, seen, skipped)
        seen = seen + same
    order, index = load_order(x, row, first, size, chunk=chunk, descending=descending, ordered=False)
    same = (order == wanted) & (index < size)
    start, step = first, tile.cast(chunk, "int64")
    for _i in tile.range(0, chunk.bit_length() - 1, 1):
        step = step >> 1
        start = tile.where(tile.sum(same & (index < start + step)) <= rest - skipped, start + step, start)
    places[row, 0] = start


@kernel
def collect_candidates(x, orders, indices, found, *, count, lanes, packed, descending):
    """The elements of each row of x [R, N] up to a bound that `count` do not exceed: orders, indices, and how many.

    The grid is (R,).
    """
    row, size = tile.program_id(0), x.shape[1]
    bound = find_bound(x, row, count, lanes=lanes, descending=descending)
    before = tile.cast(0, "int64")
    for at in tile.range(0, size, packed):
        order, index = load_order(x, row, at, size, chunk=packed, descending=descending, ordered=False)
        keep = (order <= bound) & (index < size)
        here = tile.sum(keep)
        if here > 0:
            slot = before + count_up_to(tile.cast(keep, "int32"), packed) - 1
            tile.store(orders[row, slot], order, mask=keep)
            tile.store(indices[row, slot], tile.cast(index, "int32"), mask=keep)
            before = before + here
    found[row] = before


@kernel
def choose_first(x, indices, found, chosen, *, count, chunk, packed, descending, ordered):
    """chosen[r] = the indices of the first `count` elements of row r in sorted order, equal ones in theirs; grid (R,).

    x holds elements or, if `ordered`, the orders of found[r] candidates, whose indices are given.
    """
    row = tile.program_id(0)
    size = found[row] if ordered else x.shape[1]
    wanted, before = find_order(x, row, size, count - 1, chunk=chunk, descending=descending, ordered=ordered)
    smaller, same = tile.cast(0, "int64"), before
    for at in tile.range(0, size, packed):
        order, index = load_order(x, row, at, size, chunk=packed, descending=descending, ordered=ordered)
        less, equal = order < wanted, (order == wanted) & (index < size)
        if tile.sum(less | equal) > 0:
            ahead = count_up_to(tile.cast(less, "int32"), packed)
            beside = count_up_to(tile.cast(equal, "int32"), packed)
            slot = tile.where(less, smaller + ahead, same + beside) - 1
            keep = (less | equal) & (slot < count)
            given = tile.load(indices[row, at : at + packed], edge="clip") if ordered else tile.cast(index, "int32")
            tile.store(chosen[row, slot], given, mask=keep)
            smaller, same = smaller + tile.sum(less), same + tile.sum(equal)


def find_lane_bound(x, row, first, size, *, count, lanes, chunk, descending):
    """An order that at least `count` elements of a row from `first` to `size` do not exceed: the count-th least of
    `lanes` extremes, by a bitonic sort."""
    least = tile.full((chunk,), (1 << (count_order_bits(x.dtype) - 1)) - 1, "int32")
    for at in tile.range(first, size, chunk):
        order, _index = load_order(x, row, at, size, chunk=chunk, descending=descending, ordered=False)
        least = tile.minimum(least, order)
    extremes = tile.cast(tile.min(tile.reshape(least, (lanes, chunk // lanes)), axis=1), "int64")
    place = tile.arange(0, lanes)
    extremes = merge_phases(extremes, place, 0, lanes.bit_length() - 1, lanes)
    return tile.sum(tile.where(place == count - 1, extremes, 0))


@kernel
def collect_keys(x, keys, found, *, count, lanes, chunk, part, descending):
    """The keys of the elements of parts of rows of x [R, N] up to a bound that `count` do not exceed, and how many.

    The grid is (R, parts). Of the elements that equal the bound the first `count` are enough, up to a chunk.
    """
    row, number = tile.program_id(0), tile.program_id(1)
    first = number * part
    size = tile.minimum(first + part, x.shape[1])
    bound = find_lane_bound(x, row, first, size, count=count, lanes=lanes, chunk=chunk, descending=descending)
    before, equal = tile.cast(0, "int64"), tile.cast(0, "int64")
    for at in tile.range(first, size, chunk):
        order, index = load_order(x, row, at, size, chunk=chunk, descending=descending, ordered=False)
        same = (order == bound) & (index < size) & (equal < count)
        keep = ((order < bound) & (index < size)) | same
        here = tile.sum(keep)
        if here > 0:
            slot = before + count_up_to(tile.cast(keep, "int32"), chunk) - 1
            key = join_key(order, index, x.dtype)
            tile.store(keys[row, first + slot], key, mask=keep)
            before, equal = before + here, equal + tile.sum(same)
    found[row, number] = before


def store_first(keys, best, row, first, size, slot, *, count, capacity):
    """Sort the `size` keys from `first` of a row, at most `capacity`, and store the first `count` of them."""
    place = tile.arange(0, capacity)
    block = tile.load(keys[row, first : first + capacity], edge="clip")
    block = tile.where(place < size, block, LAST_KEY)
    block = merge_phases(block, place, 0, capacity.bit_length() - 1, capacity)
    tile.store(best[row, slot + place], block, mask=place < count)


@kernel
def sort_candidates(keys, found, best, *, count, part, capacity, chunk):
    """best[r, c] = the first `count` in order of the found[r, c] keys of each part of a row; the grid is (R, parts).

    Up to `capacity` keys are sorted at once, and so are GROWTH times as many; more are walked once for each.
    """
    row, number = tile.program_id(0), tile.program_id(1)
    first, size, slot = number * part, found[row, number], number * count
    if size <= capacity:
        store_first(keys, best, row, first, size, slot, count=count, capacity=capacity)
    if (size > capacity) & (size <= GROWTH * capacity):
        store_first(keys, best, row, first, size, slot, count=count, capacity=GROWTH * capacity)
    if size > GROWTH * capacity:
        last = tile.cast(FIRST_KEY, "int64")
        for i in tile.range(0, count, 1):
            least = tile.full((chunk,), LAST_KEY, "int64")
            for at in tile.range(0, size, chunk):
                block = tile.load(keys[row, first + at : first + at + chunk], edge="clip")
                rest = (at + tile.arange(0, chunk) < size) & (block > last)
                least = tile.minimum(least, tile.where(rest, block, LAST_KEY))
            last = tile.min(least)
            best[row, slot + i] = last


@kernel
def sort_keys(keys, best, *, count, capacity):
    """best[r] = the first `count` in order of the keys of a row, at most `capacity`; the grid is (R,)."""
    row = tile.program_id(0)
    store_first(keys, best, row, 0, keys.shape[1], 0, count=count, capacity=capacity)


def select_keys(x: Tensor, count: int, descending: bool) -> Tensor:
    """The first `count` indices (int64) of a stable sort of the rows of `x` [R, N], of types that have keys.

    Parts of a row have candidates, where there are few rows, whose first ones are sorted together.
    """
    rows, size = (int(n) for n in x.shape)
    lanes = find_key_lanes(count)
    chunk = max(lanes, min(KEY_CHUNK, 1 << (size - 1).bit_length()))
    parts = max(1, min(PROGRAMS // rows, size // (ROWS_OF_LANES * chunk), MAX_CHUNK // 2 // count))
    part = ceil_divide(ceil_divide(size, parts), chunk) * chunk
    parts = ceil_divide(size, part)
    types = TensorType((rows, parts * part), int64), TensorType((rows, parts), int64)
    numbers = {"count": count, "part": part}
    keys, found = launch(
        collect_keys, (rows, parts), x, *map(OutputMemory, types), lanes=lanes, chunk=chunk, descending=descending,
        **numbers,
    )  # fmt: skip
    best = OutputMemory(TensorType((rows, parts * count), int64))
    keys = launch(sort_candidates, (rows, parts), keys, found, best, capacity=lanes, chunk=KEY_CHUNK, **numbers)
    if parts > 1:
        best = OutputMemory(TensorType((rows, count), int64))
        capacity = 1 << (parts * count - 1).bit_length()
        keys = launch(sort_keys, (rows,), keys, best, count=count, capacity=capacity)
    return bitwise_and(keys, INDEX_MASK)


def has_key_bound(size: int, count: int) -> bool:
    """Whether a row is long enough that the extremes of its lanes bound its first `count` elements."""
    return count <= MAX_KEYED and size >= find_key_lanes(count)


def find_wide_chunk(x: Tensor) -> int:
    """The elements that a program counts at once: rows of many programs are as fast with fewer threads for each."""
    return MANY_ROWS_CHUNK if int(x.shape[0]) >= PROGRAMS // 2 else WIDE_CHUNK


def select_in_parallel(x: Tensor, count: int, descending: bool) -> Tensor:
    """The first `count` indices (int64) of a stable sort of the rows of `x` [R, N], of types that have keys.

    Where many programs run side by side: by rounds of a minimum if they are few or there is little to read, otherwise
    by sorted candidates, or digits.
    """
    rows, size = (int(n) for n in x.shape)
    little = rows * size <= MAX_LITTLE and count <= MAX_LITTLE_ROUNDS
    bounded = has_key_bound(size, count) and rows * size <= MAX_KEYS
    if count <= MAX_ROUNDS or little or (count <= MAX_SELECTED and not bounded):
        return select_places(x, count, descending)
    if bounded:
        return select_keys(x, count, descending)
    chunk = find_wide_chunk(x)
    return select_front(x, count, descending, chunk, chunk)


def find_key_lanes(count: int) -> int:
    """The lanes of a part of a row whose extremes give a bound that `count` elements do not exceed."""
    return max(LEAST_LANES, 1 << (LANES_PER_CHOSEN * count - 1).bit_length())


def select_place(x: Tensor, place: int, descending: bool, chunk: int = CHUNK) -> Tensor:
    """The index [R, 1] (int64) that a stable sort of the rows of `x` [R, N] puts at a place."""
    rows, size = (int(n) for n in x.shape)
    chunk = min(chunk, 1 << (size - 1).bit_length())
    memory = OutputMemory(TensorType((rows, 1), int64))
    return launch(find_places, (rows,), x, memory, place=place, chunk=chunk, descending=descending)


def select_front(x: Tensor, count: int, descending: bool, chunk: int = CHUNK, packed: int = PACKED) -> Tensor:
    """The first `count` indices (int64) of a stable sort of the rows of `x` [R, N]."""
    rows, size = (int(n) for n in x.shape)
    lanes = max(chunk, 1 << (LANES_PER_CHOSEN * count - 1).bit_length())
    bounded = lanes <= MAX_LANES and size >= ROWS_OF_LANES * lanes
    numbers = {"count": count, "packed": min(packed, 1 << (size - 1).bit_length()), "descending": descending}
    source, indices, found = _collect(x, lanes, numbers) if bounded else (x, x, x)
    memory = OutputMemory(TensorType((rows, count), int32))
    chunk = min(chunk, 1 << (size - 1).bit_length())
    chosen = launch(
        choose_first, (rows,), source, indices, found, memory, chunk=chunk, ordered=bounded, **numbers
    )  # fmt: skip
    if count == 1:
        return cast(chosen, dtype=int64)
    order = argsort(take_along_axis(x, chosen, -1), axis=-1, descending=descending)
    return cast(take_along_axis(chosen, order, -1), dtype=int64)


def _collect(x: Tensor, lanes: int, numbers: dict[str, Any]) -> tuple[Any, ...]:
    """The candidates of each row: their orders, their indices, and how many there are."""
    rows, size = (int(n) for n in x.shape)
    word = int64 if count_order_bits(x.dtype) == 64 else int32
    types = (TensorType((rows, size), word), TensorType((rows, size), int32), TensorType((rows,), int64))
    memories = [OutputMemory(t) for t in types]
    return launch(collect_candidates, (rows,), x, *memories, lanes=lanes, **numbers)

"""Row sorting: bitonic sorts of rows (Batcher 1968) and selection of their largest elements, in the kernel language.

A row is sorted as one int64 key for each element: an integer with the element's order above, its index below. Keys are
distinct, so the order is stable whatever the network does, and equal on every target.
"""

from __future__ import annotations

from typing import Any

from tessera.core.symbolic_dim import ceil_divide
from tessera.core.types import DType, TensorType, bool_, int64, tf32
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.basic import cast, full
from tessera.ops.tensor.bits import bitcast
from tessera.ops.tensor.elementwise import bitwise_and
from tessera.ops.tensor.matrices import moveaxis
from tessera.ops.tensor.rearrange import narrow
from tessera.ops.tensor.shape import iota, reshape

# mypy: disable-error-code="operator, attr-defined, index"

INDEX_BITS = 31  # of a key, below the element's order
INDEX_MASK = (1 << INDEX_BITS) - 1
MAX_KEY_BITS = 32  # of the elements whose order fits above the index: no key is negative
LAST_KEY, FIRST_KEY = (1 << (INDEX_BITS + MAX_KEY_BITS)) - 1, -1  # of no element: behind all keys, and before all
MAX_CHUNK = 4096  # keys that a program sorts
FAR_STAGES = 3  # compare-exchange stages of a pass over memory


def count_order_bits(dtype: DType) -> int:
    """The bits, an even number, of the signed integers that have the order of a type's elements."""
    if dtype.is_float:
        return dtype.bits if dtype.bits in (16, 64) else 32
    return 2 if dtype == bool_ else dtype.bits


def make_order(x, descending):
    """Signed integers (int64 for types of 64 bits, else int32) that rise with the sorted elements of a block.

    NaN counts as the largest; the two zeros are equal.
    """
    bits = count_order_bits(x.dtype)
    word = "int64" if bits == 64 else "int32"
    if x.dtype.is_float:
        wide = x if bits == x.dtype.bits and x.dtype != tf32 else tile.cast(x, "f32")
        most = (1 << (bits - 1)) - 1
        order = tile.cast(bitcast(wide, f"int{bits}"), word)
        order = tile.where(order < 0, order ^ most, order)
        order = tile.where(wide == 0, 0, tile.where(wide != wide, most, order))
    elif x.dtype.kind == "uint":
        order = bitcast(x, word) ^ -(1 << (bits - 1)) if bits >= 32 else tile.cast(x, word) - (1 << (bits - 1))
    else:
        order = tile.cast(x, word)
    return -1 - order if descending else order


def make_keys(x, index, descending):
    """The int64 keys of a block of elements at these indices, in rising order of the sorted elements."""
    return join_key(make_order(x, descending), index, x.dtype)


def join_key(order, index, dtype):
    """The int64 keys of elements of a type with these orders and indices."""
    return (tile.cast(order, "int64") + (1 << (count_order_bits(dtype) - 1))) * (INDEX_MASK + 1) + index


def exchange(keys, reach):
    """One stage of a bitonic network on a vector: of two keys that are `reach` apart the smaller comes first."""
    pairs = tile.reshape(keys, (keys.shape[0] // (2 * reach), 2, reach))
    first = tile.reshape(tile.arange(0, 2), (1, 2, 1)) == 0
    # The sum of a pair, which may wrap, less one of them is the other: one exchange between threads, not two.
    other = tile.sum(pairs, axis=1, keepdims=True) - pairs
    return tile.reshape(tile.where((pairs < other) == first, pairs, other), keys.shape)


def turn_falling(keys, position, size):
    """The keys with those complemented that lie in falling runs: where bit `size` of their position is set.

    Complements have the opposite order, so that all stages of a phase rise; a second call gives the keys back.
    """
    return keys ^ tile.cast(0 - ((position >> size) & 1), "int64")


def merge_phases(keys, position, first, last, chunk):
    """The phases of a bitonic sort from run length 2 ** (first + 1) to 2 ** last, as far as they stay in a chunk."""
    position = tile.cast(position, "int32")
    for phase in tile.range(first, last, 1):
        size = tile.cast(phase + 1, "int32")
        keys = turn_falling(keys, position, size)
        reach = chunk // 2
        while reach >= 1:
            if 2 * reach <= tile.cast(1, "int32") << size:
                keys = exchange(keys, reach)
            reach = reach // 2
        keys = turn_falling(keys, position, size)
    return keys


@kernel
def sort_chunks(x, keys, *, descending, chunk, rows):
    """keys = the keys of the elements of x [R, N], sorted in chunks, on the grid (ceil(R / rows), chunks of a row).

    Chunks with odd numbers fall, the others rise. `chunk` and `rows` are powers of two; keys are [R, chunks · chunk].
    """
    row, start = tile.program_id(0) * rows, tile.program_id(1) * chunk
    block = tile.load(x[row : row + rows, start : start + chunk], edge="clip")
    place = start + tile.reshape(tile.arange(0, rows * chunk) % chunk, (rows, chunk))
    found = tile.where(place < x.shape[1], make_keys(block, place, descending), LAST_KEY)
    position = tile.reshape(place, (rows * chunk,))
    found = merge_phases(tile.reshape(found, (rows * chunk,)), position, 0, chunk.bit_length() - 1, chunk)
    tile.store(keys[row : row + rows, start : start + chunk], tile.reshape(found, (rows, chunk)), edge="clip")


@kernel
def merge_far(keys, step, *, stages, block):
    """`stages` stages of a phase on keys [R, W] in place; step = [phase, log2 of the distance of the first stage].

    The grid is (R, W / block / 2 ** stages): a program takes 2 ** stages runs of `block` keys.
    """
    row, number, phase, reach = tile.program_id(0), tile.program_id(1), step[0], step[1]
    width, last = 1 << stages, tile.cast(1, "int64") << (reach - (stages - 1))
    each = last // block  # programs of a group, which has 2 ** (reach + 1) keys
    group = number // each
    first = (group << (reach + 1)) + number % each * block
    index = tile.reshape(tile.arange(0, width * block), (width, block))
    place = first + index // block * last + index % block
    run = tile.reshape(keys[row, place], (width * block,))
    falls = 0 - ((group >> (phase - reach)) & 1)  # the same for all keys of the group
    run, distance = run ^ falls, width * block // 2
    while distance >= block:
        run = exchange(run, distance)
        distance = distance // 2
    keys[row, place] = tile.reshape(run ^ falls, (width, block))


@kernel
def merge_near(keys, step, *, chunk):
    """The stages of phase step[0] within chunks, on keys [R, chunks · chunk] in place; the grid is (R, chunks)."""
    row, start = tile.program_id(0), tile.program_id(1) * chunk
    run = tile.reshape(keys[row, start : start + chunk], (chunk,))
    keys[row, start : start + chunk] = merge_phases(run, start + tile.arange(0, chunk), step[0], step[0] + 1, chunk)


@kernel
def select_first(x, best, *, count, chunk, descending, keyed):
    """best[r, c] = the first `count` keys of each chunk of x [R, N] in order, on the grid (R, chunks).

    x holds elements or, if `keyed`, keys. A chunk with fewer elements is filled with the last key.
    """
    row, number = tile.program_id(0), tile.program_id(1)
    place = number * chunk + tile.arange(0, chunk)
    block = tile.load(x[row, number * chunk : number * chunk + chunk], edge="clip")
    keys = block if keyed else make_keys(block, place, descending)
    keys = tile.where(place < x.shape[1], keys, LAST_KEY)
    for i in tile.range(0, count, 1):
        first = tile.min(keys)
        best[row, number * count + i] = first
        keys = tile.where(keys == first, LAST_KEY, keys)


def has_keys(dtype: DType, size: int) -> bool:
    """Whether rows of this length and element type have keys."""
    return (dtype == bool_ or dtype.bits <= MAX_KEY_BITS) and 0 < size < INDEX_MASK


def sort_places(x: Tensor, descending: bool) -> Tensor:
    """The indices (int64) that sort the rows of `x` [R, N] stably, by a bitonic network.

    Sizes are static; the element type has at most 32 bits.
    """
    rows, size = (int(n) for n in x.shape)
    whole = 1 << (size - 1).bit_length()
    chunk = min(whole, MAX_CHUNK)
    together = min(MAX_CHUNK // chunk, 1 << (rows - 1).bit_length())
    memory = OutputMemory(TensorType((rows, whole), int64))
    grid = (ceil_divide(rows, together), whole // chunk)
    keys = launch(sort_chunks, grid, x, memory, descending=descending, chunk=chunk, rows=together)
    for phase in range(chunk.bit_length() - 1, whole.bit_length() - 1):
        keys = _merge_phase(keys, phase, chunk)
    return narrow(bitwise_and(keys, INDEX_MASK), 1, 0, size)


def _merge_phase(keys: Any, phase: int, chunk: int) -> Any:
    """The phase of a bitonic sort that makes sorted runs of 2 ** (phase + 1) keys.

    Its numbers are memory, not constants of the kernels, so that all phases share the same few.
    """
    rows, whole = (int(n) for n in keys.shape)
    reach = phase
    while 1 << reach >= chunk:
        stages = min(FAR_STAGES, reach + 2 - chunk.bit_length())
        block = max(min(MAX_CHUNK >> stages, chunk), 1)
        step = cast(iota(shape=(2,)) * (reach - phase) + phase, dtype=int64)
        keys = launch(merge_far, (rows, whole // (block << stages)), keys, step, stages=stages, block=block)
        reach -= stages
    return launch(merge_near, (rows, whole // chunk), keys, full(shape=(1,), value=phase, dtype=int64), chunk=chunk)


SELECT_CHUNK = 8192  # elements of a program that selects
MAX_SELECTED = 64  # so many rounds of a selection cost less than a sort


def select_places(x: Tensor, count: int, descending: bool) -> Tensor:
    """The first `count` indices (int64) that `sort_places` gives, by `count` rounds of a minimum over chunks."""
    rows, size = (int(n) for n in x.shape)
    keyed = False
    while not keyed or size > count:
        chunk = min(1 << (size - 1).bit_length(), SELECT_CHUNK)
        chunks = ceil_divide(size, chunk)
        memory = OutputMemory(TensorType((rows, chunks * count), int64))
        x = launch(
            select_first, (rows, chunks), x, memory, count=count, chunk=chunk, descending=descending, keyed=keyed
        )
        size, keyed = chunks * count, True
    return bitwise_and(x, INDEX_MASK)


def on_rows(x: Tensor, axis: int, function: Any) -> Tensor:
    """A function of rows [R, N] applied along an axis."""
    moved = moveaxis(x, axis, -1)
    lead = moved.shape[:-1]
    found = function(reshape(moved, shape=(-1, moved.shape[-1])))
    return cast(moveaxis(reshape(found, shape=(*lead, found.shape[-1])), -1, axis), dtype=int64)

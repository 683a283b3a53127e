"""The sum of a long vector over a whole grid, in two launches and without atomics: the same bits every time."""

# mypy: disable-error-code="operator, attr-defined, index"

from typing import Any

import numpy as np

from tessera.errors import ArgumentError, outside
from tessera.kernel import kernel, tile
from tessera.stdlib.routine import array, blocks, routine

# The second launch adds what at most so many programs of the first have found.
PROGRAMS = 256


@kernel
def sum_blocks(x, out, *, per: int, BLOCK: int = 4096):
    """out[p] = the sum of x from p · per · BLOCK on, per · BLOCK elements long, for the programs p of the grid.

    Lanes add their elements in order; then the lanes are halved until one is left. BLOCK is a power of two.
    """
    first = tile.program_id(0) * (per * BLOCK)
    lanes = tile.zeros((BLOCK,), out.dtype)
    for start in tile.range(first, first + per * BLOCK, BLOCK):
        lanes += tile.cast(tile.load(x[start : start + BLOCK], edge="clip"), out.dtype)
    out[tile.program_id(0)] = tree(lanes, BLOCK)


def tree(lanes, size):
    """The sum of a block as a tree: element i with element i + size / 2, again and again."""
    while size > 1:
        size = size // 2
        lanes = tile.sum(tile.reshape(lanes, (2, size)), axis=0)
    return tile.reshape(lanes, ())


@routine(sum_blocks)
def tree_sum(kernel: Any, x: Any) -> Any:
    """The sum of all elements of `x`, of a float or integer type, by a tree that only the size and BLOCK decide.

    Floats of 16 bits and f32 are added in f32, f64 in f64, and the result is rounded once to the type of `x`;
    integers give int64. Every target and every run gives the same bits.

    Raises:
        ArgumentError: the schedule's block is no power of two.
        DTypeError: the elements are no numbers.

    >>> int(tree_sum(np.arange(100_000)))
    4999950000
    """
    x = array(x, "x", "fi").reshape(-1)
    narrow = x.dtype.kind in "iu"
    state = np.int64 if narrow else np.float64 if x.dtype == np.float64 else np.float32
    block = kernel.bind((x, x), {"per": 1}).constants["BLOCK"]
    if block & (block - 1):
        raise ArgumentError(f"BLOCK={block} cannot be halved to one", location=outside(), expected="a power of two")
    per = max(blocks(blocks(x.size, block), PROGRAMS), 1)
    partial = np.zeros(max(blocks(x.size, per * block), 1), state)
    total = np.zeros(1, state)
    if x.size:
        kernel[(len(partial),)](x, partial, per=per)
        kernel[(1,)](partial, total, per=max(blocks(len(partial), block), 1))
    return total.astype(np.int64 if narrow else x.dtype)[0]

"""Sums of rows into the places that indices name, in the order of the indices: the same bits on every run."""

# mypy: disable-error-code="operator, attr-defined, index"
# Tensor gets its operators when the ops are loaded; mypy does not see them.

from collections.abc import Mapping

from tessera.ir.core import Module
from tessera.kernel import kernel, tile
from tessera.types import Type

BLOCK_ROWS, BLOCK_COLS = 64, 64


@kernel
def add_rows(x, places, updates, out, *, BR: int = BLOCK_ROWS, BC: int = BLOCK_COLS):
    """out = x, and then out[:, places[p]] += updates[:, p] for each p, on the grid (L, ceil(R / BC)).

    x and out are [L, N, R], updates [L, P, R], places [P] integers from 0 to N - 1. A program owns a
    block of columns: no two programs write one element.
    """
    lead, first = tile.program_id(0), tile.program_id(1) * BC
    for start in tile.range(0, x.shape[1], BR):
        block = tile.load(x[lead, start : start + BR, first : first + BC], edge="clip")
        tile.store(out[lead, start : start + BR, first : first + BC], block, edge="clip")
    for p in tile.range(0, places.shape[0], 1):
        place = places[p]
        before = tile.load(out[lead, place, first : first + BC], edge="clip")
        more = tile.load(updates[lead, p, first : first + BC], edge="clip")
        tile.store(out[lead, place, first : first + BC], before + more, edge="clip")


def specialized(types: Mapping[str, Type]) -> Module:
    """The Tile module for refs x, places, updates and out."""
    lead, rows, columns = (int(n) for n in types["x"].shape)  # type: ignore[arg-type]
    blocks = {"BR": min(BLOCK_ROWS, rows), "BC": min(BLOCK_COLS, columns)}
    return add_rows.specialize(types, blocks, (lead, -(-columns // blocks["BC"])))

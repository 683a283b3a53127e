"""What products on one element cost, in cycles: by this they are emitted, and mappings are chosen."""

from __future__ import annotations

# An operation on a whole descriptor, with the steps of the loop around it.
OVERHEAD = 26
STEP = 20
# A multiply-add whose operands stay in registers, with the loop around it: its rows lie one after another, or do not.
WALK, STRIDE = 27, 40
# Elements a cycle, of a WSE-2 and of a WSE-3: a multiply-add with a scalar, a product, a sum.
MULTIPLY_ADD, PRODUCT, SUM = (2, 4), (1, 4), (2, 4)
# "lines": a multiply-add on a row or column of the result for each factor of another. "outer": for each place that is
# summed, the products of a column and a row, then a sum. "inner": for each element of the result, the products of a
# row and a column, then their sum.
LINES, OUTER, INNER = "lines", "outer", "inner"


def ways(rows: int, columns: int, summed: int, wide: bool = False) -> dict[str, float]:
    """The cycles of a product of rows x summed by summed x columns, by each way; `wide` on a WSE-3."""
    both = 2 * OVERHEAD + STEP
    rate = 1 / PRODUCT[wide] + 1 / SUM[wide]
    return {
        LINES: summed * min(lines(rows, columns, wide)),
        OUTER: summed * (both + rows * columns * rate),
        INNER: rows * columns * (both + summed * rate),
    }


def lines(rows: int, columns: int, wide: bool = False) -> tuple[float, float]:
    """The cycles for each place that is summed of a product by rows, and by columns."""
    rate = MULTIPLY_ADD[wide]
    return rows * (WALK + columns / rate), columns * (STRIDE + rows / rate)


def cheapest(found: dict[str, float]) -> str:
    """The way of the fewest cycles."""
    return min(found, key=lambda way: found[way])


def told(words: int, places: int) -> float:
    """The cycles in which one element tells all along an axis: to the last, and back."""
    return words + 2 * places + 3 * OVERHEAD


def gathered(words: int, places: int) -> float:
    """The cycles in which all have `words` of all; each element's turn takes a few cycles of its own."""
    return words + 6 * places + 3 * OVERHEAD

"""What products on one element cost, in cycles: by this they are emitted, and mappings are chosen."""

from __future__ import annotations

# An operation on a whole descriptor, with the steps of the loop around it.
OVERHEAD = 26
STEP = 20
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
    longer, shorter = max(rows, columns), min(rows, columns)
    return {
        LINES: shorter * summed * (OVERHEAD + STEP + longer / MULTIPLY_ADD[wide]),
        OUTER: summed * (both + rows * columns * rate),
        INNER: rows * columns * (both + summed * rate),
    }


def cheapest(found: dict[str, float]) -> str:
    """The way of the fewest cycles."""
    return min(found, key=lambda way: found[way])

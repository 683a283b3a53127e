"""Print format: the name of a tile and the line that a print statement writes for it, on every target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def format_tile_name(grid: Sequence[int], group: int, program: int, tile: int) -> str:
    """A tile by its program's number in row-major order, and in a group by its own.

    >>> format_tile_name((2, 3), 1, 4, 0), format_tile_name((4,), 8, 2, 5)
    ('program (1, 1)', 'program (2,), tile 5')
    """
    numbers = tuple(int(i) for i in np.unravel_index(program, tuple(grid)))
    return f"program {numbers}" + (f", tile {tile}" if group > 1 else "")


def format_print_line(label: str, ordered: bool, values: Sequence[Any]) -> str:
    """A label with values after it, or with `ordered` in the places that it has for them.

    >>> format_print_line("x is {} of {}", True, [np.int64(3), np.arange(2)])
    'x is 3 of [0, 1]'
    >>> format_print_line("x", False, [np.float32(0.5)])
    'x 0.5'
    """
    words = [np.array2string(v, separator=", ") if np.ndim(v) else str(v) for v in values]
    return label.format(*words) if ordered else " ".join([label, *words] if label else words)

"""Array memory: the addresses that the elements of a NumPy array occupy."""

from __future__ import annotations

import numpy as np


def array_address(array: np.ndarray) -> int:
    """The address of the first element.

    >>> pair = np.zeros(2, np.int32)
    >>> array_address(pair[1:]) - array_address(pair)
    4
    """
    return int(array.__array_interface__["data"][0])


def array_span(array: np.ndarray) -> tuple[int, int]:
    """The lowest address of an element, and the address past the highest."""
    steps = [s * (n - 1) for s, n in zip(array.strides, array.shape, strict=True)]
    base = array_address(array)
    return base + sum(s for s in steps if s < 0), base + sum(s for s in steps if s > 0) + array.itemsize

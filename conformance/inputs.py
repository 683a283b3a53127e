"""Inputs of cases: seeded, of every element type, within the domain of the op."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from tessera.core.types import DType, as_dtype


def tensor(name: str, shape: tuple[int, ...], dtype: Any = "f32", low: float = -2.0, high: float = 2.0) -> np.ndarray:
    """Values between `low` and `high`, the same for the same name on every machine."""
    element: DType = as_dtype(dtype)
    generator = np.random.Generator(np.random.Philox(zlib.crc32(name.encode())))
    if element.kind == "bool":
        return generator.integers(0, 2, shape).astype(bool)
    if element.is_integer:
        return generator.integers(int(low), int(high) + 1, shape).astype(element.numpy)
    return generator.uniform(low, high, shape).astype(element.numpy)

"""Inputs of cases: seeded, of every element type, within the domain of the op."""

from __future__ import annotations

import zlib
from typing import Any

import ml_dtypes
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


# The kinds of values of `edge_values`, the simplest first.
KINDS = ("ramp", "uniform", "ties", "positive", "special", "extreme", "zeros")


def edge_values(kind: str, seed: int, shape: tuple[int, ...], dtype: Any = "f32") -> np.ndarray:
    """Values that expose errors: ramps, ties, signed zeros, the limits of the type, subnormals, NaN and infinities.

    "special" has NaN and infinities at the first, the last and a few other places of a uniform array; an element type
    without them has its limits there. "infinite" has no limits beside them. "wide" numbers span 40 powers of two, and
    "near" ones are a few steps from 1 or -1. The same arguments give the same values on every machine.
    """
    element: DType = as_dtype(dtype)
    generator = np.random.Generator(np.random.Philox(key=seed))
    count = int(np.prod(shape, dtype=np.int64))
    if element.kind == "bool":
        return (np.arange(count) % 2 == 1 if kind == "ramp" else generator.integers(0, 2, count) > 0).reshape(shape)
    make = _make_integers if element.is_integer else _make_floats
    with np.errstate(all="ignore"):
        return make(kind, generator, count, element).reshape(shape)


def _make_integers(kind: str, generator: np.random.Generator, count: int, element: DType) -> np.ndarray:
    limits = ml_dtypes.iinfo(element.numpy)
    low, high = int(limits.min), int(limits.max)
    ramp = np.arange(count) % 7
    values = {
        "ramp": lambda: ramp - 3 * (low < 0),
        "uniform": lambda: generator.integers(max(low, -9), min(high, 9) + 1, count),
        "ties": lambda: generator.integers(max(low, -1), 2, count),
        "positive": lambda: generator.integers(1, min(high, 5) + 1, count),
        "zeros": lambda: np.zeros(count, np.int64),
        "wide": lambda: generator.integers(max(low, -(2**20)), min(high, 2**20), count),
        "near": lambda: generator.integers(max(low, -1), 2, count),
    }
    if kind in values:
        return values[kind]().astype(element.numpy)
    some = np.array([low, high, low + 1, high - 1, 0, 1, max(low, -1), high // 2], dtype=element.numpy)
    return some[generator.integers(0, len(some), count)]


def _make_floats(kind: str, generator: np.random.Generator, count: int, element: DType) -> np.ndarray:
    info = ml_dtypes.finfo(element.numpy)
    top, tiny = float(info.max), float(info.smallest_subnormal)
    values = {
        "ramp": lambda: (np.arange(count) % 9 - 4) / 2,
        "uniform": lambda: generator.uniform(-2, 2, count),
        "ties": lambda: generator.integers(-1, 2, count).astype(float),
        "positive": lambda: generator.uniform(0.125, 3, count),
        "zeros": lambda: np.where(generator.integers(0, 2, count) > 0, -0.0, 0.0),
        "wide": lambda: generator.choice([-1.0, 1.0], count) * np.exp2(generator.uniform(-20, 20, count)),
        "near": lambda: generator.choice([-1.0, 1.0], count) * (1 + generator.integers(-3, 4, count) * float(info.eps)),
    }
    if kind in values:
        return values[kind]().astype(element.numpy)
    some = [top, -top, tiny, -tiny, float(info.smallest_normal), 0.0, -0.0, 1.0, float(info.eps), 1 + float(info.eps)]
    out = generator.uniform(-2, 2, count)
    if kind == "extreme":
        out = np.array(some)[generator.integers(0, len(some), count)]
    else:
        some = [np.nan, np.inf, -np.inf] * 3 + (some if kind == "special" else [])
        places = [*generator.integers(0, count, 3), 0, count - 1] if count else []
        out[places] = np.array(some)[generator.integers(0, len(some), len(places))]
    return out.astype(element.numpy)

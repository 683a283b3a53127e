"""Ops that a plan leaves to the host: NumPy runs them on memory that compiled code has filled."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import tessera.ops  # defines the ops that plans name  # noqa: F401
from tessera.op import REGISTRY
from tessera.types import TensorType, as_dtype


def bytes_at(address: int, argument: Mapping[str, Any]) -> np.ndarray:
    """The memory of an argument, by its address."""
    count = math.prod(argument["shape"]) * as_dtype(argument["dtype"]).numpy.itemsize
    return np.frombuffer((ctypes.c_uint8 * count).from_address(address), np.uint8) if count else np.empty(0, np.uint8)


def seen(memory: np.ndarray, argument: Mapping[str, Any]) -> np.ndarray:
    """Memory as an array of an argument's shape and type."""
    dtype = as_dtype(argument["dtype"]).numpy
    count = math.prod(argument["shape"]) * dtype.itemsize
    return memory[:count].view(dtype).reshape(argument["shape"])


def run_call(call: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> None:
    """Run an op from the first arrays to the rest."""
    op, many = REGISTRY[call["op"]], call["operands"]
    types = [TensorType(tuple(a["shape"]), as_dtype(a["dtype"])) for a in call["args"]]
    found = op.execute(tuple(types[:many]), tuple(types[many:]), call["attrs"], list(arrays[:many]))
    for target, result in zip(arrays[many:], found, strict=True):
        target[...] = result

"""ONNX files as entry points of the commands: the model as a jit function, and random inputs for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from tessera.core.errors import ArgumentError, Location
from tessera.core.types import DType
from tessera.frontend.jit.tracing import Jit
from tessera.onnx.element_types import ELEMENTS, find_element
from tessera.onnx.model import Signature, load, make_identifiers

Inputs = Callable[[np.random.Generator], dict[str, np.ndarray]]


def load_entry(path: str, sizes: Mapping[str, int]) -> tuple[Jit, Inputs, dict[str, DType | None], Location]:
    """The model in a file as a jit function, a function that makes inputs, the types of these, and the place.

    `sizes` has a number for each axis whose size the model leaves open: by its name, or as INPUT.AXIS. Integer inputs
    are 0 or 1, others are normally distributed; those that decide shapes must come from files.

    Raises:
        FileError, ParseError, UnsupportedOpError: as `load`.
    """
    model = load(path)
    names = make_identifiers([s.name for s in model.inputs])
    known = {str(n) for s in model.inputs for n in _open_sizes(s)}
    if unknown := [n for n in sizes if n not in known]:
        raise ArgumentError(f"{path} has no size {unknown[0]}", expected=", ".join(sorted(known)) or "no open sizes")

    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        decides = [n for n in names if n in model.shape_inputs]
        if decides:
            raise ArgumentError(
                f"the input {decides[0]} decides shapes, and has no example",
                suggestion=f"give all inputs in order with --input: {', '.join(names)}",
            )
        return {n: _draw(rng, s, sizes, path) for n, s in zip(names, model.inputs, strict=True)}

    types = {n: ELEMENTS.get(s.element) if s.element else None for n, s in zip(names, model.inputs, strict=True)}
    return model.entry(), make, types, Location(path, 1)


def _open_sizes(signature: Signature) -> list[str]:
    """The names of the axes whose sizes a model leaves open."""
    return [n or f"{signature.name}.{i}" for i, n in enumerate(signature.shape or ()) if not isinstance(n, int)]


def _draw(rng: np.random.Generator, signature: Signature, sizes: Mapping[str, int], path: str) -> np.ndarray:
    if signature.shape is None or signature.element is None:
        raise ArgumentError(f"{path}: the input {signature} has no shape", suggestion="give all inputs with --input")
    missing = [n for n in _open_sizes(signature) if n not in sizes]
    if missing:
        raise ArgumentError(
            f"{path} leaves the size {missing[0]} of the input {signature.name} open", expected=str(signature),
            suggestion=f"--size {missing[0]}=1, or give all inputs with --input",
        )  # fmt: skip
    shape = [n if isinstance(n, int) else sizes[n or f"{signature.name}.{i}"] for i, n in enumerate(signature.shape)]
    dtype = find_element(ir.DataType(signature.element), f"the input {signature.name}")
    values: Any = rng.standard_normal(shape) if dtype.is_float else rng.integers(0, 2, shape)
    return np.asarray(values).astype(dtype.numpy)

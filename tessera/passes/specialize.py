"""Specialize: a Graph function with symbolic sizes replaced by numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.ir.core import Function
from tessera.passes.retype import retype
from tessera.shapes import Dim


def specialize(function: Function, sizes: Mapping[str, int]) -> Function:
    """A function in which every size that `sizes` names is known."""
    return retype(function, lambda type: type.evaluate(sizes), lambda value: _known(value, sizes))


def _known(value: Any, sizes: Mapping[str, int]) -> Any:
    if isinstance(value, Dim):
        return value.evaluate(sizes)
    return tuple(_known(v, sizes) for v in value) if isinstance(value, tuple) else value

"""`tile.inline` in the interpreter: the Python emulation, on the elements of all program instances at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.errors import ExecutionError
from tessera.ir.core import Node
from tessera.numerics.bounded import Bounded, lift
from tessera.numerics.convert import convert, store
from tessera.numerics.formats import format_of
from tessera.op import Rules
from tessera.ops.inline import emulation, inline
from tessera.types import TensorType

rules = Rules("tile inline")


@rules(inline)
def _(machine, node, args, run):
    if machine.bound:
        return (_bounded(node, [lift(a) for a in args]),)
    out = node.out.type
    return (store(_emulated(node, args), out.dtype, None),)


def _emulated(node: Node, arrays: Sequence[Any]) -> np.ndarray:
    """What the emulation gives; floats come in the type that ops compute in.

    Raises:
        ExecutionError: it fails, or gives an array of another shape.
    """
    name = node.attrs["python"]
    function = emulation(name)
    wide = [convert(a, _compute(v.type)) for a, v in zip(arrays, node.args, strict=True)]
    shape = np.broadcast_shapes(*(a.shape for a in wide))
    try:
        found = np.asarray(function(*wide))
    except Exception as error:  # whatever a user's function raises is reported at its line
        raise ExecutionError(
            f"the emulation of tile.inline fails: {type(error).__name__}: {error}", received=name.partition("#")[0]
        ) from error
    if found.shape != shape:
        raise ExecutionError(
            "the emulation of tile.inline is not elementwise", expected=f"an array of shape {shape}",
            received=f"shape {found.shape}", suggestion="use NumPy functions that treat each element by itself",
        )  # fmt: skip
    return found


def _compute(type: Any) -> Any:
    assert isinstance(type, TensorType)
    return type.compute


def _bounded(node: Node, operands: Sequence[Bounded]) -> Bounded:
    """Exact where the operands are, but for `ulp` and the rounding; of others nothing is known."""
    out = node.out.type.dtype
    held = [convert(x.value, v.type.dtype) for x, v in zip(operands, node.args, strict=True)]
    found = _emulated(node, held)
    sure = np.broadcast_to(np.logical_and.reduce(np.broadcast_arrays(*(x.radius == 0 for x in operands))), found.shape)
    value = store(found, out, None)
    if not out.is_float:
        return Bounded(value, np.where(sure, 0.0, np.inf))
    wide = value.astype(np.float64)
    step = 2 * format_of(out).rounding(np.abs(wide))  # half a unit in the last place, twice
    return Bounded(wide, np.where(sure, node.attrs["ulp"] * step, np.inf) if node.attrs["ulp"] else _none(sure))


def _none(sure: np.ndarray) -> np.ndarray:
    return np.where(sure, 0.0, np.inf)

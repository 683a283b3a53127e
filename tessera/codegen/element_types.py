"""The check of element types before emission: what a target lacks is named with the op and its line."""

from __future__ import annotations

from collections.abc import Sequence

from tessera.errors import UnsupportedOpError
from tessera.ir.core import Module, Node
from tessera.types import DType


def check_element_types(module: Module, target: str, dtypes: Sequence[DType]) -> None:
    """Refuse a Tile module that uses element types a target does not have.

    Raises:
        UnsupportedOpError: the first op of a tile function that takes or gives such elements.
    """
    for function in module.functions[1:]:
        for node in function.body.walk():
            lacking = [t.dtype for t in (*node.result_types, *node.types) if t.dtype not in dtypes]
            if lacking:
                raise _refusal(node, lacking[0], target, dtypes)


def _refusal(node: Node, dtype: DType, target: str, dtypes: Sequence[DType]) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"{node.op.name} on {dtype} cannot be emitted: the target {target} has no element type {dtype}",
        location=node.loc,
        expected=", ".join(map(str, dtypes)),
        received=str(dtype),
        suggestion="cast to one of these before, or run in the interpreter",
    )

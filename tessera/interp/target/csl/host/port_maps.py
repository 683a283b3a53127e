"""Port maps of the SDKs before 1.0: which PE holds which element of a host tensor, written as a relation.

`{ A[i=0:5][j=0:3] -> [PE[i % 2, i // 2] -> index[j]] }`: the ranges include both ends; PE has the column and the row.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, ShapeError

_MAP = re.compile(
    r"^\s*\{\s*\w+\s*((?:\[[^\]]*\]\s*)+)->\s*\[\s*PE\s*\[(.*?)\]\s*->\s*index\s*\[(.*)\]\s*\]\s*\}\s*$", re.S
)
_RANGE = re.compile(r"\[\s*(\w+)\s*=\s*(-?\d+)\s*:\s*(-?\d+)\s*\]\s*")
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
Region = tuple[int, int, int, int, int, np.ndarray]  # px, py, width, height, elements of a PE, data


@dataclass(frozen=True)
class PortMap:
    """The region of PEs, the elements of each PE, and for each element of the tensor its place in the copied data."""

    shape: tuple[int, ...]
    origin: tuple[int, int]
    size: tuple[int, int]
    count: int
    places: np.ndarray


def parse_port_map(text: str) -> PortMap:
    """Read a port map.

    Raises:
        ArgumentError: the text is no port map.

    >>> parse_port_map("{ A[i=0:3] -> [PE[i // 2, 0] -> index[i % 2]] }").places.tolist()
    [0, 1, 2, 3]
    """
    match = _MAP.match(text)
    ranges = _RANGE.findall(match.group(1)) if match else []
    if match is None or _RANGE.sub("", match.group(1)) or any(int(low) > int(high) for _, low, high in ranges):
        raise ArgumentError(
            "a port map cannot be parsed", expected="{ A[i=0:5] -> [PE[i, 0] -> index[0]] }", received=text
        )
    axes = [np.arange(int(low), int(high) + 1) for _, low, high in ranges]
    grids = dict(zip([name for name, _, _ in ranges], np.meshgrid(*axes, indexing="ij"), strict=True))
    shape = tuple(len(axis) for axis in axes)
    x, y = (_evaluate(part, grids, shape) for part in _split(match.group(2), 2, text))
    index = np.zeros(shape, np.int64)
    for part in _split(match.group(3), 0, text):
        value = _evaluate(part, grids, shape)
        if value.min() < 0:
            raise ArgumentError("a port map has a negative index", received=text)
        index = index * (int(value.max()) + 1) + value
    origin, size = (int(x.min()), int(y.min())), (int(np.ptp(x)) + 1, int(np.ptp(y)) + 1)
    count = int(index.max()) + 1
    places = ((y - origin[1]) * size[0] + (x - origin[0])) * count + index
    return PortMap(shape, origin, size, count, places.reshape(-1))


def _split(text: str, count: int, whole: str) -> list[str]:
    """The expressions between commas."""
    parts = text.split(",")
    if count and len(parts) != count:
        raise ArgumentError("a port map does not name a PE by its column and row", received=whole)
    return parts


def _evaluate(text: str, grids: dict[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """An expression of the loop variables, for every element of the tensor."""

    def evaluate(node: ast.expr) -> Any:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -evaluate(node.operand)
        if isinstance(node, ast.Name) and node.id in grids:
            return grids[node.id]
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return np.int64(node.value)
        raise ValueError(f"{ast.unparse(node)} is no loop variable, number, sum, product or quotient")

    try:
        with np.errstate(all="raise"):
            value = evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError) as error:
        raise ArgumentError(f"an expression of a port map cannot be evaluated: {error}", received=text) from None
    return np.broadcast_to(value, shape)


def convert_input_tensor(portmap: str, tensor: np.ndarray) -> Region:
    """The region and the words of a copy to the device, in row order: the arguments of `memcpy_h2d`."""
    found = parse_port_map(portmap)
    values = np.asarray(tensor).reshape(-1)
    if values.size != found.places.size:
        raise ShapeError(
            "the tensor does not have the elements of its port map",
            expected=" x ".join(map(str, found.shape)),
            received=str(np.asarray(tensor).shape),
        )
    data = np.zeros(found.size[0] * found.size[1] * found.count, values.dtype)
    data[found.places] = values
    return (*found.origin, *found.size, found.count, data)


def prepare_output_tensor(portmap: str, dtype: Any) -> Region:
    """The region and an empty array for a copy from the device: the arguments of `memcpy_d2h`."""
    found = parse_port_map(portmap)
    return (*found.origin, *found.size, found.count, np.zeros(found.size[0] * found.size[1] * found.count, dtype))


def format_output_tensor(portmap: str, dtype: Any, data: np.ndarray) -> np.ndarray:
    """The tensor of a port map from the copied data."""
    found = parse_port_map(portmap)
    return np.asarray(data).reshape(-1).view(dtype)[found.places].reshape(found.shape)

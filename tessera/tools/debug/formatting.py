"""Formatting of values, instances, locations and source lines for the debugger."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from tessera.core.errors import Location, read_source_line
from tessera.core.types import TensorType, as_dtype
from tessera.interp.tile.affine import AffineScalar
from tessera.interp.tile.memory import InstanceMemory
from tessera.ir.core import Node
from tessera.ir.numerics.interval_arithmetic import IntervalArray
from tessera.ops.dialects import tile
from tessera.tools.debug.history import HistoryStep

CONTEXT_LINES = 4


def format_value(held: Any) -> str:
    """Format a value: small ones whole, blocks with their type and statistics."""
    if isinstance(held, IntervalArray):
        return format_bounded(held)
    if not isinstance(held, (np.ndarray, np.generic)):
        return repr(held)
    array = np.asarray(held)
    if not array.ndim:
        return f"{array} ({_format_type(array)})"
    text = np.array2string(array, threshold=64, edgeitems=3, separator=", ", max_line_width=110)
    return f"{_format_type(array)}\n{text}\n{format_statistics(array)}"


def _format_type(array: np.ndarray) -> str:
    try:
        return str(TensorType(array.shape, as_dtype(array.dtype)))
    except Exception:  # a Python object, not one of our element types
        return f"{array.dtype} {array.shape}"


def format_statistics(array: np.ndarray) -> str:
    """Format the minimum, maximum, mean and deviation of the finite elements, and the count of the others."""
    wide = np.asarray(array)
    if wide.dtype.kind == "b" or not wide.size:
        return f"true {int(wide.sum())} of {wide.size}"
    wide = wide.astype(np.float64)
    good = wide[np.isfinite(wide)]
    nans, infinities = int(np.isnan(wide).sum()), int(np.isinf(wide).sum())
    odd = f", nan {nans}" * bool(nans) + f", inf {infinities}" * bool(infinities)
    if not good.size:
        return f"nothing finite{odd}"
    return f"min {good.min():.6g}, max {good.max():.6g}, mean {good.mean():.6g}, std {good.std():.6g}{odd}"


def format_bounded(held: IntervalArray) -> str:
    """Format a value with its error bound."""
    found, radius = np.asarray(held.value), np.asarray(held.radius)
    if not found.ndim:
        return f"{found} ± {float(radius):.3g}"
    text = np.array2string(found, threshold=64, separator=", ", max_line_width=110)
    worst, mean = float(radius.max(initial=0.0)), float(np.mean(radius))
    return f"{_format_type(found)}\n{text}\nwithin {worst:.3g} (largest), {mean:.3g} (mean)"


def format_instance(step: HistoryStep, coordinates: tuple[int, ...]) -> str:
    """Format an instance: its program and, in a group, its tile; a Graph function has only one."""
    if step.launch.is_graph:
        return "the function"
    rank = len(step.launch.grid)
    tile_ = f", tile {coordinates[-1]}" if step.launch.group > 1 else ""
    return f"program {coordinates[:rank]}{tile_}"


def format_position(step: HistoryStep, coordinates: tuple[int, ...], line: HistoryStep | None = None) -> str:
    """Format the position of a step: file, line, function, and the selected instance."""
    line = line or (step.calls[-1] if step.calls else step)
    function = line.node.attrs.get("function", step.launch.function.name)
    if step.launch.is_graph:
        return f"> {format_location(line.node.loc)} in {function}"
    present = sum(1 for _ in step.instances())
    return f"> {format_location(line.node.loc)} in {function}, {format_instance(step, coordinates)} ({present} here)"


def format_location(location: Location) -> str:
    """Format a file and line, with the file relative to the current folder."""
    file = os.path.abspath(location.file)
    inside = file.startswith(os.getcwd() + os.sep)
    return f"{os.path.relpath(file) if inside else location.file}:{location.line}"


def format_source(location: Location, around: int = 0, marks: frozenset[int] = frozenset()) -> str:
    """Format a source line, optionally with context; `->` before it and `*` before lines with breakpoints."""
    lines = []
    for number in range(max(1, location.line - around), location.line + around + 1):
        text = read_source_line(location.file, number)
        if text or number == location.line:
            here = "->" if number == location.line else "  "
            lines.append(f"{here}{'*' if number in marks else ' '}{number:>5} | {text}")
    return "\n".join(lines)


def format_operation(node: Node) -> str:
    """Format a node: its op, attributes and location."""
    attrs = ", ".join(f"{k}={v}" for k, v in node.attrs.items() if k not in ("names", "known"))
    types = ", ".join(str(v.type) for v in node.args)
    gives = ", ".join(str(v.type) for v in node.results)
    return f"{node.op.name}({types}){f' {{{attrs}}}' if attrs else ''}{f' -> {gives}' if gives else ''}"


def format_op_in_line(node: Node) -> str:
    """Format a node within a line: its part of the line, and its op."""
    return f"{node.loc.excerpt()}\n{format_operation(node)}"


def format_mask(step: HistoryStep) -> str | None:
    """Format the mask of a load or store: how many elements are active, over all instances."""
    node = step.node
    skip = {tile.load: 1, tile.store: 2, tile.gather: 1, tile.scatter: 2}.get(node.op)
    if skip is None:
        return None
    place = skip + node.args[0].type.rank  # type: ignore[union-attr]
    if len(step.args) <= place:
        return None
    held = step.args[place]
    array = np.asarray(held.value if isinstance(held, IntervalArray) else held)
    return f"mask: true for {int(array.sum())} of {array.size}"


def all_instances(held: Any) -> Any:
    """Collect the values of all instances in one array."""
    if isinstance(held, IntervalArray):
        return held.value
    if isinstance(held, InstanceMemory):
        return held.array
    return f"from {held.origin} by {held.steps}" if isinstance(held, AffineScalar) else held


def is_debug_mark(node: Node) -> bool:
    """Whether a node exists only for the debugger."""
    return node.op in (tile.line, tile.pause)

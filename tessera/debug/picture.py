"""A picture of tile accesses: which program touches which part of which tensor, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.errors import ArgumentError, DeviceUnavailable
from tessera.interp.checked.shadow import READ

if TYPE_CHECKING:
    from tessera.debug.profile import Counts, Touched

_LARGEST = 512  # cells of a picture along each axis: larger tensors are drawn coarser


def draw(path: Path, launches: Sequence[Counts], tensor: str | None) -> Path:
    """One panel for each tensor and direction; a colour for each program, and the order as numbers where there is room.

    Raises:
        DeviceUnavailable: matplotlib is not installed. ArgumentError: no tensor of this name was touched.
    """
    groups = _groups(launches, tensor)
    if not groups:
        names = sorted({t.tensor for c in launches for t in c.touched})
        raise ArgumentError("nothing was touched that could be drawn", expected=", ".join(names) or "a kernel that ran")
    figures = _figures()
    figure = figures.Figure(figsize=(4.2 * len(groups), 4.2), layout="constrained")
    for number, ((name, kind), boxes) in enumerate(groups.items()):
        _panel(figure.add_subplot(1, len(groups), number + 1), f"{name} ({kind})", boxes)
    figure.supxlabel(
        "a colour for each program, of those that touch a place the first; a number for the turn", fontsize=8
    )
    figure.savefig(path)
    return path


def _figures() -> Any:
    try:
        return import_module("matplotlib.figure")
    except ImportError:
        raise DeviceUnavailable("pictures need matplotlib", suggestion='pip install "tessera[pictures]"') from None


def _groups(launches: Sequence[Counts], tensor: str | None) -> dict[tuple[str, str], list[Touched]]:
    found: dict[tuple[str, str], list[Touched]] = {}
    for each in (t for c in launches for t in c.touched if tensor in (None, t.tensor)):
        found.setdefault((each.tensor, "read" if each.kind == READ else "written"), []).append(each)
    return found


def cells(boxes: Sequence[Touched]) -> tuple[np.ndarray, tuple[int, int]]:
    """For each cell of a tensor seen as a matrix the first program that touched it (-1: none), and the cells' size."""
    rows, columns = _matrix(boxes[0].shape)
    scale = (-(-rows // _LARGEST), -(-columns // _LARGEST))
    table = np.full((-(-rows // scale[0]), -(-columns // scale[1])), -1)
    programs = {p: n for n, p in enumerate(dict.fromkeys(b.program for b in boxes))}
    for box in reversed(boxes):
        top, bottom, left, right = _span(box)
        table[top // scale[0] : -(-bottom // scale[0]), left // scale[1] : -(-right // scale[1])] = programs[
            box.program
        ]
    return table, scale


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """The rows and columns of a tensor: leading axes one below the other."""
    return int(np.prod(shape[:-1], dtype=int)), shape[-1] if shape else 1


def _span(box: Touched) -> tuple[int, int, int, int]:
    top = bottom = 0
    for size, low, high in zip(box.shape[:-1], box.low[:-1], box.high[:-1], strict=True):
        top, bottom = top * size + low, bottom * size + high - 1
    left, right = (box.low[-1], box.high[-1]) if box.shape else (0, 1)
    return top, bottom + 1, left, right


def _panel(axes: Any, title: str, boxes: Sequence[Touched]) -> None:
    table, scale = cells(boxes)
    axes.imshow(np.ma.masked_less(table, 0), aspect="auto", interpolation="nearest", cmap="turbo")
    axes.set_title(title)
    axes.set_xlabel(f"column{f' / {scale[1]}' if scale[1] > 1 else ''}")
    axes.set_ylabel(f"row{f' / {scale[0]}' if scale[0] > 1 else ''}")
    first = {(b.low, b.high): n for n, b in reversed(list(enumerate(boxes)))}
    if len(first) <= 64:
        for order in first.values():
            box = boxes[order]
            top, bottom, left, right = _span(box)
            place = ((left + right) / 2 / scale[1] - 0.5, (top + bottom) / 2 / scale[0] - 0.5)
            around = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
            axes.text(*place, str(order), ha="center", va="center", fontsize=7, bbox=around)

"""The descriptors of views: how operations on whole blocks, and copies of them, are spelled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tessera.codegen.csl.views import View

# What a mem1d descriptor can say, and the rank of a mem4d one.
LONGEST_STRIDE, MOST_AXES = 127, 4
AXES = ("i", "j", "k", "l")


def onward(text: str, steps: str) -> str:
    """An element of an array some places on."""
    name, bracket, index = text.partition("[")
    return f"{name}[@as(i16, {steps}) + {index}" if bracket and steps else text


MOVE = {"f32": "@fmovs", "f16": "@fmovh", "i32": "@mov32", "i16": "@mov16", "half": "@mov16"}


def mover(target: View, source: View) -> str | None:
    """The operation that copies a block; None where there is none, as for one value of the other 16-bit format."""
    return None if target.type == "half" and source.literal else MOVE.get(target.type)


def fitting(target: View, source: View) -> View:
    """A source of a copy; an index becomes a number of 64 bits where it is to be one."""
    counts = source.literal and target.type == "i64" and not source.literal.lstrip("-").isdigit()
    return replace(source, literal=f"@as(i64, {source.literal})") if counts else source


def block_size(shape: Sequence[int]) -> int:
    """The elements of a block."""
    size = 1
    for n in shape:
        size *= int(n)
    return size


def descriptor(view: View, shape: tuple[int, ...]) -> str | None:
    """The memory descriptor of a view (or the value of a literal); None where there is none."""
    if view.literal:
        return view.literal
    assert view.buffer is not None
    if len(shape) > MOST_AXES:
        return None
    sizes, strides = (shape, view.strides) if shape else ((1,), (1,))
    kind = "mem1d_dsd" if len(sizes) == 1 and abs(strides[0]) <= LONGEST_STRIDE else "mem4d_dsd"
    names = AXES[: len(sizes)]
    place = replace_axes(view, sizes, strides).at(names)
    return f"@get_dsd({kind}, .{{ .tensor_access = |{', '.join(names)}|{{{', '.join(map(str, sizes))}}} -> {place} }})"


def replace_axes(view: View, sizes: tuple[int, ...], strides: tuple[int, ...]) -> View:
    """A view walked along other axes."""
    return replace(view, shape=sizes, strides=strides if view.buffer else ())

"""What to do about an error: fixes that the operands' types show to work."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tessera.errors import DTypeError, TesseraError
from tessera.shapes import Dim, Size
from tessera.types import TensorType


@dataclass(frozen=True)
class Operand:
    """A tensor that took part in an error: how it is written, its type, and where it is from."""

    text: str
    type: TensorType
    origin: str
    parameter: bool = False


def fixes(error: TesseraError, text: str, operands: list[Operand]) -> tuple[str, ...]:
    """Possible fixes, the likeliest first."""
    found: list[str] = []
    if len(operands) == 2 or (operands[1:] and _is_product(text)):  # a third may be a bias
        rules = _dtype_fixes if isinstance(error, DTypeError) else _shape_fixes
        found += rules(text, *operands[:2])
    if not found and error.suggestion:
        found.append(error.suggestion)
    return tuple(dict.fromkeys(found))


def _dtype_fixes(text: str, a: Operand, b: Operand) -> Iterator[str]:
    if not (a.type.dtype.is_float and b.type.dtype.is_float) or a.type.dtype == b.type.dtype:
        return
    narrow, wide = sorted((a, b), key=lambda o: o.type.dtype.bits)
    yield f"Cast the narrower: {narrow.text}.to(ts.{wide.type.dtype})"
    yield f"Cast the wider, which rounds it: {wide.text}.to(ts.{narrow.type.dtype})"
    yield from (f"Annotate {o.text} with the other's element type" for o in (a, b) if o.parameter)
    yield f"Let a context cast every operand: with ts.precision(store=ts.{wide.type.dtype}):"


def _shape_fixes(text: str, a: Operand, b: Operand) -> Iterator[str]:
    yield from _product_fixes(a, b) if _is_product(text) else _broadcast_fixes(a, b)
    yield from _rename(a, b, *_clash(text, a, b))


def _is_product(text: str) -> bool:
    return " @ " in text or any(name in text for name in ("matmul(", "linear(", "dot("))


def _product_fixes(a: Operand, b: Operand) -> Iterator[str]:
    left, right = a.type.shape, b.type.shape
    if len(left) < 2 or len(right) < 2:
        return
    if left[-1] == right[-1]:
        yield f"Transpose the right: {a.text} @ {b.text}.transpose(-2, -1)"
    if left[-2] == right[-2]:
        yield f"Transpose the left: {a.text}.transpose(-2, -1) @ {b.text}"


def _broadcast_fixes(a: Operand, b: Operand) -> Iterator[str]:
    for one, other in ((a, b), (b, a)):
        shape, want = one.type.shape, other.type.shape
        if len(shape) == len(want) >= 2 and (*shape[:-2], shape[-1], shape[-2]) == want:
            yield f"Transpose one side: {one.text}.transpose(-2, -1)"
            return
        if len(shape) < len(want) and shape == want[: len(shape)] and len(want) - len(shape) == 1:
            yield f"Add the missing axis: ts.expand_dims({one.text}, -1)"
            return
    if a.type.shape != b.type.shape and _count(a) == _count(b):
        yield f"Reshape one side: {b.text}.reshape({', '.join(str(s) for s in a.type.shape)})"


def _count(operand: Operand) -> Size:
    return math.prod(operand.type.shape)  # type: ignore[type-var]


def _clash(text: str, a: Operand, b: Operand) -> tuple[Size, Size]:
    """The two sizes that do not fit each other."""
    if _is_product(text):
        right = b.type.shape
        return (a.type.shape or (1,))[-1], right[-2] if len(right) > 1 else (right or (1,))[0]
    pairs = zip(reversed(a.type.shape), reversed(b.type.shape), strict=False)
    return next(((x, y) for x, y in pairs if x != y and x != 1 and y != 1), (1, 1))


def _rename(a: Operand, b: Operand, left: Size, right: Size) -> Iterator[str]:
    """A name in an annotation that may be too many: the right one where both could go."""
    for operand, old, new in ((b, right, left), (a, left, right)):
        if operand.parameter and isinstance(old, Dim) and old != new:
            yield f"If {old} and {new} are one size, write {new} for {old} in the annotation of {operand.text}"
            return

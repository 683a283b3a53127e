"""Diagnostics of a check: collected errors with operand origins, suggested fixes, and their text and JSON forms."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tessera.core.errors import DTypeError, Location, ShapeError, TesseraError, read_source_line
from tessera.core.symbolic_dim import Dim, Size
from tessera.core.types import TensorType, f32
from tessera.ir.builder import Builder
from tessera.ir.core import Value
from tessera.ir.tensor import Tensor
from tessera.tools.check.instrumentation import GuardedSite

if TYPE_CHECKING:
    from tessera.tools.check.checker import CheckedFrame


@dataclass(frozen=True)
class Diagnostic:
    """One error of a program.

    `why` says where each operand has its type from; `stack` is the lines from the checked function to the error,
    each with the name of its function.
    """

    title: str
    function: str
    location: Location
    message: str
    expected: str | None = None
    received: str | None = None
    why: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()
    stack: tuple[tuple[Location, str], ...] = ()

    def __str__(self) -> str:
        parts = [
            [f"Error: {self.title} in function '{self.function}' at {format_short_location(self.location)}"],
            [f"    {n}: {v}" for n, v in (("Expected", self.expected), ("Received", self.received)) if v],
            source_lines(self.location),
            [as_sentence(self.message), *(f"  {line}" for line in self.why)],
            ["Possible fixes:", *(f"{i}. {fix}" for i, fix in enumerate(self.fixes, 1))] if self.fixes else [],
            ["Stack trace:", *(_frame(at, name) for at, name in self.stack)] if self.stack else [],
        ]
        return "\n\n".join("\n".join(lines) for lines in parts if lines)


@dataclass(frozen=True)
class CheckReport:
    """All errors found in a function, in the order of its program, and what could not be decided.

    `typed` is false where the function has parameters and none of them has a type: then nothing that follows from
    them was checked.

    >>> CheckReport("f", (), ()).ok
    True
    """

    name: str
    findings: tuple[Diagnostic, ...]
    notes: tuple[str, ...]
    typed: bool = True

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        findings = [_as_plain_data(f) for f in self.findings]
        return {"name": self.name, "findings": findings, "notes": list(self.notes), "typed": self.typed}

    def __str__(self) -> str:
        summary = "no errors" if self.typed else "nothing could be checked: no parameter has a type"
        return "\n\n\n".join(str(f) for f in self.findings) or f"{self.name}: {summary}"


def _as_plain_data(finding: Diagnostic) -> dict[str, Any]:
    found = dataclasses.asdict(finding)
    found["stack"] = [{**dataclasses.asdict(at), "function": name} for at, name in finding.stack]
    return found


def format_short_location(location: Location) -> str:
    """A location as people say it: the file's name and the line."""
    return f"{os.path.basename(location.file)}:{location.line}"


def _frame(location: Location, name: str) -> str:
    return f'  File "{location.file}", line {location.line}, in {name}'


def as_sentence(text: str) -> str:
    """A message with a capital and a full stop, in a paragraph of its own."""
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def source_lines(location: Location) -> list[str]:
    """The line with a caret, and one line of context each side."""
    middle = location.excerpt()
    if not middle:
        return []
    around = (_source_line(location, -1), middle, _source_line(location, 1))
    return [line for line in around if line]


def _source_line(location: Location, step: int) -> str:
    text = read_source_line(location.file, location.line + step)
    return f"  {location.line + step:>5} | {text}" if text.strip() else ""


def format_annotation(type: TensorType, *, dtype: bool = False) -> str:
    """A type as an annotation: Tensor["B", 768]; the element type where it is not f32, or on demand.

    >>> from tessera.core.types import bf16
    >>> format_annotation(TensorType((Dim.of("B"), 4), bf16))
    'Tensor["B", 4, bf16]'
    """
    sizes = [_size(s) for s in type.shape]
    return f"Tensor[{', '.join([*sizes, *([str(type.dtype)] if dtype or not sizes or type.dtype != f32 else [])])}]"


def _size(size: Size) -> str:
    text = "?" if isinstance(size, Dim) and str(size).startswith("?") else str(size)
    return f'"{text}"' if isinstance(size, Dim) else text


@dataclass(frozen=True)
class OperandInfo:
    """A tensor that took part in an error: how it is written, its type, and where it is from."""

    text: str
    type: TensorType
    origin: str
    parameter: bool = False


def suggest_fixes(error: TesseraError, text: str, operands: list[OperandInfo]) -> tuple[str, ...]:
    """Possible fixes, the likeliest first."""
    found: list[str] = []
    if len(operands) == 2 or (operands[1:] and _is_product(text)):  # a third may be a bias
        rules = _dtype_fixes if isinstance(error, DTypeError) else _shape_fixes
        found += rules(text, *operands[:2])
    if not found and error.suggestion:
        found.append(error.suggestion)
    return tuple(dict.fromkeys(found))


def _dtype_fixes(text: str, a: OperandInfo, b: OperandInfo) -> Iterator[str]:
    if not (a.type.dtype.is_float and b.type.dtype.is_float) or a.type.dtype == b.type.dtype:
        return
    narrow, wide = sorted((a, b), key=lambda o: o.type.dtype.bits)
    yield f"Cast the narrower: {narrow.text}.to(ts.{wide.type.dtype})"
    yield f"Cast the wider, which rounds it: {wide.text}.to(ts.{narrow.type.dtype})"
    yield from (f"Annotate {o.text} with the other's element type" for o in (a, b) if o.parameter)
    yield f"Let a context cast every operand: with ts.precision(store=ts.{wide.type.dtype}):"


def _shape_fixes(text: str, a: OperandInfo, b: OperandInfo) -> Iterator[str]:
    yield from _product_fixes(a, b) if _is_product(text) else _broadcast_fixes(a, b)
    yield from _suggest_rename(a, b, *_find_mismatch(text, a, b))


def _is_product(text: str) -> bool:
    return " @ " in text or any(name in text for name in ("matmul(", "linear(", "dot("))


def _product_fixes(a: OperandInfo, b: OperandInfo) -> Iterator[str]:
    left, right = a.type.shape, b.type.shape
    if len(left) < 2 or len(right) < 2:
        return
    if left[-1] == right[-1]:
        yield f"Transpose the right: {a.text} @ {b.text}.transpose(-2, -1)"
    if left[-2] == right[-2]:
        yield f"Transpose the left: {a.text}.transpose(-2, -1) @ {b.text}"


def _broadcast_fixes(a: OperandInfo, b: OperandInfo) -> Iterator[str]:
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


def _count(operand: OperandInfo) -> Size:
    return math.prod(operand.type.shape)  # type: ignore[type-var]


def _find_mismatch(text: str, a: OperandInfo, b: OperandInfo) -> tuple[Size, Size]:
    """The two sizes that do not fit each other."""
    if _is_product(text):
        right = b.type.shape
        return (a.type.shape or (1,))[-1], right[-2] if len(right) > 1 else (right or (1,))[0]
    pairs = zip(reversed(a.type.shape), reversed(b.type.shape), strict=False)
    return next(((x, y) for x, y in pairs if x != y and x != 1 and y != 1), (1, 1))


def _suggest_rename(a: OperandInfo, b: OperandInfo, left: Size, right: Size) -> Iterator[str]:
    """A name in an annotation that may be too many: the right one where both could go."""
    for operand, old, new in ((b, right, left), (a, left, right)):
        if operand.parameter and isinstance(old, Dim) and old != new:
            yield f"If {old} and {new} are one size, write {new} for {old} in the annotation of {operand.text}"
            return


TITLES = {ShapeError: "Shape mismatch", DTypeError: "Numerical type mismatch"}


class DiagnosticCollector:
    """What was found so far, the functions under way, and where parameters stand."""

    def __init__(self) -> None:
        self.frames: list[CheckedFrame] = []
        self.origins: dict[Value, tuple[str, Location]] = {}
        self._found: dict[tuple[Location, str], Diagnostic] = {}
        self._notes: dict[str, None] = {}

    @property
    def all(self) -> tuple[Diagnostic, ...]:
        """The findings in the order they were met."""
        return tuple(self._found.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be decided."""
        return tuple(self._notes)

    def note(self, text: str) -> None:
        """Keep a remark."""
        self._notes[text] = None

    def undecided(self, frame: CheckedFrame, reason: str) -> None:
        """Keep a remark on what types alone cannot tell, with its line."""
        location = frame.site.location if frame.site else frame.made.location
        self.note(f"{format_short_location(location)}: not checked from here: {reason}")

    def add(
        self,
        error: TesseraError,
        frame: CheckedFrame,
        site: GuardedSite | None,
        operands: Sequence[Any],
        builder: Builder,
        callee: tuple[Location, str] | None = None,
    ) -> None:
        """Keep an error; one at the same place with the same words is kept once.

        `callee` is the function whose annotations do not fit, if it is not the op's own rule that failed.
        """
        location = site.location if site else error.location or frame.made.location
        described = self._operands(site, operands, builder, location)
        title = next((t for kind, t in TITLES.items() if isinstance(error, kind)), type(error).__name__)
        finding = Diagnostic(
            title,
            frame.signature.name,
            location,
            error.message,
            None if error.expected is None else str(error.expected),
            str(error.received) if callee and error.received else _format_received(error, described),
            tuple(
                f"{o.text} is {format_annotation(o.type, dtype=isinstance(error, DTypeError))}, {o.origin}"
                for o in described
            ),
            _suggest_for_callee(error, described)
            if callee
            else suggest_fixes(error, site.text if site else "", described),
            self._stack(frame, location, callee),
        )
        self._found.setdefault((location, error.message), finding)

    def _operands(
        self, site: GuardedSite | None, operands: Sequence[Any], builder: Builder, at: Location
    ) -> list[OperandInfo]:
        texts = (site.receiver, *site.operands) if site else ()
        texts = texts[max(len(texts) - len(operands), 0) :]
        if len(texts) != len(operands):  # arguments after a star have no text of their own
            return []
        pairs = [(t, v) for t, v in zip(texts, operands, strict=True) if isinstance(v, Tensor)]
        return list({t: self._operand(t, v, builder, at) for t, v in pairs}.values())

    def _operand(self, text: str, value: Tensor, builder: Builder, at: Location) -> OperandInfo:
        if value.is_traced and value.data in self.origins:
            name, place = self.origins[value.data]
            known = "annotated in" if text == name else f"the parameter {name},"
            return OperandInfo(text, value.type, f"{known} {_format_stack_line(place, at)}", text == name)
        node = builder.producers.get(value.data) if value.is_traced else None
        return OperandInfo(
            text, value.type, f"from {_format_stack_line(node.loc, at)}" if node else "a constant of the program"
        )

    def _stack(
        self, frame: CheckedFrame, location: Location, callee: tuple[Location, str] | None
    ) -> tuple[tuple[Location, str], ...]:
        lines = [(f.site.location if f.site else f.made.location, f.signature.name) for f in self.frames]
        if self.frames[-1] is frame:  # else it is a function inside `frame`, which someone else called
            lines.pop()
        called = (callee,) if callee and callee[1] != frame.signature.name else ()
        return (*lines, (location, frame.signature.name), *called)


def _format_stack_line(location: Location, beside: Location) -> str:
    return f"line {location.line}" if location.file == beside.file else format_short_location(location)


def _format_received(error: TesseraError, operands: Sequence[OperandInfo]) -> str | None:
    if len(operands) > 1:  # as annotations, rather than as the IR writes them
        return " and ".join(format_annotation(o.type, dtype=isinstance(error, DTypeError)) for o in operands)
    return None if error.received is None else str(error.received)


def _suggest_for_callee(error: TesseraError, operands: Sequence[OperandInfo]) -> tuple[str, ...]:
    """The suggestions for a value that an annotation refuses, with the value as it is written."""
    name = next((o.text for o in operands if format_annotation(o.type, dtype=True) == error.received), "x")
    found = [error.suggestion.replace("{value}", name)] if error.suggestion else []
    last = re.search(r"axis (\d+): expected (\d+), received (\d+)$", error.message)
    if last and len(operands) == 1 and int(last[1]) == operands[0].type.rank - 1 > 0:
        found.append(f"Project it first: {operands[0].text} @ w, where w is Tensor[{last[3]}, {last[2]}]")
    return tuple(found)

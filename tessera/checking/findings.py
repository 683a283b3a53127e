"""Errors collected while a check goes on, each with its operands' origins and the lines that led to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tessera.checking.fixes import Operand, fixes
from tessera.checking.instrument import Site
from tessera.checking.report import Finding, place, spell
from tessera.errors import DTypeError, Location, ShapeError, TesseraError
from tessera.ir.builder import Builder
from tessera.ir.core import Value
from tessera.tensor import Tensor

if TYPE_CHECKING:
    from tessera.checking.checker import Frame

TITLES = {ShapeError: "Shape mismatch", DTypeError: "Numerical type mismatch"}


class Findings:
    """What was found so far, the functions under way, and where parameters stand."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.origins: dict[Value, tuple[str, Location]] = {}
        self._found: dict[tuple[Location, str], Finding] = {}
        self._notes: dict[str, None] = {}

    @property
    def all(self) -> tuple[Finding, ...]:
        """The findings in the order they were met."""
        return tuple(self._found.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be decided."""
        return tuple(self._notes)

    def note(self, text: str) -> None:
        """Keep a remark."""
        self._notes[text] = None

    def undecided(self, frame: Frame, reason: str) -> None:
        """Keep a remark on what types alone cannot tell, with its line."""
        location = frame.site.location if frame.site else frame.made.location
        self.note(f"{place(location)}: not checked from here: {reason}")

    def add(
        self,
        error: TesseraError,
        frame: Frame,
        site: Site | None,
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
        finding = Finding(
            title,
            frame.signature.name,
            location,
            error.message,
            None if error.expected is None else str(error.expected),
            str(error.received) if callee and error.received else _received(error, described),
            tuple(f"{o.text} is {spell(o.type, dtype=isinstance(error, DTypeError))}, {o.origin}" for o in described),
            _callee_fixes(error, described) if callee else fixes(error, site.text if site else "", described),
            self._stack(frame, location, callee),
        )
        self._found.setdefault((location, error.message), finding)

    def _operands(self, site: Site | None, operands: Sequence[Any], builder: Builder, at: Location) -> list[Operand]:
        texts = (site.receiver, *site.operands) if site else ()
        texts = texts[max(len(texts) - len(operands), 0) :]
        if len(texts) != len(operands):  # arguments after a star have no text of their own
            return []
        pairs = [(t, v) for t, v in zip(texts, operands, strict=True) if isinstance(v, Tensor)]
        return list({t: self._operand(t, v, builder, at) for t, v in pairs}.values())

    def _operand(self, text: str, value: Tensor, builder: Builder, at: Location) -> Operand:
        if value.is_traced and value.data in self.origins:
            name, place = self.origins[value.data]
            known = "annotated in" if text == name else f"the parameter {name},"
            return Operand(text, value.type, f"{known} {_line(place, at)}", text == name)
        node = builder.producers.get(value.data) if value.is_traced else None
        return Operand(text, value.type, f"from {_line(node.loc, at)}" if node else "a constant of the program")

    def _stack(
        self, frame: Frame, location: Location, callee: tuple[Location, str] | None
    ) -> tuple[tuple[Location, str], ...]:
        lines = [(f.site.location if f.site else f.made.location, f.signature.name) for f in self.frames]
        if self.frames[-1] is frame:  # else it is a function inside `frame`, which someone else called
            lines.pop()
        called = (callee,) if callee and callee[1] != frame.signature.name else ()
        return (*lines, (location, frame.signature.name), *called)


def _line(location: Location, beside: Location) -> str:
    return f"line {location.line}" if location.file == beside.file else place(location)


def _received(error: TesseraError, operands: Sequence[Operand]) -> str | None:
    if len(operands) > 1:  # as annotations, rather than as the IR writes them
        return " and ".join(spell(o.type, dtype=isinstance(error, DTypeError)) for o in operands)
    return None if error.received is None else str(error.received)


def _callee_fixes(error: TesseraError, operands: Sequence[Operand]) -> tuple[str, ...]:
    """The suggestion for a value that an annotation refuses, with the value as it is written."""
    written = (o.text for o in operands if spell(o.type, dtype=True) == error.received)
    return (error.suggestion.replace("{value}", next(written, "x")),) if error.suggestion else ()

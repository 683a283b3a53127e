"""What a check found, as people read it: place, expected and received, source, why, and what to do."""

from __future__ import annotations

import dataclasses
import linecache
import os
from dataclasses import dataclass
from typing import Any

from tessera.errors import Location
from tessera.shapes import Dim, Size
from tessera.types import TensorType, f32


@dataclass(frozen=True)
class Finding:
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
            [f"Error: {self.title} in function '{self.function}' at {place(self.location)}"],
            [f"    {n}: {v}" for n, v in (("Expected", self.expected), ("Received", self.received)) if v],
            source_lines(self.location),
            [sentence(self.message), *(f"  {line}" for line in self.why)],
            ["Possible fixes:", *(f"{i}. {fix}" for i, fix in enumerate(self.fixes, 1))] if self.fixes else [],
            ["Stack trace:", *(_frame(at, name) for at, name in self.stack)] if self.stack else [],
        ]
        return "\n\n".join("\n".join(lines) for lines in parts if lines)


@dataclass(frozen=True)
class Report:
    """All errors found in a function, in the order of its program, and what could not be decided.

    >>> Report("f", (), ()).ok
    True
    """

    name: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return {"name": self.name, "findings": [_plain(f) for f in self.findings], "notes": list(self.notes)}

    def __str__(self) -> str:
        return "\n\n\n".join(str(f) for f in self.findings) or f"{self.name}: no errors"


def _plain(finding: Finding) -> dict[str, Any]:
    found = dataclasses.asdict(finding)
    found["stack"] = [{**dataclasses.asdict(at), "function": name} for at, name in finding.stack]
    return found


def place(location: Location) -> str:
    """A location as people say it: the file's name and the line."""
    return f"{os.path.basename(location.file)}:{location.line}"


def _frame(location: Location, name: str) -> str:
    return f'  File "{location.file}", line {location.line}, in {name}'


def sentence(text: str) -> str:
    """A message with a capital and a full stop, in a paragraph of its own."""
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def source_lines(location: Location) -> list[str]:
    """The line with a caret, and one line of context each side."""
    middle = location.excerpt()
    if not middle:
        return []
    around = (_line(location, -1), middle, _line(location, 1))
    return [line for line in around if line]


def _line(location: Location, step: int) -> str:
    text = linecache.getline(location.file, location.line + step).rstrip("\n")
    return f"  {location.line + step:>5} | {text}" if text.strip() else ""


def spell(type: TensorType, *, dtype: bool = False) -> str:
    """A type as an annotation: Tensor["B", 768]; the element type where it is not f32, or on demand.

    >>> from tessera.types import bf16
    >>> spell(TensorType((Dim.of("B"), 4), bf16))
    'Tensor["B", 4, bf16]'
    """
    sizes = [_size(s) for s in type.shape]
    return f"Tensor[{', '.join([*sizes, *([str(type.dtype)] if dtype or not sizes or type.dtype != f32 else [])])}]"


def _size(size: Size) -> str:
    text = "?" if isinstance(size, Dim) and str(size).startswith("?") else str(size)
    return f'"{text}"' if isinstance(size, Dim) else text

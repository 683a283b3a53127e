"""Sanitizer reports: the findings of a run, and which checks are on."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from tessera.core.errors import (
    Advice,
    AlignmentError,
    AsyncCopyError,
    BarrierError,
    DeadlockError,
    ExecutionError,
    IndexOverflowError,
    Location,
    NonFiniteError,
    OutOfBoundsError,
    RaceError,
    TesseraError,
    UninitializedError,
)

# The rule of docs/semantics/tile.md that each kind of finding breaks, and its error class.
FINDING_KINDS: dict[str, tuple[str, type[TesseraError]]] = {
    "bounds": ("M1", OutOfBoundsError),
    "uninitialized": ("M2", UninitializedError),
    "race": ("M4", RaceError),
    "program race": ("M5", RaceError),
    "unordered": ("M13", RaceError),  # a race in a kernel with mbarriers
    "async": ("M8", AsyncCopyError),
    "barrier": ("M7", BarrierError),
    "grid barrier": ("M14", BarrierError),
    "stream race": ("M15", RaceError),
    "deadlock": ("M12", DeadlockError),
    "alignment": ("M11", AlignmentError),
    "overflow": ("M1", IndexOverflowError),
    "non-finite": ("", NonFiniteError),  # breaks no rule: enabled by `nan`
    # Advice: enabled by `lint`.
    "bank conflict": ("", Advice),
    "uncoalesced": ("", Advice),
    "outside mask": ("", Advice),
    "partial warp": ("", Advice),
    # Advice that every run in debug mode gives.
    "wide mask": ("", Advice),
}


@dataclass(frozen=True)
class Finding:
    """A finding of debug mode: its kind, what happened, the location, the other access of a race, and who it is about.

    `instance` is the index of the program in the grid, then that of the tile in a group of several.
    """

    kind: str
    message: str
    location: Location
    other: Location | None = None
    suggestion: str | None = None
    instance: tuple[int, ...] | None = None

    @property
    def is_advice(self) -> bool:
        """Whether this is advice: it breaks no rule."""
        return FINDING_KINDS[self.kind][1] is Advice

    @property
    def rule(self) -> str:
        """The number of the broken rule, or ""."""
        return FINDING_KINDS[self.kind][0]

    def error(self) -> TesseraError:
        """The error of this finding."""
        place = None
        if self.other is not None:
            place = f"the other access at {self.other}\n{self.other.excerpt()}"
        message = f"{self.message} (rule {self.rule})" if self.rule else self.message
        kind = FINDING_KINDS[self.kind][1]
        error = kind(message, location=self.location, received=place, suggestion=self.suggestion)
        error.instance = self.instance
        return error

    def __str__(self) -> str:
        return str(self.error())


@dataclass
class Report:
    """The findings of a run, in order."""

    findings: list[Finding] = field(default_factory=list)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    @property
    def kinds(self) -> list[str]:
        """The kind of each finding."""
        return [f.kind for f in self.findings]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.findings)) or "no findings"


@dataclass(frozen=True)
class Checks:
    """The checks that debug mode makes, and whether it continues after the first finding.

    `collect` records findings in `report` and goes on as far as values are defined; without it the first is raised.
    `nan` also looks for the first op that makes a NaN or an infinity of finite operands; `lint` gives advice:
    bank conflicts, accesses that do not coalesce, elements used that a mask had left out, groups that fill no warps.
    """

    collect: bool = False
    nan: bool = False
    lint: bool = False
    report: Report = field(default_factory=Report)

    def report_finding(self, finding: Finding) -> None:
        """Record a finding; raise it unless the checks collect. Advice is never raised."""
        self.report.findings.append(finding)
        if not self.collect and not finding.is_advice:
            raise finding.error()


# The checks of the innermost `ts.debug.checked()`; a ContextVar: threads and tasks do not share them.
ACTIVE_CHECKS: ContextVar[Checks | None] = ContextVar("tessera_debug_checks", default=None)


class SanitizerStopped(ExecutionError):
    """Ends a collecting run that cannot continue: results after its last finding are undefined."""


def as_checks(debug: Any) -> Checks | None:
    """The checks for a `debug` argument: True is all of them, False or None is no debug mode."""
    return debug if isinstance(debug, Checks) else Checks() if debug else None

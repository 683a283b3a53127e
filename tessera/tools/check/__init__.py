"""Static checking: all shape and dtype errors of a program, found from its annotations with nothing executed."""

from tessera.tools.check.checker import check
from tessera.tools.check.diagnostics import CheckReport, Diagnostic

__all__ = ["Diagnostic", "CheckReport", "check"]

"""Static checking: all shape and dtype errors of a program, found from its annotations with nothing executed."""

from tessera.checking.check import check
from tessera.checking.report import Finding, Report

__all__ = ["Finding", "Report", "check"]

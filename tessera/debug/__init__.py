"""Debug mode: races, uninitialised reads, early reads of copies, parted barriers, bounds and NaNs, found for you."""

from tessera.debug.session import check, checked
from tessera.interp.debug_report import Checks, Finding, Report

__all__ = ["Checks", "Finding", "Report", "check", "checked"]

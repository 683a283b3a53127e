"""Debugging: kernels checked as they run, stepped through, counted, and run with a target's numbers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tessera.debug.checking import check, checked
from tessera.debug.interactive import break_here, interactive, session
from tessera.interp.checked.report import Checks, Finding, Report

checks = checked  # as it is called too

if TYPE_CHECKING:
    from tessera.debug.kernel_tracing import kernel, kernel_report, kernel_trace
    from tessera.debug.memory_use import memory, memory_report
    from tessera.debug.target_numbers import as_target
    from tessera.debug.watching import watch
    from tessera.determinism import watch_determinism as deterministic

# What brings the compiler, or another large module, with it is imported when it is first asked for.
_TRACING = "tessera.debug.kernel_tracing"
_MEMORY = "tessera.debug.memory_use"
_LATER = {
    "as_target": ("tessera.debug.target_numbers", "as_target"),
    "deterministic": ("tessera.determinism", "watch_determinism"),
    "kernel": (_TRACING, "kernel"),
    "kernel_report": (_TRACING, "kernel_report"),
    "kernel_trace": (_TRACING, "kernel_trace"),
    "memory": (_MEMORY, "memory"),
    "memory_report": (_MEMORY, "memory_report"),
    "watch": ("tessera.debug.watching", "watch"),
}


def __getattr__(name: str) -> Any:
    """A part that is imported late."""
    if name in _LATER:
        module, attribute = _LATER[name]
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module 'tessera.debug' has no attribute {name!r}")


__all__ = [
    "Checks",
    "Finding",
    "Report",
    "as_target",
    "break_here",
    "check",
    "checked",
    "checks",
    "deterministic",
    "interactive",
    "kernel",
    "kernel_report",
    "kernel_trace",
    "memory",
    "memory_report",
    "session",
    "watch",
]

"""Debugging: kernels checked as they run, stepped through, counted, and run with a target's numbers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tessera.interp.sanitizer.report import Checks, Finding, Report
from tessera.tools.debug.sessions import break_here, check, checked, interactive, mode, nan_check, session

checks = checked  # its second public name

if TYPE_CHECKING:
    from tessera.tools.debug.error_bounds import error_bound
    from tessera.tools.debug.kernel_tracing import kernel, kernel_report, kernel_trace
    from tessera.tools.debug.memory_use import memory, memory_report
    from tessera.tools.debug.target_numerics import as_target
    from tessera.tools.debug.watchpoints import watch
    from tessera.transforms.determinism import check_op_determinism as deterministic

# Names whose modules load the compiler or another large module are imported on first use.
_TRACING = "tessera.tools.debug.kernel_tracing"
_MEMORY = "tessera.tools.debug.memory_use"
_LATER = {
    "as_target": ("tessera.tools.debug.target_numerics", "as_target"),
    "deterministic": ("tessera.transforms.determinism", "check_op_determinism"),
    "error_bound": ("tessera.tools.debug.error_bounds", "error_bound"),
    "kernel": (_TRACING, "kernel"),
    "kernel_report": (_TRACING, "kernel_report"),
    "kernel_trace": (_TRACING, "kernel_trace"),
    "memory": (_MEMORY, "memory"),
    "memory_report": (_MEMORY, "memory_report"),
    "watch": ("tessera.tools.debug.watchpoints", "watch"),
}


def __getattr__(name: str) -> Any:
    """Import a name on first use (PEP 562)."""
    if name in _LATER:
        module, attribute = _LATER[name]
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module 'tessera.tools.debug' has no attribute {name!r}")


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
    "error_bound",
    "interactive",
    "kernel",
    "kernel_report",
    "kernel_trace",
    "memory",
    "memory_report",
    "mode",
    "nan_check",
    "session",
    "watch",
]

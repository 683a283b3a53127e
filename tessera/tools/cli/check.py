"""`tessera check`: all shape and dtype errors of a file's functions, printed as a compiler prints them."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.text import Text

from tessera.core.errors import Location, UnknownNameError
from tessera.core.types import TensorType
from tessera.frontend.jit.tracing import Jit, read_annotations
from tessera.frontend.kernel import Kernel
from tessera.tools.check import CheckReport, Diagnostic, check
from tessera.tools.cli.entry_points import load_definitions

EXPECTED = "a kernel, a function under @ts.jit, or one with ts.Tensor[...] annotations"
MARKS = (("Error:", "bold red"), ("    Expected:", "green"), ("    Received:", "red"), ("Possible fixes:", "bold"))


def main(options: argparse.Namespace) -> int:
    """Check the functions that the command line names; exit status 1 where there are errors."""
    path, _, name = options.entry.partition(":") if ".py:" in options.entry else (options.entry, "", "")
    module, notes = load_definitions(path, name)
    functions = _find_functions(module, path, name)
    reports = [check(function) for function in functions.values()]
    if options.json:
        print(json.dumps([r.as_dict() for r in reports], indent=2))
    else:
        _show(reports, notes)
    return 0 if all(r.ok for r in reports) else 1


def _find_functions(module: ModuleType, path: str, name: str) -> dict[str, Callable[..., Any]]:
    found = {
        n: f
        for n, f in vars(module).items()
        if getattr(f, "__module__", None) == module.__name__
        and (isinstance(f, (Jit, Kernel)) or _has_tensor_annotations(f))
    }
    if name and name in found:
        return {name: found[name]}
    if name or not found:
        raise UnknownNameError(
            f"{path} has no function {name}" if name else f"{path} has no function to check",
            expected=", ".join(found) or EXPECTED,
        )
    return found


def _has_tensor_annotations(function: Any) -> bool:
    if not inspect.isfunction(function):
        return False
    return any(isinstance(a, TensorType) for a in read_annotations(function).values())


def _show(reports: list[CheckReport], notes: list[str]) -> None:
    """Print each finding once: callers of a faulty helper repeat its error."""
    console = Console(soft_wrap=True, highlight=False)
    seen: dict[tuple[Location, str], Diagnostic] = {}
    for finding in (f for r in reports for f in r.findings):
        seen.setdefault((finding.location, finding.message), finding)
    for finding in seen.values():
        console.print(_style_report(str(finding)), end="\n\n\n")
    for note in dict.fromkeys([*(n for r in reports for n in r.notes), *notes]):
        console.print(Text(f"note: {note}", "dim"))
    console.print(Text(_summarise(reports, len(seen)), "bold"))


def _summarise(reports: list[CheckReport], errors: int) -> str:
    """The number of errors, and the functions of which nothing could be checked."""
    untyped = [r.name for r in reports if r.ok and not r.typed]
    advice = f"no parameter of {', '.join(untyped)} has a type; annotate them: x: ts.Tensor[...]"
    if len(untyped) == len(reports):
        return f"nothing could be checked: {advice}"
    checked = len(reports) - len(untyped)
    summary = f"{errors} error{'s' * (errors != 1)}" if errors else "no errors"
    summary += f" in {checked} function{'s' * (checked != 1)}"
    return f"{summary}; {len(untyped)} not checked: {advice}" if untyped else summary


def _style_report(text: str) -> Text:
    styled = Text(text)
    for mark, style in MARKS:
        styled.highlight_words([mark], style)
    styled.highlight_regex(r"\|\s+\^+", "red")
    return styled

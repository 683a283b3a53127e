"""`tessera check`: all shape and dtype errors of a file's functions, printed as a compiler prints them."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.text import Text

from tessera.core.errors import Location, UnknownNameError
from tessera.core.types import TensorType
from tessera.frontend.jit.tracing import Jit, read_annotations
from tessera.tools.check import CheckReport, Diagnostic, check
from tessera.tools.cli.entry_points import load_module

MARKS = (("Error:", "bold red"), ("    Expected:", "green"), ("    Received:", "red"), ("Possible fixes:", "bold"))


def main(options: argparse.Namespace) -> int:
    """Check the functions that the command line names; exit status 1 where there are errors."""
    path, _, name = options.entry.partition(":") if ".py:" in options.entry else (options.entry, "", "")
    functions = _find_functions(path, name)
    reports = [check(function) for function in functions.values()]
    if options.json:
        print(json.dumps([r.as_dict() for r in reports], indent=2))
    else:
        _show(reports)
    return 0 if all(r.ok for r in reports) else 1


def _find_functions(path: str, name: str) -> dict[str, Callable[..., Any]]:
    module = load_module(path)
    found = {
        n: f
        for n, f in vars(module).items()
        if getattr(f, "__module__", None) == module.__name__ and (isinstance(f, Jit) or _has_tensor_annotations(f))
    }
    if name and name in found:
        return {name: found[name]}
    if name or not found:
        raise UnknownNameError(
            f"{path} has no function {name}" if name else f"{path} has no function to check",
            expected=", ".join(found) or "a function under @ts.jit, or one with ts.Tensor[...] annotations",
        )
    return found


def _has_tensor_annotations(function: Any) -> bool:
    if not inspect.isfunction(function):
        return False
    return any(isinstance(a, TensorType) for a in read_annotations(function).values())


def _show(reports: list[CheckReport]) -> None:
    """Print each finding once: callers of a faulty helper repeat its error."""
    console = Console(soft_wrap=True, highlight=False)
    seen: dict[tuple[Location, str], Diagnostic] = {}
    for finding in (f for r in reports for f in r.findings):
        seen.setdefault((finding.location, finding.message), finding)
    for finding in seen.values():
        console.print(_style_report(str(finding)), end="\n\n\n")
    for note in dict.fromkeys(n for r in reports for n in r.notes):
        console.print(Text(f"note: {note}", "dim"))
    count = len(seen)
    summary = f"{count} error{'s' * (count != 1)}" if count else "no errors"
    console.print(Text(f"{summary} in {len(reports)} function{'s' * (len(reports) != 1)}", "bold"))


def _style_report(text: str) -> Text:
    styled = Text(text)
    for mark, style in MARKS:
        styled.highlight_words([mark], style)
    styled.highlight_regex(r"\|\s+\^+", "red")
    return styled

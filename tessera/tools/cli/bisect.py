"""`tessera bisect`: the first pass whose results exceed their error bound, and the fewest ops that reproduce it."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.rule import Rule
from rich.table import Table

from tessera.codegen.artifact import Artifact
from tessera.core.device import find_generator_name
from tessera.core.errors import TesseraError
from tessera.core.io import write_array
from tessera.ir.core import Module
from tessera.ir.printer import print_module
from tessera.lower.lowering_plan import check_values
from tessera.runtime.program import PreparedProgram
from tessera.tools.bisect import FailingSlice, StepVerdict, judge_steps, reduce_program
from tessera.tools.cli.entry_points import (
    describe_configuration,
    describe_exception,
    find_entry_point,
    make_inputs,
    prepare_program,
)
from tessera.tools.cli.inspect import THEME, IrHighlighter, annotate_with_source


@check_values(False)  # a wrong pass of the user is shown, or blamed, not refused
def main(options: argparse.Namespace) -> int:
    """Judge each step; status 1 where one is to blame."""
    target = find_generator_name(options.target)
    entry = find_entry_point(options.entry, options.size)
    program = prepare_program(entry, make_inputs(entry, options.seed, options.input), target, options.tune, lower=False)
    if tuned := describe_configuration(entry, program):
        print(f"configuration: {tuned}")
    verdicts = list(judge_steps(program, target, {"arch": options.arch} if options.arch else {}))
    blamed = verdicts[-1] if verdicts[-1].bad else None
    part = reduce_program(program, blamed) if blamed is not None else None
    if options.json:
        print(json.dumps(_as_json(verdicts, part), indent=1))
    else:
        _show(program, verdicts, part)
    if options.output and blamed is not None:
        _write_evidence(Path(options.output), part.verdict if part else blamed, part.arrays if part else program.arrays)
    return 0 if blamed is None else 1


def _show(program: PreparedProgram, verdicts: Sequence[StepVerdict], part: FailingSlice | None) -> None:
    console = Console(theme=THEME, highlighter=IrHighlighter(), soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("step", "level", "results"):
        table.add_column(title)
    for verdict in verdicts:
        table.add_row(verdict.step, verdict.level, _format_verdict(verdict))
    console.print(table)
    blamed = verdicts[-1]
    if not blamed.bad:
        console.print(f"every step of {program.name} keeps its results within the bound", highlight=False)
        return
    console.print(f"\n[bold]{blamed.step}[/] is the first step that goes wrong", highlight=False)
    for line in _format_worst_element(blamed):
        console.print(f"  {line}", markup=False, highlight=False)
    if part is None:
        return
    ops = "1 op is enough" if part.ops == 1 else f"{part.ops} ops are enough"
    console.print(Rule(f"{ops} to show it (of {part.of} traced)", align="left"))
    for line in annotate_with_source(print_module(Module("graph", (part.function,)))):
        console.print(line, markup=False)
    if change := list(_format_change(part.verdict)):
        console.print(Rule(f"what {blamed.step} makes of it", align="left"))
        for line in change:
            console.print(line, markup=False)


def _format_verdict(verdict: StepVerdict) -> str:
    """A verdict as a cell of the table."""
    if verdict.status == "outside" and verdict.agreement is not None:
        return f"[red]outside[/]: {verdict.agreement.worst_share:.3g} times the bound"
    if verdict.status == "failed":
        return f"[red]fails[/]: {type(verdict.error).__name__}"
    if verdict.agreement is None:
        return verdict.status
    wide = " (a bound too wide to say much)" if verdict.agreement.useless else ""
    return f"[green]within[/]: {verdict.agreement.worst_share:.1%} of the bound{wide}"


def _format_worst_element(verdict: StepVerdict) -> Iterator[str]:
    """The worst element, or the error."""
    if verdict.error is not None:
        told = verdict.error if isinstance(verdict.error, TesseraError) else describe_exception(verdict.error)
        yield from str(told).splitlines()
    if verdict.status == "outside" and verdict.agreement is not None:
        place = f"output {verdict.output} at {list(verdict.agreement.where)}"
        yield f"{place}: {verdict.found:.9g}, and it should be {verdict.reference:.9g} ± {verdict.radius:.2g}"


def _format_change(verdict: StepVerdict) -> Iterator[str]:
    """What a step made: as a difference where both are of one level, else what it gave."""
    if not isinstance(verdict.after, Module):
        return
    after = list(annotate_with_source(print_module(verdict.after)))
    if not isinstance(verdict.before, Module) or verdict.before.level != verdict.after.level:
        yield from after
        return
    before = list(annotate_with_source(print_module(verdict.before)))
    yield from list(difflib.unified_diff(before, after, lineterm="", n=len(before)))[3:]


def _as_json(verdicts: Sequence[StepVerdict], part: FailingSlice | None) -> dict[str, object]:
    blamed = verdicts[-1] if verdicts[-1].bad else None
    shares = [v.agreement.worst_share if v.agreement else None for v in verdicts]
    return {
        "steps": [
            {"step": v.step, "level": v.level, "status": v.status, "share": share if share != np.inf else "inf"}
            for v, share in zip(verdicts, shares, strict=True)
        ],
        "first": None if blamed is None else blamed.step,
        "error": None if blamed is None or blamed.error is None else str(blamed.error),
        "lines": sorted({str(n.loc) for n in part.function.body.nodes}) if part else [],
        "part": print_module(Module("graph", (part.function,))) if part else None,
    }


def _write_evidence(folder: Path, verdict: StepVerdict, arrays: Sequence[np.ndarray]) -> None:
    """What the step took and gave, and the arrays, for use elsewhere."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, made in (("before", verdict.before), ("after", verdict.after)):
        if isinstance(made, Module):
            (folder / f"{name}.mlir").write_text(print_module(made))
        elif isinstance(made, Artifact):
            made.save(folder / name)
    for number, array in enumerate(arrays):
        write_array(str(folder / f"input{number}.npy"), np.asarray(array))

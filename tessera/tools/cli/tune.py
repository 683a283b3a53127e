"""`tessera tune`: the schedules of a function, or the configurations of an autotuned kernel, ranked and measured."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tessera.core.device import INTERP, find_generator_name
from tessera.core.errors import ArgumentError
from tessera.frontend.jit.tracing import Jit
from tessera.frontend.kernel.autotuning import Tuned
from tessera.runtime.planning import GAIN, MODEL_GAIN, ScheduleSearch, describe_trials, tune_schedule
from tessera.runtime.program import PreparedProgram, format_tuning
from tessera.tools.cli.entry_points import EntryPoint, find_entry_point, make_inputs, prepare_program

KEEP, SAMPLES = 8, 5  # schedules to measure, and the least samples of each
SHOWN = 20  # schedules that were not measured, in the table


def main(options: argparse.Namespace) -> int:
    """Tune an entry point for a target and print every schedule that was tried."""
    target = find_generator_name(options.target)
    for name in ("keep", "samples"):
        if getattr(options, name) and not options.measure:
            raise ArgumentError(f"--{name} is for measurements", received="--no-measure beside it",
                                suggestion="leave one of them out")  # fmt: skip
    entry = find_entry_point(options.entry, options.size)
    inputs = make_inputs(entry, options.seed, options.input)
    found = _tune_function(entry, inputs, target, options) if isinstance(entry.function, Jit) else None
    if found is None:
        found = _check_tuned(entry, prepare_program(entry, inputs, target, True)).tuned
    assert found is not None
    if options.json:
        print(json.dumps(_as_json(entry, target, found), indent=1))
    else:
        _show(entry.name, target, found, isinstance(entry.function, Jit))
    return 0


def _tune_function(entry: EntryPoint, inputs: Any, target: str, options: argparse.Namespace) -> Tuned:
    if target == INTERP:
        raise ArgumentError("the interpreter has no schedules to tune", expected="--target llvm, ptx, …")
    program = prepare_program(entry, inputs, target, lower=False)
    search = ScheduleSearch(options.keep or KEEP, options.samples or SAMPLES, options.measure, options.cache)
    return tune_schedule(program.levels["graph"].main, target, program.arrays, search)


def _check_tuned(entry: EntryPoint, program: PreparedProgram) -> PreparedProgram:
    if program.tuned is None:
        raise ArgumentError(
            f"{entry.name} has nothing to tune", location=entry.location,
            expected="a function under @ts.jit, or a kernel under @ts.kernel.autotune",
        )  # fmt: skip
    return program


def _as_json(entry: EntryPoint, target: str, found: Tuned) -> dict[str, Any]:
    trials = [
        {"schedule": dict(t.config), "predicted_ms": t.predicted_ms, "measured_ms": t.latency_ms, "refused": t.refused}
        for t in found.trials
    ]
    return {
        "entry": entry.name, "target": target, "chosen": dict(found.config), "latency_ms": found.latency_ms,
        "model": found.model, "cached": found.cached, "trials": trials,
    }  # fmt: skip


def _explain_mark(found: Tuned, function: bool) -> str:
    """What the star in the table means, and why the schedule beside it need not be the fastest."""
    if not function:
        return "* is used"
    share, judge = (MODEL_GAIN, "by the model") if found.model else (GAIN, "measured")
    return f"* is used: the compiler's own, unless another takes at most {share:.0%} of its time ({judge})"


def _show(name: str, target: str, found: Tuned, function: bool) -> None:
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{name} on {target}: {format_tuning(found)}", markup=False)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("", "schedule", "predicted ms", "measured ms"):
        table.add_column(title)
    for row in _shorten(describe_trials(found)):
        table.add_row(*row)
    console.print(table)
    if len(found.trials) > 1:
        console.print(_explain_mark(found, function))


def _shorten(rows: Sequence[tuple[str, str, str, str]]) -> Sequence[tuple[str, str, str, str]]:
    """All rows that were measured or chosen, and the first of the others."""
    rest = [r for r in rows if not r[0] and not r[3]]
    hidden = {id(r) for r in rest[SHOWN:]}
    kept = [r for r in rows if id(r) not in hidden]
    return [*kept, ("", f"… and {len(hidden)} more", "", "")] if hidden else kept

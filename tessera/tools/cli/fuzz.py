"""`tessera fuzz`: random programs at every level and on targets, with a small case for each kind of failure."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from rich.console import Console

from tessera.codegen.contract import get_backend
from tessera.core.device import INTERP
from tessera.tools.fuzz.campaign import CampaignRequest, Summary
from tessera.tools.fuzz.workers import run_workers

SHOWN = 8  # refused statements


def main(options: argparse.Namespace) -> int:
    """Run a campaign; status 0 only when nothing failed."""
    targets = tuple(options.target) or (INTERP,)
    for target in targets:
        if target != INTERP:
            get_backend(target)  # an unknown name is an error before anything runs
    summary = run_workers(
        CampaignRequest(
            targets, tuple(options.kind) or ("graph", "tile"), options.seconds, options.programs, options.seed,
            Path(options.output), Path(options.corpus) if options.corpus else None,
        ),
        options.jobs,
    )  # fmt: skip
    show(summary, Console(soft_wrap=True, highlight=False))
    return 1 if summary.failures else 0


def show(summary: Summary, console: Console) -> None:
    """Print what failed, with the smallest programs, and the counts."""
    for key, (failure, program) in sorted(summary.failures.items()):
        console.print(f"[red]{key}[/]" if "[" not in key else key, markup="[" not in key)
        console.print(failure.detail, markup=False)
        console.print(program.source, markup=False)
        for each in program.inputs:
            console.print(f"    {each.name} = {each.text}", markup=False)
    for path in summary.files:
        console.print(f"written: {path}", markup=False)
    rate = summary.programs / summary.seconds if summary.seconds else 0.0
    console.print(f"{summary.programs} programs in {summary.seconds:.1f} s: {rate:.1f} programs/s, "
                  f"{len(summary.failures)} kinds of failure, {len(summary.features)} features covered")  # fmt: skip
    for name, count in sorted(summary.outcomes.items()):
        console.print(f"  {name}: {count}", markup=False)
    _show_refused(summary.refused, console)


def _show_refused(refused: Counter[str], console: Console) -> None:
    if refused:
        listed = ", ".join(f"{name} {count}" for name, count in refused.most_common(SHOWN))
        console.print(f"statements that an op refused: {sum(refused.values())} ({listed})", markup=False)

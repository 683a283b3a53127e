"""`tessera conformance`: the suite on this machine's interpreters and generators, as a table."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from conformance.case import Case, Outcome, all_cases, find_profile, read_cases
from conformance.foreign import ForeignEngine, make_foreign_engines
from conformance.manifest import make_manifest
from conformance.passes import list_pass_engines
from conformance.report import FORMATS
from conformance.run import Engine, find_checked_engines, list_engines, rank_missing_ops, run_case, select_cases
from conformance.variants import list_variant_engines
from tessera.codegen.contract import get_backend
from tessera.core.errors import ArgumentError
from tessera.core.io import check_writable, write_file

UNLIMITED = 100_000  # columns
SHOWN_OPS = 15  # missing ops in the ranking of an engine
MARKS = {"pass": "[green]pass[/]", "fail": "[red]FAIL[/]", "unsupported": "[yellow]unsupported[/]"}


def main(options: argparse.Namespace) -> int:
    """Run or list the selected cases; status 0 only when nothing failed."""
    write = _open_report_writer(Path(options.report)) if options.report else None
    cases = select_cases(options.select, _list_cases(options))
    if not cases:
        raise ArgumentError(
            f"no case matches {options.select!r}", suggestion="tessera conformance --list prints the names of all cases"
        )
    if options.manifest:
        write_file(check_writable(options.manifest), lambda file: file.write(make_manifest(cases)))
        return 0
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    columns = _list_columns(options)
    outcomes: list[Outcome] = []
    with Progress(transient=True) as progress:
        bar = progress.add_task("conformance", total=len(cases))
        for case in cases:
            progress.update(bar, description=case.name, advance=1)
            outcomes += run_case(case, columns)
    for column in columns:
        if isinstance(column, ForeignEngine):
            column.close()
    _show(outcomes, [e.name for e in columns])
    if write:
        write(outcomes)
    return 1 if any(o.status == "fail" for o in outcomes) else 0


def _list_cases(options: argparse.Namespace) -> Iterable[Case]:
    if options.cases:
        return read_cases(options.cases)
    return find_profile(options.profile) if options.profile else all_cases()


def _list_columns(options: argparse.Namespace) -> list[Engine]:
    """The selected engines; with foreign ones alone only those, with `--checked` those with guard bytes too.

    With `--pass-by-pass` they are the passes on the way to each target, with `--variants` those of each function.
    """
    for target in options.target:
        get_backend(target)  # here, where an unknown name is an error of the command line
    if options.pass_by_pass:
        return [*list_pass_engines(options.target)]
    if options.variants:
        return [*list_variant_engines(options.target)]
    foreign = make_foreign_engines(options.engine)
    if foreign and not options.target and not options.level:
        return [*foreign]
    columns = list_engines(options.target, options.level)
    targets = dict.fromkeys(c.target for c in columns if c.level in ("target", "device"))
    checked = [e for t in targets for e in find_checked_engines(t)] if options.checked else []
    return [*columns, *checked, *foreign]


def _show(outcomes: Sequence[Outcome], columns: Sequence[str]) -> None:
    # Without column rules, seven engines and a name on two lines fit a terminal of 80 columns.
    table = Table(Column("case", overflow="fold", min_width=20), *columns, box=None, padding=(0, 1, 0, 0))
    rows: dict[str, dict[str, Outcome]] = {}
    for outcome in outcomes:
        rows.setdefault(outcome.case, {})[outcome.engine] = outcome
    for name, row in rows.items():
        table.add_row(name, *(_cell(row.get(c)) for c in columns))
    console = _make_console(table)
    console.print(table)
    for outcome in outcomes:
        if outcome.status == "fail":
            console.print(f"[red]{outcome.case}[/] on {outcome.engine}:")
            console.print(f"  {outcome.detail}", markup=False, highlight=False)
    for engine in columns:
        _show_missing(console, engine, [o for o in outcomes if o.engine == engine])
    console.print(_summary(outcomes, len(rows)))


def _show_missing(console: Console, engine: str, outcomes: Sequence[Outcome]) -> None:
    """Print which missing ops of an engine's target would turn the most unsupported cases green, in that order."""
    ranked = rank_missing_ops(outcomes)
    if not ranked:
        return
    others = sum(o.status == "unsupported" and not o.missing for o in outcomes)
    reason = f" ({others} unsupported cases lack something else: element types, policies, resources)" if others else ""
    console.print(f"[bold]{engine}[/]: rows for these ops would turn cases green, in this order{reason}")
    table = Table("op", Column("cases turned green", justify="right"), Column("so far", justify="right"),
                  Column("cases with it", justify="right"), box=None, padding=(0, 2, 0, 0))  # fmt: skip
    for number, op in enumerate(ranked[:SHOWN_OPS]):
        so_far = sum(each.green for each in ranked[: number + 1])
        table.add_row(op.name, str(op.green), str(so_far), str(op.cases))
    console.print(table)
    if len(ranked) > SHOWN_OPS:
        console.print(f"and {len(ranked) - SHOWN_OPS} more ops")


def _make_console(table: Table) -> Console:
    """A console for stdout; where that is no terminal, as wide as the table, so that nothing is cut off or folded."""
    console = Console()
    if not console.is_terminal:
        wanted = console.measure(table, options=console.options.update(width=UNLIMITED)).maximum
        console = Console(width=max(console.width, wanted), soft_wrap=True)
    return console


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return "[dim]–[/]"
    share = f" {outcome.share:.0%}" if outcome.status == "pass" and outcome.share else ""
    return MARKS[outcome.status] + share + (" [yellow]*[/]" if outcome.unbounded else "")


def _summary(outcomes: Sequence[Outcome], cases: int) -> str:
    counts = Counter(o.status for o in outcomes)
    worst = max((o.share for o in outcomes if o.status == "pass"), default=0.0)
    listed = ", ".join(f"{counts[s]} {s}" for s in MARKS)
    wide = sum(o.useless for o in outcomes)
    note = f"; {wide} against a bound too wide to say much" if wide else ""
    if held := sum(bool(o.nans or o.infinities) for o in outcomes):
        note += f"; {held} with NaN or infinities, where the reference has or allows them"
    if unbounded := sum(bool(o.unbounded) for o in outcomes):
        note += f"; {unbounded} (*) with elements that have no finite bound"
    error = f"worst error of the passing runs: {worst:.0%} of its bound"
    return f"{cases} cases, {len(outcomes)} runs: {listed}; {error}{note}"


def _open_report_writer(path: Path) -> Callable[[Sequence[Outcome]], None]:
    """Open the writer of a report; an unwritable path is refused before anything runs."""
    contents = FORMATS
    if path.suffix not in contents:
        raise ArgumentError(f"a report is .json, .xml or .html, not {path.suffix or path.name}")
    check_writable(path)
    return lambda outcomes: write_file(path, lambda file: file.write(contents[path.suffix](outcomes)))

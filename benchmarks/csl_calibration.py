"""The cost model of the CSL simulator beside published cycle counts of public programs: each error, fit and holdout.

    python -m benchmarks.csl_calibration CHECKOUTS [--only NAME]
    python -m benchmarks.csl_calibration CHECKOUTS --ranges     both ends of the open costs, for counts off by over 10%

CHECKOUTS is a folder with one folder `owner+name` for each repository of `benchmarks.csl_figures`; a figure whose
repository is not there is left out. The scalar programs of `benchmarks.csl_programs` run without checkouts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.csl_figures import Figure, list_figures
from benchmarks.csl_programs import KERNELS, run_kernel
from benchmarks.machine import keep, kept
from tessera.interp.target.csl import host_tools_folder

LIBRARIES = "benchmark-libs"  # of the vendor's examples, beside the programs
NEAR = 0.1  # the error that a count may have


def run_figure(figure: Figure, checkouts: Path, costs: str = "") -> list[float]:
    """The counts of one run, with the cost model of a name."""
    if figure.count != "iteration":
        output, trace = _run(figure, checkouts, 0, costs)
        launches = trace["otherData"]["launches"]
        if figure.count == "launch":
            return [max(one["end"] - one["start"] for one in launches)]
        if figure.count == "window":
            starts = {one["name"]: one["start"] for one in launches}
            return [starts["f_toc"] - starts["f_tic"]]
        return [float(text) for text in re.findall(figure.count, output)]
    ends = []
    for steps in (2, 4):
        _, trace = _run(figure, checkouts, steps, costs)
        start = trace["otherData"]["launches"][-1]["start"]
        tasks = [e for e in trace["traceEvents"] if e["ph"] == "X" and (e["tid"], e["pid"]) == (1, 1)]
        ends.append(max(e["ts"] + e["dur"] for e in tasks) - start)
    return [(ends[1] - ends[0]) / 2]


def _run(figure: Figure, checkouts: Path, steps: int, costs: str) -> tuple[str, dict[str, Any]]:
    """The output and the trace of a program. Its own check may fail: the tiled stencil differs on WSE-3."""
    with tempfile.TemporaryDirectory() as place:
        source = checkouts / figure.repository.replace("/", "+") / figure.folder
        folder = Path(place) / "programs" / "program"
        shutil.copytree(source, folder)
        if (source.parent / LIBRARIES).is_dir():
            (folder.parent / LIBRARIES).symlink_to(source.parent / LIBRARIES)
        if figure.count == "window":
            _add_stamps(folder)
        trace = Path(place) / "trace.json"
        environment = {
            **os.environ, **figure.environment, "PATH": f"{host_tools_folder()}{os.pathsep}{os.environ['PATH']}",
            "TESSERA_PYTHON": sys.executable, "TESSERA_CSL_TRACE": str(trace), "MPLBACKEND": "Agg",
            **({"TESSERA_CSL_COSTS": costs} if costs else {}),
        }  # fmt: skip
        output = ""
        for tool, text in (("cslc", figure.layout), ("cs_python", figure.run)):
            words = [tool, *shlex.split(text.replace("STEPS", str(steps)))]
            done = subprocess.run(words, cwd=folder, env=environment, check=False, capture_output=True, text=True)
            output += done.stdout
            if done.returncode and not (tool == "cs_python" and trace.is_file()):
                raise RuntimeError(f"{figure.name}: {done.stdout[-300:]}{done.stderr[-500:]}")
        return output, json.loads(trace.read_text())


STAMPS = """
const stamp_time = @import_module("<time>");
var stamp = @zeros([stamp_time.tsc_size_words]u16);
fn f_tic() void {
  stamp_time.get_timestamp(&stamp);
  sys_mod.unblock_cmd_stream();
}
fn f_toc() void { f_tic(); }
comptime {
  @export_symbol(f_tic);
  @export_symbol(f_toc);
}
"""
EXPORTS = '  @export_name("f_tic", fn()void);\n  @export_name("f_toc", fn()void);\n'


def _add_stamps(folder: Path) -> None:
    """Let the host launch a time stamp before the program and one behind it, as FABRICA did for its first counts."""
    for path in folder.glob("*.csl"):
        text = path.read_text()
        if "sys_mod = @import_module" in text:
            path.write_text(text + STAMPS)
        elif re.search(r"^layout *{", text, re.M):
            end = text.rindex("}")
            path.write_text(text[:end] + EXPORTS + text[end:])
    run = folder / "run.py"
    launch = r"^( *)(runner\.launch\()(\"\w+\")(.*)$"
    run.write_text(re.sub(launch, r'\1\2"f_tic"\4\n\1\2\3\4\n\1\2"f_toc"\4', run.read_text(), flags=re.M))


def measure(checkouts: Path, only: str) -> Iterator[dict[str, Any]]:
    """One row for each published count."""
    for kernel in KERNELS:
        if kernel.published and only in kernel.name:
            yield _row(kernel.name, kernel.published, run_kernel(kernel, np.random.default_rng(0)), True)
    for figure in list_figures():
        if only in figure.name and (checkouts / figure.repository.replace("/", "+")).is_dir():
            found = run_figure(figure, checkouts)
            for number, (count, published) in enumerate(zip(found, figure.published, strict=True)):
                if published:
                    name = figure.name if len(found) == 1 else f"{figure.name} [{number}]"
                    yield _row(name, published, count, figure.fitted)


def _row(name: str, published: float, cycles: float, fitted: bool) -> dict[str, Any]:
    error = (cycles - published) / published
    return {"name": name, "cycles": cycles, "published": published, "error": round(error, 4), "fitted": fitted}


def add_ranges(rows: list[dict[str, Any]], checkouts: Path) -> None:
    """Add to each count that is off by more than `NEAR` what it is with all open costs low, and high."""
    far = {row["name"]: row for row in rows if abs(row["error"]) > NEAR}
    for figure in list_figures():
        names = [figure.name, *(f"{figure.name} [{number}]" for number in range(len(figure.published)))]
        if far.keys() & set(names) and (checkouts / figure.repository.replace("/", "+")).is_dir():
            low, high = (run_figure(figure, checkouts, costs) for costs in ("low", "high"))
            for number, ends in enumerate(zip(low, high, strict=True)):
                row = far.get(figure.name if len(low) == 1 else f"{figure.name} [{number}]")
                if row is not None:
                    row["range"] = [min(ends), max(ends)]
                    print(f"{row['name']}: {min(ends):g} to {max(ends):g}, published {row['published']:g}", flush=True)


def summarise(rows: list[dict[str, Any]]) -> str:
    """The errors of the fit and of the holdout, in one line each."""
    lines = []
    for title, fitted in (("fit", True), ("holdout", False)):
        errors = [abs(row["error"]) for row in rows if row["fitted"] == fitted]
        if errors:
            near = sum(error <= NEAR for error in errors)
            median, worst = statistics.median(errors), max(errors)
            lines.append(f"{title}: {len(errors)} counts, median {median:.1%}, largest {worst:.0%}, {near} within 10%")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--only", default="", help="a part of the names of the figures to run")
    parser.add_argument("--ranges", action="store_true", help="add ranges to the results of the last run")
    options = parser.parse_args()
    if options.ranges:
        rows: Any = kept("csl_calibration")
        add_ranges(rows, options.checkouts)
        print(keep("csl_calibration", rows))
        return
    rows = list(measure(options.checkouts, options.only))
    table = Table("program", "cycles", "published", "error", "")
    for row in rows:
        cells = (row["name"], f"{row['cycles']:g}", f"{row['published']:g}", f"{row['error']:+.0%}")
        table.add_row(*cells, "" if row["fitted"] else "holdout")
    Console(width=110).print(table)
    print(summarise(rows))
    if not options.only:
        print(keep("csl_calibration", rows))


if __name__ == "__main__":
    main()

"""The CSL simulator: its cycles beside published counts, how long it takes, and element-cycles a second.

    TESSERA_CSL_EXAMPLES=CHECKOUT python -m benchmarks.csl [--only NAME]

CHECKOUT is the vendor's public example repository; without it only our own programs run. Published counts are a third
party's (the FABRICA benchmark, on the vendor's simulator, WSE-3, SDK 1.4). The cycles here are those of a launch: from
the first PE that begins it to the last that unblocks the command stream. The one-PE programs are ours, after its
descriptions and not its code. Seconds count the processor time of both commands, `cslc` and `cs_python`: the start of
Python, the compilation and the host part included. A rate is millions of PEs times cycles of the whole run for each
second: of both commands, and of the event loop alone (`benchmarks/csl_timed.py`), the shortest of up to `ROUNDS` more
runs, each in a new process.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.csl_programs import KERNELS, run_kernel
from benchmarks.machine import keep
from tessera.interp.target.csl import host_tools_folder

EXAMPLES = os.environ.get("TESSERA_CSL_EXAMPLES", "")
ROUNDS, LONG = 7, 5.0  # runs of an event loop, and the seconds after which no further one begins


@dataclass(frozen=True)
class Case:
    """A program of the checkout with other parameters, and the published cycles of its launch (0: none known)."""

    name: str
    folder: str
    layout: str
    grid: tuple[int, int]
    params: str
    published: int
    limit: float = 0.0  # seconds it may take, where that is promised
    options: str = "--name out"


GEMM, GEMV = "benchmarks/gemm-collectives_2d", "benchmarks/gemv-collectives_2d"
COLORS = ",".join(f"C{n}_ID:{n}" for n in range(9))
BUFFERS = "--width-west-buf=0 --width-east-buf=0"
CASES = (
    Case("gemm-collectives 4x4, 14^3 tiles", GEMM, "layout.csl", (4, 4), "P:4,Mt:14,Kt:14,Nt:14", 51425, 20.0),
    *(
        Case(
            f"gemv-collectives {p}x{p}", GEMV, "layout.csl", (p, p),
            f"kernel_rows:{p},kernel_cols:{p},matrix_rows:{8 * p},matrix_cols:{4 * p}", cycles,
        )
        for p, cycles in ((2, 3212), (4, 3670), (8, 3921))
    ),
    Case(
        "gemv-collectives 32x32", GEMV, "layout.csl", (32, 32),
        "kernel_rows:32,kernel_cols:32,matrix_rows:128,matrix_cols:128", 0, 60.0,
    ),
    Case(
        "gemv-collectives 64x64", GEMV, "layout.csl", (64, 64),
        "kernel_rows:64,kernel_cols:64,matrix_rows:256,matrix_cols:256", 0, 20.0,
    ),
    Case("gemm-collectives 32x32, 8^3 tiles", GEMM, "layout.csl", (32, 32), "P:32,Mt:8,Kt:8,Nt:8", 0, 20.0),
    Case("cholesky 10x10, 4x4 tiles", "benchmarks/cholesky", "layout.csl", (10, 10), "P:10,Nt:4", 12479),
    Case(
        "single-tile-matvec 25x25", "benchmarks/single-tile-matvec", "src/layout_matvec.csl", (2, 2),
        "width:2,height:2,tile_size:25,iters:1", 780, options="--name out --verify",
    ),
    Case(
        "residual 2x2", "benchmarks/residual", "layout.csl", (2, 2),
        "width:2,height:2,LOCAL_OUT_SZ:3,LOCAL_IN_SZ:2", 674,
    ),
    Case(
        "game-of-life 32x32", "benchmarks/game-of-life", "layout.csl", (32, 32), "x_dim:32,y_dim:32", 0,
        options="--name out --initial-state glider --iters 20",
    ),
    *(
        Case(
            f"{name} 16x16", f"benchmarks/{name}", "src/layout.csl", (16, 16),
            f"width:16,height:16,MAX_ZDIM:5,BLOCK_SIZE:2,{COLORS}", 0,
            options=f"-m=16 -n=16 -k=5 --latestlink out --channels=1 {BUFFERS} --zDim=5 --run-only {more}",
        )
        for name, more in (("7pt-stencil-spmv", ""), ("conjugate-gradient", "--max-ite=2"))
    ),
)  # fmt: skip


def run_example(case: Case) -> dict[str, Any]:
    """Compile and run one program of the checkout with its own run.py: cycles of its longest launch, and seconds."""
    with tempfile.TemporaryDirectory() as place:
        examples = Path(place) / "examples"
        for name in (case.folder, "benchmarks/benchmark-libs"):  # which programs of two folders import
            shutil.copytree(Path(EXAMPLES) / name, examples / name)
        folder = examples / case.folder
        trace = Path(place) / "trace.json"
        env = {
            **os.environ,
            "PATH": f"{host_tools_folder()}{os.pathsep}{os.environ['PATH']}",
            "TESSERA_PYTHON": sys.executable,
            "TESSERA_CSL_TRACE": str(trace),
        }
        width, height = case.grid
        compile_ = ["cslc", case.layout, "--arch=wse3", f"--fabric-dims={width + 7},{height + 2}"]
        compile_ += ["--fabric-offsets=4,1", f"--params={case.params}", "--memcpy", "--channels=1", "-o", "out"]
        start = _children_time()
        script = ["run.py", *case.options.split()]
        for command in (compile_, ["cs_python", *script]):
            subprocess.run(command, cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL)
        seconds = _children_time() - start
        launches = json.loads(trace.read_text())["otherData"]["launches"]
        timed = _time_rounds(script, folder, env)
    elements = timed["cycles"] * width * height / 1e6
    return {
        "cycles": max(one["end"] - one["start"] for one in launches), "seconds": seconds,
        "rate": elements / seconds, "simulation": timed["simulation"], "simulated": elements / timed["simulation"],
    }  # fmt: skip


def _time_rounds(script: list[str], folder: Path, env: dict[str, str]) -> dict[str, float]:
    """The cycles and the least seconds of the event loop of some more runs: long ones have fewer."""
    found = [_time_simulation(script, folder, env)]
    while len(found) < ROUNDS and sum(one["simulation"] for one in found) < LONG:
        found.append(_time_simulation(script, folder, env))
    return min(found, key=lambda one: one["simulation"])


def _time_simulation(script: list[str], folder: Path, env: dict[str, str]) -> dict[str, float]:
    """The cycles and the seconds of the event loop of one more run."""
    result = folder / "timed.json"
    paths = os.pathsep.join([str(Path(__file__).parents[1]), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "benchmarks.csl_timed", str(result), *script]
    more = {"PYTHONPATH": paths, "TESSERA_CSL_TRACE": ""}
    subprocess.run(command, cwd=folder, env={**env, **more}, check=True, stdout=subprocess.DEVNULL)
    return dict(json.loads(result.read_text()))


def _children_time() -> float:
    """The processor time of the finished child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def row(name: str, cycles: int, published: int, seconds: float, limit: float = 0.0, **rates: float) -> dict[str, Any]:
    """One line of the table."""
    error = (cycles - published) / published if published else None
    return {
        "name": name, "cycles": cycles, "published": published or None, "error": error,
        "seconds": round(seconds, 2), "limit": limit or None, **{key: round(rate, 3) for key, rate in rates.items()},
    }  # fmt: skip


def measure(only: str) -> list[dict[str, Any]]:
    """All cases that can run here and whose names contain `only`."""
    rows = []
    for case in track([case for case in CASES if EXAMPLES and only in case.name], "examples"):
        got = run_example(case)
        rows.append(row(case.name, published=case.published, limit=case.limit, **got))
    for kernel in track([kernel for kernel in KERNELS if only in kernel.name], "kernels"):
        start = time.process_time()
        cycles = run_kernel(kernel, np.random.default_rng(0))
        rows.append(row(kernel.name, cycles, kernel.published, time.process_time() - start))
    return rows


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="a part of the names of the cases to run")
    only = parser.parse_args().only
    rows = measure(only)
    heads = ("program", "cycles", "published", "error", "seconds", "limit", "M element-cycles/s", "of the simulation")
    table = Table(*heads, title="CSL simulator, WSE-3")
    for one in rows:
        error = "" if one["error"] is None else f"{one['error']:+.0%}"
        cells = [one["name"], one["cycles"], one["published"] or "", error, one["seconds"], one["limit"] or ""]
        cells += [one.get("rate", ""), one.get("simulated", "")]
        table.add_row(*(str(cell) for cell in cells))
    Console().print(table)
    rates = [one["simulated"] for one in rows if "simulated" in one]
    if rates:
        print(f"median of the simulation: {np.median(rates):.1f} M element-cycles/s ({min(rates)} to {max(rates)})")
    if not only:
        print(keep("csl", rows))


if __name__ == "__main__":
    main()

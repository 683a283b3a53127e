"""The CSL simulator: its cycles beside published counts, and how long it takes.

    TESSERA_CSL_EXAMPLES=CHECKOUT python -m benchmarks.csl

CHECKOUT is the vendor's public example repository; without it only our own programs run. Published counts are a third
party's (the FABRICA benchmark, on the vendor's simulator, WSE-3, SDK 1.4). The cycles here are those of a launch: from
the first PE that begins it to the last that unblocks the command stream. The one-PE programs are ours, after its
descriptions and not its code.
"""

from __future__ import annotations

import json
import os
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
    options: str = ""


GEMM, GEMV = "benchmarks/gemm-collectives_2d", "benchmarks/gemv-collectives_2d"
CASES = (
    Case("gemm-collectives 4x4, 14^3 tiles", GEMM, "layout.csl", (4, 4), "P:4,Mt:14,Kt:14,Nt:14", 51425, 20.0),
    *(
        Case(
            f"gemv-collectives {p}x{p}", GEMV, "layout.csl", (p, p),
            f"kernel_rows:{p},kernel_cols:{p},matrix_rows:32,matrix_cols:16", cycles,
        )
        for p, cycles in ((2, 3212), (4, 3670), (8, 3921))
    ),
    Case(
        "gemv-collectives 32x32", GEMV, "layout.csl", (32, 32),
        "kernel_rows:32,kernel_cols:32,matrix_rows:128,matrix_cols:128", 0, 60.0,
    ),
    Case("cholesky 10x10, 4x4 tiles", "benchmarks/cholesky", "layout.csl", (10, 10), "P:10,Nt:4", 12479),
    Case(
        "single-tile-matvec 25x25", "benchmarks/single-tile-matvec", "src/layout_matvec.csl", (2, 2),
        "width:2,height:2,tile_size:25,iters:1", 780, options="--verify",
    ),
    Case(
        "residual 2x2", "benchmarks/residual", "layout.csl", (2, 2),
        "width:2,height:2,LOCAL_OUT_SZ:3,LOCAL_IN_SZ:2", 674,
    ),
)  # fmt: skip


def run_example(case: Case) -> dict[str, Any]:
    """Compile and run one program of the checkout with its own run.py: cycles of its longest launch, and seconds."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "program"
        shutil.copytree(Path(EXAMPLES) / case.folder, folder)
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
        start = time.perf_counter()
        for command in (compile_, ["cs_python", "run.py", "--name", "out", *case.options.split()]):
            subprocess.run(command, cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        launches = json.loads(trace.read_text())["otherData"]["launches"]
    return {"cycles": max(one["end"] - one["start"] for one in launches), "seconds": seconds}


def row(name: str, cycles: int, published: int, seconds: float, limit: float = 0.0) -> dict[str, Any]:
    """One line of the table."""
    error = (cycles - published) / published if published else None
    return {
        "name": name, "cycles": cycles, "published": published or None, "error": error,
        "seconds": round(seconds, 2), "limit": limit or None,
    }  # fmt: skip


def measure() -> list[dict[str, Any]]:
    """All cases that can run here."""
    rows = []
    for case in track(CASES if EXAMPLES else (), "examples"):
        got = run_example(case)
        rows.append(row(case.name, got["cycles"], case.published, got["seconds"], case.limit))
    for kernel in track(KERNELS, "kernels"):
        start = time.perf_counter()
        cycles = run_kernel(kernel, np.random.default_rng(0))
        rows.append(row(kernel.name, cycles, kernel.published, time.perf_counter() - start))
    return rows


def main() -> None:
    """Measure, print, keep."""
    rows = measure()
    table = Table("program", "cycles", "published", "error", "seconds", "limit", title="CSL simulator, WSE-3")
    for one in rows:
        error = "" if one["error"] is None else f"{one['error']:+.0%}"
        cells = [one["name"], one["cycles"], one["published"] or "", error, one["seconds"], one["limit"] or ""]
        table.add_row(*(str(cell) for cell in cells))
    Console().print(table)
    print(keep("csl", rows))


if __name__ == "__main__":
    main()

"""How the simulated cycles of a SUMMA GEMM grow with the grid, and how long the simulator takes.

    TESSERA_CSL_EXAMPLES=CHECKOUT python -m benchmarks.csl_summa [--largest 32]

The program is the vendor's gemm-collectives_2d, from a checkout of its public example repository. Weak scaling: each PE
keeps a tile of 8 x 8; strong scaling: matrices of 128 x 128 over more and more PEs. `use` is multiply-adds for each PE
and cycle.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.machine import keep
from tessera.interp.target.csl.compiler import compile_program
from tessera.interp.target.csl.simulation import Simulation

GRIDS = (2, 4, 8, 16, 32)
TILE, WHOLE = 8, 128


def tiles(matrix: np.ndarray, p: int, t: int) -> dict[tuple[int, int], np.ndarray]:
    """Each PE's tile, its columns one after another."""
    blocks = np.ascontiguousarray(matrix.reshape(p, t, p, t).transpose(0, 2, 3, 1)).reshape(p, p, t * t)
    return {(x, y): blocks[y, x] for x in range(p) for y in range(p)}


def run(layout_file: Path, p: int, t: int) -> dict[str, Any]:
    """Multiply matrices of p*t by p*t on p*p PEs; the cycles of the launch, checked against NumPy."""
    params = {"P": p, "Mt": t, "Kt": t, "Nt": t}
    start = time.process_time()
    simulation = Simulation(compile_program(str(layout_file), params=params, arch="wse3"))
    simulation.boot()
    a, b, c = (np.random.default_rng(i).random((p * t, p * t), np.float32) for i in range(3))
    simulation.copy_in("A", tiles(a, p, t))
    simulation.copy_in("B", tiles(b, p, t))
    launch = simulation.launch("main")
    rows = tiles(c, p, t)
    simulation.wait(simulation.copy_out("C", rows))
    blocks = np.array([[rows[x, y] for x in range(p)] for y in range(p)]).reshape(p, p, t, t)
    np.testing.assert_allclose(blocks.transpose(0, 3, 1, 2).reshape(p * t, p * t), a @ b, rtol=1e-4)
    assert launch.started is not None
    cycles = launch.ended - launch.started
    return {
        "grid": p, "tile": t, "cycles": cycles, "use": (p * t) ** 3 / (p * p * cycles),
        "seconds": round(time.process_time() - start, 2),
    }  # fmt: skip


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--largest", type=int, default=32, help="the largest grid (default 32)")
    grids = [p for p in GRIDS if p <= parser.parse_args().largest]
    checkout = os.environ.get("TESSERA_CSL_EXAMPLES")
    if not checkout:
        sys.exit("TESSERA_CSL_EXAMPLES does not name a checkout of the vendor's public CSL examples")
    file = Path(checkout) / "benchmarks" / "gemm-collectives_2d" / "layout.csl"
    results = {
        "weak": [run(file, p, TILE) for p in track(grids, "weak")],
        # 2 x 2 PEs cannot hold 128 x 128: five tiles of 64 x 64 take more than 48 KB.
        "strong": [run(file, p, WHOLE // p) for p in track(grids[1:], "strong")],
    }
    for name, rows in results.items():
        table = Table("grid", "tile", "cycles", "use", "seconds", title=f"GEMM, {name} scaling")
        for one in rows:
            cells = (f"{one['grid']} x {one['grid']}", one["tile"], one["cycles"], f"{one['use']:.3f}", one["seconds"])
            table.add_row(*(str(cell) for cell in cells))
        Console().print(table)
    print(keep("csl_summa", results))


if __name__ == "__main__":
    main()

"""How the cycles of products grow with the grid of elements, in the CSL simulator.

    python -m benchmarks.csl_scaling [--largest 16]

Weak scaling keeps an element's tiles (14 x 14) as the grid grows, strong scaling the whole product (48 x 48 x 48). The
roofline is the multiply-adds of an element at two a cycle (WSE-2's `@fmacs`).
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import tessera as ts
from benchmarks.machine import keep
from tessera.codegen.csl import Csl
from tessera.runtime import driver

TILE, WHOLE = 14, 48
FMACS = 2  # elements a cycle


def measure(size: int, side: int, arch: str = "wse2") -> dict[str, Any]:
    """One product of size^3 on side x side elements."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, size, size)).astype(np.float32)
    traced = ts.jit(lambda a, b: a @ b).trace(a, b).function
    generator = Csl((side, side))
    artifact = generator.emit(driver.lower(traced, f"csl:{side}x{side}")["tile"], {"arch": arch})
    runtime = generator.runtime(artifact)
    start = time.process_time()
    (found,) = runtime.run([a, b])
    seconds = time.process_time() - start
    np.testing.assert_allclose(found, a @ b, rtol=1e-3, atol=1e-3)
    ideal = size**3 / (side * side) / FMACS
    return {"size": size, "grid": side, "cycles": runtime.cycles, "roofline": ideal, "seconds": seconds}


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--largest", type=int, default=16, help="the side of the largest grid")
    sides = [n for n in (1, 2, 4, 8, 16, 32) if n <= parser.parse_args().largest]
    work = [("weak", TILE * n, n) for n in sides] + [("strong", WHOLE, n) for n in sides]
    found: dict[str, list[dict[str, Any]]] = {"weak": [], "strong": []}
    for kind, size, side in track(work, description="products"):
        found[kind].append(measure(size, side))
    table = Table("scaling", "grid", "size", "cycles", "share of the roofline", "simulated in")
    for kind, rows in found.items():
        for row in rows:
            share = f"{row['roofline'] / row['cycles']:.0%}"
            grid = f"{row['grid']}x{row['grid']}"
            table.add_row(kind, grid, str(row["size"]), str(row["cycles"]), share, f"{row['seconds']:.2f} s")
    Console(width=100).print(table)
    print(keep("csl_scaling", found))


if __name__ == "__main__":
    main()

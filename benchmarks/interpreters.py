"""The Tile interpreter against other interpreter modes, on the same work in the same run.

    python -m benchmarks.interpreters --peers FOLDER --python VENV/bin/python

FOLDER holds `interp_bench.py` with its peers (Triton, Pallas, NumPy); without it only Tessera runs.
Each measurement is a process of its own with one BLAS thread. "numpy-gridvec" is the same blocked
arithmetic written in NumPy with the grid as leading axes: the roofline of such an interpreter.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.machine import keep
from benchmarks.timing import measure

CASES = (
    "vadd_1M", "softmax_1024x1024", "matmul_256_b32", "matmul_512_b32", "matmul_512_b64",
    "flash_f32", "flash_bf16", "block_reduce_64K",
)  # fmt: skip
PEERS = {"numpy-gridvec": "numpy", "triton": "triton", "pallas": "pallas"}
THREADS = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def prepare(case: str, inputs: dict[str, Any]) -> Any:
    """A call that runs our kernel of this case and gives its result."""
    from benchmarks import tile_kernels as kernels

    out = np.zeros(_result_shape(case, inputs), next(iter(inputs.values())).dtype)
    if case.startswith("vadd"):
        launch = kernels.vector_add[(len(inputs["x"]) // 1024,)]
        return lambda: (launch(inputs["x"], inputs["y"], out, BLOCK=1024), out)[1]
    if case.startswith("softmax"):
        launch = kernels.softmax[(len(inputs["x"]),)]
        return lambda: (launch(inputs["x"], out, COLUMNS=inputs["x"].shape[1]), out)[1]
    if case.startswith("matmul"):
        a, b, block = inputs["a"], inputs["b"], inputs["blk"]
        launch = kernels.matmul[(a.shape[0] // block, b.shape[1] // block)]
        return lambda: (launch(a, b, out, BLOCK=block, K=a.shape[1]), out)[1]
    if case.startswith("flash"):
        heads, length, size = inputs["q"].shape
        launch = kernels.flash[(length // 64, heads)]
        extra = {"BLOCK": 64, "D": size, "SCALE": size**-0.5}
        return lambda: (launch(inputs["q"], inputs["k"], inputs["v"], out, **extra), out)[1]
    launch = kernels.block_sum[(len(inputs["x"]) // 128,), 128]
    return lambda: (launch(inputs["x"], out, THREADS=128), out)[1]


def _result_shape(case: str, inputs: dict[str, Any]) -> tuple[int, ...]:
    if case.startswith("matmul"):
        return inputs["a"].shape[0], inputs["b"].shape[1]
    return (len(inputs["x"]) // 128,) if case.startswith("block") else next(iter(inputs.values())).shape


def child(case: str, folder: str) -> None:
    """Measure Tessera on one case and print the result."""
    sys.path.insert(0, folder)
    cases = importlib.import_module("cases")
    inputs, _ = cases.CASES[case][0](1.0)
    run = prepare(case, inputs)
    times = measure(run)
    good, error = cases.check(case, run(), inputs)
    print(
        "RESULT "
        + json.dumps({**times, "seconds": times["median"], "status": "ok" if good else "WRONG", "max_abs_err": error})
    )


def _spawn(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **THREADS}, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(lines[0][7:]) if lines else {"status": "ERROR", "error": done.stderr.strip()[-300:]}


def compare(folder: Path, python: str) -> dict[str, Any]:
    """Each case: Tessera, then each peer, at once after it."""
    found: dict[str, Any] = {}
    for case in track(CASES, description="interpreters"):
        row = {
            "tessera": _spawn(
                [sys.executable, "-m", "benchmarks.interpreters", "--child", case, "--peers", str(folder)]
            )
        }
        for variant, peer in PEERS.items():
            script = str(folder / "interp_bench.py")
            row[variant] = _spawn([python, script, "--child", peer, variant, case, "1.0", "300"])
        found[case] = row
    return found


def show(found: dict[str, Any]) -> None:
    """Seconds, and how many times faster Tessera is than each peer."""
    table = Table("case", "Tessera, ms", *(f"{p}, ms (ratio)" for p in PEERS))
    for case, row in found.items():
        ours = row["tessera"].get("seconds")
        cells = [_cell(row[p], ours) for p in PEERS]
        table.add_row(case, f"{ours * 1e3:.2f} {row['tessera']['status']}" if ours else row["tessera"]["error"], *cells)
    Console(width=140).print(table)


def _cell(result: dict[str, Any], ours: float | None) -> str:
    if "seconds" not in result or not ours:
        return result["status"]
    return f"{result['seconds'] * 1e3:.2f} ({result['seconds'] / ours:.2f}x) {result['status']}"


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--peers", type=Path, required=True, help="the folder of interp_bench.py and cases.py")
    parser.add_argument("--python", default=sys.executable, help="a Python with the peers installed")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, str(options.peers))
        return
    found = compare(options.peers.resolve(), options.python)
    show(found)
    print(keep("interpreters", found))


if __name__ == "__main__":
    main()

"""What a launch from Python and a cold compile of a product cost, against PyTorch and Triton."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import tessera as ts
from benchmarks import gpu_products
from benchmarks import triton_kernels as kernels
from benchmarks.gpu import Run, bound, compiled
from tessera.codegen.ptx.runtime.driver_api import get_gpu

CALLS = 2000
SIZE = 4096
ROUNDS = 3


@ts.jit
def add(x, y):
    """A small kernel."""
    return x + y


def measure() -> list[dict[str, Any]]:
    """Microseconds of a launch, and seconds until a product can run for the first time."""
    x = torch.randn(1024, device="cuda")
    y, out = torch.randn_like(x), torch.empty_like(x)
    program = compiled(add, [np.zeros(1024, np.float32)] * 2)
    runs = {
        "tessera": bound(program, x, y, out),
        "PyTorch": lambda: torch.add(x, y, out=out),
        "Triton": lambda: kernels.added[(1,)](x, y, out, BLOCK=1024),
    }
    times = {name: _launch(run) for name, run in runs.items()}
    cold = {name: statistics.median(_child(name) for _ in range(ROUNDS)) for name in COLD}
    print(f"launch {times}, cold compile of a product {cold}", flush=True)
    return [{"name": "launch", "microseconds": times}, {"name": "cold compile", "seconds": cold}]


def _launch(run: Run) -> float:
    """Microseconds of one call as Python sees it."""
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            run()
        found.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(found)


def _child(name: str) -> float:
    """The seconds of a cold compile in a process of its own, with no cache of the driver's or of Triton's."""
    with tempfile.TemporaryDirectory() as folder:
        empty = {"CUDA_CACHE_DISABLE": "1", "TRITON_CACHE_DIR": folder}
        command = [sys.executable, "-m", "benchmarks.gpu_launch", name]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **empty}, check=True)
    return float(done.stdout.split()[-1])


def _ours(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    program = gpu_products.compiled_product(SIZE, SIZE, SIZE, gpu_products.BLOCKS[0])
    bound(program, a, b, out)()


COLD: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "tessera": _ours,
    "Triton": kernels.multiply,
}


def main(name: str) -> None:
    """Compile and run a product once, and print the seconds."""
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    with get_gpu().active():
        torch.cuda.synchronize()
        start = time.perf_counter()
        COLD[name](a, b, out)
        torch.cuda.synchronize()
        print(time.perf_counter() - start)


if __name__ == "__main__":
    main(sys.argv[1])

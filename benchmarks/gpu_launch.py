"""What a launch from Python and a cold compile cost, against PyTorch and Triton."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

import tessera as ts
from benchmarks.gpu import Run, bound, compiled

CALLS = 2000


@ts.jit
def add(x, y):
    """A small kernel."""
    return x + y


def measure() -> list[dict[str, Any]]:
    """Microseconds of a launch, and seconds until a new kernel can run."""
    x = torch.randn(1024, device="cuda")
    y, out = torch.randn_like(x), torch.empty_like(x)
    start = time.perf_counter()
    program = compiled(add, [np.zeros(1024, np.float32)] * 2)
    cold = time.perf_counter() - start
    runs = {"tessera": bound(program, x, y, out), "PyTorch": lambda: torch.add(x, y, out=out)}
    times = {name: _launch(run) for name, run in runs.items()}
    print(f"launch {times}, cold compile {cold:.3f} s", flush=True)
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

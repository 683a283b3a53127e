"""The gradient of an MLP (4 layers, 1024 wide, batch 256) on the LLVM target against PyTorch eager on the CPU.

    python -m benchmarks.gradients --python VENV/bin/python

VENV has torch. Both run in turn, each round a process of its own on the same processor; the ratio is of the best times.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import keep
from benchmarks.timing import measure

PEER = Path(__file__).with_name("peer_gradients_torch.py")
LAYERS, WIDTH, BATCH = 4, 1024, 256
# A product forward, and two backward, for each layer (one for the first: its input has no gradient).
FLOPS = 2 * BATCH * WIDTH * WIDTH * (3 * LAYERS - 1)


def arrays() -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray, np.ndarray]:
    """Weights and biases of each layer, inputs and targets: the same numbers as the peer's."""
    rng = np.random.default_rng(0)
    layers = [
        (rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) * 0.03, np.zeros(WIDTH, np.float32)) for _ in range(LAYERS)
    ]
    return (
        layers,
        rng.normal(size=(BATCH, WIDTH)).astype(np.float32),
        rng.normal(size=(BATCH, WIDTH)).astype(np.float32),
    )


def ours(seconds: float) -> dict[str, Any]:
    """Seconds of one step: the loss and the gradients of all weights and biases."""
    import tessera as ts

    def loss(layers: Any, x: Any, y: Any) -> Any:
        for number, (w, b) in enumerate(layers):
            x = x @ w + b
            x = ts.relu(x) if number < LAYERS - 1 else x
        return ((x - y) ** 2).mean()

    step = ts.jit(ts.value_and_grad(loss), target="llvm")
    given = arrays()
    times = measure(lambda: step(*given), seconds, 10)
    value, grads = step(*given)
    return {**times, "loss": float(value), "norm": float(np.linalg.norm(np.asarray(grads[0][0])))}


def _child(*command: str, threads: int) -> dict[str, Any]:
    environment = {**os.environ, "TESSERA_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout[done.stdout.index("{") :])


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--python", help="a Python with torch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(ours(options.seconds)))
        return
    found: dict[str, Any] = {"threads": options.threads, "tessera": [], "torch": []}
    for _ in range(options.rounds):
        here = [sys.executable, "-m", "benchmarks.gradients", "--child", "--seconds", str(options.seconds)]
        found["tessera"].append(_child(*here, threads=options.threads))
        if options.python:
            peer = [options.python, str(PEER), "--seconds", str(options.seconds), "--threads", str(options.threads)]
            found["torch"].append(_child(*peer, threads=options.threads))
    found["summary"] = summary(found)
    print(json.dumps(found["summary"], indent=1))
    print(keep("gradients", found))


def summary(found: dict[str, Any]) -> dict[str, float]:
    """Best times, their rate, and their ratio; both must have computed the same."""
    best = min(r["best"] for r in found["tessera"])
    out = {"tessera_seconds": best, "tessera_gflops": FLOPS / best / 1e9}
    if found["torch"]:
        peer = min(r["best"] for r in found["torch"])
        for key in ("loss", "norm"):
            np.testing.assert_allclose(found["tessera"][0][key], found["torch"][0][key], rtol=1e-3)
        out |= {"torch_seconds": peer, "torch_gflops": FLOPS / peer / 1e9, "ratio_to_torch": best / peer}
    return out


if __name__ == "__main__":
    main()

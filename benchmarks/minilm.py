"""MiniLM, batch 32 x 128 tokens, on the LLVM target against PyTorch on the same processor.

    python -m benchmarks.minilm --python VENV/bin/python

VENV has torch and transformers. The two are measured in turn, several times; the ratio is of the best times.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import keep
from benchmarks.timing import measure

PEER = Path(__file__).with_name("peer_minilm_torch.py")
# Multiply-adds of six encoder layers for one token: projections, feed-forward, attention over 128 tokens.
FLOPS_PER_TOKEN = 2 * 6 * (4 * 384 * 384 + 2 * 384 * 1536 + 2 * 128 * 384)


def ours(batch: int, length: int, repeats: int) -> dict[str, Any]:
    """Seconds of compiling (cold or from the cache) and of one call."""
    import tessera as ts
    from examples.minilm import model, text

    sentences = (text.lines("sentences.txt") * 2)[:batch]
    ids, mask = text.encode(sentences, length)
    params = model.parameters()
    encode = ts.jit(model.encode.function, target="llvm")
    start = time.perf_counter()
    encode(params, ids, mask)
    first = time.perf_counter() - start
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        encode(params, ids, mask)
        times.append(time.perf_counter() - start)
    return {"first": first, "best": min(times), "median": sorted(times)[len(times) // 2]}


def roofline(size: int = 2048) -> float:
    """GFLOP/s of NumPy's f32 matrix product: what BLAS reaches on this processor."""
    a = np.ones((size, size), np.float32)
    return 2 * size**3 / measure(lambda: a @ a, 1.0)["best"] / 1e9


def _child(*arguments: str, environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(arguments, capture_output=True, text=True, env={**os.environ, **environment}, check=True)
    return json.loads(done.stdout[done.stdout.index("{") :])


def compare(python: str | None, batch: int, length: int, rounds: int) -> dict[str, Any]:
    """Both in turn, each round a process of its own; ours first with an empty object cache."""
    found: dict[str, Any] = {"tessera": [], "torch": []}
    here = [sys.executable, "-m", "benchmarks.minilm", "--child", "--batch", str(batch), "--length", str(length)]
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(rounds):
            found["tessera"].append(_child(*here, environment={"TESSERA_CACHE": cache}))
            if python:
                peer = [python, str(PEER), "--batch", str(batch), "--length", str(length)]
                found["torch"].append(_child(*peer, environment={}))
    return found


def summary(found: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Best times, GFLOP/s, compile times, and the ratio."""
    best = min(r["best"] for r in found["tessera"])
    out = {
        "tessera_seconds": best,
        "tessera_gflops": FLOPS_PER_TOKEN * tokens / best / 1e9,
        "blas_gflops": roofline(),
        "compile_cold_seconds": found["tessera"][0]["first"] - best,
        "compile_cached_seconds": min((r["first"] for r in found["tessera"][1:]), default=float("nan")) - best,
    }
    if found["torch"]:
        peer = min(r["seconds"] if isinstance(r["seconds"], float) else r["seconds"]["best"] for r in found["torch"])
        out |= {"torch_seconds": peer, "ratio_to_torch": best / peer}
    return out


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--python", help="a Python with torch and transformers")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(ours(options.batch, options.length, 10)))
        return
    found = compare(options.python, options.batch, options.length, options.rounds)
    found["summary"] = summary(found, options.batch * options.length)
    print(json.dumps(found["summary"], indent=1))
    print(keep("minilm", found))


if __name__ == "__main__":
    main()

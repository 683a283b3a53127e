"""The error of cost models on this processor: predictions of a matrix product's configurations against measured times.

    python -m benchmarks.cost_models [--output FILE.json]

The roofline predicts each configuration; the hybrid model predicts the configurations of a shape after it has learned
those of the shapes before. `regret` is the time of the fastest of the model's first four, over that of the fastest of
all.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import numpy as np

import tessera as ts
from tessera.tools.performance import HybridModel, RooflineModel, measure_error
from tessera.tools.performance.candidates import Candidates

SHAPES = [(256, 256, 128), (256, 128, 256), (128, 256, 512), (512, 256, 128), (256, 512, 256), (512, 512, 128)]
CONFIGS = [{"BM": m, "BN": n, "BK": k} for m in (8, 16, 32, 64) for n in (16, 32, 64) for k in (16, 64)]
KEPT, SAMPLES = 4, 7


@ts.kernel(target="llvm")
def product(a: ts.Tensor["M", "K"], b: ts.Tensor["K", "N"], out: ts.Tensor["M", "N"], *, BM: int, BN: int, BK: int):
    i, j = ts.tile.program_id(0) * BM, ts.tile.program_id(1) * BN
    acc = ts.tile.zeros((BM, BN), ts.f32)
    for k in range(0, a.shape[1], BK):
        acc += ts.tile.dot(a[i : i + BM, k : k + BK], b[k : k + BK, j : j + BN])
    out[i : i + BM, j : j + BN] = acc


def make_candidates(m: int, n: int, k: int) -> Candidates:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k)).astype("f4"), rng.standard_normal((k, n)).astype("f4")
    launch = product[lambda c: (m // c["BM"], n // c["BN"])]
    return Candidates(launch, (a, b, np.zeros((m, n), "f4")), {}, CONFIGS)


def measure(owner: Candidates) -> list[float]:
    times = []
    for config in owner.configs:
        owner.run(config)  # compiles
        times.append(min(owner.run(config) for _ in range(SAMPLES)) / 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    hybrid, roofline, rows = HybridModel("cpu"), RooflineModel("cpu"), []
    for number, shape in enumerate(SHAPES):
        owner = make_candidates(*shape)
        times = measure(owner)
        row = {"shape": shape, "configurations": len(times)}
        for name, model in (("roofline", roofline), ("hybrid", hybrid)):
            predicted = [model.predict(owner.at(c)) for c in owner.configs]
            first = sorted(range(len(times)), key=predicted.__getitem__)[:KEPT]
            error = measure_error(predicted, times)
            regret = min(times[i] for i in first) / min(times)
            row[name] = {"median": error.median, "worst": error.worst, "rank": error.rank, "regret": regret}
            if number or name == "roofline":
                print(f"{shape} {name:8}: {error}; regret of the first {KEPT}: {regret:.2f}")
        for config, seconds in zip(owner.configs, times, strict=True):
            hybrid.learn(owner.at(config), seconds)
        rows.append(row)
    for name in ("roofline", "hybrid"):
        means = {k: statistics.fmean(r[name][k] for r in rows[1:]) for k in ("median", "rank", "regret")}
        print(name, {k: round(v, 2) for k, v in means.items()}, f"over {len(rows) - 1} shapes")
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

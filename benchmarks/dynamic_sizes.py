"""Symbolic sizes: MiniLM built once for all batches and lengths, against a build for 32 x 128, on the LLVM target.

    python -m benchmarks.dynamic_sizes

Both artifacts are measured in turn, by processor time and by wall time; the ratios are of the best. Compilation starts
from an empty cache. The calls at other sizes compare the one artifact with a build for each size.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import keep

BATCH, LENGTH, ROUNDS = 32, 128, 7
OTHER_SIZES = ((1, 8), (1, 128), (8, 64), (64, 32), (16, 256))
VARIANTS = ("B == 1 and S <= 8", "B == 1 and S == 8")  # measured at the first of the other sizes


def draw(batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, and a mask that hides the last half of the odd rows."""
    ids = np.random.default_rng(batch * length).integers(1, 3000, (batch, length)).astype(np.int32)
    mask = np.ones_like(ids)
    mask[1::2, length // 2 + 1 :] = 0
    return ids, mask


def build(
    folder: Path, ids: np.ndarray, mask: np.ndarray, dynamic: bool, variants: tuple[str, ...] = ()
) -> tuple[Any, float]:
    """The loaded artifact, and the processor seconds of its build."""
    import tessera as ts
    from examples.minilm import model

    os.environ["TESSERA_CACHE"] = str(folder / "cache")
    start = time.process_time()
    options = {"dynamic": True, "variants": variants} if dynamic else {}
    ts.build(model.encode, model.parameters(), ids, mask, out=folder / "a", weights=["params"], **options)
    return ts.load(folder / "a"), time.process_time() - start


def alternate(calls: dict[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, dict[str, float]]:
    """The least wall and processor seconds of each call, measured in turn."""
    found: dict[str, dict[str, float]] = {name: {"wall": np.inf, "processor": np.inf} for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            wall, processor = time.perf_counter(), time.process_time()
            call()
            each = found[name]
            each["wall"] = min(each["wall"], time.perf_counter() - wall)
            each["processor"] = min(each["processor"], time.process_time() - processor)
    return found


def main() -> None:
    """Measure, print and keep the figures."""
    with tempfile.TemporaryDirectory() as name:
        ids, mask = draw(BATCH, LENGTH)
        static, static_seconds = build(Path(name) / "static", ids, mask, dynamic=False)
        program, seconds = build(Path(name) / "dynamic", ids, mask, dynamic=True)
        found: dict[str, Any] = {"compile": {"static": static_seconds, "dynamic": seconds}}
        timed = alternate({"static": lambda: static(ids, mask), "dynamic": lambda: program(ids, mask)})
        found["call"] = {"size": [BATCH, LENGTH], **timed}
        print(f"compile: {seconds / static_seconds:.2f} times the static build's {static_seconds:.2f} s")
        print(f"call at {BATCH} x {LENGTH}: " + ratio(timed))
        found["variants"] = measure_variants(Path(name))
        found["others"] = []
        for batch, length in OTHER_SIZES:
            ids, mask = draw(batch, length)
            own, _ = build(Path(name) / f"{batch}x{length}", ids, mask, dynamic=False)
            error = float(np.abs(own(ids, mask).numpy() - program(ids, mask).numpy()).max())
            timed = alternate({"static": lambda: own(ids, mask), "dynamic": lambda: program(ids, mask)})  # noqa: B023
            found["others"].append({"size": [batch, length], "error": error, **timed})
            print(f"call at {batch} x {length}: {ratio(timed)}, largest difference {error:.1e}")
    keep("dynamic_sizes", found)


def measure_variants(folder: Path) -> dict[str, Any]:
    """The times of a small call of artifacts with one variant each, beside those of a static build."""
    small, (ids, mask) = draw(*OTHER_SIZES[0]), draw(BATCH, LENGTH)
    static, _ = build(folder / "small", *small, dynamic=False)
    found = {}
    for number, text in enumerate(VARIANTS):
        program, _ = build(folder / f"variant{number}", ids, mask, dynamic=True, variants=(text,))
        found[text] = alternate({"static": lambda: static(*small), "dynamic": lambda: program(*small)}, 30)  # noqa: B023
        print(f"call at {OTHER_SIZES[0][0]} x {OTHER_SIZES[0][1]} with the variant {text}: {ratio(found[text])}")
    return found


def ratio(timed: dict[str, dict[str, float]]) -> str:
    """The times of the artifact of symbolic sizes relative to those of the static one."""
    parts = (f"{timed['dynamic'][kind] / timed['static'][kind]:.2f} ({kind})" for kind in ("processor", "wall"))
    return " ".join(parts) + f" of {timed['static']['wall'] * 1e3:.1f} ms"


if __name__ == "__main__":
    main()

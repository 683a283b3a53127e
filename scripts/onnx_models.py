"""ONNX models against onnxruntime: runs model files on random inputs and compares the results.

    python scripts/onnx_models.py FILE.onnx ... [--target llvm] [--size NAME=N ...] [--json FILE]

Packages that carry models, such as magika and silero-vad, install them beside their code. Open sizes are 1 unless
`--size` gives them; integers are drawn from 0 to 9. A result agrees if it is within 1e-4 + 1e-3 of each element.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

import tessera as ts
from tessera.errors import TesseraError
from tessera.onnx import OnnxModel


def draw_inputs(model: OnnxModel, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Random inputs by name."""
    rng = np.random.default_rng(0)
    found = {}
    for each in model.inputs:
        shape = [
            n if isinstance(n, int) else sizes.get(n or f"{each.name}.{i}", 1) for i, n in enumerate(each.shape or ())
        ]
        dtype = each.element.numpy()
        floats = dtype.kind not in "biu"
        values: Any = rng.standard_normal(shape) * 0.3 if floats else rng.integers(0, 10, shape)
        found[each.name] = np.asarray(values).astype(dtype)
    return found | {n: np.asarray(v).astype(found[n].dtype) for n, v in sizes.items() if n in found}


def compare(file: Path, sizes: Mapping[str, int], target: str | None) -> dict[str, Any]:
    """The outcome of one model: agreement, the largest difference, and seconds of a load, a first and a second run."""
    clock = [time.perf_counter()]
    model = ts.onnx.load(file)
    clock.append(time.perf_counter())
    inputs = draw_inputs(model, sizes)
    for _ in range(2):
        found = model.run(inputs, target)
        clock.append(time.perf_counter())
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    wanted = session.run(None, inputs)
    pairs = list(zip(found, wanted, strict=True))
    same = all(f.dtype == w.dtype and f.shape == w.shape for f, w in pairs)
    agrees = same and all(np.allclose(f, w, rtol=1e-3, atol=1e-4, equal_nan=True) for f, w in pairs)
    worst = max(float(np.max(np.abs(f.astype(np.float64) - w), initial=0.0)) for f, w in pairs) if same else None
    seconds = [round(b - a, 4) for a, b in zip(clock, clock[1:], strict=False)]
    return {"file": file.name, "agrees": agrees, "difference": worst, "seconds": seconds}


def main() -> int:
    """Compare each file; exit status 1 where one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--target")
    parser.add_argument("--size", action="append", default=[], metavar="NAME=N", help="an open size, or a scalar input")
    parser.add_argument("--json")
    options = parser.parse_args()
    onnxruntime.set_default_logger_severity(4)
    sizes = {n: int(v) for n, _, v in (s.rpartition("=") for s in options.size)}
    rows = []
    for file in options.files:
        try:
            rows.append(compare(file, sizes, options.target))
        except TesseraError as error:
            rows.append({"file": file.name, "agrees": False, "error": str(error)})
        print(rows[-1], flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))
    return int(not all(r["agrees"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())

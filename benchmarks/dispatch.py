"""What a call costs besides its arithmetic: eager ops against NumPy's own, jit calls against JAX and PyTorch.

    python -m benchmarks.dispatch --python VENV/bin/python

VENV has torch and jax. All work on 4x4 arrays of f32, so that next to nothing is computed; ours and the peers are
measured in turn, several times, and the best of each counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import keep

PEER = Path(__file__).with_name("peer_dispatch.py")
EAGER_LIMIT, JIT_LIMIT = 15.0, 20.0  # microseconds

Pair = tuple[Callable[[], Any], Callable[[], Any]]


def microseconds(run: Callable[[], Any], count: int = 100) -> float:
    """The best time of one call, of many rounds so short that other work on the machine misses some of them."""
    run()
    return min(timeit.repeat(run, number=count, repeat=100)) / count * 1e6


def eager() -> dict[str, Pair]:
    """Each op as a call of ours and as NumPy's."""
    import tessera as ts

    a = np.random.default_rng(0).random((4, 4), np.float32)
    b, row = a.copy(), a[0].copy()
    x, y, r = ts.Tensor(a), ts.Tensor(b), ts.Tensor(row)
    one, index = np.float32(1), np.array([0, 2])
    places = ts.Tensor(index)
    return {
        "add": (lambda: x + y, lambda: a + b),
        "add a number": (lambda: x + 1.0, lambda: a + one),
        "add a row": (lambda: x + r, lambda: a + row),
        "exp": (lambda: ts.exp(x), lambda: np.exp(a)),
        "sum": (lambda: x.sum(), lambda: a.sum()),
        "mean of rows": (lambda: ts.mean(x, axis=-1), lambda: np.mean(a, axis=-1)),
        "var": (lambda: x.var(), lambda: a.var()),
        "matmul": (lambda: x @ y, lambda: a @ b),
        "softmax": (lambda: ts.softmax(x), lambda: _softmax(a)),
        "where": (lambda: ts.where(x > y, x, y), lambda: np.where(a > b, a, b)),
        "relu": (lambda: ts.relu(x), lambda: np.maximum(a, 0)),
        "reshape": (lambda: x.reshape(16), lambda: a.reshape(16)),
        "transpose": (lambda: x.T, lambda: a.T),
        "subscript": (lambda: x[0], lambda: a[0]),
        "slice": (lambda: x[1:3, :2], lambda: a[1:3, :2]),
        "concatenate": (lambda: ts.concatenate([x, y]), lambda: np.concatenate([a, b])),
        "cast": (lambda: x.to(ts.f16), lambda: a.astype(np.float16)),
        "gather": (lambda: ts.gather(x, places, axis=0), lambda: np.take(a, index, axis=0)),
    }


def _softmax(a: np.ndarray) -> np.ndarray:
    e = np.exp(a - a.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def compiled() -> dict[str, float]:
    """Microseconds of a cached call on llvm."""
    import tessera as ts

    a = np.random.default_rng(0).random((4, 4), np.float32)
    x, y = ts.Tensor(a), ts.Tensor(a.copy())
    one = ts.jit(lambda x: x + 1.0, target="llvm")
    two = ts.jit(lambda x, y: ts.exp(x) * y + 1.0, target="llvm")
    return {"x + 1": microseconds(lambda: one(x)), "exp(x) * y + 1": microseconds(lambda: two(x, y))}


def ours() -> dict[str, Any]:
    """All figures of ours."""
    ops = {name: [microseconds(f), microseconds(g)] for name, (f, g) in eager().items()}
    return {"eager": {n: {"tessera": t, "numpy": p, "over": t - p} for n, (t, p) in ops.items()}, "jit": compiled()}


def best(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The least of each figure over rounds of the same shape."""
    first = rounds[0]
    if isinstance(first, dict):
        return {k: best([r[k] for r in rounds]) for k in first}
    return min(rounds)  # type: ignore[type-var,return-value]


def _child(*command: str) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout[done.stdout.index("{") :])


def show(found: dict[str, Any]) -> None:
    """Print a table and what is over its limit."""
    for name, each in found["tessera"]["eager"].items():
        peer = found.get("peers", {}).get("torch", {}).get(name)
        beside = "" if peer is None else f"  torch {peer:6.2f}"
        late = "  OVER" if each["over"] > EAGER_LIMIT else ""
        print(
            f"{name:16s} {each['tessera']:6.2f} us  numpy {each['numpy']:6.2f}  over {each['over']:6.2f}{beside}{late}"
        )
    for name, each in found["tessera"]["jit"].items():
        peer = found.get("peers", {}).get("jax", {}).get(name)
        late = "  OVER" if each > JIT_LIMIT else ""
        print(f"jit {name:16s} {each:6.2f} us" + ("" if peer is None else f"  jax.jit {peer:6.2f}") + late)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--python", help="a Python with torch and jax")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(ours()))
        return
    rounds: dict[str, list[Any]] = {"tessera": [], "peers": []}
    for _ in range(options.rounds):
        rounds["tessera"].append(_child(sys.executable, "-m", "benchmarks.dispatch", "--child"))
        if options.python:
            rounds["peers"].append(_child(options.python, str(PEER)))
    found = {name: best(each) for name, each in rounds.items() if each}
    show(found)
    print(keep("dispatch", found))


if __name__ == "__main__":
    main()

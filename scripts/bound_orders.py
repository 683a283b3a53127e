"""Error bounds of whole programs against random legal evaluations, in every float type.

    python scripts/bound_orders.py --evaluations 100000 [--seed 0] [--report orders.json]

A program is evaluated at the Graph level with its ops in legal ways that are drawn (`legal_evaluations.py` states
the family). An evaluation is one element of a result. Prints how many lay outside of their bound, and how much of the
bound the worst evaluation of an element used (median). `bound_ops.py` does the same for each op by itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
from legal_evaluations import evaluate_in_some_way  # noqa: E402

import tessera as ts  # noqa: E402
from tessera.core.types import as_dtype  # noqa: E402
from tessera.interp.bound import compare_with_bound  # noqa: E402
from tessera.ir.numerics.conversion import convert  # noqa: E402
from tessera.ir.rewrite import expand_composites  # noqa: E402
from tessera.runtime.program import prepare  # noqa: E402

DTYPES = ("f64", "f32", "f16", "bf16")
X, ROW = (256, 37), (37,)
# Programs: the function and the shapes of its operands.
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "sum": (lambda x: ts.sum(x, axis=-1), (X,)),
    "mean": (lambda x: ts.mean(x, axis=-1), (X,)),
    "prod": (lambda x: ts.prod(x, axis=-1), (X,)),
    "var": (lambda x: ts.var(x, axis=-1), (X,)),
    "std": (lambda x: ts.std(x, axis=(-1,)), (X,)),
    "logsumexp": (lambda x: ts.logsumexp(x, axis=-1), (X,)),
    "softmax": (lambda x: ts.softmax(x, axis=-1), (X,)),
    "log_softmax": (lambda x: ts.log_softmax(x, axis=-1), (X,)),
    "cumsum": (lambda x: ts.cumsum(x, axis=-1), (X,)),
    "cumprod": (lambda x: ts.cumprod(x, axis=-1), (X,)),
    "matmul": (lambda x, y: ts.matmul(x, y), (X, (37, 5))),
    "outer": (lambda x, y: ts.matmul(x, y), ((64, 1), (1, 17))),
    "linear": (lambda x, w, b: ts.linear(x, w, b), (X, (37, 5), (5,))),
    "layer_norm": (lambda x: ts.layer_norm(x), (X,)),
    "rms_norm": (lambda x, w: ts.rms_norm(x, w), (X, ROW)),
    "scatter_add": (lambda x, u: ts.scatter_add(x, ts.arange(0, 37, 1) % 4, u), ((5, 64), (37, 64))),
    "attention": (lambda q, k: ts.scaled_dot_product_attention(q, k, k), ((1, 2, 9, 8), (1, 2, 9, 8))),
    "conv2d": (lambda x, w: ts.conv2d(x, w), ((1, 3, 7, 7), (4, 3, 3, 3))),
    "conv1d": (lambda x, w: ts.conv1d(x, w), ((2, 5, 19), (4, 5, 3))),
    "avg_pool2d": (lambda x: ts.avg_pool2d(x, 3), ((2, 3, 9, 9),)),
    "norm": (lambda x: ts.norm(x, axis=-1), (X,)),
    "group_norm": (lambda x: ts.group_norm(x, 2), ((4, 6, 17),)),
    "cross_entropy": (lambda x: ts.cross_entropy(x, ts.arange(0, 256, 1) % 37), (X,)),
    "mse_loss": (lambda x, y: ts.mse_loss(x, y), ((3, 37), (3, 37))),
    "trace": (lambda x: ts.trace(x @ ts.transpose(x)), ((19, 37),)),
    "compensated_sum": (lambda x: ts.compensated_sum(x, axis=-1), (X,)),
    "batched matmul": (lambda x, y: ts.matmul(x, y), ((4, 9, 37), (4, 37, 5))),
    "recurrence": (
        lambda x: ts.scan(lambda c, v: (0.5 * c + v, ts.sum(c * v)), ts.zeros(9, dtype=x.dtype), x),
        ((37, 9),),
    ),
    "sum gradient": (lambda x: ts.grad(lambda v: ts.sum(ts.sum(v, axis=-1) ** 2.0))(x), (X,)),
    "softmax gradient": (lambda x, g: ts.grad(lambda v: ts.sum(ts.softmax(v, axis=-1) * g))(x), (X, X)),
    "layer_norm gradient": (lambda x, g: ts.grad(lambda v: ts.sum(ts.layer_norm(v) * g))(x), (X, X)),
    "matmul gradient": (lambda x, y: ts.grad(lambda v: ts.sum(ts.matmul(v, y) ** 2.0))(x), ((37, 9), (9, 5))),
    "whole numbers": (lambda x: ts.sum(ts.round(x), axis=-1), (X,)),
}


def make_operand(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Normal numbers over several orders of magnitude, some of which cancel."""
    x = rng.normal(size=shape) * 10.0 ** rng.uniform(-rng.choice([0.0, 0.5, 2.0]), 0.5, shape)
    return convert(np.where(rng.random(shape) < 0.1, -np.roll(x, 1, axis=-1), x), as_dtype(dtype))


def examine(name: str, dtype: str, evaluations: int, seed: int) -> dict[str, Any]:
    """Evaluations of a program: those outside of their bound, and the median share of the bound that was used."""
    function, shapes = PROGRAMS[name]
    rng = np.random.default_rng([seed, *name.encode(), *dtype.encode()])
    outside, done, shares, wide = 0, 0, [], []
    least = float(ml_dtypes.finfo(as_dtype(dtype).numpy).smallest_normal)
    while done < evaluations:
        arrays = [make_operand(rng, s, dtype) for s in shapes]
        program = prepare(ts.jit(function), arrays)
        bounds, graph = program.bounds(), expand_composites(program.levels["graph"].main)
        worst = [np.zeros(b.value.shape) for b in bounds]
        for _ in range(20):
            for at, (found, bound) in enumerate(zip(evaluate_in_some_way(graph, arrays, rng), bounds, strict=True)):
                done += found.size
                outside += 0 if compare_with_bound(found, bound).ok else 1
                with np.errstate(all="ignore"):
                    apart = np.abs(found.astype(np.float64) - bound.value)
                    share = np.where(apart == 0, 0.0, apart / bound.radius)
                worst[at] = np.fmax(worst[at], share)
        shares += [w.ravel() for w in worst]
        with np.errstate(all="ignore"):
            wide += [(b.radius / np.maximum(np.abs(b.value), least)).ravel() for b in bounds]
    used, relative = np.concatenate(shares), np.concatenate(wide)
    return {"op": name, "dtype": dtype, "evaluations": done, "outside": outside,
            "used": float(np.nanmedian(used)), "bits": count_bits(float(np.median(relative)), dtype)}  # fmt: skip


def count_bits(relative: float, dtype: str) -> float:
    """The bits of an element that a relative bound makes certain, at most those of the type."""
    return min(-math.log2(relative) if relative else math.inf, float(ml_dtypes.finfo(as_dtype(dtype).numpy).nmant + 1))


def main() -> int:
    """Print a table; status 1 if an evaluation lay outside."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--evaluations", type=int, default=100_000, help="for each op and type")
    options.add_argument("--op", action="append", default=[], choices=list(PROGRAMS))
    options.add_argument("--dtype", action="append", default=[], choices=DTYPES)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--report")
    given = options.parse_args()
    rows = []
    for name, dtype in itertools.product(given.op or PROGRAMS, given.dtype or DTYPES):
        rows.append(examine(name, dtype, given.evaluations, given.seed))
        print(
            "{op:14} {dtype:5} {evaluations:8} outside {outside}, used {used:.3f}, {bits:.1f} bits".format(**rows[-1])
        )
        if given.report:
            Path(given.report).write_text(json.dumps(rows, indent=1))
    return 1 if any(r["outside"] for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

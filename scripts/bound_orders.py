"""Error bounds against random legal orders: every reduction, product and scan, in every float type.

    python scripts/bound_orders.py --evaluations 100000 [--seed 0] [--report orders.json]

A program is evaluated at the Graph level with its sums, products, scans and contractions in a random legal order:
one after the other, any tree, any number of lanes, any blocking, doubling; a contraction with fused multiply-adds or
with rounded products (`combine_in_some_order` and `scan_in_some_order` are the family of orders that a bound must
cover; each interpreter's and target's own order is a member). An evaluation is one element of a result. Prints how
many lay outside of their bound, and how much of the bound the worst evaluation of an element used (median).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import tessera as ts  # noqa: E402
from tessera.core.types import as_dtype  # noqa: E402
from tessera.interp.bound import compare_with_bound  # noqa: E402
from tessera.interp.graph import control_flow_rules  # noqa: E402
from tessera.ir.builder import evaluate_block  # noqa: E402
from tessera.ir.numerics.conversion import convert  # noqa: E402
from tessera.ir.rewrite import expand_composites  # noqa: E402
from tessera.ops.tensor import contractions, reduce  # noqa: E402
from tessera.runtime.program import prepare  # noqa: E402

DTYPES = ("f64", "f32", "f16", "bf16")
Join = Callable[[Any, Any], Any]


def combine_in_some_order(rng: np.random.Generator, parts: Sequence[Any], join: Join) -> Any:
    """All parts joined as a target may: in order or not, in lanes, in blocks, or as any tree."""
    parts = [parts[i] for i in rng.permutation(len(parts))] if rng.random() < 0.5 else list(parts)
    count = int(rng.choice([1, 2, 4, 8]))
    kind = rng.integers(3)
    if kind == 0:
        parts = [functools.reduce(join, parts[i::count]) for i in range(min(count, len(parts)))]
    elif kind == 1:
        size = int(rng.integers(1, len(parts) + 1))
        parts = [functools.reduce(join, parts[i : i + size]) for i in range(0, len(parts), size)]
    while len(parts) > 1:
        i = int(rng.integers(len(parts) - 1))
        parts[i : i + 2] = [join(parts[i], parts[i + 1])]
    return parts[0]


def scan_in_some_order(rng: np.random.Generator, parts: Sequence[Any], join: Join) -> list[Any]:
    """Prefixes as a target may form them: one after the other, by doubling, in blocks, or each by a tree of its own."""
    kind, count = rng.integers(3), len(parts)
    if kind == 0:
        return [combine_in_some_order(rng, parts[: i + 1], join) for i in range(count)]
    if kind == 1:
        found, reach = list(parts), 1
        while reach < count:
            found = [join(found[i - reach], x) if i >= reach else x for i, x in enumerate(found)]
            reach *= 2
        return found
    size, found = int(rng.integers(1, count + 1)), []
    for first in range(0, count, size):
        block = list(itertools.accumulate(parts[first : first + size], join))
        found += [join(found[-1], x) for x in block] if found else block
    return found


def _round_to(wide: Any) -> Join:
    return lambda x, y: (x.astype(np.float64) + y.astype(np.float64)).astype(wide)


def reduce_in_some_order(rng: np.random.Generator, node: Any, x: Any) -> Any:
    """A sum or product along axes."""
    out = node.results[0].type
    wide, axes = out.accumulate.numpy, tuple(a % x.ndim for a in node.attrs["axis"])
    parts = np.moveaxis(x, axes, range(len(axes))).reshape(-1, *(n for a, n in enumerate(x.shape) if a not in axes))
    parts = [p.astype(wide) for p in parts]
    join = np.add if node.op is reduce.sum else np.multiply
    if not parts:
        return None
    return convert(combine_in_some_order(rng, parts, join), out.dtype).reshape(out.shape)


def scan_along_axis(rng: np.random.Generator, node: Any, x: Any) -> Any:
    """A running sum or product."""
    out = node.results[0].type
    parts = [p.astype(out.accumulate.numpy) for p in np.moveaxis(x, node.attrs["axis"], 0)]
    join = np.add if node.op is reduce.cumsum else np.multiply
    if not parts:
        return None
    found = np.stack(scan_in_some_order(rng, parts, join))
    return convert(np.moveaxis(found, 0, node.attrs["axis"]), out.dtype)


def contract_in_some_order(rng: np.random.Generator, node: Any, x: Any, y: Any) -> Any:
    """A product of matrices: fused multiply-adds, or rounded products, which are then added up."""
    out = node.results[0].type
    wide = out.accumulate.numpy
    a, b = (v.astype(np.float64) for v in (x, y))
    terms = [a[..., :, k, None] * b[..., None, k, :] for k in range(x.shape[-1])]
    if not terms or out.accumulate.kind != "float":
        return None
    if rng.random() < 0.5:  # exact products: those of two numbers of 24 bits fit 53
        total, rest = terms[0].astype(wide), [t if wide != np.float64 else t.astype(wide) for t in terms[1:]]
        for term in [rest[i] for i in rng.permutation(len(rest))]:
            total = (total.astype(np.float64) + term).astype(wide)
    else:
        total = combine_in_some_order(rng, [t.astype(wide) for t in terms], _round_to(wide))
    return convert(total, out.dtype)


ORDERS: dict[Any, Callable[..., Any]] = {
    reduce.sum: reduce_in_some_order, reduce.prod: reduce_in_some_order, reduce.cumsum: scan_along_axis,
    reduce.cumprod: scan_along_axis, contractions.dot: contract_in_some_order,
}  # fmt: skip


def run_in_some_order(function: Any, arrays: Sequence[Any], rng: np.random.Generator) -> list[np.ndarray]:
    """The results of a Graph function with its reductions in random orders."""

    def meaning(node: Any, args: list[Any], run: Any) -> Any:
        if node.op in control_flow_rules:
            return control_flow_rules.of(node.op)(node, args, run)
        rule = ORDERS.get(node.op)
        plain = rule is not None and args[0].dtype.kind not in "iub" and node.results[0].type.policy is None
        found = rule(rng, node, *args) if rule is not None and plain else None
        return node.op.execute(node.types, node.result_types, node.attrs, args) if found is None else (found,)

    with np.errstate(all="ignore"):
        return [np.asarray(a) for a in evaluate_block(function.body, arrays, meaning)]


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
            for at, (found, bound) in enumerate(zip(run_in_some_order(graph, arrays, rng), bounds, strict=True)):
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

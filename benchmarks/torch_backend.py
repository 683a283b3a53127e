"""OpInfo sweep: PyTorch's own samples of each op through torch.compile(backend="tessera"), values and gradients.

    python -m benchmarks.torch_backend --out opinfo.json [--samples 3] [--dtypes float32 int64] [--ops add mul]

A sample passes if values and gradients equal eager PyTorch's within `TOLERANCES`, or differ from its values in
float64 at most twice as far as its own do. An op counts as "whole" where Tessera ran all of it, "partly" where
PyTorch ran some of its ATen ops, "eager" where PyTorch ran all, and "none" where no graph with tensors reached the
backend: TorchDynamo left the op to Python, or it computes none. Samples that PyTorch's own backend `aot_eager` cannot
run either are left out. The exit status is 1 if a sample is wrong or fails. The file of `--out` is written after each
op, and a run goes on from it.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils._pytree import tree_leaves, tree_map

import tessera as ts

# Relative and absolute, by element type: those of PyTorch's own tests of compilers.
TOLERANCES = {torch.float32: (1e-4, 2e-5), torch.bfloat16: (2e-2, 2e-2), torch.float16: (2e-3, 2e-3)}
# Ops whose values are undefined.
UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
# Ops that name one of equal elements, which may be any: where the axis is in their arguments.
OPEN_ORDERS = {"kthvalue": 1, "median": 0, "mode": 0, "nanmedian": 0, "topk": 1}
# Ops that may leave equal elements in any order: the same with their order kept, as it is here.
STABLE = {
    "sort": lambda x, *args, **named: torch.sort(x, *args, **{**named, "stable": True}),
    "argsort": lambda x, *args, **named: torch.argsort(x, *args, **{**named, "stable": True}),
    "msort": lambda x: torch.sort(x, dim=0, stable=True)[0],
}
WHOLE, PARTLY, EAGER, NONE = "whole", "partly", "eager", "none"
WRONG, FAILED, OUT = "wrong", "failed", "left out"
ORDER = (FAILED, WRONG, EAGER, PARTLY, WHOLE, NONE)  # what an op is, of several samples: the first that one of them is


def list_samples(op: Any, dtype: torch.dtype, count: int) -> Iterator[Any]:
    """Some samples of an op, spread over those that PyTorch has."""
    grad = op.supports_autograd and dtype.is_floating_point
    torch.manual_seed(0)
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=grad))
    step = max(1, len(samples) // count)
    yield from samples[::step][:count]


def run(function: Any, sample: Any) -> tuple[list[Any], list[Any]]:
    """The results of a sample, and the gradients of its inputs."""
    fresh = tree_map(copy_leaf, (sample.input, sample.args, sample.kwargs))
    torch.manual_seed(1)
    out = function(*fresh[:1], *fresh[1], **fresh[2])
    results = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
    inputs = [x for x in tree_leaves(fresh) if isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf]
    differentiable = [r for r in results if r.requires_grad and r.dtype.is_floating_point]
    grads: list[Any] = []
    if inputs and differentiable:
        torch.manual_seed(2)
        weights = [torch.randn(r.shape).to(r.dtype) for r in differentiable]
        grads = list(torch.autograd.grad(differentiable, inputs, weights, allow_unused=True))
    return [r.detach() for r in results], grads


def copy_leaf(x: Any) -> Any:
    """A tensor of its own, as a leaf of a new graph, in the memory order of the sample."""
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
        return x
    return x.detach().clone(memory_format=torch.preserve_format).requires_grad_(x.requires_grad)


def compare(found: Any, wanted: Any) -> str | None:
    """How two results differ; None if they are equal within the tolerance."""
    for a, b in zip(found, wanted, strict=True):
        if a is None or b is None:
            if (a is None) != (b is None) and (a if b is None else b).abs().sum() != 0:
                return "a gradient is missing"
            continue
        rtol, atol = TOLERANCES.get(b.dtype, (1e-7, 1e-7))
        try:
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            return str(error)[:300]
    return None


def names_equal_elements(op: Any, sample: Any, found: Any, wanted: Any) -> bool:
    """Whether indices differ from PyTorch's, but the elements at them, and the gradients, do not."""
    if op.name in STABLE:
        kept = run(STABLE[op.name], sample)
        return not (compare(found[0], kept[0]) or compare(found[1], kept[1]))
    if op.name not in OPEN_ORDERS or len(found[0]) != 2 or compare(found[0][:1], wanted[0][:1]):
        return False
    place = OPEN_ORDERS[op.name]
    axis = sample.args[place] if len(sample.args) > place else sample.kwargs.get("dim", -1)
    values, indices = found[0]
    if indices.ndim < sample.input.ndim:
        values, indices = values.unsqueeze(axis), indices.unsqueeze(axis)
    picked = sample.input.detach().gather(axis, indices)
    return not compare([picked], [values]) and not compare(found[1], wanted[1])


def is_as_precise(function: Any, sample: Any, found: Any, wanted: Any) -> bool:
    """Whether results differ from PyTorch's in float64 at most twice as far as PyTorch's own do."""

    def widen(x: Any) -> Any:
        floats = isinstance(x, torch.Tensor) and x.dtype in TOLERANCES
        return x.detach().double().requires_grad_(x.requires_grad) if floats else x

    try:
        parts = tree_map(widen, (sample.input, sample.args, sample.kwargs))
        exact = run(function, SampleInput(parts[0], args=parts[1], kwargs=parts[2]))
    except Exception:
        return False
    for own, theirs, best in zip(sum(found, []), sum(wanted, []), sum(exact, []), strict=True):
        if own is None or theirs is None or not own.is_floating_point():
            if own is not theirs and not (own is not None and theirs is not None and torch.equal(own, theirs)):
                return False
            continue
        allowed = 2 * (theirs.double() - best).abs().nan_to_num(0, 0, 0).max() + 1e-6 if own.numel() else 0
        near = (own.double() - best).abs() <= allowed
        if not bool((near | (own == theirs) | (own.isnan() & theirs.isnan())).all()):
            return False
    return True


def judge(op: Any, sample: Any, options: dict[str, Any]) -> tuple[str, str]:
    """What became of a sample, and why."""
    function = lambda *args, **named: op(*args, **named)  # noqa: E731
    try:
        wanted = run(function, sample)
    except Exception as error:
        return OUT, f"eager: {error}"[:200]
    torch._dynamo.reset()
    ts.torch.reset_report()
    try:
        found = run(torch.compile(function, backend=ts.torch.backend, options=options), sample)
    except Exception as error:
        return _judge_failure(function, sample, error)
    report = ts.torch.report()
    difference = compare(found[0], wanted[0]) or compare(found[1], wanted[1])
    if difference and not (
        names_equal_elements(op, sample, found, wanted) or is_as_precise(function, sample, found, wanted)
    ):
        return WRONG, difference
    left = sorted({f"{f.op}: {f.reason}" for f in report.fallbacks})
    if not left:
        return (WHOLE if report.pieces else NONE), ""
    return (PARTLY if report.pieces else EAGER), "; ".join(left)[:400]


def _judge_failure(function: Any, sample: Any, error: Exception) -> tuple[str, str]:
    torch._dynamo.reset()
    try:
        run(torch.compile(function, backend="aot_eager"), sample)
    except Exception as other:
        return OUT, f"aot_eager: {type(other).__name__}: {other}"[:200]
    return FAILED, f"{type(error).__name__}: {error}"[:600]


def list_entries(names: list[str], dtypes: list[torch.dtype]) -> Iterator[tuple[str, Any, torch.dtype]]:
    """The ops of these names, or all, with each element type that they take: the name of the pair and both."""
    for op in op_db:
        if (names and op.name not in names) or op.name in UNDEFINED:
            continue
        variant = f".{op.variant_test_name}" if op.variant_test_name else ""
        for dtype in dtypes:
            if dtype in op.supported_dtypes("cpu"):
                yield f"{op.name}{variant} {str(dtype)[6:]}", op, dtype


def judge_all(op: Any, dtype: torch.dtype, samples: int, options: dict[str, Any]) -> dict[str, Any]:
    """What became of the samples of an op."""
    start = time.perf_counter()
    try:
        outcomes = [judge(op, s, options) for s in list_samples(op, dtype, samples)]
    except Exception as error:  # the sample itself
        outcomes = [(OUT, str(error)[:200])]
    known = [o for o in outcomes if o[0] != OUT]
    status = next((s for s in ORDER if any(o[0] == s for o in known)), OUT)
    why = sorted({o[1] for o in (known or outcomes) if o[1] and (o[0] == status or not known)})
    return {"status": status, "samples": len(known), "why": why, "s": round(time.perf_counter() - start, 2)}


def write(out: Path, found: dict[str, Any]) -> None:
    """Write what is known of the ops so far, with the counts of each outcome."""
    counts = collections.Counter(entry["status"] for entry in found.values())
    left = collections.Counter(
        reason.split(": ")[0]
        for entry in found.values() if entry["status"] in (PARTLY, EAGER)
        for reason in {r for why in entry["why"] for r in why.split("; ")}
    )  # fmt: skip
    content = {"torch": torch.__version__, "counts": counts, "left": dict(left.most_common()), "ops": found}
    out.write_text(json.dumps(content, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "int64"])
    parser.add_argument("--ops", nargs="+", default=[])
    parser.add_argument("--level", help="an interpreter's level in place of the llvm target")
    args = parser.parse_args()
    logging.getLogger("tessera.torch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    options = {"fallback_random": True, **({"level": args.level} if args.level else {})}
    known = json.loads(args.out.read_text())["ops"] if args.out and args.out.exists() else {}
    found: dict[str, Any] = {}
    for key, op, dtype in list_entries(args.ops, [getattr(torch, d) for d in args.dtypes]):
        found[key] = known.get(key) or judge_all(op, dtype, args.samples, options)
        if found[key]["status"] in (WRONG, FAILED):
            print(f"{key}: {found[key]['status']}: {found[key]['why'][0][:300]}", flush=True)
        if args.out and key not in known:
            write(args.out, {**known, **found})
    counts = collections.Counter(entry["status"] for entry in found.values())
    print(dict(counts))
    return 1 if counts[WRONG] or counts[FAILED] else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""OpInfo sweep: each row of the ATen table against PyTorch on PyTorch's own samples (torch.testing, OpInfo).

    python benchmarks/torch_opinfo.py --out opinfo.json
    python benchmarks/torch_opinfo.py --ops nn.functional.conv2d sort --dtypes float32 --samples 50

Each sample runs in eager PyTorch. Each ATen op that it calls, in its backward pass too, is run again through its row on
the same arguments, and the values compared. An op without a row is replaced by its decomposition, where it has one, and
the parts are compared. Needs `expecttest`.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch._decomp import core_aten_decompositions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from tessera.core.errors import TesseraError
from tessera.torch.aten import ATEN
from tessera.torch.conversion import LEFT_EMPTY, normalise_arguments
from tessera.torch.forms import FORMS, bind_by_name
from tessera.torch.tensors import from_torch, to_torch

TOLERANCES = {
    torch.float64: (1e-9, 1e-10), torch.float32: (2e-4, 2e-5), torch.bfloat16: (3e-2, 1e-2), torch.float16: (5e-3, 2e-3)
}  # fmt: skip
# Ops whose order of equal elements is open: the elements at their indices are compared, not the indices.
UNORDERED = (
    "aten.sort.default", "aten.topk.default", "aten.argsort.default", "aten.kthvalue.default",
    "aten.median.dim", "aten.mode.default", "aten.nanmedian.dim",
)  # fmt: skip
# Ops whose values are drawn or undefined: only types and shapes are compared.
UNDEFINED = (
    "empty", "rand", "bernoulli", "native_dropout", "normal", "uniform", "dropout", "new_empty", "rrelu",
    "multinomial",
)  # fmt: skip


class Record:
    """The outcomes for one op: counts, and the first of each kind."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.examples: dict[str, list[str]] = collections.defaultdict(list)

    def add(self, outcome: str, example: str = "") -> None:
        self.counts[outcome] += 1
        if outcome != "right" and len(self.examples[outcome]) < 3:
            self.examples[outcome].append(example)


class RowChecker(TorchDispatchMode):
    """Runs each ATen op that PyTorch calls through its row as well, and compares."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.records: dict[str, Record] = collections.defaultdict(Record)
        self.seen: collections.Counter[Any] = collections.Counter()
        self.decompositions = core_aten_decompositions()
        self.sample = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        if func._schema.is_mutable or not name.startswith("aten."):
            return func(*args, **kwargs)
        if name in ATEN:
            return self.compare(func, name, args, kwargs)
        if func in self.decompositions:
            self.records[name].add("decomposed")
            return self.check_parts(func, args, kwargs)
        self.records[name].add("no row", self.sample)
        return func(*args, **kwargs)

    def check_parts(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if self.admit((str(func), "parts")):
            try:
                with self:
                    self.decompositions[func](*args, **kwargs)
            except Exception as error:
                self.records[str(func)].add("decomposition failed", f"{type(error).__name__}: {error}"[:200])
        return out

    def admit(self, key: Any) -> bool:
        self.seen[key] += 1
        return self.seen[key] <= self.limit

    def compare(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        record = self.records[name]
        dtypes = tuple(sorted({str(a.dtype) for a in tree_flatten((args, kwargs))[0] if isinstance(a, torch.Tensor)}))
        if not self.admit((name, dtypes)):
            return func(*args, **kwargs)
        reason = FORMS[name](**bind_by_name(func, args, kwargs)) if name in FORMS else None
        if reason is not None:
            record.add("refused", reason)
            return func(*args, **kwargs)
        outcome: Any
        try:
            given = tree_map(lambda a: from_torch(a) if isinstance(a, torch.Tensor) else a, (args, kwargs))
            outcome = ATEN[name](*normalise_arguments(func, *given))
        except TesseraError as error:
            outcome = ("refused", f"{type(error).__name__}: {error.message}")
        except Exception as error:
            trace = traceback.extract_tb(error.__traceback__)[-1]
            outcome = ("failed", f"{type(error).__name__}: {error} at {trace.filename.split('/')[-1]}:{trace.lineno}")
        out = func(*args, **kwargs)
        if isinstance(outcome, tuple) and outcome and outcome[0] in ("refused", "failed"):
            record.add(outcome[0], f"{outcome[1]} | {self.describe(args, kwargs)}")
        else:
            difference = compare_values(name, outcome, out)
            if difference and name in UNORDERED:
                difference = compare_order(name, outcome, out, args)
            if difference:
                difference = compare_precisely(func, args, kwargs, name, outcome, out, difference)
            record.add("wrong" if difference else "right", f"{difference} | {self.describe(args, kwargs)}")
        return out

    def describe(self, args: Any, kwargs: Any) -> str:
        def shorten(a: Any) -> Any:
            if isinstance(a, torch.Tensor):
                values = f"={a.reshape(-1)[:6].tolist()}" if a.numel() <= 6 else ""
                return f"{str(a.dtype)[6:]}{list(a.shape)}{values}"
            return a

        return f"{self.sample}: {tree_map(shorten, args)} {tree_map(shorten, kwargs)}"[:400]


def compare_values(name: str, found: Any, wanted: Any) -> str:
    """How results differ; "" if they do not. What PyTorch leaves out (None, undefined, empty) is not compared."""
    ours, theirs = ([x] if not isinstance(x, (tuple, list)) else list(x) for x in (found, wanted))
    if len(ours) != len(theirs):
        return f"{len(ours)} results, not {len(theirs)}"
    for own, want in zip(ours, theirs, strict=True):
        if not isinstance(want, torch.Tensor):
            if want is not None and isinstance(want, (int, float)) and own != want:
                return f"{own}, not {want}"
            continue
        if want.shape == LEFT_EMPTY:
            continue
        if own is None:
            if "_embedding_bag" not in name:
                return "a result is missing"
            continue
        difference = compare_tensors(to_torch(own), want.detach(), any(word in name for word in UNDEFINED))
        if difference:
            return difference
    return ""


def compare_tensors(got: torch.Tensor, want: torch.Tensor, undefined: bool) -> str:
    """How two tensors differ, beyond the tolerance of their type and of the largest element."""
    if got.is_floating_point() and want.is_floating_point():
        got = got.to(want.dtype)
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}"
    if undefined or not want.numel():
        return ""
    rtol, atol = TOLERANCES.get(want.dtype, (0.0, 0.0))
    got, want = got.to(torch.float64), want.to(torch.float64)
    atol = max(atol, rtol / 100 * float(want.abs().nan_to_num(0, 0, 0).max()))
    if torch.allclose(got, want, rtol, atol, equal_nan=True):
        return ""
    worst = int((got - want).abs().nan_to_num(torch.inf).argmax())
    return f"{got.reshape(-1)[worst].item()}, not {want.reshape(-1)[worst].item()}"


def compare_order(name: str, found: Any, wanted: Any, args: Any) -> str:
    """Whether the elements at the indices are PyTorch's, where equal elements may be in any order."""
    if name in ("aten.kthvalue.default", "aten.median.dim", "aten.mode.default", "aten.nanmedian.dim"):
        return compare_values(name, found[0], wanted[0])
    own, want = (x[1] if isinstance(x, tuple) else x for x in (found, wanted))
    axis = next((a for a in args[1:] if isinstance(a, int) and not isinstance(a, bool)), -1)
    axis = (args[2] if len(args) > 2 else -1) if name == "aten.topk.default" else axis
    picked = [torch.gather(args[0], axis, i) for i in (to_torch(own), want)]
    return "" if torch.equal(*(p.to(torch.float64).nan_to_num(1e300) for p in picked)) else "another order"


def compare_precisely(func: Any, args: Any, kwargs: Any, name: str, found: Any, wanted: Any, difference: str) -> str:
    """Where results differ: nothing, if ours are about as close to those in float64 as PyTorch's own are."""

    def widen(a: Any) -> Any:
        return a.detach().to(torch.float64) if isinstance(a, torch.Tensor) and a.is_floating_point() else a

    try:
        wide = func(*tree_map(widen, args), **tree_map(widen, kwargs))
    except Exception:
        return difference
    ours, theirs, exact = ([x] if not isinstance(x, (tuple, list)) else list(x) for x in (found, wanted, wide))
    for own, want, best in zip(ours, theirs, exact, strict=False):
        if not isinstance(want, torch.Tensor) or own is None:
            continue
        got, want, best = (x.detach().to(torch.float64) for x in (to_torch(own), want, best))
        if got.shape != best.shape:
            return difference
        allowed = (
            2 * (want - best).abs().nan_to_num(0, 0, 0).max()
            + 1e-6
            + 1e-2 * best.abs() * (theirs[0].element_size() < 4)
        )
        if not bool((((got - best).abs() <= allowed) | (got == want) | (got.isnan() & want.isnan())).all()):
            return difference
    return ""


def list_entries(names: Sequence[str] | None = None) -> list[Any]:
    """The OpInfo entries of these names, or all."""
    from torch.testing._internal.common_methods_invocations import op_db  # it needs expecttest

    return [op for op in op_db if names is None or op.name in names]


def run_samples(op: Any, dtype: torch.dtype, checker: RowChecker, samples: int) -> None:
    backward = dtype == torch.float32 and op.supports_autograd
    try:
        listed = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=backward), samples))
    except Exception:
        return
    for sample in listed:
        checker.sample = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
        try:
            with warnings.catch_warnings(), checker:
                warnings.simplefilter("ignore")
                out = op(sample.input, *sample.args, **sample.kwargs)
                if backward:
                    results = [x for x in tree_flatten(out)[0] if isinstance(x, torch.Tensor) and x.requires_grad]
                    real = [x for x in results if x.is_floating_point() and x.grad_fn is not None]
                    if real:
                        torch.autograd.backward(real, [torch.randn_like(x) for x in real])
        except Exception as error:
            checker.records["(samples that did not run)"].add("eager", f"{checker.sample}: {str(error)[:120]}")


def list_direct_calls() -> list[tuple[str, tuple[Any, ...]]]:
    """Calls of ops that samples reach under another name: scalar overloads, and ops that PyTorch composes of others."""
    x, y, k = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8), torch.randint(0, 9, (4, 5))
    rows, w, b, three = torch.randn(6, 4), torch.randn(5, 4), torch.randn(5), torch.rand(3)
    kernel, volume, line = torch.randn(4, 3, 3, 3), torch.randn(2, 3, 4, 5, 6), torch.randn(2, 3, 9)
    norm = (x, three, three, torch.randn(3), torch.rand(3) + 1)
    gates, hidden = torch.randn(7, 2, 4), torch.randn(1, 2, 5)

    def weights(gates: int) -> list[torch.Tensor]:
        shapes = ((gates * 5, 4), (gates * 5, 5), (gates * 5,), (gates * 5,))
        return [torch.randn(s) for s in shapes]

    recurrent = (True, 1, 0.0, False, False, False)
    return [
        ("bitwise_and.Scalar", (k, 5)), ("bitwise_or.Scalar", (k, 5)), ("bitwise_xor.Scalar", (k, 5)),
        ("div.Scalar_mode", (x, 0.3, {"rounding_mode": "floor"})),
        ("div.Scalar_mode", (k - 4, 3, {"rounding_mode": "trunc"})), ("fmod.Scalar", (x, 0.7)),
        ("var.dim", (x, [1], True, True)), ("var.default", (x,)), ("std.default", (x,)), ("std.dim", (x, [1, 2])),
        ("native_dropout.default", (x, 0.5, True)), ("native_dropout.default", (x, 0.5, False)),
        ("randperm.default", (9,)), ("sym_size.int", (x, 1)), ("sym_numel.default", (x,)), ("sym_stride.int", (x, 1)),
        ("sym_storage_offset.default", (x,)), ("avg_pool1d.default", (line, [3], [2], [1])),
        ("adaptive_avg_pool1d.default", (line, [4])), ("adaptive_avg_pool2d.default", (x, [3, 5])),
        ("adaptive_avg_pool3d.default", (volume, [2, 3, 4])), ("max_pool1d.default", (line, [3], [2], [1])),
        ("max_pool2d.default", (x, [3, 3], [2, 2], [1, 1])), ("max_pool3d.default", (volume, [2, 2, 2])),
        ("upsample_nearest2d.vec", (x, None, [2.0, 1.5])), ("upsample_bilinear2d.vec", (x, [5, 11], False, None)),
        ("upsample_nearest1d.vec", (line, [13], None)), ("upsample_bicubic2d.vec", (x, None, True, [1.5, 2.0])),
        ("_native_batch_norm_legit_no_training.default", (*norm, 0.1, 1e-5)),
        ("_native_batch_norm_legit.default", (*norm, False, 0.1, 1e-5)),
        ("batch_norm.default", (*norm, False, 0.1, 1e-5, True)), ("group_norm.default", (x, 3, three, three)),
        ("instance_norm.default", (x, three, three, None, None, True, 0.1, 1e-5, True)),
        ("layer_norm.default", (x, [8], torch.randn(8), torch.randn(8))),
        ("rms_norm.default", (x, [8], torch.randn(8))),
        ("linear.default", (rows, w, b)), ("linear.default", (x, torch.randn(2, 8))), ("matmul.default", (x, y)),
        ("softmax.int", (x, 1)), ("log_softmax.int", (k, 1, torch.float32)),
        ("einsum.default", ("bchw,bcxw->bchx", [x, y])),
        ("conv1d.default", (line, torch.randn(4, 3, 3), None, [2], [1])),
        ("conv2d.default", (x, kernel, b[:4], [2, 1])),
        ("conv2d.padding", (x, kernel, None, [1, 1], "same")), ("conv3d.default", (volume, torch.randn(2, 3, 2, 2, 2))),
        ("conv_transpose1d.default", (line, torch.randn(3, 2, 3), None, [2], [1], [1])),
        ("conv_transpose2d.input", (x, torch.randn(3, 2, 3, 3), None, [2, 2])),
        ("conv_transpose3d.input", (volume, torch.randn(3, 2, 2, 2, 2))), ("to.dtype", (x, torch.bfloat16)),
        ("contiguous.default", (x,)), ("type_as.default", (k, x)), ("to.other", (k, x)), ("max.other", (x, y)),
        ("min.other", (x, y)), ("expand_as.default", (three[:, None, None], x)), ("chunk.default", (x, 3, -1)),
        ("broadcast_to.default", (three, [2, 3])), ("view_as.default", (x, y)), ("reshape_as.default", (x, y)),
        ("swapaxes.default", (x, 1, 2)), ("mT.default", (x,)), ("movedim.int", (x, 1, 3)),
        ("narrow.default", (x, 2, 1, 4)),
        ("movedim.intlist", (x, [0, 1], [2, 0])), ("tensor_split.sections", (x, 3, 2)), ("t.default", (rows,)),
        ("unflatten.int", (x, 2, [2, -1])), ("flatten.using_ints", (x, 1, 2)), ("tile.default", (rows, [2, 1, 3])),
        ("repeat_interleave.self_int", (rows, 3, 1)), ("repeat_interleave.self_int", (rows, 2)),
        ("hstack.default", ([rows, rows],)), ("vstack.default", ([three, three],)),
        ("pad.default", (x, [1, 2, 0, 1], "reflect")),
        ("pad.default", (x, [1, 2, 0, 1], "constant", 2.0)), ("norm.Scalar", (x, 2)),
        ("norm.ScalarOpt_dim", (x, 1, [1])),
        ("selu.default", (x,)), ("celu.default", (x, 0.7)), ("log_sigmoid.default", (x,)), ("relu6.default", (x * 4,)),
        ("prelu.default", (x, three)), ("dropout.default", (x, 0.5, False)), ("l1_loss.default", (x, y)),
        ("kl_div.default", (x, y.exp())), ("kl_div.default", (x, y, 2)), ("argsort.default", (x, 1)),
        ("cross_entropy_loss.default", (rows, torch.tensor([0, 1, 2, 3, -100, 1]))), ("outer.default", (three, b)),
        ("cross_entropy_loss.default", (x, torch.randint(0, 3, (2, 8, 8)), three, 2)), ("square.default", (x,)),
        ("scaled_dot_product_attention.default", (x, y, y, None, 0.0, True)), ("eye.default", (4,)),
        ("_scaled_dot_product_attention_math.default", (x, y, y, None, 0.0, True)), ("argsort.default", (k, 0, True)),
        ("lstm.input", (gates, [hidden, hidden * 0.5], weights(4), *recurrent)),
        ("gru.input", (gates, hidden, weights(3), *recurrent)),
        ("rnn_tanh.input", (gates, hidden, weights(1), *recurrent)),
        ("rnn_relu.input", (gates, hidden, weights(1), *recurrent)), ("true_divide.Tensor", (x, y)),
        ("sym_is_contiguous.default", (x,)), ("_local_scalar_dense.default", (three[:1],)),
        ("item.default", (k[0, 0],)),
        ("resize_.default", (rows.clone(), [3, 2])), ("resize_.default", (k.clone(), [5, 2, 2])),
        ("resize.default", (rows.clone(), [0, 7])), ("nonzero_static.default", (k > 4, {"size": 7})),
        ("nonzero_static.default", (x > 0, {"size": 500, "fill_value": 3})),
        ("nonzero_static.default", (k, {"size": 0})), ("searchsorted.Scalar", (three.sort()[0], 0.4)),
        ("searchsorted.Scalar", (torch.tensor([1, 3, 3, 7]), 3, {"side": "right"})),
        ("bucketize.Scalar", (3, torch.tensor([1.0, 3.0, 4.0]), {"out_int32": True})),
        ("repeat_interleave.Tensor", (torch.tensor([2, 0, 3]), {"output_size": 5})),
        ("mode.default", (torch.tensor([[2.0, 1.0, 2.0, 1.0, 3.0], [float("nan"), 4.0, 4.0, 0.0, 0.0]]),)),
        ("median.dim", (torch.tensor([[2.0, float("nan"), 1.0, float("nan")], [4.0, 1.0, 3.0, 2.0]]), 1)),
        ("nanmedian.dim", (torch.full((2, 3), float("nan")), 0, True)),
        ("histc.default", (torch.tensor([0.0, 1.0, 1.5, 3.0, 3.0, 4.0, -1.0]), 3, 0, 3)),
        ("histc.default", (k.float(), 4)),
        ("linalg_solve_triangular.default", (w[:4] + 2, rows.t(), {"upper": True, "unitriangular": True})),
        ("linalg_solve_triangular.default", (w[:4] + 2, rows, {"upper": False, "left": False})),
        ("_linalg_eigh.default", (rows.t() @ rows,)), ("linalg_inv.default", (rows.t() @ rows,)),
        ("linalg_solve.default", (rows.t() @ rows, rows, {"left": False})),
    ]  # fmt: skip


def check_direct_calls(checker: RowChecker) -> None:
    for name, args in list_direct_calls():
        packet, overload = name.split(".")
        args, named = (args[:-1], args[-1]) if isinstance(args[-1], dict) else (args, {})
        checker.sample = "direct"
        checker.compare(getattr(getattr(torch.ops.aten, packet), overload), f"aten.{name}", args, named)


def summarise(records: dict[str, Record]) -> dict[str, Any]:
    rows = {n: r for n, r in records.items() if n in ATEN}
    total: collections.Counter[str] = collections.Counter()
    for record in rows.values():
        total.update(record.counts)
    core = {str(getattr(getattr(torch.ops.aten, n.split(".")[1]), n.split(".")[2])) for n in ATEN}
    tagged = {
        n for n in core if torch.Tag.core in getattr(getattr(torch.ops.aten, n.split(".")[1]), n.split(".")[2]).tags
    }
    proven = {n for n, r in rows.items() if r.counts["right"] and not r.counts["wrong"] and not r.counts["failed"]}
    return {
        "rows": len(ATEN), "rows met": len(rows), "rows proven": len(proven), "core overloads in table": len(tagged),
        "core proven": len(tagged & proven), "core not met": sorted(tagged - set(rows)),
        "calls": dict(total), "no row": sorted(n for n, r in records.items() if r.counts["no row"]),
        "rows not met": sorted(set(ATEN) - set(rows)), "wrong": sorted(n for n, r in rows.items() if r.counts["wrong"]),
        "failed": sorted(n for n, r in rows.items() if r.counts["failed"]),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ops", nargs="+", help="names of OpInfo entries; all if not given")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "int64", "bool"])
    parser.add_argument("--samples", type=int, default=40, help="samples of an entry and type")
    parser.add_argument("--limit", type=int, default=60, help="comparisons of an op for each combination of types")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no entry after so long")
    parser.add_argument("--out", help="a JSON file for the counts and examples")
    args = parser.parse_args()
    torch.manual_seed(0)
    checker, began = RowChecker(args.limit), time.monotonic()
    for op in list_entries(args.ops):
        if time.monotonic() - began > args.seconds:
            break
        for name in args.dtypes:
            if getattr(torch, name) in op.supported_dtypes("cpu"):
                run_samples(op, getattr(torch, name), checker, args.samples)
    check_direct_calls(checker)
    summary = summarise(checker.records)
    summary["seconds"] = round(time.monotonic() - began)
    print(json.dumps(summary, indent=1))
    if args.out:
        details = {n: {"counts": dict(r.counts), "examples": r.examples} for n, r in sorted(checker.records.items())}
        with open(args.out, "w") as file:
            json.dump({"summary": summary, "ops": details}, file, indent=1)
    return 1 if summary["wrong"] or summary["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

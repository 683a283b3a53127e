"""Runs the StableHLO project's self-checking files (`stablehlo/testdata`, `stablehlo/tests/interpret`) and counts.

    python scripts/stablehlo_testdata.py FOLDER [--target eager|interp|llvm] [--out FILE.json] [--only PREFIX]

A file passes if each of its `check.expect_*` operations holds, by the rules of the project's own interpreter: equal, 3
units in the last place, or 1e-4. Where one does not, the file is evaluated in f64; it is "closer" if the largest error
of the result is at most that of the values in the file, which were computed in the narrow type. It is refused if it has
an operation or type that is not supported (complex numbers, dynamic shapes, quantised types, communication). Anything
else is wrong. With a target, the entry function is compiled for it, and its results are compared.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import tessera as ts
from tessera.core.types import TensorType
from tessera.errors import TesseraError, UnsupportedOpError
from tessera.stablehlo.importer import ModuleEvaluator, load
from tessera.stablehlo.parser import parse
from tessera.stablehlo.table import Site, row
from tessera.stablehlo.text import HloRegion

MAX_ULPS, TOLERANCE = 3, 1e-4
CHECKS = re.compile(r"check\.expect_(\w+)")


def order_bits(x: np.ndarray) -> np.ndarray:
    """Floats as integers in their order, so that neighbours differ by one."""
    bits = np.ascontiguousarray(x).view(f"i{x.dtype.itemsize}").astype(object)
    top = 2 ** (8 * x.dtype.itemsize - 1)
    return np.where(bits < 0, -(bits + top), bits)


def agree(kind: str, x: np.ndarray, y: np.ndarray) -> bool:
    """Whether a result is the expected one by the rule of a check."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if kind == "eq" or x.dtype.kind in "iub":
        return bool(np.all((x == y) | ((x != x) & (y != y))))
    wide, other = x.astype(np.float64), y.astype(np.float64)
    same = (wide == other) | (np.isnan(wide) & np.isnan(other))
    finite = np.isfinite(wide) & np.isfinite(other)
    if kind == "almost_eq":
        with np.errstate(all="ignore"):
            return bool(np.all(same | (finite & (np.abs(wide - other) <= TOLERANCE))))
    close = np.abs(order_bits(x) - order_bits(y)) <= MAX_ULPS
    return bool(np.all(same | (finite & close.astype(bool))))


CONSTANT_CHECKS: list[dict[str, Any]] = []  # the checks of the file that runs


def _define_check(kind: str) -> None:
    """The operation `check.expect_eq_const %x, dense<...>`, and `check.expect_eq %x, %y`."""

    @row(f"check.expect_{kind}_const")
    def _(site: Site, x: ts.Tensor) -> None:
        if site.get("tolerance") and np.all(np.abs(x.numpy() - site.get("value")) <= site.get("tolerance")):
            return
        CONSTANT_CHECKS[0][f"check.expect_{kind}"](x, ts.Tensor(site.get("value")))

    @row(f"check.expect_{kind}")
    def _(site: Site, x: ts.Tensor, y: ts.Tensor) -> None:
        CONSTANT_CHECKS[0][f"check.expect_{kind}"](x, y)


for _kind in ("eq", "close", "almost_eq"):
    _define_check(_kind)


def run_functions(text: str, name: str, calls: dict[str, Any]) -> None:
    """Run the entry function, or each function without parameters where there is none."""
    functions = parse(text, name).functions
    entries = ["main"] if "main" in functions else [n for n, f in functions.items() if not f.region.params]
    for entry in entries:
        loaded = load(text, entry=entry, name=name, custom_calls=calls)
        if functions[entry].region.params:
            raise UnsupportedOpError("the entry function takes arguments")
        loaded.function()


def run_text(text: str, path: Path, target: str) -> tuple[str, str]:
    """The outcome of a module: "pass", "refused" or "wrong", and a message."""
    failures: list[str] = []

    def check(kind: str) -> Any:
        def compare(x: ts.Tensor, y: ts.Tensor) -> None:
            if not x.is_traced and not agree(kind, x.numpy(), y.numpy()):
                failures.append(kind)

        return compare

    calls = {f"check.expect_{k}": check(k) for k in ("eq", "close", "almost_eq")}
    CONSTANT_CHECKS[:] = [calls]
    try:
        if target == "eager":
            run_functions(text, str(path), calls)
        else:
            compare_compiled(text, str(path), calls, target, failures)
    except UnsupportedOpError as error:
        return "refused", error.message
    except TesseraError as error:
        return "wrong", f"{type(error).__name__}: {error.message}"
    if not failures:
        return "pass", ""
    closer = "@main" in text and is_closer(text, str(path))
    return ("closer" if closer else "wrong"), ", ".join(failures)


def widen_type(type: Any) -> Any:
    """A tensor type with f64 in place of narrower floats."""
    narrow = isinstance(type, TensorType) and type.dtype.is_float
    return type.with_dtype(ts.f64) if narrow else type


def widen_region(region: HloRegion) -> None:
    """Replace the narrow floats of types and constants by f64."""
    region.types = [widen_type(t) for t in region.types]
    for operation in region.operations:
        operation.types = [widen_type(t) for t in operation.types]
        value = operation.attrs.get("value")
        if isinstance(value, np.ndarray) and value.dtype.kind not in "iub":
            operation.attrs["value"] = value.astype(np.float64)
        for inner in operation.regions:
            widen_region(inner)


def is_closer(text: str, name: str) -> bool:
    """Whether results are at least as close to those in f64 as the values in the file are."""
    narrow: list[tuple[np.ndarray, np.ndarray]] = []
    exact: list[np.ndarray] = []
    kinds = ("eq", "close", "almost_eq")
    record = {f"check.expect_{k}": lambda x, y: narrow.append((x.numpy(), y.numpy())) for k in kinds}
    load(text, name=name, custom_calls=record).function()
    module = parse(text, name)
    for function in module.functions.values():
        widen_region(function.region)
    keep = {f"check.expect_{k}": lambda x, y: exact.append(x.numpy()) for k in kinds}
    ModuleEvaluator(module, keep).call("main", [])
    errors = [
        [np.max(np.abs(a.astype(np.float64) - want)) for a in pair] for pair, want in zip(narrow, exact, strict=True)
    ]
    return all(own <= theirs for own, theirs in errors)


def compare_compiled(text: str, name: str, calls: dict[str, Any], target: str, failures: list[str]) -> None:
    """Run the entry function through the compiler, and compare its results with the expected ones."""
    if "@main" not in text or "@expected" not in text:
        raise UnsupportedOpError("there is no entry function with expected values")
    main = load(text, name=name, custom_calls=calls)
    main.target = target
    want = load(text, name=name, entry="expected").function()
    found = main()
    kinds = CHECKS.findall(text)
    as_tuple = lambda x: x if isinstance(x, tuple) else (x,)  # noqa: E731
    for kind, x, y in zip(kinds, as_tuple(found), as_tuple(want), strict=False):
        if not agree(kind, x.numpy(), y.numpy()):
            failures.append(kind)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="eager", help="eager (default), interp or llvm")
    parser.add_argument("--only", default="", help="only files whose names start so")
    parser.add_argument("--out", type=Path, help="a JSON file for the counts and the messages")
    options = parser.parse_args()
    files = sorted(p for p in options.folder.rglob("*.mlir") if p.name.startswith(options.only))
    counts: Counter[str] = Counter()
    messages: dict[str, dict[str, str]] = {"closer": {}, "refused": {}, "wrong": {}}
    start = time.perf_counter()
    for path in files:
        for number, text in enumerate(re.split(r"^// -----.*$", path.read_text(), flags=re.MULTILINE)):
            if "func.func" not in text:
                continue
            outcome, message = run_text(text, path, options.target)
            counts[outcome] += 1
            if outcome != "pass":
                messages[outcome][f"{path.relative_to(options.folder)} {number}"] = message
    seconds = round(time.perf_counter() - start, 1)
    for name, message in list(messages["wrong"].items())[:200]:
        print(f"wrong: {name}: {message}")
    for reason, count in Counter(messages["refused"].values()).most_common(40):
        print(f"refused {count}: {reason}")
    print(f"{len(files)} files, {counts.total()} modules: {dict(counts)} in {seconds} s")
    if options.out:
        options.out.write_text(json.dumps({"counts": counts, "seconds": seconds, **messages}, indent=1))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())

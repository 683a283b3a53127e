"""ONNX conformance: runs ONNX's own node tests, and its small and light models, and counts how many pass.

    python scripts/onnx_conformance.py [--target llvm] [-k PATTERN] [--kinds node,light,simple] [--json FILE]

A test passes if ONNX's runner accepts the results. It is refused if a typed error says that something is not
supported. Floats beyond an integer type of 2 or 4 bits are undefined in ONNX, and their stored results those of the
version of ml_dtypes. Everything else is wrong, or a fault.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import re
import sys
import time
import traceback
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnx.defs
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner, _normalize_tensor

from tessera.errors import TesseraError, TraceError, UnsupportedOpError
from tessera.onnx.backend import TesseraBackend

REFUSALS = (UnsupportedOpError, TraceError)
T = onnx.TensorProto
NARROW_INTEGERS = {T.INT2: (-2, 1), T.UINT2: (0, 3), T.INT4: (-8, 7), T.UINT4: (0, 15)}


def list_cases(kinds: list[str]):
    """(name, model or path, data sets, rtol, atol) of each test."""
    for kind in kinds:
        if kind == "light":
            folder = Path(onnx.__file__).parent / "backend/test/data/light"
            for file in sorted(folder.glob("*.onnx")):
                yield file.stem, file, None, 1e-3, 1e-5
            continue
        for case in load_model_tests(kind=kind):
            model = case.model if case.model is not None else Path(case.model_dir) / "model.onnx"
            yield case.name, model, case.data_sets, case.rtol, case.atol


def read_data_sets(folder: Path):
    """The data sets of a folder of a test: its inputs and results in protobuf files."""
    for part in sorted(folder.glob("test_data_set_*")):
        yield tuple(
            [read_value(part / f"{what}_{i}.pb") for i in range(len(list(part.glob(f"{what}_*.pb"))))]
            for what in ("input", "output")
        )


def read_value(file: Path):
    tensor = onnx.TensorProto()
    tensor.ParseFromString(file.read_bytes())
    return numpy_helper.to_array(tensor)


def light_data(file: Path, model: onnx.ModelProto):
    """The data set of a light model, as ONNX's runner makes it."""
    held = {t.name for t in model.graph.initializer}
    inputs = [Runner.generate_dummy_data(x, seed=0, name=file.stem) for x in model.graph.input if x.name not in held]
    expected = read_value(file.with_name(f"{file.stem}_output_0.pb"))
    return [(inputs, [expected])]


def compare(wanted: list, found: tuple, rtol: float, atol: float, proto: onnx.ModelProto) -> tuple[str, str]:
    """The outcome for results: by ONNX's runner, which knows no random operators and no sums of large numbers."""
    if "Bernoulli" in {n.op_type for n in proto.graph.node} or "RandomUniformLike" in {
        n.op_type for n in proto.graph.node
    }:
        same = all(w.shape == f.shape and w.dtype == f.dtype for w, f in zip(wanted, found, strict=True))
        return ("random", "only shapes and types are compared") if same else ("wrong", "another shape or type")
    wanted, found = flatten_sequences(wanted), flatten_sequences(found)
    try:
        Runner.assert_similar_outputs(wanted, found, rtol=rtol, atol=atol)
    except AssertionError:
        close = all(within_rounding(w, f) for w, f in zip(wanted, found, strict=True))
        if not close:
            raise
        return "rounding", "beyond ONNX's tolerance, within one roundoff of the largest element"
    return "pass", ""


def flatten_sequences(values) -> list:
    """Results with the elements of sequences after their number: the runner compares no scalars in sequences."""
    flat = []
    for value in values:
        flat += [np.asarray(len(value)), *value] if isinstance(value, list) else [value]
    return flat


def within_rounding(wanted, found) -> bool:
    """Whether two float arrays differ by no more than the unit roundoff of the largest element."""
    if not isinstance(wanted, np.ndarray) or wanted.dtype.kind != "f" or wanted.dtype != found.dtype:
        return isinstance(wanted, np.ndarray) and np.array_equal(wanted, found)
    limit = np.finfo(wanted.dtype).eps * np.max(np.abs(wanted.astype(np.float64)), initial=0.0)
    return wanted.shape == found.shape and bool(np.all(np.abs(found.astype(np.float64) - wanted) <= limit))


def is_undefined(proto, given, wanted, found) -> bool:
    """Whether the results of a conversion to narrow integers differ, at floats beyond their type alone."""
    limits = NARROW_INTEGERS.get(proto.graph.output[0].type.tensor_type.elem_type)
    if limits is None or not {n.op_type for n in proto.graph.node} <= {"Cast", "CastLike"}:
        return False
    differs = np.asarray(wanted).astype(np.int8) != np.asarray(found).astype(np.int8)
    whole = np.trunc(np.asarray(given).astype(np.float32))
    return bool(differs.any()) and not np.any(differs & (limits[0] <= whole) & (whole <= limits[1]))


def run_case(model, data, rtol: float, atol: float, target: str | None) -> tuple[str, str]:
    """The outcome of one test and a word about it."""
    try:
        proto = onnx.load(model) if isinstance(model, Path) else model
        if data is None:
            data = light_data(model, proto) if "light" in model.stem else list(read_data_sets(model.parent))
        prepared = TesseraBackend.prepare(proto, target=target)
        for inputs, expected in data:
            found = prepared.run([_normalize_tensor(x) for x in inputs])
            wanted = [_normalize_tensor(x) for x in expected]
            if is_undefined(proto, _normalize_tensor(inputs[0]), wanted[0], found[0]):
                return "undefined", "floats beyond the integer type"
            outcome = compare(wanted, found, rtol, atol, proto)
            if outcome[0] != "pass":
                return outcome
    except REFUSALS as error:
        return "refused", error.message
    except AssertionError as error:
        return "wrong", " ".join(str(error).split())[:200]
    except TesseraError as error:
        return "error", f"{type(error).__name__}: {error.message}"
    except Exception as error:  # noqa: BLE001 - each is counted as a fault
        return "fault", f"{type(error).__name__}: {error} {traceback.format_exc().splitlines()[-3].strip()}"
    return "pass", ""


def is_core(model) -> bool:
    """Whether a test is of ONNX's own operators in opset 22 or below."""
    if isinstance(model, Path):
        return True
    domains = {n.domain for n in model.graph.node}
    version = max(o.version for o in model.opset_import if o.domain in ("", "ai.onnx")) if not domains - {""} else 99
    known = [onnx.defs.get_schema(n.op_type, version) for n in model.graph.node] if version < 99 else []
    return version < 99 and all(min_version(s.name) <= 22 for s in known)


def min_version(name: str) -> int:
    """The version that introduced an operator."""
    return min(s.since_version for s in onnx.defs.get_all_schemas_with_history() if s.name == name and not s.domain)


def main() -> int:
    """Run the tests, print a summary, and write the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target")
    parser.add_argument("-k", default="")
    parser.add_argument("--kinds", default="node,light,simple,pytorch-operator,pytorch-converted")
    parser.add_argument("--json")
    parser.add_argument("--every", type=int, default=1, help="run one test of each so many")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    rows = []
    with contextlib.redirect_stderr(io.StringIO()):
        cases = list(list_cases(options.kinds.split(",")))
    for name, model, data, rtol, atol in cases[:: options.every]:
        if not re.search(options.k, name):
            continue
        start = time.perf_counter()
        outcome, reason = run_case(model, data, rtol, atol, options.target)
        seconds = time.perf_counter() - start
        rows.append(
            {"name": name, "outcome": outcome, "reason": reason, "core": is_core(model), "seconds": round(seconds, 3)}
        )
        if outcome != "pass":
            print(f"{outcome:8} {name}: {reason}", flush=True)
    for title, chosen in (("all", rows), ("opset <= 22, core", [r for r in rows if r["core"]])):
        counts = collections.Counter(r["outcome"] for r in chosen)
        print(f"{title}: {counts['pass']} of {len(chosen)} pass;", dict(counts))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))
    return int(any(r["outcome"] in ("wrong", "fault") for r in rows))


if __name__ == "__main__":
    sys.exit(main())

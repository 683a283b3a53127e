"""The conformance suite on the targets of browsers: WebAssembly in wasmtime, WGSL through wgpu.

    python -m benchmarks.web_conformance wasm32 [--every N] [--start I] [--seconds S] [--report FILE] [-k EXPRESSION]
    python -m benchmarks.web_conformance wgsl ...

wasm32 needs wasmtime and `wasm-ld`; wgsl the package of plugins/tessera-wgsl, wgpu and a Vulkan driver. Each case has
its error bounds, as in `tessera conformance`. The report holds what ran so far: the same command with it goes on from
there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import describe
from conformance.case import Case, all_cases
from conformance.run import Engine, run_case, select_cases
from tessera.codegen.artifact import encode_content
from tessera.codegen.c_plan import DESCRIPTION_FILE, OBJECT_FILE
from tessera.codegen.contract import emit_artifact, get_backend
from tessera.deploy.webassembly import WebModule, link_module
from tessera.interp.graph import bind_sizes
from tessera.ir.core import find_size_names
from tessera.lower.passes.type_conversion import specialise_shapes
from tessera.runtime import driver
from tessera.runtime.artifacts import describe_interface
from tessera.runtime.program import PreparedProgram

WASM, WGSL = "wasm32", "wgsl"


@dataclasses.dataclass(frozen=True)
class WebAssemblyEngine(Engine):
    """The generator llvm's code for wasm32, linked, in wasmtime."""

    def run(self, program: PreparedProgram) -> list[np.ndarray]:
        """The results, then the arrays that the program writes in place."""
        module = make_web_module(program)
        found = module(*program.arrays)
        found = list(found) if isinstance(found, tuple) else [found]
        roles = [p["role"] for p in module.description["parameters"] if p["written"]]
        order = sorted(range(len(roles)), key=lambda i: roles[i] != "output")
        return [found[i] for i in order]


def make_web_module(program: PreparedProgram) -> WebModule:
    """A prepared program as a module, of the sizes of its arrays."""
    levels = dict(program.lower_for_target("llvm"))
    if "graph" in levels and find_size_names(levels["graph"].main):
        sizes = bind_sizes(levels["graph"].main, program.arrays)
        levels = dict(driver.lower(specialise_shapes(levels["graph"].main, sizes), "llvm"))
    program = dataclasses.replace(program, levels=levels)
    generator: Any = get_backend("llvm")
    artifact = emit_artifact(generator, levels["tile"], generator.standalone_options(WASM))
    described = {**artifact.manifest, "interface": describe_interface(program, ())}
    files = generator.standalone(type(artifact)(described, artifact.files), "case", {}, WASM)
    description = json.loads(encode_content(files[DESCRIPTION_FILE]))
    return WebModule(link_module(encode_content(files[OBJECT_FILE]), description["bytes"]), description)


def make_engine(target: str) -> Engine:
    """The engine of a target."""
    return WebAssemblyEngine(WASM, "device", "llvm") if target == WASM else Engine(WGSL, "device", WGSL)


def shorten(detail: str) -> str:
    """The first line of an error, without the folder of its file.

    >>> shorten("/a/b/c.py:3:1: Error: no\\n  more")
    'c.py:3:1: Error: no'
    """
    return re.sub(r"\S*/(?=[^/\s]+\.py:)", "", (detail.splitlines() or [""])[0])[:200]


def sweep(cases: list[Case], engine: Engine, done: dict[str, Any], seconds: float, keep: Callable[[], None]) -> None:
    """Run the cases that are not done yet, for so long."""
    end = time.monotonic() + seconds
    for case in cases:
        if case.name in done or case.rejects is not None:
            continue
        if time.monotonic() > end:
            return
        (outcome,) = list(run_case(case, [engine])) or (None,)
        done[case.name] = (
            {"status": outcome.status, "share": outcome.share, "detail": shorten(outcome.detail)} if outcome else {}
        )
        if outcome is not None and outcome.status == "fail":
            print(f"FAIL {case.name}: {outcome.detail[:300]}", flush=True)
        if len(done) % 5 == 0:
            keep()


def main() -> int:
    """Run, keep and count; 1 if a case fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", choices=(WASM, WGSL))
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="as of tessera conformance")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every Nth case")
    parser.add_argument("--start", type=int, default=0, metavar="I", help="from the Ith case")
    parser.add_argument("--seconds", type=float, default=1e9, metavar="S")
    parser.add_argument("--report", type=Path, metavar="FILE")
    options = parser.parse_args()
    cases = select_cases(options.k, [c for c in all_cases() if c.mesh is None])[options.start :: options.every]
    path, done = options.report, {}
    if path and path.exists():
        done = json.loads(path.read_text())["cases"]

    def keep() -> None:
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                json.dumps({"machine": describe(), "target": options.target, "cases": done}, indent=1) + "\n"
            )

    sweep(cases, make_engine(options.target), done, options.seconds, keep)
    keep()
    counts = Counter(d.get("status", "no engine") for d in done.values())
    print(f"{len(done)} of {len([c for c in cases if c.rejects is None])} cases on {options.target}:", dict(counts))
    reasons = Counter(d["detail"].partition(": ")[2][:90] for d in done.values() if d.get("status") == "unsupported")
    for reason, count in reasons.most_common(25):
        print(f"{count:5d}  {reason}")
    return 1 if counts["fail"] else 0


if __name__ == "__main__":
    sys.exit(main())

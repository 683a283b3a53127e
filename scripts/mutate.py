"""Mutation testing: plant one small bug at a time, and see whether fuzzing, the suite or the tests find it.

    python scripts/mutate.py --count 40 [--component bounds] [--seed 0] [--report mutation.json]

Operators on the syntax tree: a comparison becomes its neighbour, `and` becomes `or`, arithmetic becomes its opposite,
`min` becomes `max`, an integer constant changes by one, a condition is negated, a statement that only calls is deleted.
Each mutant is a copy of the package. Only the checks of its component run, the quick ones first.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# A component: its files, and the tests that import it.
COMPONENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "simplify": (
        ("tessera/lower/passes/canonicalisation.py", "tessera/ir/rewrite.py"),
        ("tests/lower/passes", "tests/ir/test_rewrite.py"),
    ),
    "lowering": (
        ("tessera/lower/graph_to_schedule/*.py", "tessera/lower/schedule_to_tile/*.py"),
        ("tests/lower/test_lower_levels.py", "tests/lower/test_lower_fusion.py"),
    ),
    "memory plan": (("tessera/lower/passes/memory_planning.py",), ("tests/lower/passes",)),
    "llvm": (
        ("tessera/codegen/llvm/table/*.py", "tessera/codegen/llvm/text/*.py", "tessera/codegen/llvm/passes/*.py"),
        ("tests/codegen/llvm",),
    ),
    "ptx": (("tessera/codegen/ptx/passes/*.py", "tessera/codegen/ptx/table/*/*.py"), ("tests/codegen/ptx",)),
    "bounds": (
        ("tessera/ir/numerics/*.py", "tessera/interp/bound.py"),
        ("tests/ir/numerics", "tests/interp/test_bound.py"),
    ),
    "autodiff": (("tessera/transforms/autodiff/*.py",), ("tests/transforms/autodiff",)),
    "batching": (("tessera/transforms/batching.py",), ("tests/transforms/test_batching.py",)),
    "interpreters": (("tessera/interp/*.py", "tessera/interp/tile/*.py"), ("tests/interp",)),
    "sanitizers": (("tessera/interp/sanitizer/*.py",), ("tests/tools/debug",)),
}
# Programs of the fuzzing stage, and every which case of the sweep.
FUZZ_PROGRAMS, SWEEP_STEP = 60, 90
TARGETS = {"llvm": "llvm", "ptx": "ptx"}
CHECKS = """
import sys
from conformance.graph.sweep.cases import cases
from conformance.case import all_cases
from conformance.run import run_case, list_engines
from tessera.tools.fuzz.campaign import CampaignRequest, run_campaign
from tessera.tools.fuzz import campaign
from tessera.tools.fuzz.oracle import list_fuzz_engines
campaign.SHRINK_SECONDS = 0.0
target, programs, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if run_campaign(CampaignRequest((target,), programs=programs, seconds=600.0, seed=1)).failures:
    print("killed by fuzzing"); sys.exit(1)
engines = list_fuzz_engines((target,))
for case in [*list(cases())[::step], *list(all_cases())[::step // 6]]:
    if any(o.status == "fail" for o in run_case(case, engines)):
        print("killed by the suite"); sys.exit(1)
"""

COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
               ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}  # fmt: skip
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
              ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}


def list_mutations(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """The nodes that an operator changes, with what it does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
            yield node, "comparison"
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not isinstance(node.left, ast.Constant):
            yield node, "arithmetic"
        elif isinstance(node, ast.BoolOp):
            yield node, "and/or"
        elif isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 1000:
            yield node, "constant"
        elif isinstance(node, ast.If):
            yield node, "condition"
        elif isinstance(node, ast.Call) and _name(node.func) in CALLS:
            yield node, "call"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, "statement"


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def apply_mutation(node: Any, kind: str) -> None:
    """Change a node in place."""
    if kind == "comparison":
        node.ops[0] = COMPARISONS[type(node.ops[0])]()
    elif kind == "arithmetic":
        node.op = ARITHMETIC[type(node.op)]()
    elif kind == "and/or":
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif kind == "constant":
        node.value += 1
    elif kind == "condition":
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif kind == "call":
        setattr(node.func, "id" if isinstance(node.func, ast.Name) else "attr", CALLS[_name(node.func)])
    else:
        node.value = ast.Constant(None)


def draw_mutant(component: str, draw: random.Random) -> tuple[str, int, str, str]:
    """A mutant: its file, line and operator, and the changed source."""
    files = sorted(p for pattern in COMPONENTS[component][0] for p in ROOT.glob(pattern) if p.name != "__init__.py")
    sizes = [p.stat().st_size for p in files]
    while True:
        path = draw.choices(files, sizes)[0]
        tree = ast.parse(path.read_text())
        found = list(list_mutations(tree))
        if found:
            node, kind = draw.choice(found)
            line = node.lineno  # type: ignore[attr-defined]
            apply_mutation(node, kind)
            return str(path.relative_to(ROOT)), line, kind, ast.unparse(ast.fix_missing_locations(tree))


def judge(component: str, file: str, source: str, seconds: float) -> str:
    """What finds a mutant: "fuzzing", "suite", "tests", "error" or "time"; "" if nothing does."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("tessera", "conformance", "tests", "examples"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("docs", "benchmarks", "scripts", "setup.cfg", "README.md"):
            (copy / name).symlink_to(ROOT / name)
        (copy / file).write_text(source)
        environment = {
            **os.environ,
            "PYTHONPATH": folder,
            "TESSERA_CACHE_DIR": f"{folder}/cache",
            "OMP_NUM_THREADS": "1",
        }
        target = TARGETS.get(component, "interp")
        checks = [sys.executable, "-c", CHECKS, target, str(FUZZ_PROGRAMS), str(SWEEP_STEP)]
        tests = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-x", *COMPONENTS[component][1]]
        for command, stage in ((checks, ""), (tests, "tests")):
            try:
                done = subprocess.run(
                    command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds
                )
            except subprocess.TimeoutExpired:
                return "time"
            if done.returncode:
                return stage or _read_stage(done.stdout)
    return ""


def describe_score(counts: Counter[str]) -> str:
    """How many mutants were found; one that ran into the time limit is neither found nor missed."""
    judged = counts.total() - counts["time"]
    return f"{judged - counts['']} of {judged} found, {dict(counts)}"


def _read_stage(output: str) -> str:
    last = output.strip().splitlines()[-1:] or [""]
    return {"killed by fuzzing": "fuzzing", "killed by the suite": "suite"}.get(last[0], "error")


def main() -> int:
    """Judge mutants, print each, and the score of each component."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--count", type=int, default=40, help="mutants for each component")
    options.add_argument("--component", action="append", default=[], choices=list(COMPONENTS))
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--timeout", type=float, default=600.0, help="seconds for each stage")
    options.add_argument("--report", default="mutation.json")
    given = options.parse_args()
    results: list[dict[str, Any]] = []
    for number in range(given.count):
        for component in given.component or COMPONENTS:
            draw, start = random.Random(f"{component}/{given.seed}/{number}"), time.perf_counter()
            file, line, kind, source = draw_mutant(component, draw)
            found = judge(component, file, source, given.timeout)
            results.append({"component": component, "file": file, "line": line, "operator": kind, "killed": found})
            print(
                f"{component}: {file}:{line} {kind}: {found or 'SURVIVED'} ({time.perf_counter() - start:.0f} s)",
                flush=True,
            )
            Path(given.report).write_text(json.dumps(results, indent=1))
    for component in dict.fromkeys(r["component"] for r in results):
        counts = Counter(r["killed"] for r in results if r["component"] == component)
        print(f"{component}: {describe_score(counts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

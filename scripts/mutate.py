"""Mutation testing: plant one small bug at a time, and see whether fuzzing, the suite or the tests find it.

    python scripts/mutate.py --count 20 [--component bounds] [--planted] [--seed 0] [--report mutation.json]

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
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
from mutation_checks import COMPONENTS  # noqa: E402

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


@dataclass(frozen=True)
class Mutant:
    """A bug: its component, file, line and kind, and the changed source of the file."""

    component: str
    file: str
    line: int
    kind: str
    source: str


def draw_mutant(component: str, draw: random.Random) -> Mutant:
    """A random mutant of a component."""
    files = sorted(p for g in COMPONENTS[component].files for p in ROOT.glob(g) if p.name != "__init__.py")
    sizes = [p.stat().st_size for p in files]
    while True:
        path = draw.choices(files, sizes)[0]
        tree = ast.parse(path.read_text())
        if found := list(list_mutations(tree)):
            node, kind = draw.choice(found)
            line = node.lineno  # type: ignore[attr-defined]
            apply_mutation(node, kind)
            source = ast.unparse(ast.fix_missing_locations(tree))
            return Mutant(component, str(path.relative_to(ROOT)), line, kind, source)


def list_planted(word: str = "") -> list[Mutant]:
    """The bugs of scripts/planted_bugs.json whose name has a word: each replaces a text that its file has once."""
    found = []
    rows = json.loads((ROOT / "scripts" / "planted_bugs.json").read_text())
    for row in (r for r in rows if word in r["bug"]):
        text = (ROOT / row["file"]).read_text()
        if text.count(row["old"]) != 1:
            raise ValueError(f"{row['bug']}: {row['file']} has {row['old']!r} {text.count(row['old'])} times")
        line = text[: text.index(row["old"])].count("\n") + 1
        source = text.replace(row["old"], row["new"])
        found.append(Mutant(row["component"], row["file"], line, row["bug"], source))
    return found


class Workplace:
    """A copy of the package in which mutants are judged one after the other; compiled code is kept between them."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        for name in ("tessera", "conformance", "tests", "examples"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("docs", "benchmarks", "scripts", "setup.cfg", "README.md", "mkdocs.yml"):
            (folder / name).symlink_to(ROOT / name)

    def judge(self, mutant: Mutant) -> str:
        """What finds a mutant: the suite, fuzzing, a test or the time limit; "" if nothing does."""
        path = self.folder / mutant.file
        original = path.read_text()
        self._write(path, mutant.source)
        try:
            return self.run_checks(mutant.component, mutant.file)
        finally:
            self._write(path, original)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()

    def run_checks(self, component: str, file: str = "") -> str:
        """The first failure of the suite, fuzzing and the tests of a component."""
        checks = str(ROOT / "scripts" / "mutation_checks.py")
        done = self._run([checks, component, str(self.seconds)])
        if done is None or done.returncode:
            return "suite: no end" if done is None else _read_verdict(done.stdout)
        done = self._run([checks, "--tests", str(self.seconds), *order_tests(component, file)])
        if done is None or done.returncode:
            return "tests: no end" if done is None else f"tests: {_find_failed(done.stdout)}"
        return ""

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str] | None:
        """Run a command; None if it was ended for its processor time."""
        settings = {"PYTHONPATH": str(self.folder), "TESSERA_CACHE_DIR": str(self.folder / "cache")}
        done = subprocess.run(
            [sys.executable, *command], cwd=self.folder, env={**os.environ, **settings, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True,
        )  # fmt: skip
        return None if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL) else done


def order_tests(component: str, file: str) -> list[str]:
    """The test files of a component: those whose names share words with the mutated file, then the quick ones."""
    seconds = {
        path: float(cost)
        for cost, path in (line.split() for line in (ROOT / "tests" / "durations.txt").read_text().splitlines())
    }
    found = [p for t in COMPONENTS[component].tests for p in _list_tests(ROOT / t)]
    words = set(Path(file).stem.split("_")) - {"ptx", "csl", "llvm", "tile", "ops"}
    names = [str(p.relative_to(ROOT)) for p in found]
    return sorted(names, key=lambda n: (not words & set(Path(n).stem.split("_")), seconds.get(n, 0.0), n))


def _list_tests(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("test_*.py"))


def _read_verdict(output: str) -> str:
    last = output.strip().splitlines()[-1:] or [""]
    return last[0] if last[0].startswith(("suite", "fuzzing")) else "suite: an error"


def _find_failed(output: str) -> str:
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.M)
    return found[1] if found else "an error"


def describe_score(verdicts: list[str]) -> str:
    """How many mutants were found, and by what."""
    counts = Counter(v.partition(":")[0] or "survived" for v in verdicts)
    return f"{len(verdicts) - counts['survived']} of {len(verdicts)} found, {dict(counts)}"


def main() -> int:
    """Judge mutants, print each, and the score of each component; status 1 if a check fails without a mutant."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--count", type=int, default=20, help="mutants for each component")
    options.add_argument("--component", action="append", default=[], choices=list(COMPONENTS))
    options.add_argument("--planted", action="store_true", help="the bugs of scripts/planted_bugs.json instead")
    options.add_argument("--bug", default="", help="only the planted bugs whose name has this text")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--first", type=int, default=0, help="the number of the first mutant")
    options.add_argument("--seconds", type=float, default=30.0, help="processor seconds of each stage")
    options.add_argument("--unchecked", action="store_true", help="do not run the checks without a mutant first")
    options.add_argument("--report", default="mutation.json")
    given = options.parse_args()
    chosen = given.component or list(COMPONENTS)
    numbers = range(given.first, given.first + given.count)
    mutants: Iterable[Mutant] = (
        (m for m in list_planted(given.bug) if m.component in chosen)
        if given.planted
        else (draw_mutant(c, random.Random(f"{c}/{given.seed}/{n}")) for n in numbers for c in chosen)
    )
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Workplace(Path(folder), given.seconds)
        for component in () if given.unchecked else chosen:
            if failed := place.run_checks(component):
                print(f"without a mutant, {component} fails: {failed}")
                return 1
        for mutant in mutants:
            start, found = time.perf_counter(), place.judge(mutant)
            results.append({**asdict(mutant), "source": "", "killed": found})
            where = f"{mutant.component}: {mutant.file}:{mutant.line} {mutant.kind}"
            print(f"{where}: {found or 'SURVIVED'} ({time.perf_counter() - start:.0f} s)", flush=True)
            Path(given.report).write_text(json.dumps(results, indent=1))
    for component in dict.fromkeys(r["component"] for r in results):
        print(f"{component}: {describe_score([r['killed'] for r in results if r['component'] == component])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

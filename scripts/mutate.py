"""Mutation testing: plant one small bug at a time, and see whether the suite, fuzzing or the tests find it.

    python scripts/mutate.py --record build/mutation.coverage [--seconds 60]
    python scripts/mutate.py --count 20 [--component bounds] [--seed 0] [--report scripts/mutation_results.json]
    python scripts/mutate.py --count 20 --seed 3 --since COMMIT
    python scripts/mutate.py --planted --report build/planted.json
    python scripts/mutate.py --score

First the cases and tests run once and record which blocks of code each executes. Then each mutant is judged in child
processes that import the changed file: by the cases that execute the changed block, random programs, and the tests that
execute it, the quick ones first, until one fails. The report is continued: a mutant in it is not judged again.
"""

from __future__ import annotations

import os

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TESSERA_TRACEBACK": "full"}
import argparse  # noqa: E402
import ast  # noqa: E402
import base64  # noqa: E402
import hashlib  # noqa: E402
import importlib  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import pickle  # noqa: E402
import random  # noqa: E402
import re  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
import zlib  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Iterable, Iterator, Sequence  # noqa: E402
from contextlib import suppress  # noqa: E402
from dataclasses import dataclass, field, replace  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402
from types import CodeType  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
from mutation_checks import (  # noqa: E402
    COMPONENTS,
    FUZZ_TARGETS,
    GROUP_SHARES,
    TEST_FOLDERS,
    Checks,
    Outcome,
    list_cases,
    list_component_files,
    list_test_files,
    run_child,
)
from mutation_coverage import Recorder, compile_marked, find_block, number_blocks  # noqa: E402
from mutation_operators import Mutant, draw_mutant  # noqa: E402
from mutation_planting import LoadedFunctions, import_all, list_needed  # noqa: E402

RESULTS = ROOT / "scripts" / "mutation_results.json"
MOST_DRAWS = 3000  # until a component counts as one without another mutant
CASES_OF_CHILD, FILES_OF_CHILD = 250, 20
GENERAL = ("tests/codegen/test_program_costs.py",)  # tests that see what keeps all results: they come first
CHECK_SECONDS = 30.0  # of the processor
LOADED_BEFORE = ("numpy", "ml_dtypes", "llvmlite.binding", "pytest", "scipy.special", "torch", "hypothesis")


@dataclass
class Coverage:
    """What each check executed: its seconds and the blocks, one bit for each; `texts` are hashes of the files."""

    starts: dict[str, int]
    total: int
    texts: dict[str, str]
    checks: dict[str, tuple[float, bytes]] = field(default_factory=dict)
    modules: tuple[str, ...] = ()  # what cases import
    imported: bytes = b""  # the blocks that run when those are imported

    def find_blocks(self, mutant: Mutant) -> range:
        """The number of the changed block, or all those of the file if that is not known."""
        path = str(ROOT / mutant.file)
        start = self.starts.get(path)
        if start is None:
            return range(0)
        blocks = range(start, min([s for s in self.starts.values() if s > start], default=self.total))
        if self.texts[path] == _hash_file(Path(path)):
            block = find_block(ast.parse(Path(path).read_text()), (mutant.line, mutant.position))
            blocks = blocks if block is None else range(start + block, start + block + 1)
        return blocks

    def runs_at_import(self, mutant: Mutant) -> bool:
        """Whether the changed code runs when the package is imported, or that is not known."""
        blocks = self.find_blocks(mutant)
        return len(blocks) != 1 or not self.imported or _has_bit(self.imported, blocks)

    def find_checks(self, mutant: Mutant) -> list[str]:
        """The checks that execute the changed block (or the file, if that is not known), the quick ones first.

        Of these first some that together execute all that any of them does of the file, then as many again, and so on
        (additional coverage: Rothermel, Untch, Chu and Harrold 2001).
        """
        blocks = self.find_blocks(mutant)
        found = [c for c, (_, bits) in self.checks.items() if _has_bit(bits, blocks)]
        found.sort(key=lambda c: ("/sweep/" in c, self.checks[c][0] * (0.5 + random.Random(c).random()), c))
        found.sort(key=lambda c: not c.startswith(GENERAL))
        start = self.starts.get(str(ROOT / mutant.file), 0)
        end = min([s for s in self.starts.values() if s > start], default=self.total)
        executed = {c: _read_bits(self.checks[c][1], range(start, end)) for c in found}
        return list(spread(found, executed))


MOST_ROUNDS = 40


def spread(checks: Sequence[str], executed: dict[str, int]) -> Iterator[str]:
    """Checks in rounds: each round has, in their order, those that execute what none before them in it does.

    >>> list(spread("abcd", {"a": 1, "b": 1, "c": 3, "d": 4}))
    ['a', 'c', 'd', 'b']
    """
    left = list(checks)
    for _ in range(MOST_ROUNDS):
        seen, rest = 0, []
        for check in left:
            if executed[check] & ~seen:
                seen |= executed[check]
                yield check
            else:
                rest.append(check)
        left = rest
    yield from left


def _read_bits(bits: bytes, blocks: range) -> int:
    """Some blocks, as the bits of a number."""
    whole = np.unpackbits(np.frombuffer(zlib.decompress(bits), np.uint8))[blocks.start : blocks.stop]
    return int.from_bytes(np.packbits(whole).tobytes(), "big")


def _has_bit(bits: bytes, blocks: range) -> bool:
    raw = zlib.decompress(bits)
    if len(blocks) == 1:
        return bool(raw[blocks[0] // 8] >> (7 - blocks[0] % 8) & 1)
    return bool(np.unpackbits(np.frombuffer(raw, np.uint8))[blocks.start : blocks.stop].any())


def _hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load_libraries() -> None:
    """Import what every child needs, once; none of it may start threads."""
    for name in LOADED_BEFORE:
        with suppress(ImportError):
            importlib.import_module(name)


# Recording.


def record_coverage(
    path: Path, seconds: float, folder: str, part: str, tests: Sequence[str], groups: Sequence[str]
) -> None:
    """Record into a file: cases in random order for some seconds in each group of engines, then tests of folders."""
    files = sorted({p for c in COMPONENTS for p in list_component_files(c)})
    starts, total = number_blocks(files)
    coverage = Coverage(starts, total, {str(p): _hash_file(p) for p in files})
    code = compile_marked(starts)
    _record_imports(coverage, code, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(coverage))
    parts = {"cases": partial(_list_case_work, seconds, groups), "tests": partial(_list_test_work, seconds / 50, tests)}
    for work in (w for name, make in parts.items() if part in (name, "all") for w in make()):
        if outcome := work(partial(_record_child, code, total, folder)):
            coverage.checks |= {c: (s, base64.b64decode(e)) for c, failed, s, e in outcome.ended if not failed}
            path.write_bytes(pickle.dumps(coverage))


def _record_child(code: dict[str, CodeType], total: int, folder: str, work: Any, seconds: float) -> Outcome:
    def record(checks: Checks) -> None:
        recorder = Recorder(code, total)
        checks.take = lambda: base64.b64encode(zlib.compress(recorder.take(), 1)).decode()
        work(checks)

    return run_child(record, seconds, folder, 1500.0)


def _record_imports(coverage: Coverage, code: dict[str, CodeType], folder: str) -> None:
    names = run_child(lambda checks: checks.say("end", "", "", 0.0, list_needed()), 60.0, folder).ended[0][3]

    def work(checks: Checks) -> None:
        import_all(list(names))
        checks.say("end", "import", "", 0.0, checks.take())

    outcome = _record_child(code, coverage.total, folder, work, 60.0)
    coverage.modules, coverage.imported = tuple(names), base64.b64decode(outcome.ended[0][3])


def _list_case_work(seconds: float, groups: Sequence[str]) -> Iterator[Any]:
    found = run_child(lambda checks: [checks.say("end", c.name, "", 0.0, "") for c in list_cases()], 60, "")
    names = [e[0] for e in found.ended]
    order = sorted(names, key=lambda n: (n.startswith("graph/sweep") * 0.6 + random.Random(n).random(), n))
    for group in groups:
        left = [seconds * GROUP_SHARES[group]]
        for first in range(0, len(order), CASES_OF_CHILD):
            chosen = [(group, n) for n in order[first : first + CASES_OF_CHILD]]
            yield partial(_record_cases, chosen, left)


def _record_cases(chosen: list[tuple[str, str]], left: list[float], child: Any) -> Outcome | None:
    if left[0] <= 0:
        return None
    outcome = child(lambda checks: checks.run_cases(chosen, left[0]), 20.0)
    left[0] -= sum(e[2] for e in outcome.ended) or left[0]
    print(f"{chosen[0][0]}: {len(outcome.ended)} cases, {left[0]:.0f} s left {outcome.death}", flush=True)
    return outcome


def _list_test_work(seconds: float, folders: Sequence[str]) -> Iterator[Any]:
    for folder in folders:
        files = list_test_files(folder)
        for first in range(0, len(files), FILES_OF_CHILD):
            yield partial(_record_tests, files[first : first + FILES_OF_CHILD], seconds)


def _record_tests(files: list[str], seconds: float, child: Any) -> Outcome:
    outcome = child(lambda checks: checks.run_tests([], files, seconds), 20.0)
    done = [e for e in outcome.ended if not e[1]]
    print(f"{files[0]} ...: {len(done)} tests, {sum(e[2] for e in done):.1f} s {outcome.death}", flush=True)
    return outcome


# Judging.


@dataclass
class Judge:
    """Judges mutants: stages of checks, each for some seconds of the processor."""

    coverage: Coverage
    seconds: float
    fuzz_seconds: float
    folder: str
    loaded: LoadedFunctions
    sound: set[str] = field(default_factory=set)  # checks that passed without a mutant after they failed with one
    unsound: set[str] = field(default_factory=set)

    def judge(self, mutant: Mutant) -> dict[str, Any]:
        """What finds a mutant, and how many checks ran."""
        found = self.coverage.find_checks(mutant)
        groups = COMPONENTS[mutant.component].groups
        cases = [c for c in found if c.partition("|")[0] in groups]
        tests = [c for c in found if "|" not in c]
        facts = {"cases": len(cases), "tests": len(tests)}
        stages = (
            ("suite", partial(self.find_failure, mutant, cases, run_cases, self.seconds)),
            ("fuzzing", partial(self._fuzz, mutant) if self.fuzz_seconds else str),
            ("tests", partial(self.find_failure, mutant, tests, run_tests, self.seconds * 1.5)),
        )
        killed = ((name, found) for name, stage in stages if (found := stage()))
        return {"killed": ": ".join(next(killed, ())), **facts}

    def find_failure(self, mutant: Mutant, checks: list[str], run: Any, seconds: float) -> str:
        chosen = self._choose([c for c in checks if c not in self.unsound], seconds)
        while chosen:
            failed = _find_failed(self._run(mutant, partial(run, chosen), seconds))
            check = failed.partition(": ")[0]
            if not failed or "|" in check or check in self.sound or check not in chosen:
                return failed  # cases depend on nothing but the package
            if not _find_failed(self._run(None, partial(run, [check]), seconds)):
                self.sound.add(check)
                return failed
            self.unsound.add(check)
            chosen = [c for c in chosen if c not in self.unsound]
        return ""

    def _choose(self, checks: list[str], seconds: float) -> list[str]:
        """As many checks as fit into the time."""
        chosen: list[str] = []
        for check in checks:
            seconds -= self.coverage.checks[check][0] + 0.005
            if seconds < 0:
                break
            chosen.append(check)
        return chosen or checks[:1]

    def _fuzz(self, mutant: Mutant) -> str:
        target = FUZZ_TARGETS.get(mutant.component, "interp")
        while True:
            numbers = (n for n in itertools.count() if f"fuzz|{target} {n}" not in self.unsound)
            run = partial(run_programs, target, numbers, self.fuzz_seconds)
            failed = _find_failed(self._run(mutant, run, self.fuzz_seconds))
            check = failed.partition(": ")[0]
            if not check.startswith("fuzz|") or check in self.sound:
                return failed
            number = int(check.rpartition(" ")[2])
            if not _find_failed(self._run(None, partial(run_programs, target, (number,), 0.0), self.fuzz_seconds)):
                self.sound.add(check)
                return failed
            self.unsound.add(check)  # it is slow, or fails by itself

    def _run(self, mutant: Mutant | None, work: Any, seconds: float) -> Outcome:
        folder = self.folder
        if mutant is not None and "/runtime/" in mutant.file:
            folder = tempfile.mkdtemp(dir=self.folder)  # compiled code of another runtime

        def work_on(checks: Checks) -> None:
            if mutant is not None:
                self.loaded.plant(str(ROOT / mutant.file), mutant.tree, self.coverage.runs_at_import(mutant))
            work(checks)

        return run_child(work_on, CHECK_SECONDS, folder, 40 * seconds + 1800)


def run_cases(chosen: list[str], checks: Checks) -> None:
    checks.run_cases([tuple(c.split("|", 1)) for c in chosen])  # type: ignore[misc]


def run_programs(target: str, numbers: Iterable[int], seconds: float, checks: Checks) -> None:
    checks.run_programs(target, numbers, seconds)


def run_tests(chosen: list[str], checks: Checks) -> None:
    checks.run_tests(chosen, [])


def _find_failed(outcome: Outcome) -> str:
    """The first check that failed, with how."""
    failed = [f"{check}: {said}" for check, said, _, _ in outcome.ended if said and not said.endswith("skipped")]
    if failed:
        return failed[0]
    return f"{outcome.running or 'the import'}: {outcome.death}" if outcome.death else ""


# Drawn and planted mutants.


def list_drawn(
    components: Iterable[str], numbers: Iterable[int], seed: int, rows: list[dict[str, Any]], since: str = ""
) -> Iterator[tuple[str, Mutant]]:
    """Mutants that the report does not have, number after number, each component in turn; none is drawn twice."""
    known, drawn = {r["name"] for r in rows}, {(r["file"], r["kind"], r["change"], r["line"]) for r in rows}
    changed = list_changed_lines(since) if since else None
    for number in numbers:
        for component in components:
            files = list_component_files(component)
            if changed is not None:
                files = [f for f in files if changed.get(str(f.relative_to(ROOT)))]
            name = f"{component}/{seed}/{number}"
            if name not in known and files:
                draw = random.Random(name)
                found = (draw_mutant(component, files, ROOT, draw) for _ in range(MOST_DRAWS))
                new = (m for m in found if m.place not in drawn)
                m = next((m for m in new if changed is None or m.line in changed[m.file]), None)
                if m is not None:
                    drawn.add(m.place)
                    yield name, m


def list_changed_lines(commit: str) -> dict[str, set[int]]:
    """The lines of each file of the package that a commit did not have."""
    lines: dict[str, set[int]] = {}
    said = subprocess.run(
        ["git", "diff", "--unified=0", "--no-color", commit, "--", "tessera"], cwd=ROOT, capture_output=True, text=True
    )
    if said.returncode:
        raise SystemExit(f"--since {commit}: {said.stderr.strip()}")
    for line in said.stdout.splitlines():
        if line.startswith("+++ "):
            path = line.removeprefix("+++ b/")
        elif found := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(found[1]), int(found[2] or 1)
            lines.setdefault(path, set()).update(range(first, first + count))
    return lines


def list_planted(word: str = "") -> list[tuple[str, Mutant]]:
    """The bugs of scripts/planted_bugs.json whose name has a word: each replaces a text that its file has once."""
    found = []
    rows = json.loads((ROOT / "scripts" / "planted_bugs.json").read_text())
    for row in (r for r in rows if word in r["bug"]):
        text = (ROOT / row["file"]).read_text()
        if text.count(row["old"]) != 1:
            raise ValueError(f"{row['bug']}: {row['file']} has {row['old']!r} {text.count(row['old'])} times")
        begin = text.index(row["old"])
        begin += len(row["old"]) - len(row["old"].lstrip())
        line, column = text[:begin].count("\n") + 1, begin - text.rfind("\n", 0, begin) - 1
        tree = ast.parse(text.replace(row["old"], row["new"]))
        found.append((row["bug"], Mutant(row["component"], row["file"], line, "planted", row["bug"], tree, column)))
    return found


# The score.


FATES = ("suite", "fuzzing", "tests", "added", "survives", "equivalent")


def describe_score(rows: list[dict[str, Any]]) -> list[str]:
    """A table with a line for each component: what found its mutants, and the shares found at first and now."""
    lines = [f"| component | judged | {' | '.join(FATES)} | first | now |", "|---" * (len(FATES) + 4) + "|"]
    for name in [*dict.fromkeys(r["component"] for r in rows), "all"]:
        counts = Counter(_describe_fate(r) for r in rows if name in (r["component"], "all"))
        total = sum(counts.values()) - counts["equivalent"]
        first = total - counts["survives"] - counts["added"]
        shares = (f"{n} of {total}" for n in (first, first + counts["added"]))
        parts = (str(counts[fate] or "") for fate in FATES)
        lines.append(f"| {name} | {sum(counts.values())} | {' | '.join((*parts, *shares))} |")
    return lines


def describe_seeds(rows: list[dict[str, Any]]) -> list[str]:
    """A table with a line for each seed: of the mutants that are not equivalent, how many each stage found at first."""
    lines = ["| seed | judged | equivalent | suite and random programs | with the tests |", "|---" * 5 + "|"]
    for seed in sorted({int(r["name"].split("/")[1]) for r in rows}):
        counts = Counter(_describe_fate(r) for r in rows if r["name"].split("/")[1] == str(seed))
        total, alone = sum(counts.values()), counts["suite"] + counts["fuzzing"]
        other = total - counts["equivalent"]
        shares = (f"{n} ({n / other:.0%})" for n in (alone, alone + counts["tests"]))
        lines.append(f"| {seed} | {total} | {counts['equivalent']} | {' | '.join(shares)} |")
    return lines


def describe_survivors(rows: list[dict[str, Any]]) -> list[str]:
    """Tables of the mutants that no check found at first: what finds them now, why none can, and the rest."""
    lines: list[str] = []
    for fate, title in (("added", "what finds it now"), ("equivalent", "why no program can tell"), ("survives", "")):
        lines += [f"| mutant | where | {title or 'change'} |", "|---" * 3 + "|"]
        for row in (r for r in rows if _describe_fate(r) == fate):
            where = f"`{row['file'].removeprefix('tessera/')}:{row['line']}`"
            said = row[fate] if title else row["change"]
            lines.append(f"| `{row['name']}` | {where} | {said if fate == 'equivalent' else f'`{said}`'} |")
        lines.append("")
    return lines


def _describe_fate(row: dict[str, Any]) -> str:
    if row["killed"]:
        return str(row["killed"].partition(":")[0])
    return "equivalent" if row.get("equivalent") else "added" if row.get("added") else "survives"


def main() -> int:
    """Record coverage, judge mutants and print each, or print the score of each component."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--record", type=Path, help="only record coverage, into this file")
    options.add_argument("--part", choices=("cases", "tests", "all", "imports"), default="all", help="what is recorded")
    options.add_argument("--tests", action="append", default=[], choices=TEST_FOLDERS, help="the folders of --record")
    options.add_argument("--group", action="append", default=[], choices=GROUP_SHARES, help="the engines of --record")
    options.add_argument("--score", action="store_true", help="only print the tables of docs/mutation.md")
    options.add_argument("--coverage", type=Path, nargs="+", default=[ROOT / "build" / "mutation.coverage"])
    options.add_argument("--count", type=int, default=20, help="mutants for each component")
    options.add_argument("--component", action="append", default=[], choices=list(COMPONENTS))
    options.add_argument("--planted", action="store_true", help="the bugs of scripts/planted_bugs.json instead")
    options.add_argument("--bug", default="", help="only the planted bugs whose name has this text")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--since", default="", help="only changes of lines that this commit did not have")
    options.add_argument("--first", type=int, default=0, help="the number of the first mutant")
    options.add_argument("--seconds", type=float, default=20.0, help="processor seconds of each stage")
    options.add_argument("--fuzz-seconds", type=float, default=10.0, help="the same of random programs")
    options.add_argument("--report", type=Path, default=RESULTS)
    given = options.parse_args()
    rows = json.loads(given.report.read_text()) if given.report.exists() else []
    if given.score:
        print("\n".join([*describe_seeds(rows), "", *describe_score(rows), "", *describe_survivors(rows)]))
        return 0
    load_libraries()
    with tempfile.TemporaryDirectory() as folder:
        if given.record:
            record_coverage(
                given.record,
                given.seconds,
                folder,
                given.part,
                given.tests or TEST_FOLDERS,
                given.group or tuple(GROUP_SHARES),
            )
        else:
            _judge_all(given, rows, folder)
    return 0


def _judge_all(given: argparse.Namespace, rows: list[dict[str, Any]], folder: str) -> None:
    parts = [pickle.loads(path.read_bytes()) for path in given.coverage]
    if any(part.starts != parts[0].starts for part in parts):
        raise SystemExit("the parts of --coverage number other blocks: record them from the same sources")
    checks = {name: check for part in parts for name, check in part.checks.items()}
    (modules, imported), *_ = [(p.modules, p.imported) for p in parts if p.imported] or [((), b"")]
    import_all(list(modules))
    coverage = replace(parts[0], checks=checks, modules=modules, imported=imported)
    judge = Judge(coverage, given.seconds, given.fuzz_seconds, folder, LoadedFunctions())
    chosen, numbers = given.component or list(COMPONENTS), range(given.first, given.first + given.count)
    drawn = list_drawn(chosen, numbers, given.seed, rows, given.since)
    known = {r["name"] for r in rows}
    planted = ((n, m) for n, m in list_planted(given.bug) if m.component in chosen and n not in known)
    for name, mutant in planted if given.planted else drawn:
        start, found = time.process_time() + sum(os.times()[2:4]), judge.judge(mutant)
        spent = time.process_time() + sum(os.times()[2:4]) - start
        facts = {k: getattr(mutant, k) for k in ("component", "file", "line", "position", "kind", "change")}
        rows.append({"name": name, **facts, **found, "seconds": round(spent, 1)})
        where = f"{name}: {mutant.file}:{mutant.line} {mutant.kind}: {mutant.change}"
        print(f"{where}: {found['killed'] or 'SURVIVED'} ({spent:.0f} s)", flush=True)
        given.report.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())

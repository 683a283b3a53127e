"""The checks of mutants: components with their files, the engines that run them, and how a child process runs a check.

A check is a case of the suite on a group of engines ("llvm|graph/found/x"), programs of `tessera fuzz`, or a test.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Component:
    """Files to mutate, and the groups of engines that run their code."""

    files: tuple[str, ...]
    groups: tuple[str, ...]


# The engines that run together: interpreters of levels, what must not change a result, the runtime with guard bytes,
# emulators of text.
GROUPS = {
    "levels": ("graph", "schedule", "tile"),
    "variants": (),  # those of `conformance.variants`
    "llvm": ("llvm guarded",),
    "llvm text": ("llvm text",),
    "ptx": ("ptx text",),
    "ptx checked": ("ptx:sm_90a sanitized",),
    "csl": ("csl:2x3 text",),
}
GROUP_SHARES = {
    "levels": 1.0,
    "variants": 1.0,
    "ptx": 1.0,
    "ptx checked": 0.5,
    "csl": 1.0,
    "llvm": 0.6,
    "llvm text": 0.2,
}  # of the seconds of a recording
COMPONENTS: dict[str, Component] = {
    "simplify": Component(
        ("tessera/lower/passes/canonicalisation.py", "tessera/ir/rewrite.py", "tessera/ir/analysis.py"),
        ("levels", "variants"),
    ),
    "passes": Component(("tessera/lower/passes/*.py",), ("levels", "variants", "llvm", "ptx")),
    "lowering": Component(
        ("tessera/lower/graph_to_schedule/*.py", "tessera/lower/schedule_to_tile/*.py",
         "tessera/lower/scalar_functions/*.py", "tessera/lower/*.py"), ("levels", "variants", "llvm", "ptx"),
    ),
    "mesh": Component(("tessera/lower/mesh/*.py",), ("csl",)),
    "memory plan": Component(
        ("tessera/lower/passes/memory_planning.py", "tessera/codegen/donation.py", "tessera/codegen/host_plan.py"),
        ("levels", "variants", "llvm", "ptx", "csl"),
    ),
    "llvm": Component(("tessera/codegen/llvm/*/*.py", "tessera/codegen/grouped/*.py"), ("llvm", "llvm text")),
    "ptx": Component(
        ("tessera/codegen/ptx/*.py", "tessera/codegen/ptx/passes/*.py", "tessera/codegen/ptx/t*/*.py",
         "tessera/codegen/ptx/table/*/*.py"), ("ptx", "ptx checked"),
    ),
    "csl": Component(
        ("tessera/codegen/csl/*.py", "tessera/codegen/csl/table/*.py", "tessera/codegen/csl/text/*.py"), ("csl",)
    ),
    "bounds": Component(("tessera/ir/numerics/*.py", "tessera/interp/bound.py"), ("levels", "variants", "llvm")),
    "runtime": Component(
        ("tessera/runtime/launch/*.py", "tessera/runtime/storage/*.py", "tessera/codegen/contract.py",
         "tessera/codegen/contract.py", "tessera/codegen/llvm/runtime/g*.py", "tessera/codegen/llvm/runtime/p*.py",
         "tessera/codegen/llvm/runtime/reports.py"), ("llvm", "levels"),
    ),
    "autodiff": Component(
        ("tessera/transforms/autodiff/*.py", "tessera/transforms/flow/*deriv*.py",
         "tessera/transforms/flow/control_flow_rules.py",
         "tessera/transforms/flow/implicit_differentiation.py", "tessera/transforms/flow/launch_tangents.py"),
        ("levels", "variants"),
    ),
    "batching": Component(
        ("tessera/transforms/batching.py", "tessera/transforms/flow/*batching*.py"), ("levels", "variants")
    ),
    "interpreters": Component(("tessera/interp/*.py", "tessera/interp/tile/*.py"), ("levels", "variants")),
    "ptx emulator": Component(("tessera/interp/target/ptx/**/*.py",), ("ptx", "ptx checked")),
    "csl emulator": Component(
        tuple(f"tessera/interp/target/csl/{part}*.py" for part in ("", "fabric/", "pe/", "sema/", "text/")), ("csl",)
    ),
    "sanitizers": Component(("tessera/interp/sanitizer/*.py",), ("levels",)),
    "ops": Component(("tessera/ops/tensor/*.py",), ("levels", "variants")),
    "plan execution": Component(
        ("tessera/codegen/p*.py", "tessera/codegen/ptx/runtime/*_program.py",
         "tessera/codegen/llvm/generator.py", "tessera/runtime/program.py", "tessera/runtime/planning.py",
         "tessera/core/kept_memory.py"), ("llvm", "ptx", "levels"),
    ),
    "library": Component(("tessera/stdlib/*.py",), ("levels", "llvm", "ptx")),
    "frontend": Component(
        ("tessera/frontend/jit/*.py", "tessera/frontend/kernel/*.py", "tessera/frontend/kernel/*/*.py"), ("levels",)
    ),
    "modules": Component(("tessera/nn/*.py", "tessera/optim/*.py", "tessera/train/*.py"), ("levels",)),
    "torch": Component(("tessera/torch/*.py", "tessera/torch/rows/*.py"), ("levels",)),
    "distribution": Component(("tessera/dist/*.py",), ("levels",)),
    "language models": Component(("tessera/llm/*.py",), ("levels",)),
}  # fmt: skip
FUZZ_TARGETS = {
    "llvm": "llvm", "runtime": "llvm", "plan execution": "llvm", "memory plan": "llvm", "passes": "llvm", "ptx": "ptx",
    "ptx emulator": "ptx", "csl": "csl", "mesh": "csl", "csl emulator": "csl",
}  # fmt: skip
TEST_FOLDERS = (
    "tests/lower", "tests/compiler", "tests/ir", "tests/transforms", "tests/runtime", "tests/tools/debug",
    "tests/tools/check", "tests/codegen/llvm", "tests/codegen/grouped", "tests/codegen", "tests/codegen/csl",
    "tests/codegen/ptx",
    "tests/interp", "tests/interp/target", "tests/stdlib", "tests/frontend/kernel", "tests/frontend/jit", "tests/ops",
    "tests/nn", "tests/optim", "tests/train", "tests/torch", "tests/dist", "tests/llm",
)  # fmt: skip


def list_test_files(folder: str) -> list[str]:
    """The test files of a folder; those of its folders are another's if they are in TEST_FOLDERS."""
    names = [str(p.relative_to(ROOT)) for p in sorted((ROOT / folder).rglob("test_*.py"))]
    others = tuple(f"{f}/" for f in TEST_FOLDERS if f.startswith(f"{folder}/"))
    return [n for n in names if not n.startswith(others or "none")]


def list_component_files(component: str) -> list[Path]:
    """The files that mutants of a component change."""
    found = {p for g in COMPONENTS[component].files for p in ROOT.glob(g) if p.name != "__init__.py"}
    return sorted(found)


# What a child process does.


@dataclass
class Checks:
    """Runs checks and says so, line by line; `take` gives what a check executed, where that is recorded."""

    say: Callable[..., None]
    limit: float = 60.0  # processor seconds of one check
    take: Callable[[], str] = field(default=lambda: "")

    def start(self, check: str) -> None:
        """A check begins: the process may use `limit` more seconds of the processor."""
        self.started = time.process_time()
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(self.started + self.limit) + 1, hard))
        self.take()
        self.say("start", check)

    def end(self, check: str, failure: str) -> None:
        """A check ends, with what failed or ""."""
        self.say("end", check, failure, round(time.process_time() - self.started, 3), self.take())

    def run_cases(self, wanted: list[tuple[str, str]], seconds: float = 0.0) -> None:
        """Run cases, each (group of engines, name), until one fails; or for some seconds, whatever fails."""
        from conformance.run import run_case

        known = {case.name: case for case in list_cases()}
        engines = {g: find_engines(g) for g in {g for g, _ in wanted}}
        begin = time.process_time()
        for group, name in wanted:
            if seconds and time.process_time() - begin > seconds:
                return
            check = f"{group}|{name}"
            self.start(check)
            failed = [o.engine for o in run_case(known[name], engines[group]) if o.status == "fail"]
            self.end(check, ", ".join(failed))
            if failed and not seconds:
                return

    def run_programs(self, target: str, numbers: Iterable[int], seconds: float = 0.0) -> None:
        """Run random programs until one fails or the time is over."""
        from tessera.tools.fuzz import campaign

        campaign.SHRINK_SECONDS = 0.0
        begin, kinds = time.process_time(), tuple(campaign.GENERATORS)
        for number in numbers:
            check, kind = f"fuzz|{target} {number}", kinds[number % len(kinds)]
            self.start(check)
            request = campaign.CampaignRequest((target,), (kind,), programs=1, seconds=600.0, seed=number)
            failed = next(iter(campaign.run_campaign(request).failures), "")
            self.end(check, failed)
            if failed or (seconds and time.process_time() - begin > seconds):
                return

    def run_tests(self, wanted: list[str], files: list[str], seconds: float = 0.0) -> None:
        """Run tests by their names in an order until one fails, or those of files, of each for some seconds."""
        import pytest

        quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # this process has imported hypothesis
        options = ["-p", "no:cacheprovider", "-q", "--no-header", *quiet, *(["-x"] if wanted else [])]
        paths = files or list(dict.fromkeys(w.partition("::")[0] for w in wanted))
        ended = pytest.main([*options, *paths], [_Tests(self, wanted, seconds)])
        if ended == pytest.ExitCode.INTERRUPTED and wanted:  # a KeyboardInterrupt is reported as no test's failure
            raise KeyboardInterrupt


class _Tests:
    """A plugin of pytest: chooses and orders tests, and says which run and fail."""

    def __init__(self, checks: Checks, wanted: list[str], seconds: float) -> None:
        self.checks, self.wanted, self.seconds = checks, wanted, seconds
        self.spent: Counter[str] = Counter()  # by file

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Only the wanted tests, in their order."""
        order = {name: i for i, name in enumerate(self.wanted)}
        if order:
            items[:] = sorted((i for i in items if i.nodeid in order), key=lambda i: order[i.nodeid])

    def pytest_runtest_setup(self, item: Any) -> None:
        """No more tests of a file whose time is over."""
        import pytest

        if self.seconds and self.spent[item.nodeid.partition("::")[0]] > self.seconds:
            pytest.skip("the time is over")

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported fails."""
        if report.failed:
            self.checks.start(report.nodeid)
            self.checks.end(report.nodeid, "collection")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self.failure = ""
        self.checks.start(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A phase of a test ends."""
        if report.failed or report.skipped:
            self.failure = f"{report.when}: {report.outcome}"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test ends."""
        self.spent[nodeid.partition("::")[0]] += time.process_time() - self.checks.started
        self.checks.end(nodeid, self.failure)


@cache
def list_cases() -> tuple[Any, ...]:
    """All cases of the suite, with the sweeps."""
    from conformance.case import all_cases
    from conformance.graph.sweep.cases import cases

    return (*all_cases(), *cases())


@cache
def find_engines(group: str) -> tuple[Any, ...]:
    """The engines of a group."""
    from conformance.run import INTERPRETED, find_checked_engines, list_engines
    from conformance.variants import list_variant_engines

    if group == "variants":
        return tuple(list_variant_engines())
    found = []
    for name in GROUPS[group]:
        target, _, kind = name.partition(" ")
        if kind in ("guarded", "sanitized"):
            known = find_checked_engines(target)
        else:
            known = list_engines() if name in INTERPRETED else list_engines([target], ["target"])
        found += [e for e in known if e.name == name]
    return tuple(found)


@dataclass
class Outcome:
    """What a child process said: (check, failure, seconds, executed) of each check that ended, and how it ended."""

    ended: list[tuple[str, str, float, str]]
    running: str = ""
    death: str = ""  # "no end" or "a crash"


def run_child(work: Callable[[Checks], None], limit: float, folder: str, wall: float = 600.0) -> Outcome:
    """Do work in a forked child of this process, which must have no threads; read what it says."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _be_child(work, writer, limit, folder, wall)
    os.close(writer)
    outcome = Outcome([])
    with os.fdopen(reader) as lines:
        for line in lines:
            word, *rest = json.loads(line)
            outcome.running = rest[0] if word == "start" else ""
            if word == "end":
                outcome.ended.append(tuple(rest))
    _, status = os.waitpid(child, 0)
    outcome.death = _describe_death(status)
    return outcome


def _describe_death(status: int) -> str:
    if os.WIFEXITED(status):
        return "" if os.WEXITSTATUS(status) == 0 else "an error"
    return "no end" if os.WTERMSIG(status) in (9, 14, 24) else "a crash"  # SIGKILL, SIGALRM, SIGXCPU


def _be_child(work: Callable[[Checks], None], writer: int, limit: float, folder: str, wall: float) -> None:
    """Run the work and end the process; what it prints goes nowhere."""
    import signal

    status = 1
    try:
        signal.setitimer(signal.ITIMER_REAL, wall)  # one that waits for ever
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        nowhere = os.open(os.environ.get("MUTATION_OUTPUT", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        os.environ["TESSERA_CACHE"] = folder
        os.chdir(ROOT)
        sys.path.insert(0, str(ROOT))

        said = os.fdopen(writer, "w")

        def say(*words: Any) -> None:
            print(json.dumps(words), file=said, flush=True)

        work(Checks(say, limit))
        status = 0
    except BaseException as error:
        os.write(2, repr(error).encode())
    finally:
        os._exit(status)

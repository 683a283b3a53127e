"""What the checks of a mutant run: conformance cases and random programs, until one fails or the time is over.

    python scripts/mutation_checks.py COMPONENT SECONDS

The last line says what failed. Conformance cases of the component's areas come first, in a fixed random order, then a
sample of all others, then random programs. The kernel ends a process that uses several times its processor time, as a
loop without an end does.
"""

from __future__ import annotations

import os
import random
import resource
import sys
import time
from dataclasses import dataclass
from typing import Any

LEVELS = ("graph", "schedule", "tile")


@dataclass(frozen=True)
class Component:
    """Files to mutate, the engines and areas of the suite that run them, and their tests."""

    files: tuple[str, ...]
    engines: tuple[str, ...]
    areas: tuple[str, ...]
    tests: tuple[str, ...]


SHAPES = ("graph/found", "graph/sizes", "graph/shape", "graph/sweep/move", "graph/reduce", "graph/sweep/reduce")
KERNELS = ("tile/found", "tile/memory", "tile/blocks", "tile/groups", "tile/scans", "tile/language", "tile/control")
COMPONENTS: dict[str, Component] = {
    "simplify": Component(
        ("tessera/lower/passes/canonicalisation.py", "tessera/ir/rewrite.py", "tessera/ir/analysis.py"),
        LEVELS, ("graph/functions", "graph/elementwise", *SHAPES, "graph/flow"),
        ("tests/lower/passes", "tests/ir/test_rewrite.py", "tests/ir/test_index_analysis.py",
         "tests/ir/test_index_inputs.py"),
    ),
    "passes": Component(
        ("tessera/lower/passes/*.py",), (*LEVELS, "llvm"),
        ("graph/launches", "graph/networks", *SHAPES, "graph/numerics", *KERNELS),
        ("tests/lower/passes", "tests/lower/test_lower_levels.py"),
    ),
    "lowering": Component(
        ("tessera/lower/graph_to_schedule/*.py", "tessera/lower/schedule_to_tile/*.py",
         "tessera/lower/scalar_functions/*.py", "tessera/lower/*.py"), (*LEVELS, "llvm"),
        (*SHAPES, "graph/sweep/product", "graph/sweep/scan", "graph/composites", "graph/networks", "graph/linalg"),
        ("tests/lower",),
    ),
    "mesh": Component(
        ("tessera/lower/mesh/*.py",), ("csl:2x3", "csl:3x2"),
        (*SHAPES, "graph/linalg", "graph/sweep/product", "graph/launches"),
        ("tests/lower/test_mesh.py", "tests/lower/test_mesh_launches.py", "tests/lower/test_mesh_memory.py",
         "tests/lower/test_mesh_structure.py", "tests/codegen/csl"),
    ),
    "memory plan": Component(
        ("tessera/lower/passes/memory_planning.py", "tessera/codegen/donation.py", "tessera/codegen/host_plan.py"),
        (*LEVELS, "llvm"), ("graph/found", "graph/flow", "graph/networks", "graph/sizes", "graph/launches"),
        ("tests/lower/passes", "tests/codegen/test_host_plan.py", "tests/runtime"),
    ),
    "llvm": Component(
        ("tessera/codegen/llvm/*/*.py", "tessera/codegen/grouped/*.py"), ("llvm guarded", "llvm text"),
        (*SHAPES, *KERNELS, "tile/stdlib", "tile/cooperation", "graph/sweep/product", "graph/sweep/scan"),
        ("tests/codegen/llvm", "tests/codegen/grouped"),
    ),
    "ptx": Component(
        ("tessera/codegen/ptx/*.py", "tessera/codegen/ptx/passes/*.py", "tessera/codegen/ptx/t*/*.py",
         "tessera/codegen/ptx/table/*/*.py"), ("ptx text",),
        (*SHAPES, *KERNELS, "tile/products", "tile/stdlib", "tile/cooperation", "tile/atomics", "graph/sweep/product"),
        ("tests/codegen/ptx",),
    ),
    "csl": Component(
        ("tessera/codegen/csl/*.py", "tessera/codegen/csl/table/*.py", "tessera/codegen/csl/text/*.py"),
        ("csl:2x3",), (*SHAPES, "graph/elementwise", "graph/linalg", "graph/flow", "graph/sweep/cast"),
        ("tests/codegen/csl",),
    ),
    "bounds": Component(
        ("tessera/ir/numerics/*.py", "tessera/interp/bound.py"), LEVELS,
        ("graph/numerics", "graph/functions", "graph/sweep/cast", "graph/sweep/pointwise", *SHAPES, "tile/found"),
        ("tests/ir/numerics", "tests/interp/test_bound.py", "tests/interp/test_sampled_bounds.py"),
    ),
    "runtime": Component(
        ("tessera/runtime/launch/*.py", "tessera/runtime/storage/*.py", "tessera/codegen/legality.py",
         "tessera/codegen/contract.py", "tessera/codegen/llvm/runtime/g*.py", "tessera/codegen/llvm/runtime/p*.py",
         "tessera/codegen/llvm/runtime/reports.py"), ("llvm guarded", "llvm"),
        ("graph/found", "tile/found", "tile/memory", "graph/errors", "tile/errors", "graph/launches"),
        ("tests/runtime", "tests/frontend/kernel/test_streams.py", "tests/codegen/llvm/test_program.py",
         "tests/codegen/test_legality.py"),
    ),
    "autodiff": Component(
        ("tessera/transforms/autodiff/*.py", "tessera/transforms/flow/*deriv*.py",
         "tessera/transforms/flow/implicit_differentiation.py", "tessera/transforms/flow/launch_tangents.py"),
        ("graph", "tile"), ("graph/gradients", "graph/sweep/gradient", "graph/launches", "graph/networks"),
        ("tests/transforms/autodiff", "tests/transforms/flow"),
    ),
    "batching": Component(
        ("tessera/transforms/batching.py", "tessera/transforms/flow/*batching*.py"), ("graph", "tile"),
        ("graph/found", "graph/launches", "graph/flow", "graph/functions", "graph/gradients"),
        ("tests/transforms/test_batching.py", "tests/transforms/flow"),
    ),
    "interpreters": Component(
        ("tessera/interp/*.py", "tessera/interp/tile/*.py"), LEVELS,
        (*KERNELS, "tile/cooperation", "tile/atomics", "tile/debug", "graph/flow", "tile/spec", "graph/launches"),
        ("tests/interp/test_tile.py", "tests/interp/test_schedule.py", "tests/interp/test_bound.py",
         "tests/interp/test_lifetimes.py", "tests/interp/test_sampled_bounds.py", "tests/tools/debug"),
    ),
    "sanitizers": Component(
        ("tessera/interp/sanitizer/*.py",), ("tile",), ("tile/debug", "tile/errors", "tile/memory"),
        ("tests/tools/debug", "tests/tools/check"),
    ),
}  # fmt: skip
FUZZ_TARGETS = {"llvm": "llvm", "ptx": "ptx", "csl": "csl", "mesh": "csl", "memory plan": "llvm", "passes": "llvm"}


def list_checks(component: Component) -> tuple[list[Any], list[Any]]:
    """The cases of a component in a fixed random order, its areas first, and its engines."""
    from conformance.case import all_cases
    from conformance.graph.sweep.cases import cases
    from conformance.run import find_guarded_engine, list_engines

    targets = sorted({e.split()[0] for e in component.engines} - set(LEVELS))
    found = {e.name: e for e in list_engines(targets, [*LEVELS, "target"] if targets else LEVELS)}
    found |= {e.name: e for t in targets if (e := find_guarded_engine(t)) is not None}
    engines = [found[n] if n in found else found[f"{n} text"] for n in component.engines]
    order = sorted([*all_cases(), *cases()], key=lambda c: random.Random(c.name).random())
    near = [c for c in order if c.name.startswith(component.areas)]
    near.sort(key=lambda c: "/found/" not in c.name)  # what found bugs before comes first
    # One of ten is from elsewhere.
    far = iter([c for c in order if not c.name.startswith(component.areas)])
    mixed = [c for i, own in enumerate(near) for c in ([own, next(far, own)] if i % 9 == 8 else [own])]
    return mixed, engines


def run_checks(name: str, seconds: float) -> str:
    """What failed within the processor time, or "": two thirds are for the suite, the rest for random programs."""
    from conformance.run import run_case
    from tessera.tools.fuzz import campaign

    cases, engines = list_checks(COMPONENTS[name])
    start = time.process_time()
    for case in cases:
        if time.process_time() - start > seconds * 2 / 3:
            break
        for outcome in run_case(case, engines):
            if outcome.status == "fail":
                return f"suite: {case.name} on {outcome.engine}"
    campaign.SHRINK_SECONDS = 0.0
    target = FUZZ_TARGETS.get(name, "interp")
    for number in range(10_000):
        if time.process_time() - start > seconds:
            break
        request = campaign.CampaignRequest((target,), programs=1, seconds=600.0, seed=number)
        if failures := campaign.run_campaign(request).failures:
            return f"fuzzing: {next(iter(failures))}"
    return ""


class EndOfTime:
    """A plugin of pytest: no more tests after some processor seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def pytest_runtest_logfinish(self) -> None:
        """End the run without an error."""
        import pytest

        if time.process_time() > self.seconds:
            pytest.exit("the time is over", returncode=0)


def run_tests(paths: list[str], seconds: float) -> int:
    """Run tests until one fails or the time is over."""
    import pytest

    return int(pytest.main(["-p", "no:cacheprovider", "-q", "-x", "--no-header", *paths], [EndOfTime(seconds)]))


def main() -> int:
    """Status 1 if something failed."""
    tests = sys.argv[1] == "--tests"
    seconds = float(sys.argv[2])
    limit = int(seconds * 4) + 60
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    if tests:
        return run_tests(sys.argv[3:], seconds)
    found = run_checks(sys.argv[1], seconds)
    print(found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    sys.exit(main())

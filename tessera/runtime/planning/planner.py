"""Schedule planner: enumerates the schedules of a function for a target, refuses those that exceed the target's
resource model before anything is emitted, and ranks the others by a cost model.

A schedule is a choice of fields of the target's lowering plan (`Capabilities.plan_choices`). Every field is varied
alone, and the fields of a group that matter to the function then in pairs. Two choices that lower to the same Tile
module are one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tessera.codegen.contract import get_backend
from tessera.codegen.legality import check_resources
from tessera.codegen.llvm.runtime.thread_pool import choose_thread_count
from tessera.core.device import INTERP
from tessera.core.errors import ResourceError, TesseraError
from tessera.core.progress import operation, report_progress
from tessera.ir.core import Function, Module, structural_hash
from tessera.lower.lowering_plan import LoweringPlan
from tessera.runtime import driver
from tessera.runtime.planning.cost import MachineModel, estimate_seconds

# By target: a GPU of the newest architecture from its data sheet; a processor with vectors of 512 bits for each thread.
GPU_MODEL = MachineModel("H200", 67e12, 989e12, 4.8e12, 132, 100e9, 50e-9, 4e-6)
PROCESSOR_RATES = {"flops": 50e9, "bandwidth": 12e9, "cache": 60e9}  # of one thread


@dataclass(frozen=True)
class ScheduleCandidate:
    """A schedule of a function: the fields of the plan that it changes, and the seconds that the model predicts.

    `refused` says why the target cannot run it; "" where it can. `tile` is the module that would be emitted, `group`
    the number of the fields' group.
    """

    choice: Mapping[str, Any]
    tile: Module | None = field(repr=False, default=None)
    seconds: float = float("inf")
    refused: str = ""
    group: int = -1


def find_machine_model(target: str) -> MachineModel:
    """The machine that the cost model assumes for a target: fixed rates, so that a ranking is the same everywhere."""
    if get_backend(target).capabilities.lockstep > 1:
        return GPU_MODEL
    threads = choose_thread_count()
    flops, bandwidth = PROCESSOR_RATES["flops"] * threads, PROCESSOR_RATES["bandwidth"] * threads
    return MachineModel("processor", flops, 2 * flops, bandwidth, threads, PROCESSOR_RATES["cache"], 20e-9, 1e-6)


def list_schedules(function: Function, target: str) -> list[ScheduleCandidate]:
    """The distinct schedules of a Graph function for a target: the compiler's own first, the others by rank.

    Those that the target refuses come last. A target without choices, and the interpreter, have one schedule.
    """
    search = _ScheduleSearch(function, target)
    with operation(f"planning {function.name}"):
        own, *others = search.run()
    others.sort(key=lambda c: (bool(c.refused), c.seconds))
    return [own, *others]


class _ScheduleSearch:
    """One enumeration: what was lowered so far, by the hash of the Tile module."""

    def __init__(self, function: Function, target: str) -> None:
        self.function, self.target = function, target
        self.groups = () if target == INTERP else get_backend(target).capabilities.plan_choices
        self.machine = None if target == INTERP else find_machine_model(target)
        self.seen: set[str] = set()
        self.found: list[ScheduleCandidate] = []

    def run(self) -> list[ScheduleCandidate]:
        """Every distinct candidate, the compiler's own first."""
        self.add({})
        for number, choices in enumerate(self.groups):
            report_progress(f"planning {self.function.name}", number, len(self.groups))
            relevant = [n for n, values in choices.items() if any([self.add({n: v}, number) for v in values])]
            for pair in _list_pairs(relevant, choices):
                self.add(pair, number)
        return self.found

    def add(self, choice: Mapping[str, Any], group: int = -1) -> bool:
        """Add a candidate; False where it is one that was seen."""
        plan = driver.find_plan(self.target, choice)
        try:
            module = driver.lower(self.function, self.target, choice)["tile"]
        except TesseraError as error:
            if not choice:
                raise
            self.found.append(ScheduleCandidate(choice, refused=error.message, group=group))
            return True
        key = structural_hash(module)
        if key in self.seen:
            return False
        self.seen.add(key)
        refused = find_refusal(module, self.target, plan)
        seconds = estimate_seconds(module, self.machine) if self.machine and not refused else float("inf")
        self.found.append(ScheduleCandidate(choice, module, seconds, refused, group))
        return True


def _list_pairs(names: Sequence[str], choices: Mapping[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    for a, b in itertools.combinations(names, 2):
        for x, y in itertools.product(choices[a], choices[b]):
            yield {a: x, b: y}


def find_refusal(module: Module, target: str, plan: LoweringPlan) -> str:
    """Why the target's own resource model refuses a Tile module; "" where it does not."""
    if target == INTERP:
        return ""
    try:
        check_resources(module, target, get_backend(target).capabilities)
    except ResourceError as error:
        return error.message
    refused = sorted(plan.find_refused(module)) if plan.find_refused is not None else []
    return f"{refused[0]} needs more shared memory or registers than the target has" if refused else ""


def spread_over_groups(candidates: Sequence[ScheduleCandidate], keep: int) -> list[ScheduleCandidate]:
    """The first `keep` of ranked candidates, from all groups in round-robin order: ranks between groups may err."""
    groups: dict[int, list[ScheduleCandidate]] = {}
    for each in candidates:
        groups.setdefault(each.group, []).append(each)
    rounds = itertools.zip_longest(*groups.values())
    return [c for each in rounds for c in each if c is not None][:keep]

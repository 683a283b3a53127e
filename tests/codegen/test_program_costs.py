"""Programs of the suite cost on each target what scripts/record_costs.py recorded: launches, memory and instructions.
Their error bounds allow what they did, and programs of many sizes are lowered to what they were.

A pass that no longer does its work, or another choice of a schedule, keeps all results and is found here.
"""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import record_costs  # noqa: E402
import sized_programs  # noqa: E402

RECORDED = json.loads(record_costs.RECORD.read_text())


@pytest.mark.parametrize("kind", sized_programs.SIZED_TARGETS)
@pytest.mark.parametrize("name", sized_programs.PROGRAMS)
def test_programs_of_many_sizes_are_lowered_to_what_was_recorded(name, kind):
    recorded = {n: c for n, c in RECORDED.items() if n.startswith(f"sized/{name}/") and n.endswith(f" {kind}")}
    assert dict(sized_programs.list_choices(name, kind)) == recorded, "run scripts/record_costs.py if this is meant"


@pytest.mark.parametrize("target", [*record_costs.TARGETS, "bounds"])
def test_costs_are_those_that_were_recorded(target):
    found = dict(record_costs.list_costs((target,)))
    changed = {n: (RECORDED.get(n, "-"), c) for n, c in found.items() if RECORDED.get(n, "-") != c}
    assert not changed, f"run python scripts/record_costs.py if this is meant: {changed}"
    assert found.keys() == {n for n in RECORDED if n.endswith(f" {target}")}


def test_every_kind_of_cost_is_recorded():
    found = {(name.rpartition(" ")[2], kind) for name, counts in RECORDED.items() for kind in counts or ()}
    assert {kind for target, kind in found if target == "ptx"} == {
        *record_costs.KINDS,
        "launches",
        "lines",
        "resident",
        "shared",
        "threads",
        "workspace",
    }
    assert {kind for target, kind in found if target == "csl"} >= {"branches", "lines", "memory", "products", "waits"}

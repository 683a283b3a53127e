"""What docs/interpreter-users.md and the memory model name exists."""

import re
from pathlib import Path

from conformance.case import all_cases
from tessera.interp.sanitizer.report import FINDING_KINDS

ROOT = Path(__file__).parents[3]
USERS = (ROOT / "docs" / "interpreter-users.md").read_text()
CASES = {c.name: c for c in all_cases()}


def test_every_test_named_is_there():
    named = re.findall(r"(users|tests/[\w/]+\.py)::(test_\w+)", USERS)
    assert len(named) >= 20
    for file, name in named:
        path = "tests/tools/debug/test_interpreter_users.py" if file == "users" else file
        assert f"def {name}(" in (ROOT / path).read_text(), f"{path} has no {name}"


def test_every_case_named_is_there():
    named = re.findall(r"\b(?:tile|graph)/\w+/[\w-]+", USERS)
    assert named and not set(named) - set(CASES)


def test_all_complaints_are_there():
    assert re.findall(r"^\| (\d+) \|", USERS, re.MULTILINE) == [str(n) for n in range(1, 28)]


def test_each_rule_has_a_kernel_that_breaks_it_and_its_repair():
    rules = re.findall(r"^- \*\*(M\d+)\*\*", (ROOT / "docs" / "semantics" / "tile.md").read_text(), re.MULTILINE)
    assert rules == [f"M{n}" for n in range(1, 16)] and {r for r, _ in FINDING_KINDS.values() if r} <= set(rules)
    for rule in set(rules) - {"M15"}:  # streams are the host's: tests/frontend/kernel/test_streams.py
        found = [c for n, c in CASES.items() if n.startswith(f"tile/debug/{rule}-")]
        assert {c.rejects is None for c in found} == {True, False}, rule

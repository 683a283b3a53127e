"""Imports point one way (design 7), and no folder below knows a target."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "tessera"
# What each folder may never import.
FORBIDDEN = {
    "ir": ("codegen", "lower", "interp", "kernel", "driver", "cli"),
    "ops": ("codegen", "lower", "interp", "kernel", "driver", "cli"),
    "shapes": ("ir", "ops", "codegen", "lower", "interp", "kernel", "driver", "cli"),
    "passes": ("codegen", "driver", "cli"),
    "lower": ("codegen", "driver", "cli"),
    "interp": ("codegen", "lower.to_schedule", "lower.to_tile", "driver", "cli"),
    "codegen": ("driver", "cli"),
}


def imports(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{a.name}" for a in node.names)
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_one_way(folder):
    broken = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in (ROOT / folder).rglob("*.py")
        for name in imports(file)
        for bad in FORBIDDEN[folder]
        if name == f"tessera.{bad}" or name.startswith(f"tessera.{bad}.")
    ]
    assert not broken


def test_target_interpreters_know_nothing_of_the_compiler():
    for file in (ROOT / "interp" / "target").rglob("*.py"):
        for name in imports(file):
            below = ("tessera.core.errors", "tessera.interp.target")
            assert not name.startswith("tessera") or name.startswith(below), f"{file} imports {name}"

"""What the manifest of a compiled program says, whatever its target (design 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tessera.codegen.artifact import sha256
from tessera.ir.core import Module, structural_hash

FIELDS = ("name", "shape", "dtype")
Parameters = Sequence[Mapping[str, Any]]


def manifest(
    target: str, module: Module, plan: Mapping[str, Any], text: str, sides: tuple[Parameters, Parameters],
    options: Mapping[str, Any], schedule: Any = None, tools: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """The manifest of a Tile module compiled to `text`: `sides` are its inputs and outputs, `tools` other packages."""
    inputs, outputs = ([{k: p[k] for k in FIELDS} for p in side] for side in sides)
    return {
        "kind": "program",
        "target": target,
        "signature": {"inputs": inputs, "outputs": outputs},
        "plan": plan,
        "hashes": {"module": structural_hash(module), "text": sha256(text)},
        "schedule": schedule,
        "options": dict(options),
        "tools": {package: _version(package) for package in ("tessera", "numpy", *tools)},
    }


def sides_of(plan: Mapping[str, Any]) -> tuple[Parameters, Parameters]:
    """The inputs and the outputs of a launch plan (codegen/launch.py)."""
    params = plan["params"]
    return [p for p in params if p["role"] != "output"], [p for p in params if p["role"] == "output"]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"

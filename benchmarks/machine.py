"""What a figure depends on: the machine, and the versions of what was measured."""

from __future__ import annotations

import json
import os
import platform
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("numpy", "ml_dtypes", "llvmlite", "tessera")


def describe() -> dict[str, Any]:
    """The processor, its cores, and the versions of packages."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return {"processor": processor(), "cores": os.cpu_count(), "versions": versions, "date": date.today().isoformat()}


def processor() -> str:
    """The processor's name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def kept(name: str) -> dict[str, Any]:
    """The results of results/NAME.json, if there are any."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["results"] if path.exists() else {}


def keep(name: str, results: Any) -> Path:
    """Write results/NAME.json with the machine beside the figures."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": describe(), "results": results}, indent=1) + "\n")
    return path

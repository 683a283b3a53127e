"""The check that PTX text assembles (where ptxas is installed) and, interpreted, does what the Tile level says."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tilekernels import Kernel

from tessera.codegen.artifact import Artifact
from tessera.codegen.ptx import BACKEND
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE
from tessera.interp.tile import interpreter
from tessera.ir.core import Module

ARCHITECTURES = ("sm_80", "sm_90a")
PTXAS = shutil.which("ptxas")


@functools.cache
def assembled(text: str, arch: str) -> str:
    """What ptxas says of a text: nothing, if it takes it (or is not installed)."""
    if PTXAS is None:
        return ""
    command = [PTXAS, f"-arch={arch}", "-O1", "-o", "/dev/null", "/dev/stdin"]
    done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
    return done.stderr + done.stdout if done.returncode else ""


def emitted(module: Module, arch: str = "sm_80") -> Artifact:
    """An artifact whose text assembles."""
    artifact = BACKEND.emit(module, {"arch": arch})
    assert assembled(artifact.text(TEXT_FILE), arch) == ""
    return artifact


def both(module: Module, arrays: Sequence[np.ndarray], arch: str = "sm_80") -> list[tuple[np.ndarray, np.ndarray]]:
    """Each array after the program ran in place: as PTX, and by the Tile interpreter."""
    ours, theirs = [a.copy() for a in arrays], [a.copy() for a in arrays]
    BACKEND.interpreter(emitted(module, arch))(ours)
    interpreter.run(module, theirs)
    return list(zip(ours, theirs, strict=True))


def run(
    build: Callable[..., Any],
    *arrays: np.ndarray,
    grid: Sequence[int] = (1,),
    group: int = 1,
    arch: str = "sm_80",
    rtol: float = 0.0,
) -> None:
    """Build a kernel over arrays and check that both give the same: to the last bit unless a tolerance is given."""
    k = Kernel(*arrays, group=group)
    build(k, *k.params)
    for ours, theirs in both(k.module(grid), arrays, arch):
        kind = np.float64 if ours.dtype.kind not in "iub" else ours.dtype
        np.testing.assert_allclose(ours.astype(kind), theirs.astype(kind), rtol, rtol)


def numbers(dtype: Any, *shape: int, seed: int = 0) -> np.ndarray:
    """Random elements of a type."""
    values = np.random.default_rng(seed).standard_normal(shape) * 3
    return (values > 0) if dtype.kind == "bool" else (values * (1 if dtype.is_float else 9)).astype(dtype.numpy)

"""Checks of PTX text: it assembles (where ptxas is installed), and its interpretation agrees with the Tile level."""

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
def assemble(text: str, arch: str) -> str:
    """The errors of ptxas for a text; "" if there are none, or ptxas is not installed."""
    if PTXAS is None:
        return ""
    command = [PTXAS, f"-arch={arch}", "-O1", "-o", "/dev/null", "/dev/stdin"]
    done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
    return done.stderr + done.stdout if done.returncode else ""


def emit_checked(module: Module, arch: str = "sm_80") -> Artifact:
    """The artifact of a module; its text must assemble."""
    artifact = BACKEND.emit(module, {"arch": arch})
    assert assemble(artifact.text(TEXT_FILE), arch) == ""
    return artifact


def run_both(module: Module, arrays: Sequence[np.ndarray], arch: str = "sm_80") -> list[tuple[np.ndarray, np.ndarray]]:
    """Run a program in place as PTX and by the Tile interpreter; each array after both runs."""
    ours, theirs = [a.copy() for a in arrays], [a.copy() for a in arrays]
    BACKEND.interpreter(emit_checked(module, arch))(ours)
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
    """Build a kernel over arrays and check that both runs agree: bit by bit unless a tolerance is given."""
    k = Kernel(*arrays, group=group)
    build(k, *k.params)
    for ours, theirs in run_both(k.module(grid), arrays, arch):
        kind = np.float64 if ours.dtype.kind not in "iub" else ours.dtype
        np.testing.assert_allclose(ours.astype(kind), theirs.astype(kind), rtol, rtol)


def numbers(dtype: Any, *shape: int, seed: int = 0) -> np.ndarray:
    """Random elements of a type."""
    values = np.random.default_rng(seed).standard_normal(shape) * 3
    if dtype.kind == "bool":
        return values > 0
    # By way of int64: ml_dtypes leaves floats beyond a narrow integer type undefined, integers wrap.
    return (values if dtype.is_float else (values * 9).astype(np.int64)).astype(dtype.numpy)

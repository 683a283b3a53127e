"""Running an artifact's text in the LLVM interpreter: the same launch plan, and no compiler."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tessera.codegen.artifact import Artifact
from tessera.codegen.llvm.arguments import Arguments
from tessera.interp.target.llvm import Lanes, Module

TEXT = "kernels.ll"
# Programs run side by side as long as their scratch memory fits in this.
ROOM = 1 << 26


def interpreter(artifact: Artifact) -> Callable[[Sequence[Any]], list[np.ndarray]]:
    """A function from arrays to outputs; arrays that the program writes are written."""
    plan, text = artifact.manifest["plan"], artifact.text(TEXT)
    arguments = Arguments(plan)
    wrappers = [_wrapper(text, kernel, scratch) for kernel, scratch in plan["scratch"].items()]
    module = Module("\n".join([text, *wrappers]), TEXT)

    def run(arrays: Sequence[Any]) -> list[np.ndarray]:
        users, held = arguments.bind(arrays)
        workspace = np.zeros(plan["workspace"], np.uint8)
        for each in plan["launches"]:
            _launch(module, each, plan["scratch"][each["kernel"]], held, workspace)
        return arguments.finish(users, held)

    return run


def _launch(
    module: Module, launch: Mapping[str, Any], scratch: int, held: list[np.ndarray], workspace: np.ndarray
) -> None:
    """Every program of a launch, as lanes of one call or of several."""
    args = [_argument(a, held, workspace) for a in launch["args"]]
    total = math.prod(launch["grid"])
    most = max(1, ROOM // max(scratch, 1))
    for first in range(0, total, most):
        count = min(most, total - first)
        numbers = Lanes(np.arange(first, first + count, dtype=np.int64))
        places = Lanes(np.arange(count, dtype=np.int64) * scratch)
        arena = np.zeros(max(1, count * scratch), np.uint8)
        module.call(f"{launch['kernel']}.lane", [*args, numbers, places, *launch["grid"], arena], count)


def _argument(arg: Mapping[str, Any], held: list[np.ndarray], workspace: np.ndarray) -> Any:
    if "param" not in arg:
        return workspace[arg["offset"] : arg["offset"] + arg["bytes"]]
    return held[arg["param"]]


def _wrapper(text: str, kernel: str, scratch: int) -> str:
    """A function that runs one program in its own part of the scratch memory."""
    found = re.search(rf"^define void @{re.escape(kernel)}\.range\((.*?)i64 %begin", text, re.MULTILINE)
    assert found is not None, f"the text lacks @{kernel}.range"
    params = found[1].replace(" noalias", "")
    grid = "i64 %grid0, i64 %grid1, i64 %grid2"
    return f"""
define void @{kernel}.lane({params}i64 %n, i64 %place, {grid}, ptr %scratch) {{
  %next = add i64 %n, 1
  %own = getelementptr i8, ptr %scratch, i64 %place
  call void @{kernel}.range({params}i64 %n, i64 %next, {grid}, ptr %own)
  ret void
}}"""

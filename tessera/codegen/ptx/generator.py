"""The PTX generator: Tile modules to PTX text, run on a GPU or in the PTX interpreter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from tessera.codegen.artifact import Artifact
from tessera.codegen.backend import Capabilities
from tessera.codegen.element_types import check_element_types
from tessera.codegen.manifest import manifest, sides_of
from tessera.codegen.ptx.host.gpu import gpu
from tessera.codegen.ptx.host.interpret import TEXT, interpreter
from tessera.codegen.ptx.host.runtime import Interpreted, Program, runtime, where
from tessera.codegen.ptx.module import VERSION, emit_module
from tessera.codegen.ptx.types import WORD
from tessera.codegen.resources import check_resources
from tessera.device import gpu_count
from tessera.errors import ArgumentError
from tessera.ir.core import Module
from tessera.lower.plan import Plan

# Blocks of products as warp groups take them; rows of reductions in registers; as many programs as keep a GPU busy.
PLAN = Plan(
    m=128, n=256, busy_n=128, k=64, whole_k=64, multiple=128, rows=4096, row_limit=32768, pointwise=1024, lanes=32,
    programs=96, flash_m=64, flash_n=64, flash_deep=128,
)  # fmt: skip
OPTIONS = ("arch", "debug", "schedule")
MEETING = 132 * 32  # groups that the largest GPU so far runs at once, if they are small: it says how many when loaded
BLOCK_BYTES = 1 << 20  # of blocks alive at once in a team's registers: more is a slip in a size


class PTX:
    """The generator for NVIDIA GPUs."""

    name = "ptx"

    @cached_property
    def capabilities(self) -> Capabilities:
        """What a GPU of compute capability 8.0 or more can do."""
        return Capabilities(16, tuple(WORD), block_bytes=BLOCK_BYTES, meeting=MEETING, plan=PLAN)

    def emit(self, module: Module, options: Mapping[str, Any]) -> Artifact:
        """The PTX text of a Tile module.

        Options: `arch` ("sm_80" or "sm_90a"; by default sm_90a where the GPU is one, else sm_80) and `debug`
        (default true: lines name their source).
        """
        unknown = [k for k in options if k not in OPTIONS]
        if unknown:
            raise ArgumentError(f"the target ptx has no option {unknown[0]}", expected=", ".join(OPTIONS))
        arch = str(options.get("arch") or default_arch())
        if arch not in VERSION:
            raise ArgumentError(f"the target ptx has no architecture {arch}", expected=", ".join(VERSION))
        check_element_types(module, self.name, self.capabilities.dtypes)
        check_resources(module, self.name, self.capabilities)
        emission = emit_module(module, arch, bool(options.get("debug", True)))
        described = manifest(
            self.name, module, emission.plan, emission.text, sides_of(emission.plan), {"arch": arch},
            options.get("schedule"),
        )  # fmt: skip
        return Artifact(described, {TEXT: emission.text})

    def runtime(self, artifact: Artifact) -> Interpreted | Program:
        """The artifact on this machine's GPU, or where there is none by the PTX interpreter."""
        return runtime(artifact)

    @property
    def has_device(self) -> bool:
        """Whether this machine has a GPU."""
        return gpu_count() > 0

    def where(self) -> str:
        """What `runtime` runs on: a GPU by name, or the interpreter."""
        return where()

    def interpreter(self, artifact: Artifact) -> Callable[[Sequence[Any]], list[np.ndarray]]:
        """What runs the artifact's text in the PTX interpreter."""
        return interpreter(artifact)


def default_arch() -> str:
    """The architecture of this machine's GPU, or the oldest there is text for."""
    return "sm_90a" if gpu_count() and gpu().capability == (9, 0) else "sm_80"

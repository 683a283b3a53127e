"""The LLVM generator: Tile modules to LLVM IR, run through llvmlite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

import tessera.codegen.llvm.text.module_emitter  # noqa: F401
from tessera.codegen.artifact import Artifact, build_manifest, split_parameters
from tessera.codegen.contract import Capabilities, CompilerPass, run_passes
from tessera.codegen.coverage import OpCoverage
from tessera.codegen.grouped.vectoriser import LEVEL, vectorise, vectorise_groups
from tessera.codegen.legality import check_element_types, check_resources
from tessera.codegen.llvm.runtime.jit import get_host_vector_bytes
from tessera.codegen.llvm.runtime.program import TEXT_FILE, LlvmProgram, seal_plan
from tessera.codegen.llvm.table import REFUSED
from tessera.codegen.llvm.table.emission import pointwise_row, statement_rule
from tessera.codegen.llvm.table.loop_fusion import element_rule
from tessera.codegen.llvm.table.program_ops import MAX_BARRIER_PROGRAMS
from tessera.codegen.llvm.text.module_emitter import LlvmOptions, emit_module
from tessera.codegen.llvm.text.types import REGISTER_ELEMENTS
from tessera.core.errors import ArgumentError
from tessera.ir.core import Module
from tessera.lower.lowering_plan import LoweringPlan

# More query rows than the default: each packed key block is used by twice as many products.
TILING_PLAN = LoweringPlan(flash_m=64, host_sort=64)
OPTION_NAMES = ("vector_bytes", "debug", "schedule")
# Blocks and shared buffers are in an arena of each thread; a larger one is probably a mistake in a size.
MAX_ARENA_BYTES = 1 << 30


class LlvmBackend:
    """The generator for the host's processor."""

    name = "llvm"
    coverage = OpCoverage((pointwise_row, element_rule, statement_rule), REFUSED, (vectorise,))

    @cached_property
    def capabilities(self) -> Capabilities:
        """The capabilities of the host's processor."""
        return Capabilities(
            get_host_vector_bytes(),
            tuple(REGISTER_ELEMENTS),
            shared_bytes=MAX_ARENA_BYTES,
            block_bytes=MAX_ARENA_BYTES,
            meeting=MAX_BARRIER_PROGRAMS,
            plan=TILING_PLAN,
        )

    def emit(self, module: Module, options: Mapping[str, Any]) -> Artifact:
        """The LLVM text of a Tile module.

        Options: `vector_bytes` (default: the host's), `debug` (default true: lines have debug locations).
        """
        unknown = [k for k in options if k not in OPTION_NAMES]
        if unknown:
            raise ArgumentError(f"the target llvm has no option {unknown[0]}", expected=", ".join(OPTION_NAMES))
        if module.level != LEVEL:
            check_element_types(module, self.name, self.capabilities.dtypes)
            check_resources(module, self.name, self.capabilities)
        vector = int(options.get("vector_bytes", self.capabilities.vector_bytes))
        ready = run_passes(self.passes(module, options), module)
        emission = emit_module(ready, LlvmOptions(vector, bool(options.get("debug", True))))
        text = seal_plan(emission.text, emission.plan)
        described = build_manifest(
            self.name, module, emission.plan, text, split_parameters(emission.plan), {"vector_bytes": vector},
            options.get("schedule"), ("llvmlite",),
        )  # fmt: skip
        return Artifact(described, {TEXT_FILE: text})

    def passes(self, module: Module, options: Mapping[str, Any]) -> tuple[CompilerPass, ...]:
        """The only rewrite of a Tile module: fusion and bufferisation are analyses, which emission reads."""
        return () if module.level == LEVEL else (CompilerPass("group vectorisation", vectorise_groups),)

    def runtime(self, artifact: Artifact, threads: int | None = None) -> LlvmProgram:
        """The artifact compiled for this processor."""
        return LlvmProgram(artifact, threads)

    def interpreter(self, artifact: Artifact) -> Callable[[Sequence[Any]], list[np.ndarray]]:
        """The artifact's text run in the LLVM emulator, without a compiler."""
        from tessera.codegen.llvm.runtime.emulation import make_emulator  # loads the emulator: a build needs none

        return make_emulator(artifact)

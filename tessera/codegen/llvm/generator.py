"""The LLVM generator: Tile modules to LLVM text, run through llvmlite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from tessera.codegen.artifact import Artifact
from tessera.codegen.backend import Capabilities
from tessera.codegen.element_types import check_element_types
from tessera.codegen.llvm.function import Options
from tessera.codegen.llvm.interpret import interpreter
from tessera.codegen.llvm.jit import host_vector_bytes
from tessera.codegen.llvm.meeting import MOST
from tessera.codegen.llvm.module import emit_module
from tessera.codegen.llvm.runtime import TEXT, Program
from tessera.codegen.llvm.types import REGISTER
from tessera.codegen.manifest import manifest, sides_of
from tessera.codegen.resources import check_resources
from tessera.errors import ArgumentError
from tessera.ir.core import Module
from tessera.lower.plan import Plan

# More rows of a query block than the default: each packing of the keys then serves twice as many products.
PLAN = Plan(flash_m=64, host_sort=64)
OPTIONS = ("vector_bytes", "debug", "schedule")
# Blocks and shared buffers lie in an arena that each thread holds; more than this is a slip in a size.
ARENA = 1 << 30


class LLVM:
    """The generator for this machine's processor."""

    name = "llvm"

    @cached_property
    def capabilities(self) -> Capabilities:
        """What the processor at hand can do."""
        return Capabilities(
            host_vector_bytes(), tuple(REGISTER), shared_bytes=ARENA, block_bytes=ARENA, meeting=MOST, plan=PLAN
        )

    def emit(self, module: Module, options: Mapping[str, Any]) -> Artifact:
        """The LLVM text of a Tile module.

        Options: `vector_bytes` (default: the host's), `debug` (default true: lines name their source).
        """
        unknown = [k for k in options if k not in OPTIONS]
        if unknown:
            raise ArgumentError(f"the target llvm has no option {unknown[0]}", expected=", ".join(OPTIONS))
        check_element_types(module, self.name, self.capabilities.dtypes)
        check_resources(module, self.name, self.capabilities)
        vector = int(options.get("vector_bytes", self.capabilities.vector_bytes))
        emission = emit_module(module, Options(vector, bool(options.get("debug", True))))
        described = manifest(
            self.name, module, emission.plan, emission.text, sides_of(emission.plan), {"vector_bytes": vector},
            options.get("schedule"), ("llvmlite",),
        )  # fmt: skip
        return Artifact(described, {TEXT: emission.text})

    def runtime(self, artifact: Artifact, threads: int | None = None) -> Program:
        """The artifact compiled for this processor."""
        return Program(artifact, threads)

    def interpreter(self, artifact: Artifact) -> Callable[[Sequence[Any]], list[np.ndarray]]:
        """What runs the artifact's text in the LLVM interpreter, with no compiler."""
        return interpreter(artifact)

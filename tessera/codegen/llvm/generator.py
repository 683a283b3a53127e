"""The LLVM generator's compiler: Tile modules to LLVM IR with a host plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tessera.codegen.llvm.text.module_emitter  # noqa: F401
from tessera.codegen.artifact import Artifact, build_manifest, split_parameters
from tessera.codegen.contract import Capabilities, CompilerPass, run_passes
from tessera.codegen.coverage import OpCoverage
from tessera.codegen.grouped.vectoriser import LEVEL, vectorise, vectorise_groups
from tessera.codegen.legality import check_element_types, check_resources
from tessera.codegen.llvm.passes.reshape_propagation import propagate_reshapes
from tessera.codegen.llvm.runtime.jit import has_pair_products
from tessera.codegen.llvm.runtime.program import TEXT_FILE, seal_plan
from tessera.codegen.llvm.table import REFUSED
from tessera.codegen.llvm.table.emission import pointwise_row, statement_rule
from tessera.codegen.llvm.table.loop_fusion import element_rule
from tessera.codegen.llvm.text.module_emitter import LlvmOptions, emit_module
from tessera.core.errors import ArgumentError
from tessera.ir.core import Module

OPTION_NAMES = ("vector_bytes", "pair_products", "debug", "schedule")
COVERAGE = OpCoverage((pointwise_row, element_rule, statement_rule), REFUSED, (vectorise,))


def emit(name: str, capabilities: Capabilities, module: Module, options: Mapping[str, Any]) -> Artifact:
    """The LLVM text of a Tile module: see `LlvmBackend.emit`."""
    unknown = [k for k in options if k not in OPTION_NAMES]
    if unknown:
        raise ArgumentError(f"the target llvm has no option {unknown[0]}", expected=", ".join(OPTION_NAMES))
    if module.level != LEVEL:
        check_element_types(module, name, capabilities.dtypes)
        check_resources(module, name, capabilities)
    vector = int(options.get("vector_bytes", capabilities.vector_bytes))
    ready = run_passes(list_passes(module), module)
    pairs = bool(options.get("pair_products", vector == capabilities.vector_bytes and has_pair_products()))
    emission = emit_module(ready, LlvmOptions(vector, bool(options.get("debug", True)), pairs))
    text = seal_plan(emission.text, emission.plan)
    described = build_manifest(
        name, module, emission.plan, text, split_parameters(emission.plan),
        {"vector_bytes": vector, "pair_products": pairs},
        options.get("schedule"), ("llvmlite",),
    )  # fmt: skip
    return Artifact(described, {TEXT_FILE: text})


def list_passes(module: Module) -> tuple[CompilerPass, ...]:
    """The rewrites of a Tile module: fusion and bufferisation are analyses, which emission reads."""
    if module.level == LEVEL:
        return ()
    return (
        CompilerPass("reshape propagation", propagate_reshapes),
        CompilerPass("group vectorisation", vectorise_groups),
    )

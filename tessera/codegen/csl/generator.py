"""CSL generator: compiles programs on a grid of processing elements (PEs) to CSL, and runs them in the simulator."""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.codegen.artifact import Artifact, build_manifest
from tessera.codegen.contract import Capabilities, CompilerPass, Runtime, run_passes
from tessera.codegen.coverage import OpCoverage
from tessera.codegen.csl.kernel_launch import emit_kernel, is_kernel, make_kernel_plan, ungroup_kernels
from tessera.codegen.csl.runtime import host_script
from tessera.codegen.csl.table import argreduce, broadcast_routes, collectives, control_flow, matmul, slices
from tessera.codegen.csl.table.blocks import emit, emit_block
from tessera.codegen.csl.table.refusals import REFUSED
from tessera.codegen.csl.table.scalars import pointwise_rows
from tessera.codegen.csl.text import program_files
from tessera.codegen.csl.text.context import CslContext
from tessera.codegen.csl.text.dsd import CSL_TYPES, TYPE_BYTES
from tessera.codegen.csl.text.statements import add_line
from tessera.codegen.grouped.vectoriser import LEVEL, vectorise
from tessera.codegen.legality import check_element_types
from tessera.core.errors import ArgumentError, UnsupportedOpError
from tessera.core.types import RefType, bf16, f16
from tessera.ir.core import Function, Module, Value
from tessera.ir.printer import print_module
from tessera.lower.lowering_plan import LoweringPlan
from tessera.lower.mesh.sharding import CANNON, SUMMA

assert (
    argreduce and collectives and control_flow and matmul and broadcast_routes and slices
)  # these imports register their rows

ARCHITECTURES = ("wse2", "wse3")
OPTIONS = ("arch", "schedule", "optimize", "comments", "debug", "address")
DEFAULT_GRID = (2, 2)
MAX_GRID = (1172, 762)  # rows and columns of the WSE-3 fabric


@dataclass(frozen=True)
class Csl:
    """The generator for a grid of PEs.

    `configured("4x8")` selects another grid, and `configured("4x4,cannon")` Cannon's algorithm instead of SUMMA.
    """

    grid: tuple[int, int] = DEFAULT_GRID
    product: str = SUMMA
    name: str = "csl"

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the target."""
        return Capabilities(
            4, tuple(CSL_TYPES), plan=LoweringPlan(mesh=self.grid, mesh_product=self.product, flash=False)
        )

    @property
    def coverage(self) -> OpCoverage:
        """The ops that have a row, and those that are refused."""
        return OpCoverage((emit, pointwise_rows), REFUSED, (vectorise,))

    @property
    def has_device(self) -> bool:
        """Whether a device is available. It never is: programs run in the simulator."""
        return False

    def where(self) -> str:
        """The name of what `runtime` runs on."""
        return program_files.SIMULATOR

    def configured(self, options: str) -> Csl:
        """The generator for a grid, "ROWSxCOLUMNS", and a matrix product algorithm, "summa" or "cannon".

        Raises:
            ArgumentError: the options have another form, or the grid is larger than a wafer.
        """
        text_, _, product = options.partition(",")
        sizes = text_.split("x")
        if len(sizes) != 2 or not all(s.isdigit() and 0 < int(s) for s in sizes):
            raise ArgumentError(f'"{options}" is not a grid of PEs', expected="ROWSxCOLUMNS, as in csl:4x4")
        if any(int(s) > most for s, most in zip(sizes, MAX_GRID, strict=True)):
            raise ArgumentError(
                f"the grid {text_} is larger than a wafer", expected="at most {}x{} PEs".format(*MAX_GRID)
            )
        if product not in ("", SUMMA, CANNON):
            raise ArgumentError(f'"{product}" is not a matrix product algorithm', expected=f"{SUMMA} or {CANNON}")
        return Csl((int(sizes[0]), int(sizes[1])), product or SUMMA)

    def emit(self, module: Module, options: Mapping[str, Any]) -> Artifact:
        """The CSL files of a program on a grid of PEs.

        Options: `arch` ("wse2", the default, or "wse3"); `optimize` (default on: fuses chains of pointwise ops into one
        loop and selects the fastest matrix product); `comments` (default on: names the source of each line); `debug`
        (default off: adds "mesh.tess", the program as IR, and "lines.json", the source of each line); `address` of a
        machine, for run.py.

        Raises:
            UnsupportedOpError: an op has no row, or the tiles of a kernel's groups communicate.
            ResourceError: the program exceeds the memory or the queues of a PE.
        """
        arch = str(options.get("arch") or ARCHITECTURES[0])
        unknown = [k for k in options if k not in OPTIONS]
        if unknown or arch not in ARCHITECTURES:
            raise ArgumentError(
                f"the target csl has no {f'option {unknown[0]}' if unknown else f'architecture {arch}'}",
                expected=", ".join(OPTIONS if unknown else ARCHITECTURES),
            )
        check_element_types(module, self.name, self.capabilities.dtypes)
        ready = run_passes(self.passes(module, options), module)
        ctx = self._build_program(ready, arch == ARCHITECTURES[1], bool(options.get("optimize", True)))
        program_files.check_memory(ctx, ready.functions[1].loc)
        program_files.check_channels(ctx, ready.functions[1].loc)
        plan, bfloat = _make_host_plan(ready, ctx), _uses_bfloat(ready.functions[1])
        files = _make_files(ready, ctx, plan, {**options, "arch": arch})
        return Artifact(self._manifest(module, plan, files, arch, bfloat), files)

    def passes(self, module: Module, options: Mapping[str, Any]) -> tuple[CompilerPass, ...]:
        """The only rewrite: pointwise fusion is an analysis, which emission reads."""
        if module.level == LEVEL or not is_kernel(module):
            return ()
        return (CompilerPass("group vectorisation", ungroup_kernels),)

    def _build_program(self, module: Module, is_wse3: bool, fuses: bool) -> CslContext:
        """The emitted program; one that exceeds memory or queues is emitted again in a form that needs less."""
        for uses_routes, saves_memory in itertools.product((True, False), (False, True)):
            ctx = CslContext(self.grid, is_wse3, fuses, saves_memory, uses_routes)
            if is_kernel(module):
                emit_kernel(module, ctx)
            else:
                ctx.grid = tuple(module.functions[1].attrs["mesh"])
                emit_block(ctx, module.functions[1].body)
            add_line(ctx, "sys_mod.unblock_cmd_stream();")
            if program_files.fits_resources(ctx):
                break
        return ctx

    def _manifest(self, module: Module, plan: Any, files: Mapping[str, str], arch: str, bfloat: bool) -> dict[str, Any]:
        return build_manifest(
            self.name, module, plan, "".join(files.values()), (plan["inputs"], plan["outputs"]),
            {"arch": arch, "bfloat": bfloat}, {"mesh": list(plan["grid"])},
        )  # fmt: skip

    def runtime(self, artifact: Artifact) -> Runtime:
        """A runtime that executes the program in the simulator."""
        from tessera.codegen.csl.runtime.simulation import (
            CslSimulation,  # emission does not need the simulator
        )

        return CslSimulation(artifact)

    def interpreter(self, artifact: Artifact) -> Callable[[Sequence[Any]], list[np.ndarray]]:
        """A function that executes the program in the simulator."""
        return self.runtime(artifact).run


def _make_files(module: Module, ctx: CslContext, plan: Any, options: Mapping[str, Any]) -> dict[str, str]:
    """The files of an artifact."""
    name, arch, bfloat = module.main.name, str(options["arch"]), _uses_bfloat(module.functions[1])
    comments = bool(options.get("comments", True))
    program = program_files.format_program(name, ctx)
    files = {
        **program_files.finish_sources(
            {"layout.csl": program_files.format_layout(name, ctx), "pe_program.csl": program}, comments
        ),
        "plan.json": json.dumps(plan, indent=1) + "\n",
        "run.py": inspect.getsource(host_script),
        f"commands_{arch}.sh": program_files.format_commands(arch, ctx.grid, bfloat, str(options.get("address") or "")),
    }
    if options.get("debug"):
        lines = program_files.map_source_lines(program, comments)
        files |= {"mesh.tess": print_module(module), "lines.json": json.dumps(lines, indent=1) + "\n"}
    return files


def _make_host_plan(module: Module, ctx: CslContext) -> dict[str, Any]:
    """The host plan: how each tensor is split into pieces, and the exported symbol of its pieces."""
    outputs, function = int(module.main.attrs.get("outputs", 0)), module.functions[1]
    if is_kernel(module):
        return make_kernel_plan(function, ctx, outputs)
    params = function.params
    entries = {n.args[0]: n for n in function.body.nodes if n.op.name in ("mesh.read", "mesh.write")}
    unread = [p for p in params if p not in entries]
    inputs = [p for p in params[: len(params) - outputs] if p not in unread]
    return {
        "grid": list(ctx.grid),
        "inputs": [_describe_tensor(ctx, p, entries[p]) for p in inputs],
        "outputs": [_describe_tensor(ctx, p, entries[p]) for p in params[len(params) - outputs :]],
        "faults": ctx.faults,
        "given": [i for i, p in enumerate(params[: len(params) - outputs]) if p in inputs],
    }


def _describe_tensor(ctx: CslContext, ref: Value, node: Any) -> dict[str, Any]:
    type = ref.type
    assert isinstance(type, RefType)
    piece = node.attrs["shape"] if node.op.name == "mesh.read" else node.args[1].type.shape
    return {
        "name": ref.hint,
        "symbol": ctx.exported[ref],
        "shape": [int(n) for n in type.shape],
        "dtype": type.dtype.numpy.name,
        "bytes": TYPE_BYTES[ctx.symbols[ref].type],
        "split": list(node.attrs["split"]),
        "piece": [int(n) for n in piece],
    }


def _uses_bfloat(function: Function) -> bool:
    """Whether the 16-bit floats of the program are bf16. A program has one 16-bit float type."""
    float_types = {t.dtype for n in function.body.walk() for t in (*n.types, *n.result_types)} & {f16, bf16}
    if len(float_types) > 1:
        raise UnsupportedOpError(
            "a CSL program has only one 16-bit float type, which cslc's option --fp16-format selects",
            location=function.loc, received="f16 and bf16", suggestion="cast one of them to f32",
        )  # fmt: skip
    return bf16 in float_types

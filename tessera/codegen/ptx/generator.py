"""The PTX generator: a Tile module to PTX text with its launch plan, run on a GPU or in the PTX interpreter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tessera.codegen.artifact import Artifact, build_manifest, split_parameters
from tessera.codegen.contract import Capabilities
from tessera.codegen.host_plan import build_host_plan, find_aliased_kernels
from tessera.codegen.legality import check_element_types, check_resources
from tessera.codegen.ptx.passes.shared_memory_allocator import SHARED_SYMBOL
from tessera.codegen.ptx.pipeline import SHARED_LIMIT, emit_function
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE, make_interpreter
from tessera.codegen.ptx.runtime.gpu import get_gpu
from tessera.codegen.ptx.runtime.gpu_program import EmulatedProgram, GpuProgram, describe_device, make_runtime
from tessera.codegen.ptx.text.builder import SourceFiles
from tessera.codegen.ptx.text.entry import KernelEntry
from tessera.codegen.ptx.text.memref import VECTOR_BYTES
from tessera.codegen.ptx.text.register_types import PTX_TYPES
from tessera.core.device import count_gpus
from tessera.core.errors import ArgumentError, ResourceError
from tessera.ir.core import Function, Module, Node
from tessera.lower.lowering_plan import LoweringPlan
from tessera.ops.dialects import host

# A Tile module as PTX text, and what its entry function does as a launch plan.


ISA_VERSIONS = {"sm_80": (7, 8), "sm_90a": (8, 0)}
MAX_PROGRAMS = (1 << 31) - 1  # of a launch: as many as the first axis of a grid has places


@dataclass(frozen=True)
class EmittedModule:
    """The text of a module and its launch plan."""

    text: str
    plan: dict[str, Any]


def emit_module(module: Module, arch: str, debug: bool) -> EmittedModule:
    """Every tile function that the entry launches.

    Raises:
        UnsupportedOpError: an op has no emission; it names the op, the target and the line.
        ResourceError: a function needs more shared memory than a block has.
    """
    files = SourceFiles() if debug else None
    launches = [n for n in module.main.body.walk() if n.op is host.launch]
    together = find_aliased_kernels(module)
    entries: dict[str, KernelEntry] = {}
    plan = build_host_plan(module, {})
    for function in module.functions[1:]:
        grids = _launch_grids(launches, function)
        aligned = _parameter_alignments(plan, function)
        entry = emit_function(function, files, grids, function.name not in together, aligned, arch)
        _check_shared_bytes(function.name, entry, arch, function.loc)
        entries[function.name] = entry
    plan["entries"] = {name: e.described() for name, e in entries.items()}
    for each, node in zip(plan["launches"], launches, strict=True):
        each["rank"] = len(_launch_grids(launches, module.function(node.attrs["kernel"]))[0])
    return EmittedModule("\n".join(_module_lines(arch, files, list(entries.values()))) + "\n", plan)


def _parameter_alignments(plan: Mapping[str, Any], function: Function) -> list[int]:
    """Of how many bytes each parameter's address is a multiple: less than a vector's where slices begin anywhere."""
    args = [each["args"] for each in plan["launches"] if each["kernel"] == function.name]
    moves = [[n for given in args for _, n in given[i].get("moves", ())] for i in range(len(function.params))]
    return [math.gcd(VECTOR_BYTES, *counts) for counts in moves]


def _module_lines(arch: str, files: SourceFiles | None, entries: Sequence[KernelEntry]) -> list[str]:
    major, minor = max(ISA_VERSIONS[arch], *(entry.isa for entry in entries)) if entries else ISA_VERSIONS[arch]
    head = ["// Tessera: PTX", f".version {major}.{minor}", f".target {arch}", ".address_size 64", ""]
    named = [*files.text(), ""] if files is not None else []
    shared = [f".extern .shared .align 1024 .b8 {SHARED_SYMBOL}[];", ""]
    return [*head, *named, *shared, *(line for entry in entries for line in entry.lines)]


def _check_shared_bytes(name: str, entry: KernelEntry, arch: str, loc: Any) -> None:
    if entry.shared > SHARED_LIMIT[arch]:
        raise ResourceError(
            f"{name} needs {entry.shared:,} bytes of shared memory", location=loc,
            expected=f"at most {SHARED_LIMIT[arch]:,} on {arch}", received=f"{entry.shared:,}",
            suggestion="smaller tiles, or fewer stages",
        )  # fmt: skip


def _launch_grids(launches: Sequence[Node], function: Function) -> list[tuple[int, ...]]:
    """The grids that a function is launched over, all of as many axes: those that one lacks have one program."""
    grids = [_launch_grid(n) for n in launches if n.attrs["kernel"] == function.name]
    rank = max(map(len, grids), default=1)
    return [(*g, *(1,) * (rank - len(g))) for g in grids]


def _launch_grid(node: Node) -> tuple[int, ...]:
    grid = tuple(int(n) for n in node.attrs["grid"])
    if math.prod(grid) > MAX_PROGRAMS:
        raise ResourceError(
            f"a grid of {math.prod(grid):,} programs", location=node.loc, expected=f"at most {MAX_PROGRAMS:,} on a GPU",
            received=f"{math.prod(grid):,}", suggestion="fewer programs that do more each, in a loop",
        )  # fmt: skip
    return grid or (1,)


# The PTX generator: Tile modules to PTX text, run on a GPU or in the PTX interpreter.


# Blocks of products as warp groups take them; rows of reductions in registers; as many programs as keep a GPU busy.
PLAN = LoweringPlan(
    m=128, n=256, busy_n=128, k=64, whole_k=64, multiple=128, rows=4096, row_limit=32768, pointwise=1024, lanes=32,
    programs=96, flash_m=64, flash_n=64, flash_deep=128,
)  # fmt: skip
OPTION_NAMES = ("arch", "debug", "schedule")
MAX_COOPERATIVE_GROUPS = (
    132 * 32
)  # groups that the largest GPU so far runs at once, if they are small: it says how many when loaded
BLOCK_BYTES = 1 << 20  # of blocks alive at once in a team's registers: more is a slip in a size


class PtxGenerator:
    """The generator for NVIDIA GPUs."""

    name = "ptx"

    @cached_property
    def capabilities(self) -> Capabilities:
        """What a GPU of compute capability 8.0 or more can do."""
        return Capabilities(16, tuple(PTX_TYPES), block_bytes=BLOCK_BYTES, meeting=MAX_COOPERATIVE_GROUPS, plan=PLAN)

    def emit(self, module: Module, options: Mapping[str, Any]) -> Artifact:
        """The PTX text of a Tile module.

        Options: `arch` ("sm_80" or "sm_90a"; by default sm_90a where the GPU is one, else sm_80) and `debug`
        (default true: lines name their source).
        """
        unknown = [k for k in options if k not in OPTION_NAMES]
        if unknown:
            raise ArgumentError(f"the target ptx has no option {unknown[0]}", expected=", ".join(OPTION_NAMES))
        arch = str(options.get("arch") or choose_default_arch())
        if arch not in ISA_VERSIONS:
            raise ArgumentError(f"the target ptx has no architecture {arch}", expected=", ".join(ISA_VERSIONS))
        check_element_types(module, self.name, self.capabilities.dtypes)
        check_resources(module, self.name, self.capabilities)
        emission = emit_module(module, arch, bool(options.get("debug", True)))
        described = build_manifest(
            self.name, module, emission.plan, emission.text, split_parameters(emission.plan), {"arch": arch},
            options.get("schedule"),
        )  # fmt: skip
        return Artifact(described, {TEXT_FILE: emission.text})

    def runtime(self, artifact: Artifact) -> EmulatedProgram | GpuProgram:
        """The artifact on this machine's GPU, or where there is none by the PTX interpreter."""
        return make_runtime(artifact)

    @property
    def has_device(self) -> bool:
        """Whether this machine has a GPU."""
        return count_gpus() > 0

    def where(self) -> str:
        """What `runtime` runs on: a GPU by name, or the interpreter."""
        return describe_device()

    def interpreter(self, artifact: Artifact) -> Callable[[Sequence[Any]], list[np.ndarray]]:
        """What runs the artifact's text in the PTX interpreter."""
        return make_interpreter(artifact)


def choose_default_arch() -> str:
    """The architecture of this machine's GPU, or the oldest there is text for."""
    return "sm_90a" if count_gpus() and get_gpu().capability == (9, 0) else "sm_80"

"""The PTX generator: a Tile module to PTX text with its launch plan, run on a GPU or in the PTX emulator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from tessera.codegen.artifact import Artifact, build_manifest, split_parameters
from tessera.codegen.contract import (
    Capabilities,
    CompilerPass,
    check_element_types,
    check_resources,
    measure_resources,
    run_passes,
)
from tessera.codegen.coverage import OpCoverage
from tessera.codegen.host_plan import plan_launches
from tessera.codegen.ptx.context import KernelEntry
from tessera.codegen.ptx.emission import SHARED_LIMIT, analyse_launches, emit_function
from tessera.codegen.ptx.layout import WARP_THREADS
from tessera.codegen.ptx.ops import LEVEL, LaunchFacts
from tessera.codegen.ptx.passes.shared_memory import SHARED_SYMBOL
from tessera.codegen.ptx.pipeline import FUNCTION_PASSES, list_passes
from tessera.codegen.ptx.runtime.device_memory import get_device_memory
from tessera.codegen.ptx.runtime.driver_api import get_gpu
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE, EmulatedProgram, make_emulator
from tessera.codegen.ptx.runtime.gpu_program import GpuProgram, SizedGpuProgram, describe_device, make_runtime
from tessera.codegen.ptx.table import REFUSED, emission_rule
from tessera.codegen.ptx.table.scalars.math_functions import emit
from tessera.codegen.ptx.text.builder import PTX_TYPES, SourceFiles
from tessera.core.device import count_gpus
from tessera.core.device_array import DeviceMemory
from tessera.core.errors import ArgumentError, ResourceError, UnsupportedOpError
from tessera.core.types import TensorType
from tessera.ir.core import Function, Module
from tessera.lower.lowering_plan import LoweringPlan

# The resource model: the kernels of a Tile module that exceed a GPU's shared memory or registers. The lowering asks it
# before it settles tile sizes (`LoweringPlan.find_refused`). A bound settles most kernels; the passes and the emission
# themselves measure the others, for each architecture, since the architecture is chosen after the tiles.

BLOCK_BYTES = 1 << 20  # of blocks live at once in a team's registers: more indicates a wrong size
# Kernels hold one block at a time in the exchange buffer, or both operands of a product with padded rows; pipelining
# leaves room for it. With smaller blocks than this, the kernel has shared memory enough on every architecture.
SAFE_BLOCK_BYTES = min(SHARED_LIMIT.values()) // 2


def find_refused(module: Module) -> frozenset[str]:
    """The names of the tile functions of a Tile module that need more than a GPU of some architecture has."""
    kernels = module.functions[1:]
    refused = {f.name for f in kernels if measure_resources(f).block_bytes > BLOCK_BYTES}
    open_ = [f.name for f in kernels if f.name not in refused and _largest_block_bytes(f) > SAFE_BLOCK_BYTES]
    for arch, limit in SHARED_LIMIT.items() if open_ else ():
        analysed = analyse_launches(module, arch)
        refused |= {name for name in open_ if _measure_shared_bytes(analysed.function(name)) > limit}
    return frozenset(refused)


def _largest_block_bytes(function: Function) -> int:
    """The bytes of the largest block of a tile function."""
    types = [v.type for node in function.body.walk() for v in node.results if isinstance(v.type, TensorType)]
    return max((math.prod(map(int, t.shape)) * max(t.dtype.bits, 8) // 8 for t in types), default=0)


def _measure_shared_bytes(function: Function) -> int:
    """The bytes of shared memory that a block needs; 0 for a function that cannot be emitted for another reason."""
    try:
        for _, rewrite in FUNCTION_PASSES:
            function = rewrite(function)
        return emit_function(function, None).shared
    except UnsupportedOpError:  # the generator raises it, with the target's name
        return 0


# A module that every pass has prepared, as PTX text with its launch plan.


ISA_VERSIONS = {"sm_80": (7, 8), "sm_90a": (8, 0)}


@dataclass(frozen=True)
class PtxModuleText:
    """The text of a module and its launch plan."""

    text: str
    plan: dict[str, Any]


def emit_module(module: Module, arch: str, debug: bool) -> PtxModuleText:
    """The text of a module of the level `ptx`, and how the host launches its functions.

    Raises:
        UnsupportedOpError: an op has no emission; it names the op, the target and the line.
        ResourceError: a function needs more shared memory than a block has.
    """
    files = SourceFiles() if debug else None
    entries: dict[str, KernelEntry] = {}
    for function in module.functions[1:]:
        entry = emit_function(function, files)
        _check_shared_bytes(function.name, entry, arch, function.loc)
        entries[function.name] = entry
    plan = plan_launches(module, {})
    plan["entries"] = {name: e.describe() for name, e in entries.items()}
    for each in plan["launches"]:
        each["rank"] = len(LaunchFacts.of(module.function(each["kernel"])).grid)
    return PtxModuleText("\n".join(_module_lines(arch, files, list(entries.values()))) + "\n", plan)


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


# The PTX generator: Tile modules to PTX text, run on a GPU or in the PTX emulator.


# Blocks of products as warp groups take them; rows of reductions in registers; as many programs as keep a GPU busy.
PLAN = LoweringPlan(
    stack_views=False,
    m=128, n=256, busy_n=128, warpgroup_rows=64, processors=132, wave_blocks=True, k=64, whole_k=63, multiple=128,
    rows=4096, row_limit=32768, row_tile=8192, row_warps=8,
    pointwise=1024, pointwise_bytes=8192, lanes=32, result_lanes=1024, power_of_two_tiles=True, peel=True,
    collapse=True, programs=96,
    flash_m=64, flash_n=64, flash_deep=128, tensor_cores=True, vector_products=1, vector_results=512,
    find_refused=find_refused, parallel=528, shares_rows=True, own_row=4096, table_bytes=216 << 10,
)  # fmt: skip
# What tuning tries in the place of these; the resource model (`find_refused`) judges each before it is emitted.
PLAN_CHOICES: tuple[Mapping[str, tuple[Any, ...]], ...] = (
    {"m": (64, 256), "n": (64, 128), "k": (32, 128)},
    {"rows": (1024, 8192), "lanes": (64,), "parallel": (132, 1056)},
    {"pointwise": (512, 4096)},
    {"vector_products": (0, 8)},
    {"flash_m": (32, 128), "flash_n": (32, 128)},
)
OPTION_NAMES = ("arch", "debug", "schedule")
MAX_COOPERATIVE_GROUPS = (
    132 * 32
)  # groups that the largest GPU so far runs at once, if they are small: it says how many when loaded


@dataclass(frozen=True)
class ArchitecturePlan:
    """The plan for an architecture; for the one of this machine, its driver is asked when something is lowered."""

    arch: str

    def __call__(self) -> LoweringPlan:
        return PLAN if (self.arch or choose_default_arch()) == "sm_90a" else replace(PLAN, wave_blocks=False)


@dataclass(frozen=True)
class PtxGenerator:
    """The generator for NVIDIA GPUs; `configured("sm_90a")` emits for this architecture whatever the machine has."""

    name: ClassVar[str] = "ptx"
    coverage: ClassVar[OpCoverage] = OpCoverage((emission_rule, emit), REFUSED)
    arch: str = ""

    def configured(self, options: str) -> PtxGenerator:
        """The generator for an architecture.

        Raises:
            ArgumentError: there is no text for this architecture.
        """
        return PtxGenerator(_check_arch(options))

    @cached_property
    def capabilities(self) -> Capabilities:
        """What a GPU of compute capability 8.0 or more can do, with the tiles for the architecture."""
        return Capabilities(
            16,
            tuple(PTX_TYPES),
            block_bytes=BLOCK_BYTES,
            meeting=MAX_COOPERATIVE_GROUPS,
            lockstep=WARP_THREADS,
            symbolic=True,
            prefers_static=True,
            plan=ArchitecturePlan(self.arch),
            donation=True,
            plan_choices=PLAN_CHOICES,
        )

    def emit(self, module: Module, options: Mapping[str, Any]) -> Artifact:
        """The PTX text of a Tile module, or of one that has been through `passes`.

        Options: `arch` ("sm_80" or "sm_90a"; by default the configured one, else sm_90a where the GPU is one, else
        sm_80) and `debug` (default true: lines name their source).
        """
        arch = self._read_arch(module, options)
        if module.level != LEVEL:
            check_element_types(module, self.name, self.capabilities.dtypes)
            check_resources(module, self.name, self.capabilities)
        emission = emit_module(run_passes(self.passes(module, options), module), arch, bool(options.get("debug", True)))
        described = build_manifest(
            self.name, module, emission.plan, emission.text, split_parameters(emission.plan), {"arch": arch},
            options.get("schedule"),
        )  # fmt: skip
        return Artifact(described, {TEXT_FILE: emission.text})

    def passes(self, module: Module, options: Mapping[str, Any]) -> tuple[CompilerPass, ...]:
        """The passes between a Tile module and its text; none for a module that they have been through."""
        return () if module.level == LEVEL else list_passes(self._read_arch(module, options))

    def runtime(self, artifact: Artifact) -> EmulatedProgram | GpuProgram | SizedGpuProgram:
        """The artifact on this machine's GPU, or where there is none by the PTX emulator."""
        return make_runtime(artifact)

    def standalone_options(self, machine: str | None) -> dict[str, Any]:
        """The options of `emit` for a launcher; sm_80 runs on every newer GPU, too."""
        return {"arch": machine or "sm_80", "debug": False}

    def standalone(
        self, artifact: Artifact, name: str, stored: Mapping[str, bytes], machine: str | None
    ) -> dict[str, bytes | str]:
        """The files of a C launcher: PTX text, C text, header, example, Makefile."""
        from tessera.codegen.ptx.standalone import emit_standalone  # other programs need none

        return emit_standalone(artifact, name, stored)

    def memory(self) -> DeviceMemory:
        """The memory of this machine's GPU, or the emulator's."""
        return get_device_memory()

    @property
    def has_device(self) -> bool:
        """Whether this machine has a GPU."""
        return count_gpus() > 0

    def where(self) -> str:
        """What `runtime` runs on: a GPU by name, or the emulator."""
        return describe_device()

    def interpreter(self, artifact: Artifact) -> Callable[[Sequence[Any]], list[np.ndarray]]:
        """What runs the artifact's text in the PTX emulator."""
        return make_emulator(artifact)

    def sanitized(self, artifact: Artifact) -> Callable[[Sequence[Any]], list[np.ndarray]]:
        """The same in debug mode: races, missing waits, barriers and fences, and uninitialised memory are errors."""
        return make_emulator(artifact, debug=True)

    def _read_arch(self, module: Module, options: Mapping[str, Any]) -> str:
        """The architecture: the one that a module's passes were for, the one asked for, or the default."""
        unknown = [k for k in options if k not in OPTION_NAMES]
        if unknown:
            raise ArgumentError(f"the target ptx has no option {unknown[0]}", expected=", ".join(OPTION_NAMES))
        if module.level == LEVEL and module.functions[1:]:
            return LaunchFacts.of(module.functions[1]).arch
        return _check_arch(str(options.get("arch") or self.arch or choose_default_arch()))


def _check_arch(arch: str) -> str:
    if arch not in ISA_VERSIONS:
        raise ArgumentError(f"the target ptx has no architecture {arch}", expected=", ".join(ISA_VERSIONS))
    return arch


def choose_default_arch() -> str:
    """The architecture of this machine's GPU, or the oldest there is text for."""
    return "sm_90a" if count_gpus() and get_gpu().capability == (9, 0) else "sm_80"

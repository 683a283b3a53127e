"""Code generator for processors: Tile modules to LLVM IR, run through llvmlite.

Loading an artifact needs the runtime alone; the compiler (`generator`) is imported by the first call that compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.codegen.artifact import Artifact
from tessera.codegen.contract import Capabilities, CompilerPass
from tessera.codegen.llvm.runtime.jit import get_host_vector_bytes, seal_object_code
from tessera.codegen.llvm.runtime.program import OBJECT_FILE, TEXT_FILE, LlvmProgram
from tessera.codegen.llvm.text.builder import REGISTER_ELEMENTS
from tessera.codegen.llvm.text.protocol import MAX_BARRIER_PROGRAMS
from tessera.ir.core import Module
from tessera.lower.lowering_plan import LoweringPlan

if TYPE_CHECKING:
    from tessera.codegen.coverage import OpCoverage

# More query rows than the default: each packed key block is used by twice as many products.
TILING_PLAN = LoweringPlan(
    balance_k=4,
    flat_windows=True,
    indirect_windows=True,
    flash_m=64,
    flash_least=2,
    flash_rows_cost=8,
    flash_keys_cost=4,
    host_sort=64,
    rows=2048,  # several blocks of a row kernel are live at once: they fit the first cache
    result_lanes=512,
    result_rows=8192,
    streamed=1 << 20,  # no cache of a core holds more
    reduction_parts=16,
    collapse=True,
    peel=True,
    serial_scans=True,
    matrix_steps=768,  # more take more than a second to compile
    matrix_side=64,  # the second cache holds so many
    vector_products=1,
    product_pack=32,
    divided_row=1 << 18,
)
# What tuning tries in the place of these: tiles of products and their depth, elements of a row and of a pointwise
# program, programs of a launch, the lanes of reductions, products as reductions, queries and keys of attention.
PLAN_CHOICES: tuple[Mapping[str, tuple[Any, ...]], ...] = (
    {"m": (32, 64, 256), "n": (64, 256, 512), "k": (128, 256, 1024)},
    {"rows": (512, 8192), "result_lanes": (64, 256, 2048), "reduction_parts": (None, 64)},
    {"pointwise": (2048, 32768)},
    {"programs": (2, 32)},
    {"vector_products": (0, 4)},
    {"serial_scans": (False,)},
    {"flash_m": (32, 128), "flash_n": (32, 128)},
)
# Blocks and shared buffers are in an arena of each thread; a larger one is probably a mistake in a size.
MAX_ARENA_BYTES = 1 << 30


class LlvmBackend:
    """The generator for the host's processor."""

    name = "llvm"

    @property
    def coverage(self) -> OpCoverage:
        """The ops that it emits and refuses."""
        return _import_compiler().COVERAGE  # type: ignore[no-any-return]

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
            symbolic=True,
            donation=True,
            plan_choices=PLAN_CHOICES,
        )

    def emit(self, module: Module, options: Mapping[str, Any]) -> Artifact:
        """The LLVM text of a Tile module.

        Options: `vector_bytes` (default: the host's), `pair_products` (products of bf16 multiply two elements at
        a time; default: whether the host has the instruction), `byte_products` (how many elements those of 8-bit
        integers multiply at a time: 4, 2 or 1; default: as the host's instructions do), `debug` (default true: lines
        have debug locations).
        """
        return _import_compiler().emit(self.name, self.capabilities, module, options)  # type: ignore[no-any-return]

    def passes(self, module: Module, options: Mapping[str, Any]) -> tuple[CompilerPass, ...]:
        """The passes from a Tile module to the module that is emitted."""
        return _import_compiler().list_passes(module)  # type: ignore[no-any-return]

    def precompile(self, artifact: Artifact) -> dict[str, bytes]:
        """The machine code of an artifact for this processor, as files that travel in it."""
        return {OBJECT_FILE: seal_object_code(artifact.text(TEXT_FILE))}

    def standalone_options(self, machine: str | None) -> dict[str, Any]:
        """The options of `emit` for a program that runs on another machine."""
        from tessera.codegen.llvm.standalone import find_machine  # other programs need none

        # The products of pairs are plain text there, which takes longer than products of single elements.
        products = {"pair_products": False, "byte_products": 1}
        return {"vector_bytes": find_machine(machine)[1].vector_bytes, "debug": False, **products}

    def standalone(
        self, artifact: Artifact, name: str, stored: Mapping[str, bytes], machine: str | None
    ) -> dict[str, bytes | str]:
        """The files of a C library: text, machine code for the machine, header, example, Makefile."""
        from tessera.codegen.llvm.standalone import emit_standalone  # other programs need none

        return emit_standalone(artifact, name, stored, machine)

    def runtime(self, artifact: Artifact, threads: int | None = None) -> LlvmProgram:
        """The artifact as machine code: its own, if it was built for this processor, else compiled from its text."""
        return LlvmProgram(artifact, threads)

    def guarded(self, artifact: Artifact) -> Callable[[Sequence[Any]], list[np.ndarray]]:
        """The artifact as machine code with guard bytes around every buffer: a write outside one is an error."""
        from tessera.codegen.llvm.runtime.guards import run_guarded  # for tests of this generator alone

        return partial(run_guarded, artifact)

    def interpreter(self, artifact: Artifact) -> Callable[[Sequence[Any]], list[np.ndarray]]:
        """The artifact's text run in the LLVM emulator, without a compiler."""
        from tessera.codegen.llvm.runtime.emulation import make_emulator  # loads the emulator: a build needs none

        return make_emulator(artifact)


def _import_compiler() -> ModuleType:
    from tessera.codegen.llvm import generator  # loads the emitters: a program that is loaded needs none

    return generator


BACKEND = LlvmBackend()

"""Code generator for WebGPU: Tile modules to WGSL, run through wgpu (W3C, WebGPU Shading Language)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.codegen.artifact import Artifact
from tessera.codegen.contract import Capabilities
from tessera.codegen.coverage import OpCoverage
from tessera.codegen.grouped.vectoriser import vectorise
from tessera.core.types import bf16, bool_, f16, f32, int8, int16, int32, int64, uint8, uint16, uint32
from tessera.lower.lowering_plan import LoweringPlan
from tessera_wgsl import statements
from tessera_wgsl.generator import emit_program, write_web_engine
from tessera_wgsl.pointwise import REFUSED, pointwise_row

# A program is one invocation: small tiles, of which each invocation holds all elements.
PLAN = LoweringPlan(
    m=8, n=8, k=16, whole_k=16, multiple=4, rows=64, row_limit=256, pointwise=16, lanes=1, programs=64, flash=False,
    stack_views=False, serial_scans=True,
)  # fmt: skip
# int64 is an element type of indices: values that are proven to fit in 32 bits.
DTYPES = (f32, f16, bf16, int32, uint32, bool_, int8, int16, uint8, uint16, int64)


class WgslBackend:
    """The generator for GPUs behind WebGPU, in browsers and through wgpu."""

    name = "wgsl"
    capabilities = Capabilities(vector_bytes=16, dtypes=DTYPES, max_group=256, block_bytes=1 << 20, plan=PLAN)
    coverage = OpCoverage((pointwise_row, statements.statement_row), REFUSED, (vectorise,))

    def emit(self, module: Any, options: Mapping[str, Any]) -> Artifact:
        """The WGSL text of a Tile module: one shader for each kernel, and a launch plan."""
        return emit_program(self.name, self.capabilities, module, options)

    def runtime(self, artifact: Artifact) -> Any:
        """The artifact on the first adapter of wgpu.

        Raises:
            DeviceUnavailable: wgpu is not installed, or finds no adapter.
        """
        from tessera_wgsl.runtime import WgslProgram  # to emit text needs no device

        return WgslProgram(artifact)

    def web_engine(self, artifact: Artifact) -> tuple[str, str]:
        """The name of the engine in a page, and its script.

        Raises:
            UnsupportedOpError: an op is computed by NumPy.
        """
        return "WebGPU", write_web_engine(artifact)

    def where(self) -> str:
        """The adapter that programs run on."""
        from tessera_wgsl.runtime import describe_adapter

        return describe_adapter()


BACKEND = WgslBackend()

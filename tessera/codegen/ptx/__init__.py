"""The PTX generator: Tile modules to PTX text for NVIDIA GPUs."""

from tessera.codegen.ptx.generator import PtxGenerator

BACKEND = PtxGenerator()

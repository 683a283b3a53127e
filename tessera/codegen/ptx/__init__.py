"""The PTX generator: Tile modules to PTX text for NVIDIA GPUs."""

from tessera.codegen.ptx.generator import PTX

BACKEND = PTX()

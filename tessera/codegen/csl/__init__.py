"""CSL code generator: programs for a mesh of processing elements (Cerebras SDK)."""

from typing import Any

from tessera.codegen.csl.generator import Csl

BACKEND = Csl()
LATER = ("CodeGenOptions", "CodeGenResult", "CSLCodeGenerator", "compile_to_csl")

__all__ = ["BACKEND", "Csl", *LATER]


def __getattr__(name: str) -> Any:
    """Import the graph compiler on first use: it needs the whole pipeline, and the pipeline needs this package."""
    if name in LATER:
        from tessera.codegen.csl import generator as compiling

        return getattr(compiling, name)
    raise AttributeError(f"module 'tessera.codegen.csl' has no attribute {name!r}")

"""Graph compilation: compiles a Graph function to a folder of CSL, and returns errors as part of the result."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tessera.codegen.artifact import MANIFEST, Artifact
from tessera.codegen.csl.generator import Csl
from tessera.core.errors import ResourceError, TesseraError, UnsupportedOpError
from tessera.ir.core import Function, Module
from tessera.lower.pipeline import lower

# The square grids that are tried, smallest first, when the sizes are 0.
AUTOMATIC = (1, 2, 4, 8, 16, 32)


@dataclass
class CodeGenOptions:
    """Options of the code generation.

    `target` is "wse2" or "wse3". `optimize` fuses chains of pointwise ops into one loop and selects the fastest matrix
    product. `generate_debug_info` adds the program as IR ("mesh.tess") and the source of each line ("lines.json");
    `emit_comments` writes the sources into the text. `fabric_width` and `fabric_height` count PEs; 0 selects the
    smallest grid that holds the program. `runtime_address` is the address of a machine for commands_*.sh; without it
    the commands use the vendor's simulator.
    """

    output_dir: str = "./pyflame_csl_output"
    target: str = "wse2"
    optimize: bool = True
    generate_debug_info: bool = False
    emit_comments: bool = True
    fabric_width: int = 0
    fabric_height: int = 0
    runtime_address: str = ""


@dataclass
class CodeGenResult:
    """The result: whether the compilation succeeded, the files written, their text, or the error message."""

    success: bool
    output_dir: str
    generated_files: list[str] = field(default_factory=list)
    error_message: str = ""
    sources: dict[str, str] = field(default_factory=dict)


class CSLCodeGenerator:
    """Generates CSL from Graph functions."""

    def generate(self, graph: Function | Module, options: CodeGenOptions | None = None) -> CodeGenResult:
        """Write the CSL of a graph into `options.output_dir`; an error becomes the message of the result.

        >>> import numpy as np, tempfile, tessera as ts
        >>> graph = ts.jit(lambda x: ts.exp(x)).trace(np.ones((4, 4), np.float32)).function
        >>> result = CSLCodeGenerator().generate(graph, CodeGenOptions(output_dir=tempfile.mkdtemp() + "/out"))
        >>> result.success, "pe_program.csl" in result.sources
        (True, True)
        """
        options = options or CodeGenOptions()
        try:
            artifact = self._emit_on_smallest_grid(
                graph if isinstance(graph, Module) else Module("graph", (graph,)), options
            )
            folder = artifact.save(options.output_dir)
        except TesseraError as error:
            return CodeGenResult(False, options.output_dir, error_message=str(error))
        sources = {name: artifact.text(name) for name in artifact.files}
        written = [str(Path(folder) / name) for name in (*sources, MANIFEST)]
        return CodeGenResult(True, str(folder), written, "", sources)

    def _emit_on_smallest_grid(self, module: Module, options: CodeGenOptions) -> Artifact:
        sizes = [(options.fabric_height or n, options.fabric_width or n) for n in AUTOMATIC]
        grids = sizes[:1] if options.fabric_width and options.fabric_height else sizes
        chosen = {
            "arch": options.target, "optimize": options.optimize, "comments": options.emit_comments,
            "debug": options.generate_debug_info, "address": options.runtime_address,
        }  # fmt: skip
        for place, grid in enumerate(grids):
            generator = Csl(grid)
            try:
                *_, (_, tile) = lower(module, generator.capabilities.plan)
                return generator.emit(tile, chosen)
            except (ResourceError, UnsupportedOpError):  # a larger grid may suffice
                if place == len(grids) - 1:
                    raise
        raise AssertionError("there is a grid to try")


def compile_to_csl(graph: Function | Module, options: CodeGenOptions | None = None) -> CodeGenResult:
    """`CSLCodeGenerator().generate(graph, options)`."""
    return CSLCodeGenerator().generate(graph, options)

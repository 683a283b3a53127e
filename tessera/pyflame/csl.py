"""CSL code generation from lazy graphs: the layouts of tensors choose the mesh and the sharding of the inputs.

The generator and its options are those of `tessera.codegen.csl`. Leaves of the graph are the inputs of the program.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tessera.codegen.artifact import read_artifact
from tessera.codegen.csl import generator as csl_generator
from tessera.codegen.csl.generator import CodeGenOptions
from tessera.core.errors import ArgumentError, TesseraError, user_location
from tessera.pyflame.graph import Graph, as_graph
from tessera.pyflame.lazy_graph import Expression, assemble, evaluate
from tessera.pyflame.tensor import Tensor

# Rows and columns of the fabrics (of the SDK's --fabric-dims).
FABRICS = {"wse2": (996, 757), "wse3": (1172, 762)}


@dataclass
class CodeGenResult:
    """The result of code generation: the files, or the error.

    `run()` executes the program in the CSL simulator. `error` is the typed error behind `error_message`.
    """

    success: bool
    output_dir: str
    generated_files: list[str] = field(default_factory=list)
    error_message: str = ""
    sources: dict[str, str] = field(default_factory=dict)
    grid: tuple[int, int] = (0, 0)
    error: TesseraError | None = None
    inputs: tuple[Expression, ...] = field(default=(), repr=False)

    def run(self) -> Any:
        """Execute the program in the CSL simulator, on the elements of the graph's leaves.

        Returns the array of the tensor, or a list for several. The files in `output_dir` are those that run.

        Raises:
            ArgumentError: the generation failed.
            ArtifactError: the files are missing or corrupt.
        """
        if not self.success:
            raise self.error or ArgumentError("there is no program", location=user_location())
        evaluate(self.inputs)
        artifact = read_artifact(self.output_dir)
        arrays = [x.elements.numpy() for x in self.inputs if x.elements is not None]
        found = csl_generator.Csl(self.grid).runtime(artifact).run(arrays)
        return found[0] if len(found) == 1 else found


class CSLCodeGenerator:
    """Generates CSL from graphs.

    >>> import tempfile, tessera.pyflame as pf
    >>> options = pf.CodeGenOptions(output_dir=tempfile.mkdtemp() + "/out")
    >>> x = pf.ones([4, 4], layout=pf.MeshLayout.grid(2, 2))
    >>> result = CSLCodeGenerator().generate(pf.get_graph(x * 2.0), options)
    >>> result.success, result.grid, float(result.run().sum())
    (True, (2, 2), 32.0)
    """

    def generate(self, graph: Graph | Tensor, options: CodeGenOptions | None = None) -> CodeGenResult:
        """Write the CSL of a graph into `options.output_dir`; an error of the program is in the result.

        Raises:
            ArgumentError: an argument is neither a graph nor options.
        """
        known = as_graph(graph)
        chosen = _check_options(options)
        program = assemble(known.wanted, lambda x: x.record is None, "pyflame")
        try:
            grid = choose_grid(program.order, chosen)
            pinned = tuple(None if x.layout is None else x.layout.sharding(x.type.rank) for x in program.leaves)
            found = csl_generator.CSLCodeGenerator().generate(program.function, _on_grid(chosen, grid), pinned)
        except TesseraError as error:
            return CodeGenResult(False, chosen.output_dir, error_message=str(error), error=error)
        return CodeGenResult(
            found.success, found.output_dir, found.generated_files, found.error_message, found.sources,
            found.grid, found.error, program.leaves,
        )  # fmt: skip


def compile_to_csl(tensor: Tensor, options: CodeGenOptions | None = None) -> CodeGenResult:
    """`CSLCodeGenerator().generate` of the graph of a tensor."""
    return CSLCodeGenerator().generate(as_graph(tensor), options)


def _check_options(options: Any) -> CodeGenOptions:
    if options is None:
        return CodeGenOptions()
    if not isinstance(options, CodeGenOptions):
        raise ArgumentError(
            "these are not options of the code generation", location=user_location(), received=repr(options),
            expected="pf.CodeGenOptions",
        )  # fmt: skip
    if not isinstance(options.output_dir, (str, os.PathLike)):
        raise ArgumentError(
            "output_dir is not a path", location=user_location(), received=repr(options.output_dir),
            expected="the path of a folder",
        )  # fmt: skip
    if options.target not in FABRICS:
        raise ArgumentError(
            f"there is no target {options.target!r}", location=user_location(), received=repr(options.target),
            expected=", ".join(FABRICS),
        )  # fmt: skip
    for name in ("fabric_width", "fabric_height"):
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ArgumentError(
                f"{name} is not a number of processing elements", location=user_location(), received=repr(value),
                expected="an integer from 0 on",
            )  # fmt: skip
    return options


def choose_grid(order: Sequence[Expression], options: CodeGenOptions) -> tuple[int, int] | None:
    """The rows and columns of the mesh that the layouts of tensors and the fabric ask for; None: any.

    Raises:
        ArgumentError: layouts contradict each other, or the mesh is larger than the fabric or the target.
    """
    rows, columns = _join_layouts(order)
    found = (rows or options.fabric_height, columns or options.fabric_width)
    if found == (0, 0):
        return None
    grid = (found[0] or 1, found[1] or 1)
    most = FABRICS[options.target]
    limits = (options.fabric_height or most[0], options.fabric_width or most[1])
    largest = (min(limits[0], most[0]), min(limits[1], most[1]))
    if grid[0] > largest[0] or grid[1] > largest[1]:
        at = next((x.location for x in order if x.layout and (x.layout.rows, x.layout.cols) != (1, 1)), None)
        raise ArgumentError(
            f"the mesh of {grid[0]} x {grid[1]} processing elements is larger than the target",
            location=at or user_location(), expected=f"at most {largest[0]} rows and {largest[1]} columns",
            received=f"{grid[0]} rows and {grid[1]} columns", suggestion="choose a smaller layout or a larger fabric",
        )  # fmt: skip
    return grid


def _join_layouts(order: Sequence[Expression]) -> tuple[int, int]:
    """The rows and columns of all layouts; 0 where no layout says."""
    known: dict[str, tuple[int, Expression]] = {}
    explicit = [x for x in order if x.layout is not None]
    for x in explicit:
        assert x.layout is not None
        for name, count in (("rows", x.layout.rows), ("columns", x.layout.cols)):
            if count == 1:
                continue
            before, first = known.setdefault(name, (count, x))
            if before != count:
                raise ArgumentError(
                    f"two layouts need meshes of {before} and of {count} {name}: {first.layout!r} at {first.location}",
                    location=x.location, received=repr(x.layout), expected=f"layouts of {before} {name}",
                )  # fmt: skip
    if explicit and not known:  # all on one element
        return 1, 1
    rows, columns = (known[n][0] if n in known else 0 for n in ("rows", "columns"))
    return (rows or 1, columns or 1) if known else (0, 0)


def _on_grid(options: CodeGenOptions, grid: tuple[int, int] | None) -> CodeGenOptions:
    return options if grid is None else replace(options, fabric_height=grid[0], fabric_width=grid[1])

"""CSL generator: compiles graph programs and kernel launches for a grid of processing elements (PEs) to CSL, and runs
them in the simulator.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tessera.codegen.artifact import MANIFEST, Artifact, build_manifest
from tessera.codegen.contract import Capabilities, CompilerPass, Runtime, check_element_types, run_passes
from tessera.codegen.coverage import OpCoverage
from tessera.codegen.csl.runtime import host_script
from tessera.codegen.csl.standalone import emit_standalone
from tessera.codegen.csl.table import REFUSED, broadcast_routes, collectives, control_flow, matmul, memory
from tessera.codegen.csl.table.blocks import ROUND, emit, emit_block
from tessera.codegen.csl.table.memory import declare_param
from tessera.codegen.csl.table.scalars import pointwise_rows
from tessera.codegen.csl.text import program_files
from tessera.codegen.csl.text.context import CslContext
from tessera.codegen.csl.text.dsd import CSL_TYPES, TYPE_BYTES
from tessera.codegen.csl.text.memory_allocation import ARRAY_MEMORY_BYTES, bind_value
from tessera.codegen.csl.text.statements import add_fault, add_line, cast_to_index, emit_fault_return, open_block
from tessera.codegen.grouped import vectorise_groups
from tessera.codegen.grouped.diagnostics import report_op
from tessera.codegen.grouped.vectoriser import LEVEL, vectorise
from tessera.core.errors import ArgumentError, ResourceError, TesseraError, UnsupportedOpError
from tessera.core.types import RefType, bf16, f16
from tessera.ir.core import Function, Module, Value
from tessera.ir.printer import print_module
from tessera.lower.lowering_plan import LoweringPlan
from tessera.lower.mesh.launch_programs import partition_kernel
from tessera.lower.mesh.launch_windows import explain_whole
from tessera.lower.mesh.mesh_lowering import CANNON, PIECE_MEMORY_BYTES, SUMMA
from tessera.lower.pipeline import lower
from tessera.ops.dialects import mesh, tile
from tessera.ops.dialects.mesh import UNSPLIT

# Kernel launches that are not cut: one PE holds all arrays and runs all programs of a launch in sequence.
#
# A kernel with groups is ungrouped first: one program then executes each op for all tiles of a group before the next
# op.


def is_kernel(module: Module) -> bool:
    """Whether a module launches a kernel, a function that has no mesh layout."""
    return "mesh" not in module.functions[1].attrs


def emit_kernel(module: Module, ctx: CslContext) -> None:
    """Emit the launch of a kernel.

    Raises:
        UnsupportedOpError: the programs synchronise with each other, or the host does more than one launch.
    """
    (launch, *more), function = module.main.body.nodes, module.functions[1]
    if more or launch.op.name != "host.launch" or tuple(launch.args) != tuple(module.main.params):
        raise _make_launch_error(function, "the host does more than one launch")
    if tile.uses_grid_barrier(function.body) and math.prod(map(int, launch.attrs["grid"])) > 1:
        raise _make_launch_error(function, "its programs synchronise with each other, and a PE runs them in sequence")
    for param in function.params:
        bind_value(ctx, param, declare_param(ctx, param))
    grid = tuple(int(n) for n in launch.attrs["grid"])
    names = [f"program{axis}" if n > 1 else "0" for axis, n in enumerate(grid)]
    ctx.index_type = "i64"
    ctx.programs = tuple((cast_to_index(ctx, name), n) for name, n in zip(names, grid, strict=True))
    with ExitStack() as loops:
        for name, n in zip(names, grid, strict=True):
            if n != 1:
                loops.enter_context(open_block(ctx, f"for (@range(i32, {n})) |{name}|"))
        emit_block(ctx, function.body)


def _check_kernel_memory(module: Module, ctx: CslContext) -> None:
    """Check that a launch that is not cut fits a PE; the error tells why it is not cut.

    Raises:
        ResourceError: it does not fit.
    """
    why = explain_whole(module.functions[1].body, module.main.body.nodes[0].attrs["grid"])
    if why is None or program_files.fits_resources(ctx):
        return
    raise ResourceError(
        f"processing-element memory exceeded: {program_files.count_array_bytes(ctx) / 1024:.0f} KB of arrays needed, "
        f"and the launch is not cut over the grid: {why.reason}",
        location=why.loc, expected=f"at most {ARRAY_MEMORY_BYTES} bytes of arrays on each PE",
        suggestion="let each program store elements of its own, at indices that are affine in its program ids",
    )  # fmt: skip


def make_kernel_plan(function: Function, ctx: CslContext, outputs: int) -> dict[str, Any]:
    """The host plan of a kernel: every PE receives all arrays, and the host copies the written ones back."""
    written = tile.find_written_refs(function.body)
    entries = [_describe_array(ctx, p) for p in function.params]
    input_count = len(entries) - outputs  # outputs are returned; other written arrays are copied back to their inputs
    back = [{**e, "into": i} for i, (e, p) in enumerate(zip(entries, function.params, strict=True)) if p in written]
    outputs_ = entries[input_count:] + [e for e in back if e["into"] < input_count]
    return {
        "grid": list(ctx.grid),
        "inputs": entries[:input_count],
        "outputs": outputs_,
        "faults": ctx.faults,
        "given": list(range(input_count)),
        "rounds": 1,
    }


def _describe_array(ctx: CslContext, param: Value) -> dict[str, Any]:
    shape = [int(n) for n in param.type.shape]
    return {
        "name": param.hint,
        "symbol": ctx.exported[param],
        "shape": shape,
        "dtype": param.type.dtype.numpy.name,
        "bytes": ctx.symbols[param].bytes // ctx.symbols[param].size,
        "split": [-1] * len(shape),
        "piece": shape,
    }


def _make_launch_error(function: Function, why: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"{function.name} cannot be emitted for csl: {why}", location=function.loc,
        suggestion="write it as a function of whole tensors with @ts.jit, or run it on another target",
    )  # fmt: skip


# Groups of tiles.

REPORT_EXPECTATIONS = {
    "assert": "a condition that is true for every element in every program",
    "deadlock": "the arrivals and bytes that the mbarrier phase needs",
}


def ungroup_kernels(module: Module) -> Module:
    """Rewrite a kernel with groups into one program per group; a new leading axis of each varying block indexes its
    tiles.
    """
    return vectorise_groups(module) if is_kernel(module) else module


@emit(report_op)
def _(ctx, node, *operands):
    kind, text = node.attrs["kind"], node.attrs["text"]
    if kind not in REPORT_EXPECTATIONS:
        raise UnsupportedOpError(
            f"the target csl cannot emit tile.print: {REFUSED[tile.print_]}", location=node.loc,
            suggestion="run this on another target, or in the interpreter",
        )  # fmt: skip
    said = f"assertion failed: {text}".removesuffix(": ") if kind == "assert" else text
    emit_fault_return(ctx, add_fault(ctx, node, kind, said, REPORT_EXPECTATIONS[kind]))


# CSL generator: compiles programs on a grid of processing elements (PEs) to CSL, and runs them in the simulator.


assert (
    collectives and collectives and control_flow and matmul and broadcast_routes and memory
)  # these imports register their rows

ARCHITECTURES = ("wse2", "wse3")
OPTIONS = ("arch", "schedule", "optimize", "comments", "debug", "address")
DEFAULT_GRID = (2, 2)
# The memory for which a launch is cut, as shares of what pieces may use: emission may need more than is estimated.
PARTITION_SHARES = (1, 3 / 4, 1 / 2, 1 / 4, 0)
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
            raise ArgumentError(
                f'"{text_}" is not a grid of PEs', expected="ROWSxCOLUMNS, as in csl:4x4",
                received=f"the target csl:{options}",
            )  # fmt: skip
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
        if is_kernel(ready):
            _check_kernel_memory(ready, ctx)
        program_files.check_memory(ctx, ready.functions[1].loc)
        program_files.check_channels(ctx, ready.functions[1].loc)
        plan, bfloat = _make_host_plan(ready, ctx), _uses_bfloat(ready.functions[1])
        files = _make_files(ready, ctx, plan, {**options, "arch": arch})
        return Artifact(self._manifest(module, plan, files, arch, bfloat), files)

    def standalone_options(self, machine: str | None) -> dict[str, Any]:
        """The options of `emit` for the SDK's folder; `machine` is "wse2" or "wse3"."""
        return {"arch": machine} if machine else {}

    def standalone(
        self, artifact: Artifact, name: str, stored: Mapping[str, bytes], machine: str | None
    ) -> dict[str, bytes | str]:
        """The folder for the vendor's SDK, with the weights."""
        return emit_standalone(artifact, name, stored)

    def passes(self, module: Module, options: Mapping[str, Any]) -> tuple[CompilerPass, ...]:
        """The rewrites of kernels; pointwise fusion is an analysis, which emission reads."""
        if module.level == LEVEL or not is_kernel(module):
            return ()
        return (
            CompilerPass("group vectorisation", ungroup_kernels),
            CompilerPass("mesh partition", lambda module: self._partition(module, options)),
        )

    def _partition(self, module: Module, options: Mapping[str, Any]) -> Module:
        """The launch of a kernel, cut over the elements: into ever smaller parts until the program fits."""
        check_element_types(module, self.name, self.capabilities.dtypes)
        is_wse3, fuses = options.get("arch") == ARCHITECTURES[1], bool(options.get("optimize", True))
        for share in PARTITION_SHARES:
            cut = partition_kernel(module, self.grid, int(PIECE_MEMORY_BYTES * share))
            if is_kernel(cut) or program_files.fits_resources(self._build_program(cut, is_wse3, fuses)):
                break
        return cut

    def _build_program(self, module: Module, is_wse3: bool, fuses: bool) -> CslContext:
        """The emitted program; one that exceeds memory or queues is emitted again in a form that needs less."""
        for uses_routes, saves_memory in itertools.product((True, False), (False, True)):
            ctx = CslContext(self.grid, is_wse3, fuses, saves_memory, uses_routes)
            if is_kernel(module):
                emit_kernel(module, ctx)
            else:
                ctx.grid, body = tuple(module.functions[1].attrs["mesh"]), module.functions[1].body
                if any(n.op in (tile.alloc, mesh.window) for n in body.walk()):  # a kernel computes its own indices
                    ctx.index_type = "i64"
                emit_block(ctx, module.functions[1].body)
                _emit_round_end(ctx, count_rounds(module))
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
    nodes = [n for n in function.body.nodes if n.op in (*_HOST_READS, *_HOST_WRITES)]
    read = {n.args[0]: n for n in nodes if n.op in _HOST_READS}
    written = {n.args[0]: n for n in nodes if n.op in _HOST_WRITES}
    given = [i for i, p in enumerate(params[: len(params) - outputs]) if p in read]
    back = [
        {**_describe_tensor(ctx, p, written[p]), "into": i}
        for i, p in enumerate(params[: len(params) - outputs])
        if p in written
    ]
    return {
        "grid": list(ctx.grid),
        "inputs": [_describe_tensor(ctx, params[i], read[params[i]]) for i in given],
        "outputs": [_describe_tensor(ctx, p, written[p]) for p in params[len(params) - outputs :]] + back,
        "faults": ctx.faults,
        "given": given,
        "rounds": count_rounds(module),
    }


_HOST_READS, _HOST_WRITES = (mesh.read, mesh.window), (mesh.write, mesh.copy_back)


def count_rounds(module: Module) -> int:
    """How often the host runs the program, each time with other windows."""
    return int(module.functions[1].attrs.get("rounds", 1))


def _emit_round_end(ctx: CslContext, rounds: int) -> None:
    """Count the rounds, and begin again after the last."""
    if rounds > 1:
        ctx.variables.append(f"{ROUND}: i32 = 0")
        add_line(ctx, f"{ROUND} = if ({ROUND} == {rounds - 1}) 0 else {ROUND} + 1;")


def _describe_tensor(ctx: CslContext, ref: Value, node: Any) -> dict[str, Any]:
    """The array of a tensor, and how it is split: into pieces, or into windows of tiles of programs."""
    type, known = ref.type, node.attrs
    assert isinstance(type, RefType)
    piece = known["shape"] if node.op in _HOST_READS else node.args[1].type.shape
    window = {k: list(known[k]) for k in ("first", "tiles") if k in known}
    if window:
        window["steps"] = [list(step) for step in known["steps"]]
    return {
        "name": ref.hint,
        "symbol": ctx.exported[ref],
        "shape": [int(n) for n in type.shape],
        "dtype": type.dtype.numpy.name,
        "bytes": TYPE_BYTES[ctx.symbols[ref].type],
        "split": list(known.get("split", (UNSPLIT,) * type.rank)),
        "piece": [int(n) for n in piece],
        **window,
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


# Graph compilation: compiles a Graph function to a folder of CSL, and returns errors as part of the result.


# The square grids that are tried, smallest first, when the sizes are 0.
AUTOMATIC = (1, 2, 4, 8, 16, 32)


@dataclass(slots=True)  # an option that does not exist is an error
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
    grid: tuple[int, int] = (0, 0)  # rows and columns of PEs
    error: TesseraError | None = None


class CSLCodeGenerator:
    """Generates CSL from Graph functions."""

    def generate(
        self,
        graph: Function | Module,
        options: CodeGenOptions | None = None,
        shardings: Sequence[tuple[int, ...] | None] = (),
    ) -> CodeGenResult:
        """Write the CSL of a graph into `options.output_dir`; an error becomes the message of the result.

        `shardings` fixes for each parameter the mesh axis of each of its axes (-1: whole); None leaves it to the cost
        model.

        >>> import numpy as np, tempfile, tessera as ts
        >>> graph = ts.jit(lambda x: ts.exp(x)).trace(np.ones((4, 4), np.float32)).function
        >>> result = CSLCodeGenerator().generate(graph, CodeGenOptions(output_dir=tempfile.mkdtemp() + "/out"))
        >>> result.success, "pe_program.csl" in result.sources
        (True, True)
        """
        options = options or CodeGenOptions()
        try:
            module = graph if isinstance(graph, Module) else Module("graph", (graph,))
            artifact, grid = self._emit_on_smallest_grid(module, options, tuple(shardings))
            folder = _add_interface(artifact, module.main).save(options.output_dir)
        except TesseraError as error:
            return CodeGenResult(False, options.output_dir, error_message=str(error), error=error)
        sources = {name: artifact.text(name) for name in artifact.files}
        written = [str(Path(folder) / name) for name in (*sources, MANIFEST)]
        return CodeGenResult(True, str(folder), written, "", sources, grid)

    def _emit_on_smallest_grid(
        self, module: Module, options: CodeGenOptions, shardings: tuple[tuple[int, ...] | None, ...]
    ) -> tuple[Artifact, tuple[int, int]]:
        sizes = [(options.fabric_height or n, options.fabric_width or n) for n in AUTOMATIC]
        grids = sizes[:1] if options.fabric_width and options.fabric_height else sizes
        chosen = {
            "arch": options.target, "optimize": options.optimize, "comments": options.emit_comments,
            "debug": options.generate_debug_info, "address": options.runtime_address,
        }  # fmt: skip
        for place, grid in enumerate(grids):
            generator = Csl(grid)
            try:
                *_, (_, tile) = lower(module, replace(generator.capabilities.plan, mesh_shardings=shardings))
                return generator.emit(tile, chosen), grid
            except (ResourceError, UnsupportedOpError):  # a larger grid may suffice
                if place == len(grids) - 1:
                    raise
        raise AssertionError("there is a grid to try")


def _add_interface(artifact: Artifact, function: Function) -> Artifact:
    """The artifact with what `ts.load` needs: the arguments by name, shape and element type."""
    parameters = [
        {
            "name": p.hint or f"x{i}", "shape": [int(n) for n in p.type.shape],
            "dtype": str(p.type.dtype), "stored": False,
        }
        for i, p in enumerate(function.params)
    ]  # fmt: skip
    interface = {"entry": function.name, "parameters": parameters, "written": []}
    return replace(artifact, manifest={**artifact.manifest, "interface": interface})


def compile_to_csl(graph: Function | Module, options: CodeGenOptions | None = None) -> CodeGenResult:
    """`CSLCodeGenerator().generate(graph, options)`."""
    return CSLCodeGenerator().generate(graph, options)

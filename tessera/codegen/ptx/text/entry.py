"""Kernel entries: the .entry directive, its parameters, and the assembled text of one tile function."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tessera.codegen.ptx.context import EmissionContext
from tessera.codegen.ptx.text.builder import PtxBuilder, ptx_type, register_class
from tessera.codegen.ptx.text.memref import VECTOR_BYTES, PtxMemRef
from tessera.core.symbolic_dim import Dim
from tessera.core.types import DType, RefType, bf16, bool_, f16
from tessera.ir.core import Value, find_size_names


@dataclass(frozen=True)
class KernelEntry:
    """The text of a tile function, and what its launch needs."""

    lines: tuple[str, ...]
    threads: int  # of a block
    shared: int  # bytes of dynamic shared memory
    maps: tuple[dict[str, Any], ...] = ()  # TMA descriptors
    programs: int = 0  # of a persistent kernel, which loops over them; 0: one for each block
    cluster: int = 1  # blocks of a cluster
    sites: Mapping[str, Any] = field(default_factory=dict)  # sites of the hidden parameters
    isa: tuple[int, int] = (0, 0)  # the PTX ISA version, where the architecture's first one does not suffice
    linear_grid: bool = False  # whether the launch has a linear grid
    odd_byte_params: Collection[int] = ()  # 8-bit parameters of odd length that 16-bit atomics access

    def describe(self) -> dict[str, Any]:
        """The entry as manifest data."""
        more: dict[str, Any] = {"maps": list(self.maps)} if self.maps else {}
        more |= {"programs": self.programs} if self.programs else {}
        more |= {"folded": True} if self.linear_grid else {}
        more |= {"halves": sorted(self.odd_byte_params)} if self.odd_byte_params else {}
        more |= {"cluster": self.cluster} if self.cluster > 1 else {}
        return {"threads": self.threads, "shared": self.shared, **more, **self.sites}


def bind_parameters(ctx: EmissionContext, alignments: Sequence[int]) -> None:
    """Load the parameters; `alignments` are divisors of their addresses, by default those of a vector access."""
    for i, v in enumerate(ctx.function.params):
        _bind_parameter(ctx, v, name_parameter(ctx.function.name, i), alignments[i] if alignments else VECTOR_BYTES)
    for i, name in _number_size_parameters(ctx):
        with ctx.text.at_entry_head():
            ctx.sizes.known[Dim.of(name)] = ctx.text.let(
                "ld.param.u64", "b64", f"[{name_parameter(ctx.function.name, i)}]"
            )


def name_parameter(function: str, number: int) -> str:
    """The name of a parameter: never that of another entry (`f_1` beside `f`), at which ptxas would fail."""
    return f"{function}_param_{number}"


def _number_size_parameters(ctx: EmissionContext) -> Iterator[tuple[int, str]]:
    """The parameters after a kernel's own: the symbolic sizes that it mentions."""
    return enumerate(find_size_names(ctx.function), len(ctx.function.params))


def _bind_parameter(ctx: EmissionContext, v: Value, name: str, align: int) -> None:
    text = ctx.text
    with text.at_entry_head():
        if isinstance(v.type, RefType):
            pointer = text.let("ld.param.u64", "b64", f"[{name}]")
            base = text.let("cvta.to.global.u64", "b64", pointer)
            ctx.memrefs[v] = PtxMemRef(v.type.dtype, "global", base, tuple(v.type.shape), align)
        else:
            ctx.values[v] = (_load_scalar_parameter(text, v.type.dtype, name),)


def _load_scalar_parameter(text: PtxBuilder, dtype: DType, name: str) -> str:
    """Load a scalar parameter from its memory format."""
    if dtype == bool_:
        return text.let("setp.ne.u32", "pred", text.let("ld.param.u8", "b32", f"[{name}]"), 0)
    if dtype in (f16, bf16):
        half = text.let("ld.param.b16", "b16", f"[{name}]")
        return text.let(f"cvt.f32.{dtype.name}", "f32", half)
    return text.let(f"ld.param.{_memory_type(dtype)}", register_class(dtype), f"[{name}]")


def _memory_type(dtype: DType) -> str:
    """The PTX type of an element in memory."""
    form = ptx_type(dtype)
    return f"{form[0]}{dtype.bits}" if dtype.bits < 32 else form


def _parameter_type(v: Value) -> str:
    if isinstance(v.type, RefType):
        return "u64"
    return {bool_: "u8", f16: "b16", bf16: "b16"}.get(v.type.dtype) or _memory_type(v.type.dtype)


def finish_entry(ctx: EmissionContext, maps: Sequence[dict[str, Any]] = (), programs: int = 0) -> KernelEntry:
    """Assemble the entry whose body has been emitted."""
    entry, grid, allocator = ctx.entry, ctx.grid, ctx.smem.allocator
    prologue = [*allocator.format_prologue(), *entry.hidden.load(ctx.function.name)]
    lines = (*_format_header(ctx, len(maps)), *ctx.text.assemble(prologue), "}", "")
    return KernelEntry(
        lines, ctx.team.block_threads, allocator.shared_bytes, tuple(maps), programs,
        grid.cluster.size if grid.cluster is not None else 1, entry.hidden.describe(), entry.isa_version,
        bool(grid.linear), entry.odd_byte_params,
    )  # fmt: skip


def _format_header(ctx: EmissionContext, maps: int) -> Iterator[str]:
    name = ctx.function.name
    params = [f"\t.param .align 64 .b8 {name}_map{i}[128]" for i in range(maps)]
    params += [f"\t.param .{_parameter_type(v)} {name_parameter(name, i)}" for i, v in enumerate(ctx.function.params)]
    params += [f"\t.param .u64 {name_parameter(name, i)}" for i, _ in _number_size_parameters(ctx)]
    params += ctx.entry.hidden.declare(name)
    yield f".visible .entry {name}("
    yield ",\n".join(params)
    yield ")"
    # With setmaxnreg one block takes all registers of a multiprocessor.
    resident = 1 if ctx.team.producer_threads else ctx.entry.min_resident_blocks
    yield f".reqntid {ctx.team.block_threads}, 1, 1" + (f" .minnctapersm {resident}" if resident else "")
    if ctx.grid.cluster is not None:
        yield f".explicitcluster .reqnctapercluster {ctx.grid.cluster.size}, 1, 1"
    yield "{"

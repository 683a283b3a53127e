"""Emission context: what the emission of one tile function knows and has produced so far, as a passive record.

Emission rules and passes read and write its fields; `emitter` walks the function. This module imports no rule.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tessera.codegen.ptx.layout import DistributedLayout, Sizes, ThreadTeam, bit_width
from tessera.codegen.ptx.ops import LaunchFacts
from tessera.codegen.ptx.passes.layout_inference import LaidOutFunction
from tessera.codegen.ptx.passes.shared_memory import HazardTracker, SharedMemoryAllocator
from tessera.codegen.ptx.passes.tile_scheduler import ThreadBlockCluster, TileScheduler
from tessera.codegen.ptx.table.scalars.arithmetic import check_rounding_policy
from tessera.codegen.ptx.table.warpgroup.ring_buffer import PipelineState, StageRingBuffer
from tessera.codegen.ptx.text.builder import HiddenParameters, PtxBuilder, element_bytes, ptx_type, register_class
from tessera.core.errors import Location, ResourceError, TesseraError
from tessera.core.symbolic_dim import Dim, Size
from tessera.core.types import DType, RefType, bf16, bool_, f16
from tessera.ir.analysis import AffineAnalysis, IntervalAnalysis, find_divisor
from tessera.ir.core import Block, Function, Node, Value, find_size_names
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic

Registers = tuple[str, ...]
TENSOR_MAP_BYTES = 128
MAX_PARAMETER_BYTES = 4096  # of an entry, before LARGE_PARAMETERS_ISA
MAX_LARGE_PARAMETER_BYTES = 32_764  # PTX ISA, "Parameter State Space"
LARGE_PARAMETERS_ISA = (8, 1)
WITHOUT_DEPENDENT_LAUNCH = ("sm_80",)  # architectures before programmatic dependent launch

# Memory references: row-major buffers, vectorised accesses, and swizzled rows of shared memory for ldmatrix.
#
# ldmatrix reads eight rows at once; these must be in different banks. Where a row's bytes are a power of two, the last
# bits of the row's number swizzle the 16-byte units within the row; other rows are padded by one unit.


VECTOR_BYTES = 16  # the widest load or store of one thread


@dataclass(frozen=True)
class PtxMemRef:
    """A row-major buffer: `base` is a 64-bit register whose address is a multiple of `align` bytes."""

    dtype: DType
    space: str
    base: str
    shape: tuple[Size, ...]
    align: int = VECTOR_BYTES

    @property
    def strides(self) -> tuple[Size, ...]:
        """The bytes from one element to the next along each axis."""
        return tuple(math.prod(self.shape[a + 1 :]) * element_bytes(self.dtype) for a in range(len(self.shape)))


def find_vector_length(
    producers: Mapping[Value, Node], m: PtxMemRef, starts: Sequence[Value], block: Sizes, most: int, known: int = 1
) -> int:
    """The elements along the last axis, at most `most`, that one aligned access can move anywhere in the block, of
    which `known` elements divide the distance of its first one from that of the memory."""
    length, row = max(1, most), math.prod(block[:-1]) == 1
    while length > 1 and not _is_aligned(producers, m, starts, block, length):
        if row and known % length == 0 and m.align % (length * element_bytes(m.dtype)) == 0:
            break
        length //= 2
    return length


def _is_aligned(
    producers: Mapping[Value, Node], m: PtxMemRef, starts: Sequence[Value], block: Sizes, length: int
) -> bool:
    size = element_bytes(m.dtype)
    *outer, (last, _, _) = zip(starts, (stride // size for stride in m.strides), block, strict=True)
    aligned = all(
        stride % length == 0 or (n == 1 and find_divisor(producers, v) % length == 0) for v, stride, n in outer
    )
    return aligned and m.align % (length * size) == 0 and find_divisor(producers, last) % length == 0


def find_run_length(producers: Mapping[Value, Node], m: PtxMemRef, indices: Sequence[Value], most: int) -> int:
    """The elements along the last axis of blocks of indices, at most `most`, that lie side by side in memory, so that
    one aligned access can move them anywhere in the block."""
    *outer, last = indices
    form = AffineAnalysis(producers, narrow=True).find_form(last)  # an index that wraps is outside of the memory
    if form is None or dict(form.ramps) != {-1: 1} or not all(_repeats(producers, v) for v in outer):
        return 1
    size, starts = element_bytes(m.dtype), [c * find_divisor(producers, v) for v, c in form.scalars.items()]
    length = max(1, most)
    while length > 1 and not (
        all(stride % (length * size) == 0 for stride in m.strides[:-1])
        and all(n % length == 0 for n in (form.constant, *starts))
        and m.align % (length * size) == 0
    ):
        length //= 2
    return length


def find_access_length(producers: Mapping[Value, Node], m: PtxMemRef, node: Node, block: Sizes, most: int) -> int:
    """The elements along the last axis of a block, at most `most`, that one instruction of a node moves."""
    before = 1 if node.op in (tile.load, tile.gather) else 2
    indices = node.args[before : before + len(m.shape)]
    if node.op in (tile.load, tile.store):
        return find_vector_length(producers, m, indices, block, most, node.attrs["vector"])
    return find_run_length(producers, m, indices, most) if node.op in (tile.gather, tile.scatter) else 1


def _repeats(producers: Mapping[Value, Node], v: Value) -> bool:
    """Whether the elements of a block along its last axis are seen to be equal."""
    node = producers.get(v)
    if v.type.shape[-1:] in ((), (1,)) or (node is not None and node.op is basic.full):
        return True
    return node is not None and node.op in (basic.broadcast_to, basic.cast) and _repeats(producers, node.args[0])


@dataclass(frozen=True)
class VectorAccess:
    """One load or store of `count` neighbouring registers of a block, from register `first` on.

    `guards` holds the predicate of each element; "" means that the element is always accessed.
    """

    first: int
    count: int
    address: str
    offset: int
    guards: tuple[str, ...]

    @property
    def operand(self) -> str:
        """The address as an operand."""
        return format_address(self.address, self.offset)


def format_address(register: str, offset: int) -> str:
    """An address operand.

    >>> format_address("%x1", 16), format_address("%x1", 0)
    ('[%x1+16]', '[%x1]')
    """
    return f"[{register}+{offset}]" if offset else f"[{register}]"


SWIZZLE_UNIT = 16  # bytes that a swizzle moves together
BANK_BYTES = 128  # bytes of one row of all shared memory banks


@dataclass(frozen=True)
class SwizzledRows:
    """Rows in shared memory: the bytes from one row to the next, and the swizzle of row r: `r >> shift & mask`."""

    pitch: int
    shift: int = 0
    mask: int = 0

    def swizzle(self, row: int) -> int:
        """The number that a byte's offset within a row is XORed with."""
        return (row >> self.shift & self.mask) * SWIZZLE_UNIT

    def split_offset(self, row: int, byte: int) -> tuple[int, int]:
        """The distance of a byte from a thread's first one: the part XORed to the address, and the part added."""
        within = BANK_BYTES - 1 if self.mask else 0
        return byte & within ^ self.swizzle(row), row * self.pitch + (byte & ~within)


def choose_row_layout(count: int) -> SwizzledRows:
    """The layout of rows of `count` bytes, a multiple of two swizzle units.

    >>> choose_row_layout(128), choose_row_layout(64), choose_row_layout(96)
    (SwizzledRows(pitch=128, shift=0, mask=7), SwizzledRows(pitch=64, shift=1, mask=3), SwizzledRows(pitch=112,
    shift=0, mask=0))
    """
    if count & (count - 1):
        return SwizzledRows(count + SWIZZLE_UNIT)
    bits = min(bit_width(count // SWIZZLE_UNIT), 3)
    return SwizzledRows(count, 3 - bits, (1 << bits) - 1)


@dataclass(frozen=True)
class SmemSlots:
    """The staging buffers of one `smem_slots`."""

    base: str  # a 32-bit address
    slot_bytes: int
    rows: SwizzledRows
    element_bytes: int


@dataclass
class SmemOperand:
    """A block in one staging buffer; each address in it is computed once."""

    team: ThreadTeam
    slots: SmemSlots
    base: str
    flipped: bool = False
    _addresses: dict[tuple[str, int], str] = field(default_factory=dict)

    def operand_at(self, thread_address: str, row: int, byte: int) -> str:
        """The address operand of a byte at a distance from a thread's own first byte."""
        return format_address(*self.locate(thread_address, row, byte))

    def locate(self, thread_address: str, row: int, byte: int) -> tuple[str, int]:
        """The same address as a register and a constant."""
        swizzled, added = self.slots.rows.split_offset(row, byte)
        text, known = self.team.text, self._addresses
        if (thread_address, 0) not in known:
            start = text.let("add.u32", "b32", self.base, thread_address) if thread_address != "0" else self.base
            known[thread_address, 0] = start
        if (thread_address, swizzled) not in known:
            known[thread_address, swizzled] = text.let("xor.b32", "b32", known[thread_address, 0], swizzled)
        return known[thread_address, swizzled], added

    def thread_address(self, layout: DistributedLayout, unit: int) -> str:
        """A thread's offset in a slot: `layout` maps threads to rows and, in units of `unit` bytes, to columns."""
        team, rows = self.team, self.slots.rows
        row, column = (team.thread_offset(layout, axis) for axis in (0, 1))
        key = ("slot", row, column, unit, rows)
        byte = team.hoist((*key, "byte"), "mul.lo.u32", "b32", column, unit) if column != "0" else "0"
        if row == "0":
            return byte
        if rows.mask:
            bits = team.hoist((*key, "bits"), "bfe.u32", "b32", row, rows.shift, rows.mask.bit_length())
            swizzle = team.hoist((*key, "swizzle"), "shl.b32", "b32", bits, bit_width(SWIZZLE_UNIT))
            byte = team.hoist((*key, "swizzled"), "xor.b32", "b32", byte, swizzle)
        return team.hoist((*key, "address"), "mad.lo.u32", "b32", row, rows.pitch, byte)


# The emission context.


@dataclass
class FunctionAnalyses:
    """Facts about the values of the function."""

    producers: dict[Value, Node]  # the node that defines each value; filled during the walk
    ranges: IntervalAnalysis  # intervals of scalars: they prove that an access is in bounds
    use_counts: Counter[Value]  # uses of each value as an operand or as a region's result


@dataclass
class SharedMemory:
    """Shared memory of the thread block, and the accesses that still need a barrier."""

    allocator: SharedMemoryAllocator
    hazards: HazardTracker
    slots: dict[Value, SmemSlots] = field(default_factory=dict)  # staging buffers of `smem_slots`
    operands: dict[Value, SmemOperand] = field(default_factory=dict)  # blocks that MMAs read in place
    left_rows: dict[tuple[int, int], str] = field(default_factory=dict)  # memory by rows and bytes of each


@dataclass
class ProgramGrid:
    """How the programs of the launch map to thread blocks."""

    rank: int = 1  # axes of the grid
    linear: tuple[int, ...] = ()  # the grid's shape where the hardware grid has only one axis, else empty
    scheduler: TileScheduler | None = None  # of a persistent kernel
    cluster: ThreadBlockCluster | None = None


@dataclass
class EntryState:
    """What the entry declares, and what its launch must provide."""

    hidden: HiddenParameters
    arch: str
    isa_version: tuple[int, int] = (0, 0)  # the PTX ISA version that the text needs; (0, 0): the architecture's first
    min_resident_blocks: int = 0  # `.minnctapersm`; 0 leaves the register count to ptxas
    odd_byte_params: set[int] = field(default_factory=set)  # 8-bit parameters of odd length that 16-bit atomics access
    waits_in_body: bool = False  # whether loads of constants come before the wait for the kernel ahead
    loop_counters: dict[Node, str] = field(default_factory=dict)  # iteration counts of loops that print
    exit_label: str = ""  # the label at the end of the entry, once something branches there


@dataclass(frozen=True)
class InFlightMma:
    """A committed wgmma that no wait has covered yet."""

    result: Value
    stage: str  # the register with the ring stage that it reads; "" where a later one still reads that stage
    optional: bool = False  # whether that register may hold NO_STAGE: the loop has not committed it yet
    reads_registers: bool = False  # whether its left operand is in registers rather than in shared memory


@dataclass
class WarpgroupPipeline:
    """Pipeline of a kernel with asynchronous copies or MMAs."""

    ring: StageRingBuffer | None = None
    state: PipelineState | None = None  # stage and phase of the side under emission: producer or consumer
    tensor_maps: tuple[str, ...] = ()  # address registers of the TMA descriptors
    tma_stores: dict[Node, str] = field(default_factory=dict)  # stores made by TMA, with their descriptors
    row_stores: frozenset[Node] = frozenset()  # stores of accumulators to rows that TMA cannot make
    resident_states: dict[Node, PipelineState] = field(default_factory=dict)  # one ring for each resident operand
    resident_operands: dict[Value, tuple[PipelineState, str]] = field(default_factory=dict)  # with matrix descriptors
    in_flight: list[InFlightMma] = field(default_factory=list)  # in commit order
    # For the result of each MMA that stays in flight across iterations: the loop's block parameter that owns the
    # accumulator's registers, and the register with the MMA's stage.
    carried_targets: dict[Value, tuple[Value, str]] = field(default_factory=dict)
    emit_prefetched: Callable[[Node], None] | None = None  # emission of `prefetched_load`
    most_held: int = 0  # the stages that a consumer holds at once: a ring of fewer would wait for ever

    def wait_for_stage(self, held: int = 0) -> None:
        """Wait for the next stage's copy, while products in flight, and so many others, hold stages before it."""
        assert self.state is not None
        held += sum(mma.stage != "" for mma in self.in_flight)
        self.most_held = max(self.most_held, held + 1)
        self.state.wait(self.state.ring.full)


@dataclass
class PtxSizeRegisters:
    """The 64-bit registers of symbolic sizes: parameters, and expressions of them, computed at the entry's head."""

    text: PtxBuilder
    known: dict[Size, str] = field(default_factory=dict)

    def find(self, size: Size) -> str | int:
        """The operand of a size: a register, or a number."""
        if not isinstance(size, Dim):
            return size
        if size not in self.known:
            with self.text.at_entry_head():
                self.known[size] = self._compute(size)
        return self.known[size]

    def _compute(self, size: Dim) -> str:
        total: str | int = 0
        for monomial, count in size.terms:
            product: str | int = count.numerator
            for atom in monomial:
                factor = self.find(Dim.of(atom)) if isinstance(atom, str) else self._divide(*atom)
                product = factor if product == 1 else self.text.let("mul.lo.s64", "b64", factor, product)
            if count.denominator != 1:
                product = self.text.let("div.s64", "b64", product, count.denominator)
            total = product if total == 0 else self.text.let("add.s64", "b64", product, total)
        return str(total)

    def _divide(self, sign: str, left: Size, right: Size) -> str:
        """A floor quotient of sizes, or its remainder; the dividend is a register."""
        a, b, text = self._as_register(left), self.find(right), self.text
        rest = text.let("rem.s64", "b64", a, b)
        low = text.let("setp.lt.s64", "pred", rest, 0)
        remainder = text.let("selp.b64", "b64", text.let("add.s64", "b64", rest, b), rest, low)
        return remainder if sign == "%" else text.let("div.s64", "b64", text.let("sub.s64", "b64", a, remainder), b)

    def _as_register(self, size: Size) -> str:
        found = self.find(size)
        return found if isinstance(found, str) else self.text.let("mov.b64", "b64", found)


@dataclass
class EmissionContext:
    """One tile function under emission."""

    function: Function
    layouts: Mapping[Value, DistributedLayout]
    text: PtxBuilder
    team: ThreadTeam
    vector_width: int  # neighbouring elements that a thread holds
    analyses: FunctionAnalyses
    smem: SharedMemory
    entry: EntryState
    location: Location  # the source location of the lines under emission
    grid: ProgramGrid = field(default_factory=ProgramGrid)
    pipeline: WarpgroupPipeline = field(default_factory=WarpgroupPipeline)
    values: dict[Value, Registers] = field(default_factory=dict)  # the registers (or immediates) of each value
    memrefs: dict[Value, PtxMemRef] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sizes = PtxSizeRegisters(self.text)

    def layout(self, v: Value) -> DistributedLayout:
        """The layout of a block."""
        return self.layouts[v]

    def scalar_operand(self, v: Value) -> str:
        """The register or immediate of a scalar."""
        return self.values[v][0]


def make_context(
    laid_out: LaidOutFunction,
    text: PtxBuilder,
    team: ThreadTeam,
    vector_width: int,
    grid: Sequence[float] | None,
    facts: LaunchFacts,
) -> EmissionContext:
    """The context of a function before its first instruction."""
    function, layouts = laid_out.function, laid_out.layouts
    producers: dict[Value, Node] = {}
    analyses = FunctionAnalyses(producers, IntervalAnalysis(producers, grid), _count_uses(function.body))
    smem = SharedMemory(SharedMemoryAllocator(team), HazardTracker(function, layouts, team, facts.noalias))
    entry, text.arch = EntryState(HiddenParameters(text), facts.arch), facts.arch
    return EmissionContext(function, layouts, text, team, vector_width, analyses, smem, entry, function.loc)


def _count_uses(block: Block) -> Counter[Value]:
    uses = Counter(block.results)
    for node in block.walk():
        uses.update(node.args)
        for region in node.regions:
            uses.update(region.results)
    return uses


@contextmanager
def at_location(ctx: EmissionContext, node: Node) -> Iterator[None]:
    """Attach the node's source location to the lines, and to the errors, of the `with` block."""
    before, ctx.location = ctx.location, node.loc
    ctx.text.set_location(node.loc)
    try:
        check_rounding_policy(node)
        yield
    except TesseraError as error:
        raise error.at(node.loc) from None
    finally:
        ctx.location = before
        ctx.text.set_location(before)


def synchronise_team(ctx: EmissionContext) -> None:
    """Emit a barrier of the team that the emission itself needs between two accesses to shared memory."""
    ctx.team.synchronise()
    ctx.smem.hazards.note_barrier()


def get_exit_label(ctx: EmissionContext) -> str:
    """The label at the end of the entry, for threads that exit early."""
    ctx.entry.exit_label = ctx.entry.exit_label or ctx.text.new_label("end")
    return ctx.entry.exit_label


# Kernel entries: the .entry directive, its parameters, and the assembled text of one tile function.


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
    early_loads: bool = False  # whether it loads inputs of the program before the kernel ahead has ended
    held_stages: int = 0  # the stages of its ring that a consumer holds at once

    def describe(self) -> dict[str, Any]:
        """The entry as manifest data."""
        more: dict[str, Any] = {"maps": list(self.maps)} if self.maps else {}
        more |= {"programs": self.programs} if self.programs else {}
        more |= {"folded": True} if self.linear_grid else {}
        more |= {"halves": sorted(self.odd_byte_params)} if self.odd_byte_params else {}
        more |= {"cluster": self.cluster} if self.cluster > 1 else {}
        more |= {"early": True} if self.early_loads else {}
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
    if entry.arch not in WITHOUT_DEPENDENT_LAUNCH:
        with ctx.text.at_entry_head():  # after what reads no memory that kernels write
            if not ctx.team.producer_threads:  # whose blocks take a multiprocessor each: others would take their room
                ctx.text.do("griddepcontrol.launch_dependents")
            if not entry.waits_in_body:
                ctx.text.do("griddepcontrol.wait")
    lines = (*_format_header(ctx, len(maps)), *ctx.text.assemble(prologue), "}", "")
    if _count_parameter_bytes(ctx, len(maps)) > MAX_PARAMETER_BYTES:
        entry.isa_version = max(entry.isa_version, LARGE_PARAMETERS_ISA)
    return KernelEntry(
        lines, ctx.team.block_threads, allocator.shared_bytes, tuple(maps), programs,
        grid.cluster.size if grid.cluster is not None else 1, entry.hidden.describe(), entry.isa_version,
        bool(grid.linear), entry.odd_byte_params, entry.waits_in_body, ctx.pipeline.most_held,
    )  # fmt: skip


def wait_for_kernel_ahead(ctx: EmissionContext) -> None:
    """Programmatic dependent launch: wait here, rather than at the entry's head, until the kernel ahead has ended."""
    ctx.entry.waits_in_body = True
    ctx.text.do("griddepcontrol.wait")


def _count_parameter_bytes(ctx: EmissionContext, maps: int) -> int:
    """At least the bytes of an entry's parameters.

    Raises:
        ResourceError: there are more than a launch may have.
    """
    count = len(ctx.function.params) + sum(1 for _ in _number_size_parameters(ctx))
    held = TENSOR_MAP_BYTES * maps + 8 * (count + len(ctx.entry.hidden.declare(ctx.function.name)))
    if held > MAX_LARGE_PARAMETER_BYTES:
        raise ResourceError(
            f"{ctx.function.name} has {held:,} bytes of parameters", location=ctx.function.loc,
            expected=f"at most {MAX_LARGE_PARAMETER_BYTES:,} on a GPU", received=f"{held:,}",
            suggestion="fewer arrays in one kernel",
        )  # fmt: skip
    return held


def _format_header(ctx: EmissionContext, maps: int) -> Iterator[str]:
    name = ctx.function.name
    params = [f"\t.param .align 64 .b8 {name}_map{i}[{TENSOR_MAP_BYTES}]" for i in range(maps)]
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

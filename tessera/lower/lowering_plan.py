"""Lowering plan: the tile sizes and limits that a target sets, the ops that it computes with hand-written kernels, and
the passes that users add (pipeline extensions)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from tessera.core.errors import UnknownNameError
from tessera.core.hooks import load_library_launches
from tessera.core.symbolic_dim import Size, round_up
from tessera.ir.core import Attrs, Function, Module, Node, Value
from tessera.ir.rules import Op, Rules

if TYPE_CHECKING:
    from tessera.ir.rewrite import UseDef

# The rates of products by blocks of `busy_n` columns relative to those of `n`, for long and for short contractions.
SHORT_DEPTH, NARROW_RATE, SHORT_NARROW_RATE = 1024, 0.93, 1.05
# The rates of 16-bit products by blocks of so many rows and columns, relative to the fastest: measured on an H200. The
# second is that of a right operand whose columns lie side by side in memory: it is copied in boxes of 64 columns.
BLOCK_RATES = {
    (128, 256): (1.0, 1.0), (128, 224): (0.95, 0.9), (128, 192): (0.96, 0.96), (128, 160): (0.93, 0.89),
    (128, 128): (0.92, 0.92), (128, 96): (0.9, 0.6), (128, 64): (0.7, 0.6), (64, 256): (0.91, 0.91),
    (64, 192): (0.9, 0.9), (64, 128): (0.93, 0.93), (64, 96): (0.9, 0.55), (64, 64): (0.72, 0.72),
}  # fmt: skip
EVEN_BLOCKS = tuple(block for block in BLOCK_RATES if block[1] & (block[1] - 1) == 0)  # powers of two
OTHER_BLOCK_RATE = 0.8
# What all processors load is bound by the L2 cache: the multiply-adds in the time of two elements of an operand.
LOAD_STEPS = 0.4
# Smaller blocks than those of a warp group: what each element of the contraction takes, and each result for it.
WARPGROUP_SIDE, SMALL_BLOCK_STEPS, SMALL_RESULT_STEPS = 64, 5300, 7.6
PIPELINE_STEPS = 2e6  # in which the copies of a pipeline begin
STEP_SECONDS = 2.95e-13  # of a processor for a multiply-add at the highest rate
# The time in which a block's results are stored, in elements of a contraction; blocks of this size store theirs while
# the next one is computed, where contractions are short and programs many (ping-pong).
STORE_DEPTH, PINGPONG_BLOCK, PINGPONG_DEPTH, PINGPONG_PROGRAMS = 186, (128, 128), 1280, 256
# The lanes down to which blocks of results become narrower where their axis is padded by more than this.
NARROW_LANES, MOST_PADDING = 128, 1.15
LEAST_LANES = 8  # of such a block, where there would be few


@dataclass(frozen=True)
class LoweringPlan:
    """The parameters of a target for the lowering; the defaults suit a CPU with a few threads.

    `rows` and `pointwise` count the elements that one program holds in a row kernel and in an elementwise
    one; a row longer than `row_limit` is walked by a loop, and so is a contraction longer than `whole_k`.
    `find_refused` is the target's resource model: the names of the kernels of a Tile module that need more shared
    memory or registers than it has; None: it has no such limits.
    """

    m: int = 128
    n: int = 128
    k: int = 512
    busy_n: int | None = None  # like n, for products whose results go through functions at once; None: n
    processors: int | None = None  # that run one program of a product each; None: blocks are not chosen by waves
    wave_blocks: bool = False  # 16-bit products that copies feed have the blocks whose waves take the least time
    warpgroup_rows: int = 0  # of an instruction of a warp group
    whole_k: int = 512
    balance_k: int = 0  # the tiles of a contraction are multiples of this, and pad it least; 0: they are near k
    multiple: int = 16
    # What packing an element of a product's right operand costs, in multiply-adds; 0: products are not packed.
    product_pack: int = 0
    rows: int = 8192
    row_limit: int = 8192
    row_warps: int = 1  # rows that a program reduces to numbers side by side, if there are many short ones
    row_tile: int | None = None  # of longer rows that several loops walk, where there are many; None: row_limit
    pointwise: int = 8192
    pointwise_bytes: int = 0  # that a program of a pointwise kernel reads and writes, if there are many programs
    divided_row: int = 0  # rows up to this length that compare their index are one tile, whose loop is divided
    lanes: int = 64
    result_lanes: int | None = None  # like lanes, for reductions whose lanes have results of their own; None: the same
    result_rows: int | None = None  # like rows, for the same reductions; None: the same
    streamed: int | None = None  # elements from which on such reductions have twice the lanes and rows; None: never
    programs: int = 8
    # Blocks are padded to powers of two, so tiles are such powers rather than divisors of their axes.
    power_of_two_tiles: bool = False
    collapse: bool = False  # adjacent dims that every access walks as one become one
    shares_rows: bool = False  # kernels of rows store what other kernels read of the rows, too
    # Elements of a row that each program of a product of this row with a matrix computes itself, with the reductions
    # that this takes; 0: a kernel before the product computes it.
    own_row: int = 0
    peel: bool = False  # the last partial tile of a looped reduction is emitted apart, at its own size
    # Longer axes than this are sorted by the host; None: never, the lowering compares all pairs.
    host_sort: int | None = None
    # Stacks of slices that products read are strided views; else they are written, and read by tensor maps (PTX).
    stack_views: bool = True
    flat_windows: bool = False  # products read the windows of convolutions along flat lines of the padded array
    indirect_windows: bool = False  # convolutions read windows through tables of offsets
    vector_products: int = 0  # products of at most so many rows or columns are reductions
    vector_results: int | None = None  # the results of such a product whose sums run across rows of memory; None: any
    tensor_cores: bool = False  # convolutions are implicit GEMMs, and large f32 products split into bf16
    serial_scans: bool = False  # scans walk their rows in one pass; else all elements double their reach together
    flash: bool = True
    flash_m: int = 32
    flash_n: int = 64
    flash_least: int = 16  # rows of a block for fewer queries
    # What a block of queries or keys costs, in elements: blocks are as long as pads least; 0: they are powers of two.
    flash_rows_cost: int = 0
    flash_keys_cost: int = 0
    flash_deep: int | None = None  # rows and columns instead of both for heads of 64 or 128 features; None: the same
    # Multiply-adds of a small matrix up to which a batch is solved and factored, one in each lane; 0: the host does.
    matrix_steps: int = 0
    matrix_side: int = 0  # rows and columns up to which a batch is factored by loops, a matrix in each lane
    mesh: tuple[int, int] | None = None  # rows and columns of elements, each with its own memory
    mesh_product: str = "summa"  # or "cannon": the algorithm of distributed products
    # Parameters whose memory results may take: of an update of a slice of one, the slice alone is computed.
    donated: frozenset[int] = frozenset()
    table_bytes: int = 0  # of memory of a processor for vectors from which its programs gather again and again
    find_refused: Callable[[Module], Collection[str]] | None = None
    parallel: int | None = (
        None  # programs that keep the target busy: reductions with fewer are split; None: they are not
    )
    reduction_parts: int | None = None  # like parallel, for reductions alone; None: the same
    # For each parameter the mesh axis over which each of its axes is cut (-1: whole), or None; (): the search chooses.
    mesh_shardings: tuple[tuple[int, ...] | None, ...] = ()

    def widen(self, elements: int) -> int:
        """The factor of `result_lanes` and `result_rows` for a reduction of so many elements."""
        return 2 if self.streamed is not None and elements >= self.streamed else 1

    def fit_lanes(self, extent: int, most: int) -> int:
        """The results along memory of a program of a reduction: the most that pad their axis little, at most `most`.

        >>> LoweringPlan(power_of_two_tiles=True).fit_lanes(1280, 1024)
        256
        """
        if not self.power_of_two_tiles or most <= NARROW_LANES:
            return most
        widths = [most >> n for n in range((most // NARROW_LANES).bit_length())]
        padding = {
            w: round_up(extent, w) / extent if w < extent else (1 << (extent - 1).bit_length()) / extent for w in widths
        }
        return next((w for w in widths if padding[w] <= MOST_PADDING), min(widths, key=lambda w: (padding[w], -w)))

    def fills_waves(self, outer: int, rows: int, columns: int, depth: int) -> bool:
        """Whether products by blocks of `busy_n` columns take less time than those of `n`: they fill the last wave of
        programs better, and where contractions are short they overlap what follows with the next block."""
        if self.processors is None or self.busy_n is None:
            return False
        bands = outer * -(-rows // self.m)
        if bands * -(-columns // self.n) < self.programs:
            return False  # there, blocks are halved anyway
        whole, narrow = (-(-bands * -(-columns // n) // self.processors) * n for n in (self.n, self.busy_n))
        return narrow < (SHORT_NARROW_RATE if depth <= SHORT_DEPTH else NARROW_RATE) * whole


def estimate_waves(
    sizes: tuple[int, int, int, int], block: tuple[int, int], processors: int, turned: bool = False
) -> float:
    """The time of a 16-bit product [Z, M, K] · [Z, K, N], sizes (Z, M, K, N), by waves of programs with a block each.

    In multiply-adds of a processor at its highest rate. `turned`: the right operand is [Z, N, K] in memory.

    >>> estimate_waves((1, 768, 8192, 3072), (128, 256), 132) > estimate_waves((1, 768, 8192, 3072), (128, 160), 132)
    True
    """
    (batch, rows, depth, columns), (m, n) = sizes, block
    programs = batch * -(-rows // m) * -(-columns // n)
    waves = -(-programs // processors)
    if min(block) < WARPGROUP_SIDE:
        return waves * depth * (SMALL_BLOCK_STEPS + SMALL_RESULT_STEPS * m * n)
    overlaps = block == PINGPONG_BLOCK and depth <= PINGPONG_DEPTH and programs >= PINGPONG_PROGRAMS
    rate = BLOCK_RATES.get(block, (OTHER_BLOCK_RATE,) * 2)[not turned]
    each = max(m * n / rate, LOAD_STEPS * min(programs, processors) * (m + n))
    return waves * (each * depth + (0 if overlaps else STORE_DEPTH * m * n)) + PIPELINE_STEPS


@dataclass(frozen=True)
class LibraryLaunch:
    """A launch of a library kernel: the tile function, its grid, and the shapes of the views it takes."""

    function: Function
    grid: tuple[Size, ...]
    shapes: tuple[tuple[Size, ...], ...]
    result: tuple[Size, ...]


# rule(node, plan) gives the launch for a node, or None where its lowering is used.
library_rules = Rules("launch")
LibraryRule = Callable[[Node, LoweringPlan], "LibraryLaunch | None"]


@cache
def _load_library() -> Rules:
    """The table of these rules, whose library is imported now."""
    return load_library_launches()  # type: ignore[no-any-return]


def find_library_ops(plan: LoweringPlan) -> frozenset[Op]:
    """The ops that the kernel library computes under this plan."""
    return frozenset(_load_library()) if plan.flash else frozenset()


def find_library_launch(node: Node, plan: LoweringPlan) -> LibraryLaunch | None:
    """The launch of a library kernel for a node, or None."""
    rule = _load_library().get(node.op) if plan.flash else None
    return rule(node, plan) if rule else None


@dataclass(frozen=True)
class LibraryLowering:
    """A node's results as a function of tensors, which launches library kernels; `operands` are its arguments."""

    operands: tuple[Value, ...]
    function: Callable[..., Any]


# rule(node, uses, plan) gives the library lowering of a node, or None where its own is used.
library_lowerings = Rules("library lowering")
# Of ops whose rules take the result of another op: that op. Their other nodes are not looked at.
library_operands: dict[Op, Op] = {}
# The same for nodes of a simplified function, where one stands for many ops of the traced one.
simplified_lowerings = Rules("library lowering of simplified functions")


def find_library_lowering(
    node: Node, uses: UseDef, plan: LoweringPlan, rules: Rules = library_lowerings
) -> LibraryLowering | None:
    """The library lowering of a node, or None."""
    rule = rules.get(node.op) if plan.flash and _load_library() else None
    operand = library_operands.get(node.op)
    if rule is None or (operand is not None and uses.find(node.args[0], operand) is None):
        return None
    return rule(node, uses, plan)  # type: ignore[no-any-return]


# Pipeline extensions: passes that users add to the lowering, by name, and which of them a traced function has. A
# function under trace records the names of its extensions as attributes (`passes`, `fusion`), so that every tool that
# lowers the function again (`inspect`, `bisect`, `build`) finds the same passes. Extensions of the Graph level run
# first, in order; those of the Schedule level run after the pass `schedule`.


GRAPH, SCHEDULE = "graph", "schedule"
PASSES, FUSION = "passes", "fusion"  # attributes of a Graph function


@dataclass(frozen=True, eq=False)
class PipelineExtension:
    """A pass of a user: its name in the pipeline, the level whose modules it takes, and the function itself."""

    name: str
    level: str
    run: Callable[[Module, LoweringPlan], Module]
    source: Any = None  # what it was made from
    serial: int = field(default_factory=itertools.count(1).__next__)  # of no other extension, as an id may be


# The extensions by name, and the names of those that every program has.
EXTENSIONS: dict[str, PipelineExtension] = {}
INSTALLED: list[str] = []
# The names of the extensions that programs traced in this context have besides, and their fusion.
SCOPED: ContextVar[tuple[str, ...]] = ContextVar("scoped passes", default=())
HIDDEN: ContextVar[frozenset[str]] = ContextVar("hidden passes", default=frozenset())  # installed, but not here
SCOPED_FUSION: ContextVar[Attrs | None] = ContextVar("fusion", default=None)
# The rules of `ts.fusion.pattern` by name: rule(producer, consumer) says whether two ops may share a kernel.
FUSION_RULES: dict[str, Callable[[Any, Any], bool]] = {}
# What notes the compiled programs that run in this context (`ts.profile`), or None: its method
# `note(function, device, run, arrays)` runs the program.
RUN_OBSERVER: ContextVar[Any] = ContextVar("run observer", default=None)
# Whether a pass compares the program before and after it on arrays of its own.
VALUES_CHECKED: ContextVar[bool | None] = ContextVar("values checked", default=None)


def register_extension(extension: PipelineExtension) -> PipelineExtension:
    """Register an extension; another one of its name is replaced, as where a notebook's cell is run again."""
    EXTENSIONS[extension.name] = extension
    return extension


def list_active_names() -> tuple[str, ...]:
    """The names of the extensions of a program that is traced now."""
    hidden = HIDDEN.get()
    installed = [n for n in INSTALLED if n not in hidden]
    return (*installed, *(n for n in SCOPED.get() if n not in installed))


def make_extension_key() -> Hashable:
    """A cache key of the extensions of a program that is traced now; None where there are none."""
    if not INSTALLED and not SCOPED.get() and SCOPED_FUSION.get() is None and RUN_OBSERVER.get() is None:
        return None  # as for most calls
    names, fusion, observed = list_active_names(), SCOPED_FUSION.get(), RUN_OBSERVER.get() is not None
    if not names and fusion is None and not observed:
        return None
    return tuple((n, EXTENSIONS[n].serial) for n in names), fusion, observed


def make_program_attributes(passes: Sequence[str] = (), fusion: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The attributes of a function that is traced now; `passes` and `fusion` are its own, besides the context's."""
    names = tuple(dict.fromkeys((*list_active_names(), *passes)))
    chosen = fusion or SCOPED_FUSION.get()
    return {**({PASSES: names} if names else {}), **({FUSION: Attrs(chosen)} if chosen else {})}


@contextmanager
def use_extensions(names: Sequence[str] = (), fusion: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Programs traced in this context have these extensions, too."""
    token = SCOPED.set(tuple(dict.fromkeys((*SCOPED.get(), *names))))
    other = SCOPED_FUSION.set(Attrs(fusion) if fusion else SCOPED_FUSION.get())
    try:
        yield
    finally:
        SCOPED.reset(token)
        SCOPED_FUSION.reset(other)


@contextmanager
def check_values(wanted: bool) -> Iterator[None]:
    """Turn the comparison of values after each pass of a user on or off."""
    token = VALUES_CHECKED.set(wanted)
    try:
        yield
    finally:
        VALUES_CHECKED.reset(token)


def find_extensions(function: Function, level: str) -> list[PipelineExtension]:
    """The extensions of a traced function at a level, in order.

    Raises:
        UnknownNameError: this process has no pass of that name.
    """
    names = function.attrs.get(PASSES, ())
    unknown = [n for n in names if n not in EXTENSIONS]
    if unknown:
        raise UnknownNameError(
            f"{function.name} was traced with the compiler pass {unknown[0]}, which is not here",
            location=function.loc, expected=", ".join(EXTENSIONS) or "none",
            suggestion="import the module that defines it",
        )  # fmt: skip
    return [e for n in names if (e := EXTENSIONS[n]).level == level]

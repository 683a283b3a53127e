"""A tile function as an entry: the threads it takes, its parameters, its body."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tessera.codegen.ptx.blocks import (  # noqa: F401  (their rows fill the tables)
    access,
    atomics,
    checks,
    control,
    copies,
    dot,
    group,
    ids,
    inline,
    mbarrier,
    meeting,
    moves,
    prints,
    reduce,
    slots,
)
from tessera.codegen.ptx.blocks.ids import AXES, folds
from tessera.codegen.ptx.blocks.meeting import leave
from tessera.codegen.ptx.entries import consume  # noqa: F401  (their rows fill the tables)
from tessera.codegen.ptx.entries.cluster import Cluster, asked_cluster
from tessera.codegen.ptx.entries.specialize import special, specialized
from tessera.codegen.ptx.entries.supplier import supplied_entry
from tessera.codegen.ptx.entry import Entry, bind_parameters, finished
from tessera.codegen.ptx.kernel import Kernel
from tessera.codegen.ptx.passes.arrange import arrange
from tessera.codegen.ptx.passes.contract import contracted
from tessera.codegen.ptx.passes.flush import flushed
from tessera.codegen.ptx.passes.fuse import fuse_sums
from tessera.codegen.ptx.passes.hoist import loads_first
from tessera.codegen.ptx.passes.infer import sizes
from tessera.codegen.ptx.passes.peel import peeled
from tessera.codegen.ptx.passes.pipeline import pipelined
from tessera.codegen.ptx.passes.places import placed
from tessera.codegen.ptx.passes.products import tensor_cores
from tessera.codegen.ptx.passes.rotate import rotated
from tessera.codegen.ptx.passes.split import split_products
from tessera.codegen.ptx.passes.stages import staged
from tessera.codegen.ptx.passes.stream import streaming
from tessera.codegen.ptx.passes.supply import supplying
from tessera.codegen.ptx.scalars import chance, formulas, functions  # noqa: F401  (their rows fill the tables)
from tessera.codegen.ptx.scalars.policy import has_policies
from tessera.codegen.ptx.team import WARP, Team
from tessera.codegen.ptx.text import Files, Text
from tessera.codegen.ptx.types import size
from tessera.ir.core import Function, Value
from tessera.ops import tile
from tessera.types import TensorType

SPECIAL = ("sm_90a",)  # architectures with instructions of warp groups
SHARED_LIMIT = {"sm_80": 166_912, "sm_90a": 232_448}
STAGES = (12, 8, 6, 5, 4, 3, 2)  # of a ring, the most that fit: a small product waits for memory alone
ALIGN = 16
THREADS = (32, 1024)  # the fewest and the most of a team
EACH = 8  # elements that a thread holds of the largest block, where the team can be as large
PRODUCT = 128  # the same where tensor cores form products: what a warp reads serves 64 rows and columns
WIDE = 32  # from so many on the team grows past HALF
HALF = 256
REGISTERS = 1 << 16  # of a multiprocessor
MOST_BLOCKS = 8  # of them that are asked to share its registers


def emit_function(
    function: Function,
    files: Files | None,
    grids: Sequence[Sequence[int]],
    apart: bool,
    aligned: Sequence[int],
    arch: str,
) -> Entry:
    """A tile function as an entry for these grids.

    `apart` says that its refs lie in different memory, `aligned` of how many bytes their addresses are multiples.
    """  # fmt: skip
    if has_policies(function):
        return _plain(function, files, grids, apart, aligned, arch)
    fused = fuse_sums(split_products(flushed(function)))
    if any(tensor_cores(node) for node in fused.body.walk()):  # what these add up, no other engine rounds alike
        fused = contracted(fused)
    fits = apart and arch in SPECIAL and len(set(grids)) == 1 and min(aligned, default=ALIGN) == ALIGN
    # Programs that wait for each other are not worked through in turn.
    fits = fits and not tile.meets(function.body) and len(grids[0]) <= len(AXES)
    ready = _streams(pipelined(fused), grids[0]) if fits else fused
    cluster = asked_cluster(function, ready, grids[0] if grids else (), fits)
    if special(ready) and (entry := _special(ready, files, grids[0], apart, cluster)) is not None:
        return entry
    supply = supplying(fused, grids[0], team_size(fused)) if fits else None
    if supply is not None:
        return supplied_entry(supply, team_size(fused), vector_width(fused), files, grids[0], apart)
    ahead = staged(fused, apart, aligned, team_size(fused), SHARED_LIMIT[arch])
    return _plain(ahead, files, grids, apart, aligned, arch)


def _special(
    function: Function, files: Files | None, grid: Sequence[int], apart: bool, cluster: Cluster | None
) -> Entry | None:
    """An entry whose threads have different work, with as many stages as fit; None where not even the fewest do."""
    asked = function.attrs.get("stages")  # by a Schedule: so many, or the shared memory is said not to suffice
    for stages in STAGES if asked is None else (int(asked),):
        entry = specialized(function, files, grid, apart, stages, cluster)
        if entry.shared <= SHARED_LIMIT[SPECIAL[0]] or asked is not None:
            return entry
    return entry if cluster is not None else None  # which a Schedule asks for, too


def _streams(function: Function, grid: Sequence[int]) -> Function:
    """A function with its products streamed, if it can be, and its loops made fit for that."""
    found = streaming(function)
    if found is function:
        return function
    return placed(peeled(rotated(contracted(found), grid), grid))


def _plain(
    function: Function,
    files: Files | None,
    grids: Sequence[Sequence[int]],
    apart: bool,
    aligned: Sequence[int],
    arch: str,
) -> Entry:
    """An entry in which every thread does the same."""
    group = int(function.attrs.get("group", 1))
    text = Text(files)
    team = Team(text, 1 if group > 1 else team_size(function), group)
    vector = vector_width(function)
    grid = tuple(max(each) for each in zip(*grids, strict=True)) if grids else None
    kernel = Kernel(arrange(loads_first(function), team.threads, vector), text, team, vector, grid, apart)
    kernel.arch, kernel.resident = arch, resident_blocks(function)
    kernel.rank, kernel.folded = max((len(g) for g in grids), default=1), folds(grids)
    bind_parameters(kernel, aligned)
    kernel.run(kernel.function.body)
    if kernel.ended:
        text.label(kernel.ended)
    if "meeting" in kernel.extras.used:
        leave(kernel)
    text.line("ret")
    return finished(kernel)


def team_size(function: Function) -> int:
    """The threads for a tile: so many that none holds many elements of the largest block."""
    most = max((_count(v) for node in function.body.walk() for v in node.results), default=1)
    if any(tensor_cores(node) for node in function.body.walk()):
        return min(max(1 << max(most // PRODUCT - 1, 0).bit_length(), 4 * WARP), HALF)
    wanted = most // EACH if most // EACH <= HALF else max(HALF, most // WIDE)
    return min(max(1 << max(wanted - 1, 0).bit_length(), THREADS[0]), THREADS[1])


def resident_blocks(function: Function) -> int:
    """The blocks of threads that a multiprocessor should hold at once where products take each other's results; 0: any.

    The assembler keeps more alive of them than pays. A thread then has four registers for each element that it holds
    of the largest block: sums, the operands of the next instructions, and addresses.
    """
    if sum(tensor_cores(node) for node in function.body.walk()) < 2:
        return 0
    most = max(_count(v) for node in function.body.walk() for v in node.results)
    return max(1, min(REGISTERS // (4 * most), MOST_BLOCKS))


def vector_width(function: Function) -> int:
    """The neighbours that a thread holds: 16 bytes of the narrowest elements that are loaded or stored."""
    narrow = [n.args[0].type.dtype for n in function.body.walk() if n.op in (tile.load, tile.store)]
    return max(1, min(8, 16 // min((size(d) for d in narrow), default=4)))


def _count(v: Value) -> int:
    return math.prod(sizes(v)) if isinstance(v.type, TensorType) else 1

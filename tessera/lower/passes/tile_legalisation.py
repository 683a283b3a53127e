"""Tile legalisation: kernels that a target's resource model refuses get the next smaller tiles, before any emission.

Tile sizes are chosen for speed (`choose_tile_sizes`). The resource model of the target (`LoweringPlan.find_refused`)
then says which kernels exceed its shared memory or registers. Their candidates are tried from the largest tile to the
smallest: each halves the longest side, which costs the least arithmetic intensity.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from tessera.ir.core import Attrs, Block, Module, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, rewrite_function
from tessera.lower.graph_to_schedule.lowering import TileSizeSearch
from tessera.lower.indexing_maps import analyse_body
from tessera.lower.lowering_plan import LoweringPlan
from tessera.lower.schedule_to_tile.lowering import REDUCTION_OPS, to_tile
from tessera.ops.dialects import host, schedule


def to_legal_tile(module: Module, plan: LoweringPlan) -> Module:
    """The Tile module of a Schedule module, with tiles that the target's resource model accepts.

    A kernel that it refuses even with the smallest tiles stays as it is: the generator then names what is missing.
    """
    tile = to_tile(module)
    if plan.find_refused is None:
        return tile
    while refused := plan.find_refused(tile):
        smaller = _cut_refused(module, tile, refused, plan)
        if smaller is None:
            break
        module, tile = smaller, to_tile(smaller)
    return tile


def _cut_refused(module: Module, tile: Module, refused: Collection[str], plan: LoweringPlan) -> Module | None:
    """The Schedule module with smaller tiles for the refused kernels; None if none of them has smaller ones."""
    kinds = (schedule.kernel, host.launch)
    kernels = [n for n in _walk_host(module.main.body) if n.op in kinds]
    launches = [n for n in _walk_host(tile.main.body) if n.op is host.launch]
    found = {
        k: cut
        for k, launch in zip(kernels, launches, strict=True)
        if k.op is schedule.kernel and launch.attrs["kernel"] in refused and (cut := cut_tiles(k, plan)) is not None
    }
    patterns = RewritePatterns("tile legalisation")

    @patterns(schedule.kernel)
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> tuple[()] | None:
        if node not in found:
            return None
        attrs = Attrs({**node.attrs, "schedule": found[node]})
        rewriter.builder.add(schedule.kernel, args, attrs, types=(), regions=node.regions)
        return ()

    return module.replace(rewrite_function(module.main, patterns), *module.functions[1:]) if found else None


def _walk_host(block: Block) -> Iterator[Node]:
    """The nodes that the host runs, those of loops and branches included, without the bodies of kernels."""
    for node in block.nodes:
        yield node
        if node.op is not schedule.kernel:
            for region in node.regions:
                yield from _walk_host(region)


def cut_tiles(kernel: Node, plan: LoweringPlan) -> Attrs | None:
    """The schedule of a kernel with half of its longest tile side; None if every side is one element.

    A side along which the kernel reduces is cut last, and then walked by a loop.
    """
    (block,), dims = kernel.regions, kernel.attrs["dims"]
    chosen = kernel.attrs["schedule"]
    search = TileSizeSearch(block, analyse_body(block, dims), plan)
    search.tile, search.loop = list(chosen["tile"]), list(chosen["loop"])
    reduced = {n.attrs["dim"] for n in block.nodes if n.op in REDUCTION_OPS}
    free = [d for d in range(len(dims)) if d not in reduced and dims[d][2] == "parallel"]
    walked = [d for d in reduced if search.loop in ([], [d])]
    for sides in (free, walked):
        longest = max((d for d in sides if search.tile[d] > 1), key=search.tile.__getitem__, default=None)
        if longest is not None:
            search.tile[longest] = search.cut(longest, -(-search.tile[longest] // 2))
            search.loop = [longest] if longest in reduced else search.loop
            return Attrs({**chosen, "tile": tuple(search.tile), "loop": tuple(search.loop)})
    return None

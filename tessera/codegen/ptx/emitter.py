"""The PTX emitter: the state of emitting one tile function, and the walk over its nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING

from tessera.codegen.ptx.layout import DistributedLayout
from tessera.codegen.ptx.passes.barrier_insertion import HazardTracker
from tessera.codegen.ptx.passes.layout_inference import LaidOutFunction
from tessera.codegen.ptx.passes.shared_memory_allocator import SharedMemoryAllocator
from tessera.codegen.ptx.passes.tile_scheduler import TileScheduler
from tessera.codegen.ptx.table import emit_node
from tessera.codegen.ptx.table.blocks import elementwise
from tessera.codegen.ptx.table.blocks.diagnostics import LoopCounters
from tessera.codegen.ptx.table.scalars.conversion import check_rounding_policy
from tessera.codegen.ptx.table.warpgroup.ring_buffer import PipelineState, RingBuffer
from tessera.codegen.ptx.table.warpgroup.wgmma import AsyncMmaQueue
from tessera.codegen.ptx.text.builder import HiddenParameters, PtxBuilder
from tessera.codegen.ptx.text.memref import PtxMemRef
from tessera.codegen.ptx.text.thread_team import ThreadTeam
from tessera.codegen.value_ranges import IntervalAnalysis
from tessera.core.errors import Location, TesseraError, UnsupportedOpError
from tessera.ir.core import Block, Node, Value
from tessera.ops.dialects import control_flow
from tessera.ops.tensor import basic, shape

if TYPE_CHECKING:
    from tessera.codegen.ptx.passes.persistent_prefetch import BlockPrefetcher
    from tessera.codegen.ptx.passes.tile_scheduler import ThreadBlockCluster
    from tessera.codegen.ptx.table.blocks.staging_buffers import SmemOperand, SmemSlots

# What only names the registers of other values anew: it may come before pointwise ops that it does not use.
FREE_OPS = (basic.full, basic.broadcast_to, shape.iota)


class PtxEmitter:
    """One tile function under emission: what registers hold each value, and where memory lies."""

    def __init__(
        self,
        arranged: LaidOutFunction,
        text: PtxBuilder,
        team: ThreadTeam,
        vector: int,
        grid: Sequence[int] | None,
        apart: bool,
    ) -> None:
        self.vector, self.rank = vector, 1
        self.persistent: TileScheduler | None = None
        self.ring: RingBuffer | None = None
        self.pipeline_state: PipelineState | None = None
        self.cluster: ThreadBlockCluster | None = None
        self.prefetcher: BlockPrefetcher | None = None
        self.maps: tuple[str, ...] = ()
        self.tma_stores: dict[Node, str] = {}
        self.kept: dict[Node, PipelineState] = {}  # the rings of blocks that stay, and of these blocks
        self.resident_operands: dict[Value, tuple[PipelineState, str]] = {}  # with the descriptor of its begin
        self.extras, self.rounds = HiddenParameters(text), LoopCounters(self)
        self.arch, self.exit_label = "sm_80", ""
        self.folded: tuple[int, ...] = ()  # the grid, where the hardware knows programs by number alone
        self.halves: set[int] = set()  # parameters of single bytes that are swapped two by two, and whose number is odd
        self.isa = (0, 0)  # the version of the instruction set, where one is needed that is newer than the least
        self.resident = 0  # blocks that registers must suffice for on one multiprocessor; 0: as the assembler likes
        self.function, self.layouts, self.text, self.team = arranged.function, arranged.layouts, text, team
        self.values: dict[Value, tuple[str, ...]] = {}
        self.memories: dict[Value, PtxMemRef] = {}
        self.slots: dict[Value, SmemSlots] = {}
        self.smem_operands: dict[Value, SmemOperand] = {}  # blocks that stay where copies put them
        self.producers: dict[Value, Node] = {}
        self.ranges = IntervalAnalysis(self.producers, grid)
        self.room = SharedMemoryAllocator(team)
        self.hazards = HazardTracker(self.function, self.layouts, team, apart)
        self.used = _used_values(self.function.body)
        self.mma_queue = AsyncMmaQueue(self)  # products that go on while other work is done
        self._loc: Location = self.function.loc

    @contextmanager
    def at(self, node: Node) -> Iterator[None]:
        """Tie the lines emitted inside, and errors, to the node's place."""
        before, self._loc = self._loc, node.loc
        self.text.place(node.loc)
        try:
            check_rounding_policy(node)
            yield
        except TesseraError as error:
            raise error.at(node.loc) from None
        finally:
            self._loc = before
            self.text.place(before)

    def run(self, block: Block) -> None:
        """Emit the nodes of a block in order."""
        chain: list[Node] = []
        for node in block.nodes:
            if node.op.pointwise and emit_node.get(node.op) is None:
                self.producers.update(dict.fromkeys(node.results, node))
                chain.append(node)
                continue
            if node.op not in FREE_OPS or {n.out for n in chain} & set(node.args):
                self._end(chain)
            self.emit(node)
        self._end(chain)

    def _end(self, chain: list[Node]) -> None:
        """Emit the pointwise nodes that were put off, those of one layout together."""
        for _, group in groupby(chain, lambda node: self.layout(node.out).count):
            nodes = list(group)
            self._wait_operands(nodes)
            elementwise.emit_elementwise(self, nodes)
        chain.clear()

    def _wait_operands(self, nodes: Sequence[Node]) -> None:
        """Wait for the products whose sums some nodes need; before a branch, or a loop that does not count, for all."""
        if any(node.regions and node.op is not control_flow.for_ for node in nodes):
            self.mma_queue.wait_for_all()
        elif not any(node.regions for node in nodes):
            self.mma_queue.wait_for(v for node in nodes for v in node.args)

    def emit(self, node: Node) -> None:
        """Emit a node."""
        self.producers.update(dict.fromkeys(node.results, node))
        self._wait_operands([node])
        with self.at(node):
            if self.hazards.before(node):
                self.team.meet(self.text)
            rule = emit_node.get(node.op)
            if rule is not None:
                rule(self, node)
            elif node.op.pointwise:
                elementwise.emit_elementwise(self, [node])
            else:
                raise UnsupportedOpError(f"the target ptx cannot emit {node.op.name}", location=node.loc)

    def scalar_operand(self, v: Value) -> str:
        """The register or number of a scalar."""
        return self.values[v][0]

    def layout(self, v: Value) -> DistributedLayout:
        """The layout of a block."""
        return self.layouts[v]

    def end(self) -> str:
        """The label at the end of the entry, for threads that go there at once."""
        self.exit_label = self.exit_label or self.text.new_label("end")
        return self.exit_label

    def meet(self) -> None:
        """Wait for the team, between two uses of memory by the emission itself."""
        self.team.meet(self.text)
        self.hazards.note_barrier()


def _used_values(block: Block) -> set[Value]:
    """The values that something takes."""
    found = set(block.results)
    for node in block.walk():
        found.update(node.args, *(region.results for region in node.regions))
    return found
